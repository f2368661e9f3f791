"""Which clients of a round are run at once on a CPU."""

from collections.abc import Iterator, Sequence

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
    start = 0
    while start < len(left):
        count = min(most, len(left) - start)
        if not _pays(left[start : start + count]):
            count = 1
        yield left[start : start + count]
        start += count


def _pays(plans: Sequence[WorkPlan]) -> bool:
    """Whether clients, those with the most steps first, are faster at once."""
    steps = [plan.participant.steps for plan in plans]
    first = plans[0].batches
    shares = isinstance(first, TensorBatches) and all(
        isinstance(plan.batches, TensorBatches) and plan.batches.tensors is first.tensors for plan in plans
    )
    is_equal = shares and steps[0] == steps[-1]
    step = _STEP_OF_ALL if is_equal else _STEP
    row = _ROW[0] if is_equal else _ROW[1] if shares else _ROW[2]
    at_once = _CHUNK + len(plans) + steps[0] * step + sum(steps) * row
    return at_once < sum(steps) + len(plans) * _CLIENT
