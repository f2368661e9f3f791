"""Examples that no tensor holds together, as in object detection, and batches of different sizes."""

import torch
from torch.utils.data import BatchSampler, Dataset


class Detection(Dataset):
    """Images of three channels, each with boxes of its own."""

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
