"""Fine-tune a torchvision network across clients: ``python examples/finetune_torchvision.py --weights DEFAULT``.

``--weights DEFAULT`` downloads weights trained on ImageNet. A path loads weights from a file. By default, they are
random. The images are scikit-learn's digits, enlarged to RGB for the network. Put your own images in ``data_of``.

No mean over clients gives the right running statistics of BatchNorm. So by default, the backbone is frozen with its
statistics. Clients train and exchange only the last layer, and every layer before it is the same map everywhere.
``--train-backbone`` trains all layers, with GroupNorm, which has no statistics, in place of BatchNorm. Weights trained
with one do not fit the other, so this starts from random weights and needs many more rounds.
"""

import argparse
from functools import partial

import lightning_fed  # noqa: F401 - before anything that imports Lightning
import torch
from pytorch_lightning import seed_everything
from torch.utils.data import TensorDataset
from torchvision.models import get_model

from lightning_fed import FederatedDataModule, FederatedTrainer
from lightning_fed.algorithms import FedAvg, Scaffold
from lightning_fed.data import Digits, Dirichlet
from lightning_fed.models import Classifier


class FineTuned(Classifier):
    """A ResNet of torchvision with a new last layer. ``weights`` is a name from torchvision, a file, or None."""

    def __init__(
        self, num_classes: int, weights: str | None = None, train_backbone: bool = False, lr: float = 0.03
    ) -> None:
        from_file = weights is not None and weights.endswith((".pt", ".pth"))
        norm = {"norm_layer": partial(torch.nn.GroupNorm, 32)} if train_backbone else {}
        if train_backbone and weights is not None:
            raise ValueError("weights that were trained with BatchNorm do not fit GroupNorm: choose one of the two")
        net = get_model("resnet18", weights=None if from_file else weights, **norm)
        if from_file:
            net.load_state_dict(torch.load(weights, weights_only=True))
        net.requires_grad_(train_backbone).train(train_backbone)  # Lightning does not change the mode
        net.fc = torch.nn.Linear(net.fc.in_features, num_classes)
        super().__init__(net, num_classes, lr)

    @torch.no_grad()
    def measure_statistics(self, images: torch.Tensor) -> None:
        """Set BatchNorm's statistics from images [B, 3, H, W], since random weights have none."""
        for layer in self.modules():
            if isinstance(layer, torch.nn.BatchNorm2d):
                layer.momentum = None  # the plain mean over all images
        self.net.train()(images)
        self.net.eval()


def enlarged(batch: list[torch.Tensor]) -> list[torch.Tensor]:
    """Turn a batch of digits [B, 64] into normalized images [B, 3, 32, 32]."""
    images = batch[0].view(-1, 1, 8, 8).repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
    return [(images.expand(-1, 3, -1, -1) - 0.45) / 0.225, *batch[1:]]


def data_of(num_clients: int) -> FederatedDataModule:
    """Return the clients. Any map-style data set of images and labels works for ``train`` and ``val``."""
    digits = Digits(num_clients=1)
    train, val = digits.client_dataset(0), TensorDataset(*digits.val[:])
    partition = Dirichlet(num_clients, alpha=0.5)
    return FederatedDataModule(train=train, val=val, partition=partition, batch_size=32, transform=enlarged)


def main(max_rounds: int = 10, weights: str | None = None, train_backbone: bool = False) -> float:
    """Train, and return the last validation accuracy."""
    seed_everything(0)
    model = FineTuned(num_classes=10, weights=weights, train_backbone=train_backbone)
    data = data_of(num_clients=20)
    if weights is None and not train_backbone:
        (images,) = enlarged([data.val.tensors[0]])  # the server's own images
        model.measure_statistics(images)
    trainer = FederatedTrainer(
        algorithm=FedAvg() if train_backbone else Scaffold(),
        max_rounds=max_rounds,
        clients_per_round=10,
        local_epochs=1,
        engine="auto",
    )
    trainer.fit(model, data)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"trained and exchanged: {trained:,} of {sum(p.numel() for p in model.parameters()):,} parameters")
    return float(trainer.callback_metrics["val_acc"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-rounds", type=int, default=10)
    parser.add_argument("--weights", help="DEFAULT, another name of torchvision's, or a .pth file; random if left out")
    parser.add_argument("--train-backbone", action="store_true", help="train all layers, with GroupNorm")
    main(**vars(parser.parse_args()))
