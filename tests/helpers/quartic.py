"""Clients with nonlinear gradients, and a check of a method against a NumPy loop on them."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.helpers import Round, play

__all__ = ["LR", "ROUNDS", "SIZES", "Array", "X", "assert_follows", "gradient", "mean", "path"]

LR = 0.1
STREAM = np.random.default_rng(0)
ROWS = [(STREAM.normal(size=(n, 4)), STREAM.normal(size=n)) for n in (5, 8, 6)]
SIZES = tuple(len(targets) for _, targets in ROWS)
X = STREAM.normal(size=4)
ROUNDS = [
    Round({0: ([0, 1], [2, 3, 4], [1, 2]), 2: ([5], [0, 1, 2])}),
    Round({1: ([0, 7], [3], [4, 5]), 0: ([4, 0],)}),
    Round({2: ([1, 2], [3, 4]), 1: ([2, 6], [1])}),
]
Array = NDArray[np.float64]


def gradient(y: Array, i: int, batch: Any = None) -> Array:
    """The gradient of half the mean squared error plus a quartic term, which makes it nonlinear."""
    rows, targets = ROWS[i] if batch is None else (part[batch] for part in ROWS[i])
    return rows.T @ (rows @ y - targets) / len(targets) + 0.3 * y**3


def path(algorithm: Any, rounds: list[Round] = ROUNDS, weighting: str | None = None) -> list[Tensor]:
    """Return the server parameters after each round."""

    def grad(y: Tensor, i: int, batch: Any) -> Tensor:
        return torch.from_numpy(gradient(y.numpy(), i, batch))

    return play(algorithm, grad, SIZES, torch.from_numpy(X), rounds, LR, weighting).x


def assert_follows(algorithm: Any, expected: list[Array], weighting: str | None = None) -> None:
    """Check that a method's server parameters follow a path."""
    for got, want in zip(path(algorithm, weighting=weighting), expected, strict=True):
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-12, atol=1e-14)


def mean(ids: list[int], values: list[Array], weighting: str) -> Array:
    """Return the mean over clients, by "examples" or "uniform"."""
    weights = [SIZES[i] if weighting == "examples" else 1 for i in ids]
    return np.average(values, axis=0, weights=weights)
