"""Full-batch gradients through traces: products are added straight into the sum over a client's batches."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fed._compat import rank_zero_warn
from lightning_fed.core.types import Vector
from lightning_fed.engines.vectorized.batch_trees import flatten, unflatten
from lightning_fed.engines.vectorized.functional import FunctionalStep
from lightning_fed.tracing.traces import Found, TracedStep, kinds, resized

__all__ = ["FullGradients", "is_gradient"]

_CLOSE = 1e-2  # how far a gradient may be from the module's own, relatively
_SIZES = (5, 3, 2)  # examples in the batches that a trace is made of, and compared with


class FullGradients:
    """Sums of gradients over batches at a fixed point, as traced graphs that add to them.

    Args:
        step: The module's step.
    """

    def __init__(self, step: FunctionalStep) -> None:
        self.step = step
        self.layout = step.flat.layout

    def of_one(self, point: Vector, batches: Iterable[tuple[Any, int]], size: int) -> Vector | None:
        """Return the mean gradient [P] over one client's examples, None if it cannot be traced.

        Args:
            point: The parameters [P].
            batches: (batch, examples in it) pairs, on the device.
            size: The number of examples.
        """
        out = torch.zeros_like(point)
        views = self.layout.views(out)
        for batch, examples in batches:
            leaves, spec = flatten(batch)
            traced = self._polymorphic(views, leaves, spec, point, examples)
            if traced is None or not self._add(traced, views, leaves, spec, point, examples / size, alone=True):
                return None
        return out

    def of_many(self, point: Vector, batch: Any) -> Tensor | None:
        """Return the gradients [S, P] of several clients on a batch each, None if they cannot be traced.

        Args:
            point: The parameters [P].
            batch: The clients' batches, every tensor [S, B, ...].
        """
        leaves, spec = flatten(batch)
        count = len(leaves[0])
        out = point.new_zeros(count, len(point))
        views = self.layout.stacked_views(out)
        key = ("sum", False, spec, *kinds(leaves))
        traced = self._get(key, views, leaves, spec, point)
        return out if traced and self._add(traced, views, leaves, spec, point, 1.0, alone=False) else None

    def _add(
        self,
        traced: TracedStep,
        views: Sequence[Tensor],
        leaves: Sequence[Tensor],
        spec: Any,
        point: Vector,
        factor: float,
        alone: bool,
    ) -> bool:
        """Add a batch's gradients to the sums; return False if the module's loss is another than the trace's."""
        _, once = traced.once([point])
        size, seen = leaves[0].shape, traced.sizes_seen
        is_largest = size not in seen and all(other[0] < size[0] for other in seen)
        if is_largest and not self._is_gradient(traced, leaves, spec, point, once, alone):
            return False
        loss, _ = traced(*views, *leaves, *once, factor)
        if "sum" in self.step.checked and size in seen:
            return True
        seen.add(size)
        at = self.layout.views(point)
        expected = self.step.loss_of_first(at, leaves if alone else [leaf[0] for leaf in leaves], spec, 0, True)
        return self.step.is_right(loss if alone else loss[0], expected, "sum")

    def _is_gradient(
        self,
        traced: TracedStep,
        leaves: Sequence[Tensor],
        spec: Any,
        point: Vector,
        once: Sequence[Tensor],
        alone: bool,
    ) -> bool:
        """Compare a trace's gradient with the module's: hooks of tensors let it be another than the loss's."""
        found = torch.zeros_like(point) if alone else point.new_zeros(len(leaves[0]), len(point))
        views = self.layout.views(found) if alone else self.layout.stacked_views(found)
        traced(*views, *leaves, *once, 1.0)
        first = leaves if alone else [leaf[0] for leaf in leaves]
        if is_gradient(self.step, found if alone else found[0], point, [(unflatten(first, spec), 1.0)]):
            return True
        self.step.traces.forbid()
        rank_zero_warn(
            f"{type(self.step.module).__name__}.training_step has another gradient than when it was traced, though the"
            " same loss. Local steps run untraced from here on, which is slower."
        )
        return False

    def _polymorphic(
        self, views: Sequence[Tensor], leaves: Sequence[Tensor], spec: Any, point: Vector, examples: int
    ) -> TracedStep | None:
        """Return the graph for batches of any number of examples, made of small ones, if it is the same for these."""
        if examples < 2 or any(len(leaf) != examples for leaf in leaves):
            return None
        key = ("sum", True, spec, *kinds(leaves, _SIZES[0]))
        traced = self._get(key, views, leaves, spec, point, sizes=_SIZES[:1])
        function = self._function(len(leaves), spec, True)

        def of(size: int) -> list[Tensor]:
            return [*views, *resized(leaves, size), point]

        if traced is None or self.step.traces.fits_any_size(traced, function, of, _SIZES[1:]):
            return traced
        return self._get(("any size", *key), views, leaves, spec, point, sizes=_SIZES)

    def _get(
        self,
        key: Any,
        views: Sequence[Tensor],
        leaves: Sequence[Tensor],
        spec: Any,
        point: Vector,
        sizes: Sequence[int] = (),
    ) -> TracedStep | None:
        """Return a graph by its key: of one client, made with batches of some sizes, or of several with theirs."""
        function = self._function(len(leaves), spec, alone=bool(sizes))

        def of(size: int | None) -> Callable[[], list[Tensor]]:
            return lambda: [*views, *(leaves if size is None else resized(leaves, size)), point]

        own: Sequence[int | None] = sizes or (None,)
        first, *others = map(of, own)
        return self.step.traces.get_step(key, function, first, len(views), 1, {}, again=others)

    def _function(self, num_leaves: int, spec: Any, alone: bool) -> Callable[..., Found]:
        """Return gradients, loss and logged values as a function of sums (not read), batch and point."""
        step, n = self.step, len(self.layout.shapes)

        def function(*flat: Tensor) -> Found:
            leaves, point = flat[n : n + num_leaves], self.layout.views(flat[-1])
            return step.take(point, leaves, spec, alone, shared=not alone)

        return function


def is_gradient(step: FunctionalStep, found: Vector, point: Vector, batches: Iterable[tuple[Any, float]]) -> bool:
    """Whether a vector [P] is the module's gradient at a point [P], to the digits that matter.

    Args:
        step: The module's step.
        found: The vector.
        point: The point.
        batches: The batches, and the share of each in the gradient.
    """
    step.is_hot = False  # no traces
    views, real = step.flat.layout.views(point), torch.zeros_like(point)
    for batch, share in batches:
        grads, _, _ = step.gradient_of_one(views, batch, 0)
        real.add_(torch.cat([g.reshape(-1) for g in grads]), alpha=share)
    scale = float(real.abs().max())
    return torch.allclose(found, real, rtol=_CLOSE, atol=_CLOSE * scale, equal_nan=True)
