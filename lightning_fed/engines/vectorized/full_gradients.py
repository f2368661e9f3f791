"""Full-batch gradients through traces, which add directly to the sum over a client's batches."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from lightning_fed.core.types import Vector
from lightning_fed.engines.vectorized.batches import are_rows, flatten
from lightning_fed.engines.vectorized.module_step import ModuleStep
from lightning_fed.tracing.traces import Found, Trace, kinds, resized

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
            if examples < 2 or not are_rows(leaves, examples):
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
        while (trace := self._trace(views, leaves, spec, point, is_one)) is not None:
            _, rest = trace.once([point])
            is_known = trace in self.module.compared and leaves[0].shape in trace.checked
            before = total if is_known else total.clone()
            _, losses, _ = trace(*views, *leaves, *rest, factor)
            if is_known or self._is_right(trace, losses, before, total, factor, point, leaves, spec):
                return True
            total.copy_(before)
            if trace.round == self.module.traces.round:
                return False
        return False

    def _is_right(
        self,
        trace: Trace,
        losses: Tensor,
        before: Tensor,
        total: Tensor,
        factor: float,
        point: Vector,
        leaves: Sequence[Tensor],
        spec: Any,
    ) -> bool:
        """Compare a trace with the module for the first of some clients; if it differs, drop it.

        Its gradients, times a factor, were added to sums [P] or [S, P]. They are compared, too, since tensor hooks may
        change gradients but not losses.
        """
        module, at, loss, first = self.module, self.layout.views(point), losses, leaves
        if total.ndim > 1:
            before, total, loss, first = before[0], total[0], losses[0], [leaf[0] for leaf in leaves]
        found = self.layout.views((total - before).div_(factor))
        grads, expected, _ = module.own_gradient(at, first, spec)
        what = module.difference(
            loss, found, expected, grads, total, lambda: module.gradient(at, first, spec)[0], factor
        )
        if what is None:
            trace.checked[leaves[0].shape] = {}
            module.compared.add(trace)
            return True
        if not module.is_outdated(trace, what):
            module.give_up(what)
        return False

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
