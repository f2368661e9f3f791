"""What every system trains: data, cohorts and initial parameters, functions of fixed seeds. Needs NumPy only."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

__all__ = ["BLOCKS", "WORKLOADS", "Array", "Problem", "Workload", "prepare"]

Array = np.ndarray

BLOCKS = (
    (64, 64, 1),
    (64, 64, 1),
    (64, 128, 2),
    (128, 128, 1),
    (128, 256, 2),
    (256, 256, 1),
    (256, 512, 2),
    (512, 512, 1),
)
"""Input channels, output channels and stride of the blocks of ResNet-18."""


@dataclass(frozen=True)
class Workload:
    """What is trained on which data.

    Attributes:
        data: The name of the data set.
        layers: The widths of a fully connected network, input and classes included; empty for ResNet-18.
        cohort: Clients per round.
        batch: Examples in a batch.
        epochs: Local epochs.
        lr: The clients' learning rate.
        eval_rows: Examples that the final loss is taken over.
        warmup: Rounds to warm up unless told otherwise.
        repeats: Repeats of a comparison unless told otherwise.
    """

    data: str
    layers: tuple[int, ...]
    cohort: int
    batch: int
    epochs: int = 1
    lr: float = 0.1
    eval_rows: int = 4000
    warmup: int = 30
    repeats: int = 3


_MLP = (784, 300, 100, 62)
WORKLOADS = {
    "W1": Workload("W1", _MLP, cohort=20, batch=20),
    "W1x10": Workload("W1", _MLP, cohort=20, batch=20, epochs=10, warmup=2),
    "W2": Workload("W1", (784, 62), cohort=20, batch=20),
    # A round takes ten seconds and all its batches have one shape: little varies from round to round
    "W3": Workload("W3", (), cohort=4, batch=20, lr=0.001, eval_rows=200, warmup=2, repeats=1),
    "W4": Workload("W4", (60, 10), cohort=100, batch=10),
    # A client's examples are one batch, so that their order plays no role and losses agree up to rounding
    "tiny": Workload("tiny", (8, 6, 4), cohort=4, batch=20, epochs=2),
}


class Problem:
    """A workload with its data in memory.

    Args:
        name: The name of the workload.
        folder: Where :func:`prepare` has put the data.

    Attributes:
        x: All examples, one client after the other.
        y: Their classes.
        offsets: Client i owns the examples ``offsets[i]`` to ``offsets[i + 1]``.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.workload = WORKLOADS[name]
        with np.load(_file(self.workload.data, folder), allow_pickle=False) as stored:
            self.x: Array = stored["x"]
            self.y: Array = stored["y"]
            self.offsets: Array = stored["offsets"]

    @property
    def num_clients(self) -> int:
        """The number of clients."""
        return len(self.offsets) - 1

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return self.workload.layers[-1] if self.workload.layers else 10

    def rows(self, client: int) -> tuple[int, int]:
        """Return the first example of a client and the one after its last."""
        return int(self.offsets[client]), int(self.offsets[client + 1])

    def cohort(self, round: int) -> list[int]:
        """Return the clients of a round in increasing order."""
        stream = np.random.default_rng([7, round])
        chosen: list[int] = np.sort(stream.choice(self.num_clients, self.workload.cohort, replace=False)).tolist()
        return chosen

    def initial(self) -> list[Array]:
        """Return the initial parameters in the order and layout of PyTorch's, uniform in +-1/sqrt(fan-in)."""
        stream = np.random.default_rng(11)

        def weight(*shape: int) -> Array:
            bound = 1 / np.sqrt(np.prod(shape[1:]))
            return stream.uniform(-bound, bound, shape).astype(np.float32)

        def normed(*shape: int) -> list[Array]:
            return [weight(*shape), np.ones(shape[0], np.float32), np.zeros(shape[0], np.float32)]

        layers = self.workload.layers
        if layers:
            return [
                a for fan_in, width in pairwise(layers) for a in (weight(width, fan_in), np.zeros(width, np.float32))
            ]
        out = normed(64, 3, 3, 3)
        for fan_in, width, _ in BLOCKS:
            out += normed(width, fan_in, 3, 3) + normed(width, width, 3, 3)
            out += normed(width, fan_in, 1, 1) if width != fan_in else []
        return [*out, weight(self.num_classes, 512), np.zeros(self.num_classes, np.float32)]

    def loss(self, logits_of: Callable[[Array], Array]) -> float:
        """Return the mean cross-entropy of a model over a fixed sample of all clients' examples."""
        count = min(self.workload.eval_rows, len(self.x))
        pick = np.random.default_rng(5).choice(len(self.x), count, replace=False)
        logits = np.asarray(logits_of(self.x[pick]), np.float64)
        logits -= logits.max(1, keepdims=True)
        return float(np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(count), self.y[pick]]))


def prepare(name: str, folder: Path) -> None:
    """Make the data of a workload unless they are there: 139 MB for W1 and W2, 25 for W3, 50 for W4."""
    data = WORKLOADS[name].data
    path = _file(data, folder)
    if path.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as part:
        x, y, offsets = _DATA[data]()
        np.savez(part, x=x, y=y, offsets=offsets)
    os.replace(part.name, path)  # whole or not at all


def _file(data: str, folder: Path) -> Path:
    return folder / f"{data}.npz"


def _w1() -> tuple[Array, Array, Array]:
    stream = np.random.default_rng(20240601)
    sizes = np.clip(np.rint(stream.lognormal(np.log(200), 0.5, 200)), 40, 400).astype(int)
    return _gaussian_classes(stream, sizes, (784,), 62)


def _w3() -> tuple[Array, Array, Array]:
    return _gaussian_classes(np.random.default_rng(20240603), np.full(20, 100), (3, 32, 32), 10)


def _w4() -> tuple[Array, Array, Array]:
    return _gaussian_classes(np.random.default_rng(20240604), np.full(20_000, 10), (60,), 10)


def _tiny() -> tuple[Array, Array, Array]:
    return _gaussian_classes(np.random.default_rng(1), np.arange(5, 17), (8,), 4)


_DATA = {"W1": _w1, "W3": _w3, "W4": _w4, "tiny": _tiny}


def _gaussian_classes(
    stream: np.random.Generator, sizes: Array, shape: tuple[int, ...], classes: int
) -> tuple[Array, Array, Array]:
    """Return examples around a mean per class and a shift per client; the clients' label shares are Dirichlet(0.5)."""
    dim = int(np.prod(shape))
    means = stream.standard_normal((classes, dim), dtype=np.float32)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    total = int(offsets[-1])
    x = stream.standard_normal((total, dim), dtype=np.float32)
    y = np.empty(total, np.int64)
    for first, end in pairwise(offsets):
        shares = stream.dirichlet(np.full(classes, 0.5))
        y[first:end] = stream.choice(classes, size=end - first, p=shares)
        x[first:end] += np.float32(0.2) * stream.standard_normal(dim, dtype=np.float32)
    x += np.float32(0.5) * means[y]
    x *= np.float32(0.5)
    return x.reshape(total, *shape), y, offsets
