"""Which shapes of batches come so often that a trace of them pays."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from lightning_fed.engines.vectorized.batches import BatchGroup

__all__ = ["Recurring"]

_SHARE = 8  # of the steps of a round so far, one in so many has batches of a shape that recurs


class Recurring:
    """Counts the shapes of a round's batches, where these may be of any: padded texts differ from batch to batch.

    A trace is made for one shape, in the time of hundreds of steps. Every round begins anew, whatever has been traced
    before, so that a resumed run takes the same steps traced.

    Args:
        batch_size: The examples in a full batch; None where batches have no size in common.
    """

    def __init__(self, batch_size: int | None) -> None:
        self._batch_size = batch_size
        self._steps: Counter[Any] = Counter()

    def begin_round(self) -> None:
        """Forget what was seen."""
        self._steps.clear()

    def note(self, groups: Sequence[BatchGroup]) -> bool:
        """Take note of the batches of a step; return whether they are of shapes that recur."""
        recur = [group.is_rows or self._recurs(group) for group in groups]  # each is counted
        return all(recur)

    def _recurs(self, group: BatchGroup) -> bool:
        leaves, full = group.first, self._batch_size
        is_smaller = full is not None and group.examples < full and all(len(leaf) == group.examples for leaf in leaves)
        shapes = [(full, *leaf.shape[1:]) if is_smaller else tuple(leaf.shape) for leaf in leaves]
        kind = (group.spec, *((shape, leaf.dtype) for shape, leaf in zip(shapes, leaves, strict=True)))
        self._steps[kind] += 1
        return self._steps[kind] > 1 and self._steps.total() <= _SHARE * self._steps[kind]
