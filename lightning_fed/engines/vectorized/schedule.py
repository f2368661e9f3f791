"""The order in which the clients of a chunk take their local steps."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, NamedTuple

from lightning_fed.core.seeds import Purpose, derive_seed, generator, seed_global
from lightning_fed.data.batches.batches import TensorBatches
from lightning_fed.engines.base import Engine, RoundInputs, WorkPlan
from lightning_fed.engines.batch_hooks import has_transfer_hooks
from lightning_fed.engines.vectorized.batches import (
    AnyBatches,
    BatchGroup,
    RowBatches,
    RowLookup,
    StepGroup,
    are_rows,
    rows_of_one_kind,
)
from lightning_fed.engines.vectorized.chunk_work import ChunkWork
from lightning_fed.engines.vectorized.clients import ChunkMeans
from lightning_fed.engines.vectorized.local_steps import LocalSteps
from lightning_fed.engines.vectorized.module_step import ModuleStep

_SHARE = 8  # a shape recurs if one in this many steps of the round so far had it


class StartGroup(NamedTuple):
    """Adjacent clients of a chunk with local schedules that begin at the same step; groups run one after another."""

    clients: range  # rows in the chunk, those with the most steps first
    first_step: int  # the step of the schedule, 0 without one
    steps: Sequence[StepGroup]


class Schedule:
    """Runs the local steps of a chunk's clients."""

    def __init__(self, engine: Engine, module: ModuleStep) -> None:
        self.trainer, self.seed, self.shuffle = engine.trainer, engine.seed, engine.shuffle
        self.device, self.module, self.data = engine.flat.y.device, module, engine.data
        self.batch_size: int | None = self.trainer.datamodule.batch_size
        self.has_hooks = has_transfer_hooks(self.trainer)
        self.recurring = RecurringShapes(self.batch_size)
        self._current_steps: int | None = None  # steps of the current clients

    def steps(
        self, plans: Sequence[WorkPlan], rows: Sequence[TensorBatches], starts: Sequence[int], is_bare: bool
    ) -> tuple[list[int], list[StartGroup]]:
        """Return the client of each row of the chunk, and the clients' steps.

        Clients whose local schedules begin at the same step (``starts``) have the same rate at each step. They step
        together, or in the order of :func:`interleaved` if a step only changes parameters (``is_bare``) and batches are
        ``rows`` of tensors. This order is faster if clients' smaller batches come at different times, since traces are
        for full batches.
        """
        sizes, full = [[1] * plan.participant.steps for plan in plans], 1  # as if all batches were full
        module, size = self.module, self.batch_size
        may_trace = module.traces.allowed and not module.reads_index and not module.is_random
        is_alike = len(rows) > 1 and set(map(attrgetter("settings.batch_size"), rows)) == {size}
        if size is not None and is_bare and may_trace and is_alike:
            full = size
            sizes = [batch_sizes(plan, full) for plan in plans]
        lengths = [own.count(full) for own in sizes]
        order = sorted(sorted(range(len(plans)), key=lengths.__getitem__, reverse=True), key=starts.__getitem__)
        groups, done = list[StartGroup](), 0
        for first_step, members in groupby(order, starts.__getitem__):
            own, rest = [sizes[i] for i in members], range(done, len(plans))
            steps = [StepGroup(rest[some.start : some.stop], at) for some, at in interleaved(own, full)]
            groups.append(StartGroup(rest[: len(own)], first_step, steps))
            done += len(own)
        return order, groups

    def run(
        self,
        inputs: RoundInputs,
        plans: Sequence[WorkPlan],
        rows: Sequence[TensorBatches],
        groups: Sequence[StartGroup],
        work: ChunkWork,
        means: ChunkMeans,
    ) -> None:
        """Take all steps of a chunk's clients, whose plans and rows of tensors are in the chunk's order."""
        module = self.module
        batches = self.batches(plans, rows, inputs.round, module.reads_index)
        if module.is_random or not rows:
            seed_global(derive_seed(self.seed, Purpose.TRAINING, inputs.round, plans[0].participant.index), self.device)
        with module.recording():
            batches_of_steps = batches.in_order(list(chain.from_iterable(map(attrgetter("steps"), groups))))
            for group in groups:
                if work.optimizer.schedule is not None:
                    work.begin(group.clients, group.first_step)
                local_steps = LocalSteps(module, work, group.clients, self.batch_size, means)
                for step in group.steps:
                    self._current_steps = step.at[0]
                    if work.optimizer.schedule is not None:
                        work.begin_step()
                    self.trainer._signal_connector.check()
                    batch_groups = next(batches_of_steps)
                    may_trace = bool(rows) or self.recurring.note(batch_groups)
                    local_steps.run(work.memory.clients(step.clients), batch_groups, may_trace)
        self._current_steps = None

    def rows(self, plans: Sequence[WorkPlan]) -> list[TensorBatches]:
        """Return the clients' batches if all are rows of tensors of one kind, which need no loader."""
        return [] if self.has_hooks else rows_of_one_kind(map(attrgetter("batches"), plans))

    def batches(
        self, plans: Sequence[WorkPlan], rows: Sequence[TensorBatches], round: int, by_index: bool
    ) -> RowBatches | AnyBatches:
        """Return the batches of clients; ``by_index`` separates those at different indices of their epochs."""
        stream = partial(generator, self.seed, Purpose.BATCHES, round)
        if rows:
            return RowBatches(RowLookup(self.trainer, rows, self.data), plans, stream, self.shuffle, by_index)
        return AnyBatches(self.trainer, plans, stream, self.shuffle, by_index, self.has_hooks)

    def abandon(self) -> int | None:
        """Drop the current clients; return their number of local steps, or None if there are none."""
        steps, self._current_steps = self._current_steps, None
        return steps


