"""Which clients of a round are run at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from lightning_fed.core.types import Vector
from lightning_fed.engines.base import WorkPlan
from lightning_fed.engines.vectorized.row_lookup import are_of_one_kind
from lightning_fed.engines.vectorized.schedule import full_batches

__all__ = ["chunks_that_pay", "default_chunk_size"]

_SMALL = 2**16  # parameters, up to which a CPU runs several clients at once

_CLIENT = 10.6
"""What is around the local steps of a client that runs alone; in local steps of such a client, as all costs here."""


@dataclass(frozen=True, slots=True)
class _Costs:
    """What a chunk costs on a CPU, beside the arithmetic, which is the same alone.

    They were measured with logistic regression of 610 to 65,000 parameters, in which a step takes 23 us beside the
    arithmetic. Nothing is timed in a run: it has to repeat bit by bit.

    Attributes:
        chunk: Everything around the steps.
        client: The same for each client.
        step: A step of many at once.
        row: Each client's part of it.
        row_of_parameter: The same for each of its parameters, which are further from the core than those of one client.
        smaller: A step on a smaller batch, which its client takes alone.
    """

    chunk: float
    client: float
    step: float
    row: float
    row_of_parameter: float
    smaller: float


_EQUAL = _Costs(8.8, 1.1, 2.1, 0.38, 0.5e-5, 0.0)  # all have as many examples: none has a smaller batch of its own
_IN_TURNS = _Costs(8.8, 1.1, 3.8, 0.38, 0.5e-5, 3.6)
_STACKED = _Costs(25.0, 1.3, 8.8, 1.8, 0.0, 0.0)  # each batch has to be made by itself, and stacked


def chunks_that_pay(plans: Sequence[WorkPlan], most: int, numel: int) -> Iterator[Sequence[WorkPlan]]:
    """Yield the clients of a round in groups that are faster at once than one by one; the others alone.

    A chunk takes as many steps as the client with the most, and at the end few are left to share them: clients with
    many more steps than the others are run alone, and so are clients that are few. It is a function of the clients'
    work alone.

    Args:
        plans: The clients' work.
        most: The most clients at once.
        numel: The number of parameters.
    """
    are_rows = are_of_one_kind([plan.batches for plan in plans])
    members = [plan.participant for plan in plans]
    at_once = [full_batches(plan) if are_rows else plan.participant.steps for plan in plans]
    work = [(n, member.steps, member.size) for n, member in zip(at_once, members, strict=True)]
    order = sorted(range(len(plans)), key=work.__getitem__, reverse=True)
    full = [work[i][0] for i in order]
    full_before = [0, *accumulate(full)]
    steps_before = [0, *accumulate(work[i][1] for i in order)]
    start = 0
    while start < len(order):
        stop = min(start + most, len(order))
        total = steps_before[stop] - steps_before[start]
        common = full_before[stop] - full_before[start]
        is_equal = work[order[start]] == work[order[stop - 1]]
        costs = _STACKED if not are_rows else _EQUAL if is_equal else _IN_TURNS
        together = costs.chunk + costs.client * (stop - start) + costs.step * full[start]
        together += (costs.row + costs.row_of_parameter * numel) * common + costs.smaller * (total - common)
        if together >= total + _CLIENT * (stop - start):
            stop = start + 1
        yield [plans[i] for i in order[start:stop]]
        start = stop


def default_chunk_size(y: Vector) -> int:
    """Return how many clients to run at once.

    On a CPU one at a time is fastest unless the model is small: its parameters stay in the cache then. On a GPU as many
    as fit its memory.

    Args:
        y: The parameters [P].
    """
    if y.device.type == "cpu":
        return min(128, 2**20 // y.numel()) if y.numel() <= _SMALL else 1
    # not what happens to be free: random layers draw other numbers in a chunk of another size
    memory = torch.cuda.get_device_properties(y.device).total_memory if y.device.type == "cuda" else 2**33
    return max(1, min(1024, memory // (32 * y.numel() * y.element_size())))
