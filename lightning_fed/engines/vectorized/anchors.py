"""Gradients at the anchor that are taken once: in the full pass, over the batches of a local epoch that is to come.

The full-batch gradient of Mime is the mean of the gradients on the batches on which its local steps take them again.
Where the loss is provably a mean over examples, the full pass goes over these very batches, and keeps what the steps
need: of the gradient of a linear layer its two factors, if they are smaller than their product; else the gradient.
Where that is a row for every example throughout, as in networks of linear layers, many batches are passed at once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_fed.core.types import Vector
from lightning_fed.data.batches.settings import BatchSettings
from lightning_fed.engines.vectorized.full_gradients import is_gradient
from lightning_fed.engines.vectorized.module_step import ModuleStep
from lightning_fed.tracing.gradient_parts import Parts, keep_parts
from lightning_fed.tracing.traces import Found, Trace, kinds, resized

__all__ = ["AnchorPass", "AnchorTrace", "KeptAnchor", "has_rows"]

_KEPT_BYTES = 2**30  # kept from the full pass to the local steps, in each process


@dataclass(frozen=True, slots=True)
class PassedSpan:
    """What a pass over some batches of a local epoch gave.

    Attributes:
        start: Its first example in the epoch.
        examples: Their number.
        in_batch: The examples in each of the batches, or in the last one of the epoch if that was passed alone.
        loss: Their mean loss.
        parts: The parts.
    """

    start: int
    examples: int
    in_batch: int
    loss: Tensor
    parts: list[Tensor]


@dataclass(slots=True)
class AnchorTrace:
    """A trace of gradients at a point.

    Attributes:
        trace: Adds them to sums.
        parts: What it returns beside.
        rest: What it takes after the batch and its factor.
        takes_any_size: Whether it takes batches of any size but one.
        by_rows: Whether every part has a row for each example, which depends on no other, so that batches may be passed
            at once.
    """

    trace: Trace
    parts: Parts
    rest: Sequence[Tensor]
    takes_any_size: bool
    by_rows: bool = False

    def add(
        self, sums: Sequence[Tensor], leaves: Sequence[Tensor], batches: int = 1, factor: float = 0.0
    ) -> tuple[Tensor, list[Tensor]]:
        """Add a multiple of the sum of the gradients on so many batches to sums, but for the products.

        Returns:
            The mean loss, then the parts and the counts.
        """
        times = torch.tensor(float(batches), dtype=sums[0].dtype, device=sums[0].device)
        with torch.no_grad():
            loss, *parts = self.trace(*(sums[i] for i in self.parts.others), *leaves, times, *self.rest, factor)
        return loss, parts

    def pass_over(self, sums: Sequence[Tensor], epoch: Sequence[Tensor], span: range, size: int) -> PassedSpan | None:
        """Add the gradients on a span of an epoch, in batches of a size, to the full-batch gradient, but for products.

        Returns:
            None if some targets are to be ignored: batches do not weigh as much as they have examples then.
        """
        examples, total = len(span), len(epoch[0])
        in_batch = min(size, examples)
        leaves = [t[span.start : span.stop] for t in epoch]
        is_single = examples == 1 and self.by_rows
        if is_single:  # the trace does not fit a batch of one
            leaves = [torch.cat([t, t]) for t in leaves]
        batches = 2 if is_single else examples // in_batch
        loss, found = self.add(sums, leaves, batches, examples / (batches * total))
        counts = [float(count) for count in found[self.parts.count :]]
        if counts != [share * len(leaves[0]) for share in self.parts.shares]:
            return None
        parts = found[: self.parts.count]
        return PassedSpan(span.start, examples, in_batch, loss, [p[:1] for p in parts] if is_single else parts)

    def add_products(self, sums: Sequence[Tensor], epoch: Sequence[Tensor], passed: Sequence[PassedSpan]) -> None:
        """Add the products of all batches of an epoch."""
        first, last = passed[0].in_batch, passed[-1].in_batch

        def joined(at: int, is_weighted: bool) -> Tensor:
            if at < len(epoch):
                return epoch[at]
            column = [each.parts[at - len(epoch)] for each in passed]
            if is_weighted and last != first:
                column[-1] = column[-1] * (last / first)
            return column[0] if len(column) == 1 else torch.cat(column)

        for i, (left, right) in self.parts.products.items():
            weighs_left = left >= len(epoch)  # the tensors of the batches stay as they are
            factors = joined(left, weighs_left).t(), joined(right, not weighs_left)
            sums[i].addmm_(*factors, alpha=first / len(epoch[0]))

    def kept(self, passed: PassedSpan) -> "list[KeptAnchor]":
        """Return what is kept for each of the batches."""
        if passed.examples == passed.in_batch:  # also where parts have no rows to be split by
            return [KeptAnchor(passed.parts, self)]
        of_batches = zip(*(part.split(passed.in_batch) for part in passed.parts), strict=True)
        return [KeptAnchor(list(parts), self) for parts in of_batches]


@dataclass(frozen=True, slots=True)
class KeptAnchor:
    """The parts of the gradient at the anchor on a batch; on one of each of several clients, if :meth:`stacked`."""

    parts: list[Tensor]
    _made_by: AnchorTrace

    @property
    def assemble(self) -> Callable[..., list[Tensor]]:
        """From the tensors of the batch and the parts to the gradients."""
        return self._made_by.parts.assembly.forward

    @staticmethod
    def stacked(kept: "Sequence[KeptAnchor]") -> "KeptAnchor":
        """Return those of several clients' batches of one size as one, each part [n, ...]."""
        parts = [torch.stack(column) for column in zip(*(each.parts for each in kept), strict=True)]
        return KeptAnchor(parts, kept[0]._made_by)

    def parts_of(self, leaves: Sequence[Tensor], sums: Sequence[Tensor]) -> list[Tensor]:
        """Return the parts of another batch, given memory in the parameters' shapes; for traces of other sizes."""
        _, parts = self._made_by.add([torch.empty_like(s) for s in sums], leaves)
        return parts[: self._made_by.parts.count]