class RecurringShapes:
    """Counts the shapes of a round's batches, which may vary, as with padded texts.

    Recording a trace for one shape takes as long as hundreds of steps. Every round counts from zero, regardless of
    earlier traces, so that a resumed run traces the same steps.
    """

    def __init__(self, batch_size: int | None) -> None:
        self._batch_size = batch_size
        self._steps: Counter[Any] = Counter()

    def begin_round(self) -> None:
        """Reset the counts."""
        self._steps.clear()

    def note(self, groups: Sequence[BatchGroup]) -> bool:
        """Count the batches of a step; return whether their shapes recur."""
        recur = [self._recurs(group) for group in groups]  # a list, so that each one is counted
        return all(recur)

    def _recurs(self, group: BatchGroup) -> bool:
        leaves, full = group.first, self._batch_size
        is_smaller = full is not None and group.examples < full and are_rows(leaves, group.examples)
        shapes = [(full, *leaf.shape[1:]) if is_smaller else tuple(leaf.shape) for leaf in leaves]
        kind = (group.spec, *((shape, leaf.dtype) for shape, leaf in zip(shapes, leaves, strict=True)))
        self._steps[kind] += 1
        return self._steps[kind] > 1 and self._steps.total() <= _SHARE * self._steps[kind]


def interleaved(sizes: Sequence[Sequence[int]], full: int) -> Iterator[StepGroup]:
    """Yield the clients' steps: together on full batches, one client alone on each smaller batch.

    ``sizes`` has the examples of each client's batches, clients with the most full batches first. Every client takes
    its steps in order; the order between clients does not affect the result. Clients with equal batch sizes throughout
    also take smaller ones together.
    """
    at = [0] * len(sizes)  # the next batch of each client
    active = len(sizes)
    are_alike = sizes.count(sizes[0]) == len(sizes)
    while True:
        for client, own in enumerate(sizes[:active] if not are_alike else ()):
            while at[client] < len(own) and own[at[client]] < full:
                yield StepGroup(range(client, client + 1), [at[client]])
                at[client] += 1
        while active and at[active - 1] == len(sizes[active - 1]):
            active -= 1
        if not active:
            return
        yield StepGroup(range(active), at[:active])
        at[:active] = [k + 1 for k in at[:active]]


def batch_sizes(plan: WorkPlan, full: int) -> list[int]:
    """Return the number of examples in each batch of a client, given that of a full one."""
    sizes = list[int]()
    for length in plan.epochs:
        whole, rest = divmod(plan.batches.num_examples(length), full)
        sizes += [full] * whole + ([rest] if rest else [])
    return sizes
