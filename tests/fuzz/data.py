"""Small federations of every kind of data set: features or tokens, classes or numbers."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.data import Dirichlet
from tests.fuzz.configuration import Configuration

__all__ = ["CLASSES", "FEATURES", "TOKENS", "VOCABULARY", "make_data"]

FEATURES, CLASSES = 6, 3
TOKENS, VOCABULARY = 5, 10


class Plain(Dataset[Any]):
    """A map-style data set other than ``TensorDataset``.

    Args:
        x: The inputs.
        y: The targets.
        as_dict: Whether an example is a dict.
        fails: Whether the last example cannot be read.
    """

    def __init__(self, x: Tensor, y: Tensor, as_dict: bool = False, fails: bool = False) -> None:
        self.x, self.y, self.as_dict, self.fails = x, y, as_dict, fails

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> Any:
        if self.fails and i == len(self) - 1:
            raise OSError("this example cannot be read")
        return {"x": self.x[i], "y": self.y[i]} if self.as_dict else (self.x[i], self.y[i])


def make_data(c: Configuration) -> FederatedDataModule:
    """Return the data of a configuration. They are the same in every call."""
    x, y = _examples(c, sum(c.sizes), stream=1)
    val = _dataset(c, *_examples(c, 5, stream=2))
    options: dict[str, Any] = {"val": val if c.validate else None}
    options["augment"] = _noisy if c.augment else None
    options |= {"batch_size": c.batch, "drop_last": c.drop_last, "shuffle": c.shuffle}
    parts = list(torch.arange(len(y)).split(list(c.sizes)))
    if c.dataset == "subset":
        whole = TensorDataset(x, y)
        return FederatedDataModule(clients=[Subset(whole, part.tolist()) for part in parts], **options)
    if c.dataset == "partition":
        partition = Dirichlet(len(c.sizes), alpha=1.0, seed=c.number)
        return FederatedDataModule(train=TensorDataset(x, y), partition=partition, **options)
    sets = [_dataset(c, x[part], y[part], fails=c.fails and i == 1) for i, part in enumerate(parts)]
    if c.dataset == "named":
        return FederatedDataModule(clients={f"client {i}": own for i, own in enumerate(sets)}, **options)
    return FederatedDataModule(clients=sets, **options)


def _noisy(batch: Any, generator: torch.Generator) -> Any:
    """Return a batch with noise added to its features, or its tokens shifted by one place."""
    x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
    if x.is_floating_point():
        x = x + 0.1 * torch.randn(x.shape, generator=generator)
    else:
        x = x.roll(int(torch.randint(2, (), generator=generator)), dims=1)
    return {"x": x, "y": y} if isinstance(batch, dict) else [x, y]


def _examples(c: Configuration, n: int, stream: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1000 * c.number + stream)
    if c.tokens:
        x = torch.randint(VOCABULARY, (n, TOKENS), generator=source)
    else:
        x = torch.randn(n, FEATURES, generator=source)
    if c.loss == "mse":
        return x, torch.randn(n, CLASSES, generator=source)
    y = torch.randint(CLASSES, (n,), generator=source)
    y[: min(n, CLASSES)] = torch.arange(min(n, CLASSES))  # every class occurs
    return x, y


def _dataset(c: Configuration, x: Tensor, y: Tensor, fails: bool = False) -> Dataset[Any]:
    if c.dataset in ("plain", "dict"):
        return Plain(x, y, as_dict=c.dataset == "dict", fails=fails)
    return TensorDataset(x, y)
