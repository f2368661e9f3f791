"""Examples that cannot be stacked into one tensor, as in object detection, and batches of different sizes."""

import pytorch_lightning as pl
import torch
from torch.utils.data import BatchSampler, Dataset


class Detection(Dataset):
    """Images of three channels, each with its own number of boxes."""

    def __init__(self, n=10):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return torch.full((3, 4, 4 + index % 2), float(index)), {"boxes": torch.zeros(1 + index % 3, 4)}


def collate(examples):
    return tuple(zip(*examples, strict=True))


class Buckets(BatchSampler):
    """A batch sampler with batches of different sizes."""

    def __init__(self, generator):
        self.generator = generator

    def __iter__(self):
        order = torch.randperm(10, generator=self.generator).tolist()
        return iter([order[:4], order[4:9], order[9:]])

    def __len__(self):
        return 3


class Detector(pl.LightningModule):
    """The loss of an image is (w - its value)^2 / 2."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))

    def _loss(self, batch):
        return torch.stack([(self.w - image.mean()) ** 2 / 2 for image in batch[0]]).mean()

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("logged", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self._loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
