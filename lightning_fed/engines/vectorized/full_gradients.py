"""Full-batch gradients through traces, which add directly to the sum over a client's batches."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from lightning_fed.core.types import Vector
from lightning_fed.engines.optimizer import FederatedOptimizer
from lightning_fed.engines.vectorized.batches import flatten
from lightning_fed.engines.vectorized.module_step import ModuleStep
from lightning_fed.tracing.traces import Found, Trace, kinds, resized

__all__ = ["FullGradients", "add_decay"]

_CLOSE = 1e-2  # relative tolerance of a gradient against the module's
_EXAMPLES = (5, 3, 2)  # batch sizes that record a trace for any number of examples


class FullGradients:
    """Sums of gradients over batches at a fixed point, from traces that add to them."""

    def __init__(self, module: ModuleStep) -> None:
        self.module = module
        self.layout = module.flat.layout

    def of_one(self, point: Vector, batches: Iterable[tuple[Any, int]], size: int) -> Vector | None:
        """Return the mean gradient [P] over a client's batches of ``size`` examples, or None if it cannot be traced.

        ``batches`` are (batch, examples in it) pairs, on the device.
        """
        total = torch.zeros_like(point)
        for batch, examples in batches:
            leaves, spec = flatten(batch)
            if examples < 2 or any(len(leaf) != examples for leaf in leaves):
                return None
            if not self._add(total, point, leaves, spec, examples / size):
                return None
        return total

    def of_many(self, point: Vector, leaves: Sequence[Tensor]) -> Tensor | None:
        """Return the gradients [S, P] of clients on one batch each, a list of tensors, or None without a trace."""
        total = point.new_zeros(len(leaves[0]), len(point))
        return total if self._add(total, point, leaves, list, 1.0) else None

    def _add(self, total: Tensor, point: Vector, leaves: Sequence[Tensor], spec: Any, factor: float) -> bool:
        """Add gradients on batches to sums [P] or [S, P]; return False if no trace is correct."""
        is_one = total.ndim == 1
        views = self.layout.views(total) if is_one else self.layout.stacked_views(total)
        trace = self._trace(views, leaves, spec, point, is_one)
        if trace is None:
            return False
        first = leaves if is_one else [leaf[0] for leaf in leaves]
        _, rest = trace.once([point])
        size = leaves[0].shape
        is_new = size not in trace.checked
        if is_new and all(other[0] < size[0] for other in trace.checked):
            own = torch.zeros_like(total)
            trace(*(self.layout.views(own) if is_one else self.layout.stacked_views(own)), *leaves, *rest, 1.0)
            if not self._is_gradient(own if is_one else own[0], point, first, spec):
                return False
        _, loss, _ = trace(*views, *leaves, *rest, factor)
        if trace in self.module.compared and not is_new:
            return True
        trace.checked[size] = {}
        self.module.compared.add(trace)
        expected = self.module.own_step(self.layout.views(point), first, spec).loss
        return self.module.agrees(loss if is_one else loss[0], expected) or self.module.give_up("gives another loss")

    def _is_gradient(self, found: Vector, point: Vector, leaves: Sequence[Tensor], spec: Any) -> bool:
        """Compare a trace's gradient with the module's, which tensor hooks may change."""
        module = self.module
        grads, _, _ = module.own_gradient(self.layout.views(point), leaves, spec)
        real = torch.zeros_like(point)
        for part, grad in zip(self.layout.views(real), grads, strict=True):
            if grad is not None:
                part.copy_(grad)
        atol = _CLOSE * float(real.nan_to_num(0.0, 0.0, 0.0).abs().max())  # the client's data may be NaN
        return torch.allclose(found, real, rtol=_CLOSE, atol=atol, equal_nan=True) or module.traces.forbid(
            f"{type(module.module).__name__}.training_step has another gradient than when it was traced, though"
            " the same loss. Local steps run untraced from here on, which is slower."
        )

    def _trace(
        self, views: Sequence[Tensor], leaves: Sequence[Tensor], spec: Any, point: Vector, is_one: bool
    ) -> Trace | None:
        """Return the trace of one client for any number of examples, or of several clients for a fixed number."""
        module, n, num_leaves = self.module, len(views), len(leaves)

        def function(*flat: Tensor) -> Found:
            batch, at = flat[n : n + num_leaves], self.layout.views(flat[-1])

            def take(*batch: Tensor) -> Any:
                return module.gradient(at, batch, spec)

            grads, loss, _ = (take if is_one else vmap(take, randomness="different"))(*batch)
            return grads, loss, {}

        def inputs(size: int) -> list[Tensor]:
            return [*views, *(resized(leaves, size) if is_one else leaves), point]

        kind = tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves) if is_one else kinds(leaves)
        sizes = _EXAMPLES if is_one else (0,)
        return module.traces.get(("sum", is_one, spec, kind), function, inputs, sizes, moves=n, constants=1)


def add_decay(grads: Tensor, point: Vector, optimizer: FederatedOptimizer) -> Tensor:
    """Add the gradient of coupled weight decay at a point [P] to gradients [..., P], in place; return them."""
    sizes = optimizer.flat.layout.sizes
    for part, at, decay in zip(grads.split(sizes, dim=-1), point.split(sizes), optimizer.decay, strict=True):
        if decay:
            part.add_(at, alpha=decay)
    return grads
