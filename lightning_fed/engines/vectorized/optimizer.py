"""What moves stacked parameters: the user's local optimizer and gradient clipping, client by client."""

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fed.core.torch_optimizers import without_coupled_decay
from lightning_fed.optim import FederatedOptimizer

__all__ = ["ELEMENTWISE", "Clipping", "StackedOptimizer"]

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
)
"""The optimizers whose step of stacked parameters is the step of each client's."""


_SHARED = ("step", "mu_product")  # statistics that are no gradients', also where a parameter is a single number


@dataclass(frozen=True, slots=True)
class Clipping:
    """How gradients are clipped, client by client.

    Attributes:
        value: The largest norm, or the largest absolute value.
        algorithm: "norm" or "value".
        corrected: Whether the corrected gradient is clipped, instead of the client's own.
    """

    value: float
    algorithm: str
    corrected: bool

    def __call__(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return the clipped gradients [n, n_p] per parameter."""
        if self.algorithm == "value":
            return [g.clamp(-self.value, self.value) for g in grads]
        norms = torch.stack([torch.linalg.vector_norm(g, dim=1) for g in grads])
        scale = (self.value / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
        return [g * scale[:, None] for g in grads]


class StackedOptimizer:
    """The user's local optimizer, stepping the columns [n, n_p] of the clients at work from a fresh state.

    Args:
        optimizer: The wrapped optimizer; it is left as it is.
    """

    def __init__(self, optimizer: FederatedOptimizer) -> None:
        base = optimizer.base
        self._base = copy.copy(base)
        self._base.state = defaultdict(dict)
        self._positions = {id(p): i for i, p in enumerate(optimizer.flat.params)}
        self._shapes = optimizer.flat.layout.shapes
        self._groups = base.param_groups
        self._columns: list[Tensor] = []

    def narrow(self, columns: Sequence[Tensor]) -> None:
        """Take the columns of the clients still at work, and their rows of the state."""
        base, old = self._base, self._columns
        states = [base.state.get(c, {}) for c in old]
        self._columns = list(columns)
        base.param_groups = [
            {
                **group,
                "fused": False,  # fused kernels take columns of a matrix for adjacent memory
                "params": [columns[self._positions[id(p)]] for p in group["params"] if id(p) in self._positions],
            }
            for group in self._groups
        ]
        base.state = defaultdict(dict)
        for column, before, state in zip(columns, old, states, strict=False):
            base.state[column] = {
                k: v[: len(column)] if isinstance(v, Tensor) and v.shape == before.shape else v
                for k, v in state.items()
            }
        if not old and isinstance(base, torch.optim.Adagrad):  # it makes its state when it is made
            for group in base.param_groups:
                start = group["initial_accumulator_value"]
                for p in group["params"]:
                    base.state[p] = {"step": torch.tensor(0.0), "sum": torch.full_like(p, start)}

    def step(
        self, grads: Sequence[Tensor], solver: list[dict[str, Tensor]] | None, injected: bool, skipped: frozenset[int]
    ) -> None:
        """Step with these gradients [n, n_p]; statistics of a method's own are loaded before and dropped after."""
        base = self._base
        for i, (column, g) in enumerate(zip(self._columns, grads, strict=True)):
            column.grad = None if i in skipped else g.contiguous()
        if solver is not None:
            base.state = defaultdict(dict)
            for column, shape, entries in zip(self._columns, self._shapes, solver, strict=True):
                if entries:
                    base.state[column] = {k: _spread(k, v, shape, column) for k, v in entries.items()}
        if injected:
            with without_coupled_decay(base):
                base.step()
        else:
            base.step()
        for column in self._columns:
            column.grad = None


def _spread(name: str, value: Tensor, shape: torch.Size, column: Tensor) -> Tensor:
    """Return one parameter's statistic for every client; what depends on steps alone is one number for all."""
    if name in _SHARED or value.shape != shape:
        return value.clone()
    return value.reshape(-1).expand_as(column).clone()