class AnchorPass:
    """Full-batch gradients over the batches of a local epoch, and what is kept of them until its local steps.

    Args:
        module: The module's step; where it changes, another pass takes the place of this one.
    """

    def __init__(self, module: ModuleStep) -> None:
        self.module = module
        self.layout = module.flat.layout
        self._by_rows: dict[Trace, bool] = {}
        self._is_mean: dict[int, bool] = {}  # by the number of a client's examples
        self._compared = 0  # examples of the largest client whose gradient was compared with the module's own
        self._is_gradient = True  # whether it was the same
        self._has_checked = False  # a loss in this round
        self._kept: dict[int, list[KeptAnchor]] = {}  # by client, in this round
        self._bytes: dict[int, int] = {}
        self._at: dict[Any, AnchorTrace | None] = {}  # by the kinds of full batches, in this round

    def clear(self) -> None:
        """Let go of what is of one round: all that was kept."""
        self._has_checked = False
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
        self._bytes.pop(index, None)  # of a round that has begun again
        if sum(self._bytes.values()) + needed > _KEPT_BYTES:
            return None
        at.add_products(sums, epoch, passed)
        if not self._is_right(total, passed, epoch, point, settings):
            return None
        self._bytes[index] = needed
        self._kept[index] = [kept for each in passed for kept in at.kept(each)]
        return total

    def _is_right(
        self,
        found: Vector,
        passed: Sequence[PassedSpan],
        epoch: Sequence[Tensor],
        point: Vector,
        settings: BatchSettings,
    ) -> bool:
        """Compare with the module: the loss once a round and for a new size, the gradient of a larger client."""
        size, most = len(epoch[0]), settings.full_batch_size
        if not self._has_checked or size not in self._is_mean:
            self._has_checked = True
            count = size if size <= most else max(1, most // settings.batch_size) * settings.batch_size
            expected = self.module.own_loss(self.layout.views(point), [t[:count] for t in epoch], list)
            mean = sum(each.loss * (each.examples / count) for each in passed if each.start < count)
            self._is_mean[size] = self.module.agrees(torch.as_tensor(mean), expected)
        if self._is_mean[size] and size > self._compared:
            batches = zip(*(t.split(most) for t in epoch), strict=True)
            shares = ((list(batch), len(batch[0]) / size) for batch in batches)
            self._compared, self._is_gradient = size, is_gradient(self.module, found, point, shares)
        return self._is_mean[size] and self._is_gradient

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
                at.by_rows = self._by_rows[trace]
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


def has_rows(at: AnchorTrace, leaves: Sequence[Tensor], sums: Sequence[Tensor]) -> bool:
    """Whether parts have a row for every example, which is the same whatever comes with it; found out by trying."""
    scratch, examples = [torch.zeros_like(s) for s in sums], len(leaves[0])

    def parts_of(batch: Sequence[Tensor], batches: int) -> list[Tensor]:
        return at.add(scratch, batch, batches)[1][: at.parts.count]

    first = parts_of(leaves, 1)
    if any(not part.ndim or len(part) != examples for part in first):
        return False
    other = [t[:1].expand_as(t).contiguous() for t in leaves]
    both = parts_of([torch.cat(pair) for pair in zip(leaves, other, strict=True)], 2)
    return all(map(_are_joined, both, first, parts_of(other, 1)))


def _are_joined(both: Tensor, first: Tensor, second: Tensor) -> bool:
    expected = torch.cat([first, second])
    atol = 1e-3 * float(expected.abs().max()) if expected.numel() else 0.0
    return both.shape == expected.shape and torch.allclose(both, expected, rtol=1e-3, atol=atol, equal_nan=True)
