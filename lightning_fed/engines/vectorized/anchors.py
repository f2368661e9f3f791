"""Gradients at the anchor that are taken once: in the full pass, over the batches of a local epoch that is to come.

The full-batch gradient of Mime is the mean of the gradients on the batches on which its local steps take them again.
Where the loss is provably a mean over examples, the full pass goes over these very batches, and keeps what the steps
need: of the gradient of a linear layer its two factors, if they are smaller than their product; else the gradient.
Where that is a row for every example throughout, as in networks of linear layers, many batches are passed at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_fed.core.types import Vector
from lightning_fed.data.batch_settings import BatchSettings
from lightning_fed.engines.vectorized.anchor_traces import AnchorTrace, KeptAnchor, PassedSpan, has_rows
from lightning_fed.engines.vectorized.full_gradients import is_gradient
from lightning_fed.engines.vectorized.module_step import ModuleStep
from lightning_fed.tracing.gradient_parts import keep_parts
from lightning_fed.tracing.traces import Found, Trace, kinds, resized

__all__ = ["AnchorPass"]

_KEPT_BYTES = 2**30  # kept from the full pass to the local steps, in each process


class AnchorPass:
    """Full-batch gradients over the batches of a local epoch, and what is kept of them until its local steps.

    Args:
        module: The module's step.
    """

    def __init__(self, module: ModuleStep) -> None:
        self.module = module
        self.layout = module.flat.layout
        self._by_rows: dict[Trace, bool] = {}
        self._is_mean: dict[int, bool] = {}  # by the number of a client's examples
        self._kept: dict[int, list[KeptAnchor]] = {}  # by client, in this round
        self._bytes: dict[int, int] = {}
        self._at: dict[Any, AnchorTrace | None] = {}  # by the kinds of full batches, in this round
        self._has_checked = False
        self._compared = 0  # examples of the largest client whose gradient was compared with the module's own
        self._is_gradient = True  # whether it was the same

    def begin_round(self, is_new: bool) -> None:
        """Begin with nothing kept; and with nothing known of the loss, if it may be a new one."""
        self.end_round()  # the last one may have been given up
        self._has_checked = False
        if is_new:
            self._is_mean.clear()
            self._by_rows.clear()
            self._compared, self._is_gradient = 0, True

    def end_round(self) -> None:
        """Let go of all that was kept."""
        for kept in (self._kept, self._bytes, self._at):
            kept.clear()

    def of(self, index: int) -> Sequence[KeptAnchor]:
        """Return what is kept of a client's batches, in the order of its first local epoch; nothing if it is not."""
        return self._kept.get(index, ())

    def gradient(self, index: int, point: Vector, epoch: list[Tensor], settings: BatchSettings) -> Vector | None:
        """Return a client's full-batch gradient [P], and keep its parts; None if it cannot be had in this way.

        Args:
            index: The client's.
            point: The parameters [P], the same throughout a round.
            epoch: The tensors of all batches of its local epoch, which visit every example once, one after the other.
            settings: How examples become batches.
        """
        size, full = len(epoch[0]), settings.batch_size
        if not self._is_gradient or not self._is_mean.get(size, True):
            return None
        total = torch.zeros_like(point)
        sums, passed = self.layout.views(total), list[PassedSpan]()
        at = self._at_point(resized(epoch, full) if size < full else [t[:full] for t in epoch], point, sums)
        if at is None or (size % full and not at.takes_any_size) or (size % full == 1 and not at.by_rows):
            return None
        for span in _spans(size, full, settings.full_batch_size if at.by_rows else full):
            of_span = at.pass_over(sums, epoch, span, full)
            if of_span is None:
                return None
            passed.append(of_span)
        needed = sum(part.numel() * part.element_size() for each in passed for part in each.parts)
        others = sum(size for client, size in self._bytes.items() if client != index)
        if others + needed > _KEPT_BYTES or not self._is_right(passed, epoch, point, settings):
            return None
        at.add_products(sums, epoch, passed)
        if size > self._compared:
            batches = zip(*(t.split(settings.full_batch_size) for t in epoch), strict=True)
            shares = ((list(batch), len(batch[0]) / size) for batch in batches)
            self._compared, self._is_gradient = size, is_gradient(self.module, total, point, shares)
            if not self._is_gradient:
                return None
        self._bytes[index] = needed
        self._kept[index] = [kept for each in passed for kept in at.kept(each)]
        return total

    def _is_right(
        self, passed: Sequence[PassedSpan], epoch: Sequence[Tensor], point: Vector, settings: BatchSettings
    ) -> bool:
        """Compare with the module's loss on all examples at once, once a round and for clients of a new size."""
        size = len(epoch[0])
        if self._has_checked and size in self._is_mean:
            return True
        self._has_checked = True
        most = settings.full_batch_size
        count = size if size <= most else max(1, most // settings.batch_size) * settings.batch_size
        expected = self.module.own_loss(self.layout.views(point), [t[:count] for t in epoch], list)
        mean = sum(each.loss * (each.examples / count) for each in passed if each.start < count)
        self._is_mean[size] = self.module.agrees(torch.as_tensor(mean), expected)
        return self._is_mean[size]

    def _at_point(self, full: Sequence[Tensor], point: Vector, sums: Sequence[Tensor]) -> AnchorTrace | None:
        """Return the trace for batches such as this full one, and for others where there is one for any number."""
        key, most = kinds(full), len(full[0])
        if key not in self._at:
            any_size = self._trace(full, point, sums, (most, most - 1)) if most > 2 else None
            trace = any_size or self._trace(full, point, sums, (most,))
            at = None
            if trace is not None and trace.parts is not None:
                at = AnchorTrace(trace, trace.parts, trace.once([point])[1], trace is any_size)
                if trace not in self._by_rows:
                    self._by_rows[trace] = at.takes_any_size and has_rows(at, full, sums)
                at = replace(at, by_rows=self._by_rows[trace])
            self._at[key] = at
        return self._at[key]

    def _trace(
        self, full: Sequence[Tensor], point: Vector, sums: Sequence[Tensor], sizes: Sequence[int]
    ) -> Trace | None:
        """Return a trace made with batches of some sizes, to take any if there are several."""
        module, n, num_leaves = self.module, len(sums), len(full)

        def function(*flat: Tensor) -> Found:
            """Return gradients and loss, given sums (not read), batch, a factor of the gradients, and point."""
            leaves, at = flat[n : n + num_leaves], self.layout.views(flat[-1])
            grads, loss, _ = module.gradient(at, leaves, list, times=flat[-2])
            return grads, loss, {}

        def inputs(size: int) -> list[Tensor]:
            return [*sums, *resized(full, size), torch.ones((), dtype=point.dtype, device=point.device), point]

        return module.traces.get(
            ("anchor", len(sizes), kinds(full)),
            function,
            inputs,
            sizes,
            moves=n,
            constants=1,
            keep=lambda graph: keep_parts(graph, n, num_leaves, len(full[0])),
        )


def _spans(size: int, full: int, most: int) -> Iterator[range]:
    """Yield the examples of an epoch in spans of full batches, of ``most`` examples if more than one; then the rest."""
    whole, step = size - size % full, max(1, most // full) * full
    for start in range(0, whole, step):
        yield range(start, min(start + step, whole))
    if whole < size:
        yield range(whole, size)
