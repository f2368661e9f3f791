"""Moving stacked parameters, client by client: the user's local optimizer and gradient clipping."""

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_fed.compat.package import pl
from lightning_fed.core.torch_optimizers import STEP_COUNTS, without_coupled_decay
from lightning_fed.engines.local_schedule import MOVED
from lightning_fed.engines.optimizer import FederatedOptimizer

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
"""Optimizers whose step on stacked parameters equals each client's step."""


@dataclass(frozen=True, slots=True)
class Clipping:
    """Gradient clipping, client by client."""

    value: float  # the largest norm, or the largest absolute value
    algorithm: str  # "norm" or "value"
    corrected: bool  # whether to clip the corrected gradient instead of the client's

    @staticmethod
    def of(trainer: pl.Trainer) -> "Clipping | None":
        """Return the trainer's gradient clipping, or None."""
        corrected = trainer.fit_loop.corrected_clip
        value, algorithm = corrected or (trainer.gradient_clip_val, trainer.gradient_clip_algorithm or "norm")
        if not value:
            return None
        return Clipping(float(value), str(getattr(algorithm, "value", algorithm)), corrected is not None)

    def __call__(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return one client's clipped gradients, one tensor per parameter."""
        if self.algorithm == "value":
            return [g.clamp(-self.value, self.value) for g in grads]
        norms = torch.stack([torch.linalg.vector_norm(g) for g in grads])
        scale = (self.value / (torch.linalg.vector_norm(norms) + 1e-6)).clamp(max=1.0)
        return [g * scale for g in grads]


class StackedOptimizer:
    """The user's local optimizer, which steps the current clients' parameters from a new state."""

    def __init__(self, optimizer: FederatedOptimizer) -> None:
        base = optimizer.base
        self._base = copy.copy(base)
        self._base.state = defaultdict(dict)
        self._positions = {id(p): i for i, p in enumerate(optimizer.flat.params)}
        self._shapes = optimizer.flat.whole_layout.shapes
        self._groups, self._is_scheduled = base.param_groups, optimizer.schedule is not None
        self._views: Sequence[Tensor] = []

    def step(
        self,
        views: Sequence[Tensor],
        directions: Sequence[Tensor],
        solver: Sequence[dict[str, Tensor]] | None,
        skipped: frozenset[int],
    ) -> None:
        """Move parameters along directions, which include coupled weight decay, by the optimizer.

        ``views`` are those of the chunk's first clients, at most as many as in the last step. The method's statistics
        (``solver``, per parameter) are loaded before and discarded after. Parameters at ``skipped`` stay fixed.
        """
        base = self._base
        if views is not self._views:
            self._narrow(views)
        if self._is_scheduled:
            for own, group in zip(base.param_groups, self._groups, strict=True):
                own.update({name: group[name] for name in MOVED if name in group})
        for i, (view, direction) in enumerate(zip(views, directions, strict=True)):
            view.grad = None if i in skipped else direction.contiguous()
        if solver is not None:
            base.state = defaultdict(dict)
            for view, shape, entries in zip(views, self._shapes, solver, strict=True):
                if entries:
                    base.state[view] = {k: _spread(k, v, shape, view) for k, v in entries.items()}
        with without_coupled_decay(base):
            base.step()
        for view in views:
            view.grad = None

    def _narrow(self, views: Sequence[Tensor]) -> None:
        """Keep the parameters of the remaining clients, and their rows of the state."""
        base, old = self._base, self._views
        states = [base.state.get(view, {}) for view in old]
        self._views = views
        base.param_groups = [
            {
                **group,
                "fused": False,  # fused kernels mistake parts of a matrix for contiguous memory
                "params": [views[self._positions[id(p)]] for p in group["params"] if id(p) in self._positions],
            }
            for group in self._groups
        ]
        base.state = defaultdict(dict)
        for view, before, state in zip(views, old, states, strict=False):
            rows: Any = slice(len(view)) if view.ndim == before.ndim else 0  # one client has no client dimension
            base.state[view] = {
                k: v[rows] if isinstance(v, Tensor) and v.shape == before.shape and k not in STEP_COUNTS else v
                for k, v in state.items()
            }
        if not old and isinstance(base, torch.optim.Adagrad):  # it creates its state in __init__
            for group in base.param_groups:
                start = group["initial_accumulator_value"]
                for p in group["params"]:
                    base.state[p] = {"step": torch.tensor(0.0), "sum": torch.full_like(p, start)}


def _spread(name: str, value: Tensor, shape: torch.Size, view: Tensor) -> Tensor:
    """Return a parameter's statistic for every client; those that only depend on steps are shared."""
    if name in STEP_COUNTS or value.shape != shape:
        return value.clone()
    return value.expand_as(view).clone()
