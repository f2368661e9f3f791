"""The local steps of the clients of a chunk: traced where they can be, and in an order that lets them be."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.seeds import Purpose, capture_random_state, derive_seed, generator, seed_global
from lightning_fed.data.batches import ClientBatches, TensorBatches
from lightning_fed.engines.base import Engine, RoundInputs, WorkPlan
from lightning_fed.engines.vectorized.anchors import KeptAnchor
from lightning_fed.engines.vectorized.batch_groups import BatchGroup, Turn
from lightning_fed.engines.vectorized.chunk_batches import ChunkBatches, chunk_batches, has_transfer_hooks
from lightning_fed.engines.vectorized.device_data import ResidentData
from lightning_fed.engines.vectorized.functional import FunctionalStep
from lightning_fed.engines.vectorized.means import ChunkMeans
from lightning_fed.engines.vectorized.optimizer import Clipping
from lightning_fed.engines.vectorized.recurring import Recurring
from lightning_fed.engines.vectorized.row_batches import (
    Alike,
    OneClient,
    RowBatches,
    Stream,
    are_of_one_kind,
    fits_one_lookup,
    is_rows,
    look_up,
)
from lightning_fed.engines.vectorized.stacked import StackedWork
from lightning_fed.engines.vectorized.traced_steps import BoundSteps, LocalSteps
from lightning_fed.engines.vectorized.turns import full_size_of, turns

__all__ = ["Stepping"]


class Stepping:
    """Takes the local steps of the clients of a chunk.

    Args:
        engine: The engine that runs them.
        step: The module's step.
        resident: The data on the device.
    """

    def __init__(self, engine: Engine, step: FunctionalStep, resident: ResidentData) -> None:
        self.trainer, self.algorithm, self.optimizer = engine.trainer, engine.algorithm, engine.optimizer
        self.seed, self.shuffle, self.layout = engine.seed, engine.shuffle, engine.flat.layout
        self.device, self.step, self.resident = engine.flat.y.device, step, resident
        self.names = engine.flat.names
        self.batch_size: int | None = self.trainer.datamodule.batch_size
        self.has_hooks = has_transfer_hooks(self.trainer)
        self.steps = LocalSteps(step, self.algorithm, self.batch_size)
        self.recurring = Recurring(self.batch_size)
        self._taken: int | None = None  # steps of the clients at work

    def takes_turns(self, plans: Sequence[WorkPlan], clip: Clipping | None) -> bool:
        """Whether clients step in turns (:mod:`lightning_fed.engines.vectorized.turns`), and not all whenever one does.

        That is faster on a CPU where they come to their smaller batches at different times: traced are full batches.

        Args:
            plans: The clients' work.
            clip: How gradients are clipped, if they are.
        """
        if len(plans) == 1 or self.device.type != "cpu" or not self.steps.may_trace or self.step.is_random:
            return False
        if not StackedWork.plain_steps(self.algorithm, self.optimizer, clip):
            return False
        if self.has_hooks or not are_of_one_kind([plan.batches for plan in plans]):
            return False
        return all(full_size_of(plan) == self.batch_size for plan in plans)

    def run(
        self,
        inputs: RoundInputs,
        plans: Sequence[WorkPlan],
        work: StackedWork,
        means: ChunkMeans,
        in_turns: bool,
        kept: Sequence[Sequence[KeptAnchor]],
    ) -> None:
        """Take all steps of the clients of a chunk.

        Args:
            inputs: What the server hands out.
            plans: The clients' work, those with the most steps, or with the most full batches in turns, first.
            work: Their parameters and states.
            means: Takes their losses, and what they log.
            in_turns: Whether they step in turns.
            kept: What is kept of the gradients at the anchor on each client's first batches.
        """
        if self.step.is_random or not all(is_rows(plan.batches) for plan in plans):
            seed_global(derive_seed(self.seed, Purpose.TRAINING, inputs.round, plans[0].participant.index), self.device)
        streams = [partial(generator, self.seed, Purpose.BATCHES, inputs.round, p.participant.index) for p in plans]
        batches = self.batches(plans, streams, self.step.reads_index)
        with self.step.recording(), torch.no_grad():
            if in_turns:
                assert isinstance(batches, RowBatches)
                self._take_turns(inputs, batches, work, means, kept)
            elif isinstance(batches, OneClient):
                self._step_one(inputs, batches, work, means, kept[0])
            else:
                steps = [plan.participant.steps for plan in plans]
                self._step_together(inputs, steps, batches, work, means)
        self._taken = None

    def batches(self, plans: Sequence[WorkPlan], streams: Sequence[Stream], by_index: bool) -> ChunkBatches:
        """Return the batches of the clients of a chunk; see :func:`chunk_batches`."""
        return chunk_batches(self.trainer, plans, streams, self.shuffle, by_index, self.resident, self.has_hooks)

    def fits_one_lookup(self, batches: ClientBatches) -> bool:
        """Whether :meth:`first_epoch` may look up a client's examples."""
        if not isinstance(batches, TensorBatches) or self.has_hooks or self.device.type != "cpu":
            return False
        return batches.settings.batch_size == self.batch_size and fits_one_lookup(batches)

    def first_epoch(self, plan: WorkPlan, round: int) -> list[Tensor]:
        """Return the tensors of all batches of a client's first local epoch, one after the other."""
        assert isinstance(plan.batches, TensorBatches)
        stream = generator(self.seed, Purpose.BATCHES, round, plan.participant.index)
        return look_up(self.trainer, self.resident, plan.batches, plan.batches.epoch_rows(stream, self.shuffle))

    def abandon(self) -> int | None:
        """Forget the clients at work; return the local steps they had taken, None if nobody is."""
        taken, self._taken = self._taken, None
        return taken

    def _step_together(
        self,
        inputs: RoundInputs,
        steps: Sequence[int],
        batches: ChunkBatches,
        work: StackedWork,
        means: ChunkMeans,
    ) -> None:
        """Take step k of all clients that have so many, then the next."""
        anchor = self._anchor(inputs)
        active, bound = 0, None
        for k in range(steps[0]):
            self._taken = k
            self.trainer._signal_connector.check()
            now = active or len(steps)
            while steps[now - 1] <= k:
                now -= 1
            if now != active:
                active = now
                work.narrow(active)
                bound = self.steps.bind(work) if active in (1, len(steps)) else None
            groups = batches.step(active)
            recurs = self.recurring.note(groups)
            if bound is None or not recurs or not self._take_traced(bound, groups, means):
                self._step(work, groups, anchor, means, recurs)

    def _step_one(
        self,
        inputs: RoundInputs,
        batches: OneClient,
        work: StackedWork,
        means: ChunkMeans,
        kept: Sequence[KeptAnchor],
    ) -> None:
        """Take all steps of a single client, those on batches of one size in one go where they are traced."""
        anchor, bound = self._anchor(inputs), self.steps.bind(work)
        self._taken = 0
        for alike in batches.runs():
            own, kept = kept[: len(alike.batches)], kept[len(alike.batches) :]
            done = 0 if bound is None else self._take_alike(bound, alike, means, own)
            for i in range(done, len(alike.batches)):
                self.trainer._signal_connector.check()
                self._step(work, [alike.group(i)], anchor, means)
                self._taken += 1

    def _take_alike(self, bound: BoundSteps, alike: Alike, means: ChunkMeans, kept: Sequence[KeptAnchor]) -> int:
        """Take the traced steps on batches of one size, and return how many were taken."""
        self.trainer._signal_connector.check()
        group = alike.group(0)
        if not self._take_traced(bound, [group], means, kept[0] if kept else None):
            return 0
        self._count()
        found = bound.take_alike(alike, kept, self._count)
        if found is None:
            return 1
        means.add((0,) * (len(alike.batches) - 1), alike.examples, *found)
        return len(alike.batches)

    def _count(self) -> None:
        """Count a step of the client at work, and look whether the run is to stop."""
        self._taken = (self._taken or 0) + 1
        self.trainer._signal_connector.check()

    def _take_turns(
        self,
        inputs: RoundInputs,
        batches: RowBatches,
        work: StackedWork,
        means: ChunkMeans,
        kept: Sequence[Sequence[KeptAnchor]],
    ) -> None:
        """Take the clients' full batches at once, and their smaller ones client by client."""
        anchor, size = self._anchor(inputs), self.batch_size
        assert size is not None
        bounds: dict[tuple[int, int], BoundSteps | None] = {}
        order = list(turns(batches.sizes, size, self._takes_any_count(batches, work, size, kept)))
        for k, (turn, group) in enumerate(zip(order, batches.in_turns(order), strict=True)):
            self._taken = k
            self.trainer._signal_connector.check()
            rows = (len(turn.at), turn.clients.start)
            work.narrow(*rows)
            if rows not in bounds:
                bounds[rows] = self.steps.bind(work, next(iter(bounds.values()), None))
            bound = bounds[rows]
            if bound is None or not self._take_traced(bound, [group], means, _kept_of(kept, turn)):
                self._step(work, [group], anchor, means)

    def _takes_any_count(
        self, batches: RowBatches, work: StackedWork, size: int, kept: Sequence[Sequence[KeptAnchor]]
    ) -> bool:
        """Whether the traced step that comes first takes any number of clients; found out before it is taken.

        What is run depends on the clients' work alone then, and not on what was run before.
        """
        firsts = [of_client[0] for of_client in batches.sizes if of_client]
        full = firsts.count(size)
        count = full or (len(firsts) if len(set(firsts)) == 1 else 0)
        if count < 2:
            return False
        turn = Turn(slice(0, count), [0] * count)
        anchors = _kept_of(kept, turn)
        known, key = self.step.traces.fit_any_count, (batches.kinds, firsts[0], anchors is None)
        if key not in known:
            work.narrow(count)
            bound = self.steps.bind(work)
            (group,) = batches.in_turns([turn])
            known[key] = bound is not None and bound.fits_any_count(group, anchors)
        return known[key]

    def _take_traced(
        self, bound: BoundSteps, groups: Sequence[BatchGroup], means: ChunkMeans, kept: KeptAnchor | None = None
    ) -> bool:
        """Take a step in one go, where there is a trace of it."""
        if len(groups) > 1:
            return False
        (group,) = groups
        found = bound.take(group, kept)
        if found is not None:
            means.add(group.clients, group.examples, *found)
        return found is not None

    def _anchor(self, inputs: RoundInputs) -> list[Tensor] | None:
        name = self.algorithm.anchor_at
        if name is None:
            return None
        return self.layout.views(inputs.x if name == "x" else inputs.server[name])

    def _step(
        self,
        work: StackedWork,
        groups: Sequence[BatchGroup],
        anchor: list[Tensor] | None,
        means: ChunkMeans,
        recurs: bool = True,
    ) -> None:
        self.step.is_hot = recurs and self._is_regular(work, groups)
        if work.active == 1:
            self._step_alone(work, groups[0], anchor, means)
            return
        grads: list[list[Tensor]] = []
        anchors: list[list[Tensor]] = []
        for group in groups:
            views = work.views if isinstance(group.rows, slice) else [v[group.rows] for v in work.views]
            restore = capture_random_state(self.device) if anchor is not None and self.step.is_random else None
            found, loss, logged = self.step.gradients(views, group.batch, group.batch_idx)
            grads.append([g.reshape(len(g), -1) for g in found])
            means.add(group.clients, group.examples, loss, logged)
            if anchor is not None:
                if restore is not None:
                    restore()
                anchors.append(self._anchor_gradients(anchor, group))
        unused = self._unused_by_all(groups) if work.skips else frozenset()
        whole_anchors = None if anchor is None else _scatter(groups, anchors, work)
        work.take_step(_scatter(groups, grads, work), whole_anchors, unused)

    def _unused_by_all(self, groups: Sequence[BatchGroup]) -> frozenset[int]:
        """Return the parameters that the losses do not depend on.

        Raises:
            FederatedError: If that differs from client to client.
        """
        found = {self.step.unused_in(group.first, group.batch_idx) for group in groups}
        if len(found) > 1:
            some = frozenset.union(*found) - frozenset.intersection(*found)
            raise FederatedError(
                f"engine='vectorized' cannot step clients at once whose losses depend on {self.names[min(some)]!r} for"
                " some of them only, with this optimizer. Use chunk_size=1, or engine='sequential'."
            )
        return found.pop()

    def _is_regular(self, work: StackedWork, groups: Sequence[BatchGroup]) -> bool:
        """Whether it is a step on full batches of one client, or of all clients of a chunk, as most are."""
        everybody = work.active in (1, len(work.y))
        full = len(groups) == 1 and groups[0].examples == self.batch_size
        return everybody and full and not self.step.reads_index

    def _step_alone(self, work: StackedWork, group: BatchGroup, anchor: list[Tensor] | None, means: ChunkMeans) -> None:
        restore = capture_random_state(self.device) if anchor is not None and self.step.is_random else None
        batch = group.first
        grads, loss, logged = self.step.gradient_of_one(work.alone, batch, group.batch_idx)
        means.add(group.clients, group.examples, loss, logged)
        if work.takes_raw:
            work.take_raw_step(grads)
            return
        if restore is not None:
            restore()
        anchors = None
        if anchor is not None:
            found, _, _ = self.step.gradient_of_one(anchor, batch, group.batch_idx)
            anchors = self._with_decay(found, anchor, 1)
        unused = self.step.last_unused
        if unused is None and work.skips:
            unused = self.step.unused_in(batch, group.batch_idx)
        work.take_step([g.reshape(1, -1) for g in grads], anchors, unused or frozenset())

    def _anchor_gradients(self, anchor: list[Tensor], group: BatchGroup) -> list[Tensor]:
        """Return the gradients at the anchor on the same batches, coupled weight decay included."""
        count = len(group.clients)
        if self.step.is_random:  # as many draws, in the same order, as at the clients' own parameters
            point = [v.expand(count, *v.shape) for v in anchor]
            found, _, _ = self.step.gradients(point, group.batch, group.batch_idx)
        else:
            found, _, _ = self.step.gradients(anchor, group.batch, group.batch_idx, shared=True)
        return self._with_decay(found, anchor, count)

    def _with_decay(self, grads: Sequence[Tensor], anchor: Sequence[Tensor], count: int) -> list[Tensor]:
        parts = zip(grads, anchor, self.optimizer.decay, strict=True)
        return [(g.add(v, alpha=decay) if decay else g).reshape(count, -1) for g, v, decay in parts]


def _kept_of(kept: Sequence[Sequence[KeptAnchor]], turn: Turn) -> KeptAnchor | None:
    """Return what is kept of the gradients at the anchor on the batches of a step, None if any client lacks it."""
    if not all(at < len(own) for own, at in zip(kept[turn.clients], turn.at, strict=True)):
        return None
    own = [own[at] for own, at in zip(kept[turn.clients], turn.at, strict=True)]
    return own[0] if len(own) == 1 else KeptAnchor.stacked(own)


def _scatter(groups: Sequence[BatchGroup], parts: Sequence[Sequence[Tensor]], work: StackedWork) -> Sequence[Tensor]:
    """Bring the groups' gradients [n, n_p] into the clients' order."""
    if len(groups) == 1:
        return parts[0]
    out = [torch.empty_like(column) for column in work.columns]
    for group, columns in zip(groups, parts, strict=True):
        for whole, part in zip(out, columns, strict=True):
            whole[group.rows] = part
    return out
