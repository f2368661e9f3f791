"""Traces of gradients at the anchor: what a pass over some batches gives, and what is kept of it for local steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fed.tracing.gradient_parts import Parts
from lightning_fed.tracing.traces import Trace

__all__ = ["AnchorTrace", "KeptAnchor", "PassedSpan", "has_rows"]


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


@dataclass(frozen=True, slots=True)
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
        """Add a multiple of the sum of the gradients on batches to sums, but for the products.

        Args:
            sums: One tensor per parameter.
            leaves: The examples of all batches.
            batches: The number of batches, of one size.
            factor: The multiple.

        Returns:
            The mean loss, then the parts and the counts.
        """
        times = torch.tensor(float(batches), dtype=sums[0].dtype, device=sums[0].device)
        with torch.no_grad():
            loss, *parts = self.trace(*(sums[i] for i in self.parts.others), *leaves, times, *self.rest, factor)
        return loss, parts

    def pass_over(self, sums: Sequence[Tensor], epoch: Sequence[Tensor], span: range, size: int) -> PassedSpan | None:
        """Add the gradients on some batches of an epoch to the full-batch gradient, but for the products.

        Args:
            sums: One tensor per parameter.
            epoch: The examples of the epoch.
            span: Those of the batches.
            size: The examples in a full batch.

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
        if passed.examples == passed.in_batch:
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


def has_rows(at: AnchorTrace, leaves: Sequence[Tensor], sums: Sequence[Tensor]) -> bool:
    """Whether parts have a row for every example, which is the same whatever comes with it.

    A loss that is provably a mean over examples leaves hardly another way; it is looked at all the same.
    """
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
