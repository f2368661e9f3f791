"""Which clients of a round are run at once on a CPU."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from lightning_fed.data.batches import TensorBatches
from lightning_fed.engines.plan import WorkPlan

__all__ = ["chunks_that_pay"]

# What a chunk costs on a CPU, in local steps of a client that runs alone; measured with logistic regression, in which
# such a step takes 30 us. Another model, with more arithmetic in a step, gains less from being run at once, and loses
# less.
_CLIENT = 6.0  # everything around the local steps of a client
_CHUNK = 20.0  # the same for a chunk
_STEP_OF_ALL = 4.2  # a step that all clients of a chunk take, which is traced as a whole
_STEP = 7.0  # a step of some of them
_ROW = 0.03, 0.33, 1.4  # each client's part of a step: of all, of some, and where its data has to be stacked


def chunks_that_pay(plans: Sequence[WorkPlan], most: int) -> Iterator[Sequence[WorkPlan]]:
    """Yield the clients of a round in groups that are faster at once than one by one; the others alone.

    A chunk takes as many steps as the client with the most, and at the end few are left to share them: clients with
    many more steps than the others are run alone, and so are clients that are few. It is a function of the clients'
    work alone, so that a run repeats bit by bit.

    Args:
        plans: The clients' work.
        most: The most clients at once.
    """
    left = sorted(plans, key=lambda plan: -plan.participant.steps)
    steps = [plan.participant.steps for plan in left]
    before = [0, *accumulate(steps)]  # the steps of all clients before each
    shares = _share_tensors(left)
    start = 0
    while start < len(left):
        count = min(most, len(left) - start)
        first, last, total = steps[start], steps[start + count - 1], before[start + count] - before[start]
        if not _pays(count, first, total, shares, shares and first == last):
            count = 1
        yield left[start : start + count]
        start += count


def _share_tensors(plans: Sequence[WorkPlan]) -> bool:
    """Whether all clients are cut out of the same tensors, so that a chunk's batches are one lookup."""
    tensors = {id(plan.batches.tensors) if isinstance(plan.batches, TensorBatches) else None for plan in plans}
    return len(tensors) == 1 and None not in tensors


def _pays(count: int, longest: int, total: int, shares: bool, is_equal: bool) -> bool:
    """Whether clients are faster at once.

    Args:
        count: How many they are.
        longest: The local steps of the one with the most.
        total: The local steps of all.
        shares: Whether they are cut out of the same tensors.
        is_equal: Whether, moreover, all have as many steps.
    """
    step = _STEP_OF_ALL if is_equal else _STEP
    row = _ROW[0] if is_equal else _ROW[1] if shares else _ROW[2]
    return _CHUNK + count + longest * step + total * row < total + count * _CLIENT
