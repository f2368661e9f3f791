"""The order in which the clients of a chunk take their steps on a CPU, where they do not wait for each other."""

from collections.abc import Iterator, Sequence

from lightning_fed.data.batches import TensorBatches
from lightning_fed.engines.base import WorkPlan
from lightning_fed.engines.vectorized.batch_groups import Turn

__all__ = ["full_batches", "full_size_of", "pieces", "turns"]

_COUNTS = (128, 100, 80, 64, 50, 40, 32, 25, 20, 16, 12, 10, 8, 6, 5, 4, 3, 2, 1)
"""Of clients that step at once: each number takes a trace of its own, and cohorts are often round numbers."""


def full_batches(plan: WorkPlan) -> int:
    """Return how many of a client's batches have the full number of examples."""
    return sum(min(length, plan.batches.size // full_size_of(plan)) for length in plan.epochs)


def full_size_of(plan: WorkPlan) -> int:
    """Return the number of examples in a client's full batches."""
    assert isinstance(plan.batches, TensorBatches)
    return plan.batches.settings.batch_size


def pieces(active: int) -> Iterator[slice]:
    """Yield the clients at work, the first ones of a chunk, in groups of few different sizes."""
    start = 0
    while start < active:
        count = next(n for n in _COUNTS if n <= active - start)
        yield slice(start, start + count)
        start += count


def turns(sizes: Sequence[Sequence[int]], size: int, whole: bool = False) -> Iterator[Turn]:
    """Yield the clients' steps: on full batches many at once, on each smaller one its client alone, as it comes to it.

    Every client takes its own steps in order; who is ahead of whom makes no difference to what it arrives at. Clients
    whose batches are alike all through take the smaller ones at once too.

    Args:
        sizes: The examples of each batch of every client; clients are sorted by :func:`full_batches`, those with the
            most first.
        size: The examples in a full batch.
        whole: Whether any number of clients may step at once; or they go in :func:`pieces`.
    """
    at = [0] * len(sizes)  # the next batch of each
    active = len(sizes)
    are_alike = all(own == sizes[0] for own in sizes)
    while True:
        for client, own in enumerate(sizes[:active] if not are_alike else ()):
            while at[client] < len(own) and own[at[client]] < size:
                yield Turn(slice(client, client + 1), [at[client]])
                at[client] += 1
        while active and at[active - 1] == len(sizes[active - 1]):
            active -= 1
        if not active:
            return
        for piece in (slice(0, active),) if whole else pieces(active):
            yield Turn(piece, at[piece])
        at[:active] = [k + 1 for k in at[:active]]
