"""The order in which the clients of a chunk take their local steps."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from lightning_fed.core.seeds import Purpose, derive_seed, generator, seed_global
from lightning_fed.data.batches.batches import TensorBatches
from lightning_fed.engines.base import Engine, RoundInputs, WorkPlan
from lightning_fed.engines.vectorized.batches import (
    AnyBatches,
    BatchGroup,
    RowBatches,
    Turn,
    has_transfer_hooks,
)
from lightning_fed.engines.vectorized.chunk_work import ChunkWork, steps_are_plain
from lightning_fed.engines.vectorized.clients import ChunkMeans
from lightning_fed.engines.vectorized.local_steps import LocalSteps
from lightning_fed.engines.vectorized.module_step import ModuleStep
from lightning_fed.engines.vectorized.optimizer import Clipping
from lightning_fed.engines.vectorized.row_lookup import DeviceData, RowLookup, rows_of_one_kind

__all__ = ["RecurringShapes", "Schedule", "batch_sizes", "staggered"]

_SHARE = 8  # of the steps of a round so far, one in so many has batches of a shape that recurs


class Schedule:
    """Lets the clients of a chunk take their local steps.

    Args:
        engine: The engine that runs them.
        module: The module's step.
    """

    def __init__(self, engine: Engine, module: ModuleStep) -> None:
        self.trainer, self.algorithm, self.optimizer = engine.trainer, engine.algorithm, engine.optimizer
        self.seed, self.shuffle = engine.seed, engine.shuffle
        self.device, self.module, self.data = engine.flat.y.device, module, DeviceData(engine.flat.y.device)
        self.batch_size: int | None = self.trainer.datamodule.batch_size
        self.has_hooks = has_transfer_hooks(self.trainer)
        self.recurring = RecurringShapes(self.batch_size)
        self._taken: int | None = None  # steps of the clients at work

    def turns(self, plans: Sequence[WorkPlan], clip: Clipping | None) -> tuple[list[int], list[Turn]]:
        """Return which row of the chunk each client comes to, and their steps.

        All clients step whenever one does; on a CPU, where that can be, in the order of :func:`staggered`. That is
        faster where they come to their smaller batches at different times: traced are full batches.

        Args:
            plans: The clients' work.
            clip: How gradients are clipped, if they are.
        """
        sizes, full = [[1] * plan.participant.steps for plan in plans], 1  # as if all batches were full
        if self.batch_size is not None and self._is_staggered(plans, clip):
            full = self.batch_size
            sizes = [batch_sizes(plan, full) for plan in plans]
        lengths = [own.count(full) for own in sizes]
        order = sorted(range(len(plans)), key=lengths.__getitem__, reverse=True)
        return order, list(staggered([sizes[i] for i in order], full))

    def _is_staggered(self, plans: Sequence[WorkPlan], clip: Clipping | None) -> bool:
        module = self.module
        may_trace = module.traces.allowed and not module.reads_index and not module.is_random
        if len(plans) == 1 or self.device.type != "cpu" or not may_trace:
            return False
        rows = self.rows(plans) if steps_are_plain(self.algorithm, self.optimizer, clip) else []
        return bool(rows) and {own.settings.batch_size for own in rows} == {self.batch_size}

    def run(
        self,
        inputs: RoundInputs,
        plans: Sequence[WorkPlan],
        turns: Sequence[Turn],
        work: ChunkWork,
        means: ChunkMeans,
    ) -> None:
        """Take all steps of the clients of a chunk.

        Args:
            inputs: What the server hands out.
            plans: The clients' work, row by row.
            turns: Their steps.
            work: Their parameters and states.
            means: Takes their losses, and what they log.
        """
        batches = self.batches(plans, inputs.round, self.module.reads_index)
        are_rows = isinstance(batches, RowBatches)
        if self.module.is_random or not are_rows:
            seed_global(derive_seed(self.seed, Purpose.TRAINING, inputs.round, plans[0].participant.index), self.device)
        steps = LocalSteps(self.module, work, self.batch_size, means)
        with self.module.recording():
            groups = batches.in_order(turns)
            for turn in turns:
                self._taken = turn.at[0]
                self.trainer._signal_connector.check()
                clients, of_turn = work.memory.clients(turn.clients), next(groups)
                may_trace = are_rows or self.recurring.note(of_turn)
                steps.run(clients, of_turn, may_trace)
        self._taken = None

    def rows(self, plans: Sequence[WorkPlan]) -> list[TensorBatches]:
        """Return the clients' batches if all are rows of tensors of one kind, for which no loader is needed."""
        return [] if self.has_hooks else rows_of_one_kind([plan.batches for plan in plans])

    def batches(self, plans: Sequence[WorkPlan], round: int, by_index: bool) -> RowBatches | AnyBatches:
        """Return the batches of clients.

        Args:
            plans: Their work.
            round: The round.
            by_index: Whether clients at different places of their local epochs must be kept apart.
        """
        stream = partial(generator, self.seed, Purpose.BATCHES, round)
        if rows := self.rows(plans):
            return RowBatches(RowLookup(self.trainer, rows, self.data), plans, stream, self.shuffle, by_index)
        return AnyBatches(self.trainer, plans, stream, self.shuffle, by_index, self.has_hooks)

    def abandon(self) -> int | None:
        """Forget the clients at work; return the local steps they had taken, None if nobody is."""
        taken, self._taken = self._taken, None
        return taken


class RecurringShapes:
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
        recur = [self._recurs(group) for group in groups]  # each is counted
        return all(recur)

    def _recurs(self, group: BatchGroup) -> bool:
        leaves, full = group.first, self._batch_size
        is_smaller = full is not None and group.examples < full and all(len(leaf) == group.examples for leaf in leaves)
        shapes = [(full, *leaf.shape[1:]) if is_smaller else tuple(leaf.shape) for leaf in leaves]
        kind = (group.spec, *((shape, leaf.dtype) for shape, leaf in zip(shapes, leaves, strict=True)))
        self._steps[kind] += 1
        return self._steps[kind] > 1 and self._steps.total() <= _SHARE * self._steps[kind]


def staggered(sizes: Sequence[Sequence[int]], full: int) -> Iterator[Turn]:
    """Yield the clients' steps: on full batches all at once, on each smaller one its client alone, as it comes to it.

    Every client takes its own steps in order; the order between clients does not affect the result. Clients whose
    batches are alike all through take the smaller ones at once too.

    Args:
        sizes: The examples of each batch of every client; those with the most full batches come first.
        full: The examples in a full batch.
    """
    at = [0] * len(sizes)  # the next batch of each
    active = len(sizes)
    are_alike = sizes.count(sizes[0]) == len(sizes)
    while True:
        for client, own in enumerate(sizes[:active] if not are_alike else ()):
            while at[client] < len(own) and own[at[client]] < full:
                yield Turn(range(client, client + 1), [at[client]])
                at[client] += 1
        while active and at[active - 1] == len(sizes[active - 1]):
            active -= 1
        if not active:
            return
        yield Turn(range(active), at[:active])
        at[:active] = [k + 1 for k in at[:active]]


def batch_sizes(plan: WorkPlan, full: int) -> list[int]:
    """Return the examples of each batch of a client, given those of a full one."""
    sizes = list[int]()
    for length in plan.epochs:
        whole, rest = divmod(plan.batches.num_examples(length), full)
        sizes += [full] * whole + ([rest] if rest else [])
    return sizes
