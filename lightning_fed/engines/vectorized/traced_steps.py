"""Local steps of plain SGD in one go: gradients, the method's correction and the update, as one traced graph."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.engines.vectorized.anchors import KeptAnchor
from lightning_fed.engines.vectorized.batch_groups import BatchGroup
from lightning_fed.engines.vectorized.batch_trees import flatten
from lightning_fed.engines.vectorized.correction_inputs import Constants, KnownParts
from lightning_fed.engines.vectorized.functional import FunctionalStep, Logged
from lightning_fed.engines.vectorized.row_batches import Alike
from lightning_fed.engines.vectorized.stacked import StackedWork
from lightning_fed.tracing.traces import Found, TracedStep, kinds, resized

__all__ = ["BoundSteps", "LocalSteps"]

_COUNTS = (5, 7)  # of clients with whom a graph that takes any number is made, whoever is at work


class LocalSteps:
    """The traced local steps of a method.

    Args:
        step: The module's step.
        algorithm: The method.
        batch_size: The examples in a full batch; None where batches have no size in common.
    """

    def __init__(self, step: FunctionalStep, algorithm: Algorithm, batch_size: int | None) -> None:
        self.step, self.algorithm, self.batch_size = step, algorithm, batch_size

    def bind(self, work: StackedWork, like: "BoundSteps | None" = None) -> "BoundSteps | None":
        """Return the steps of the clients at work, None if they cannot be traced.

        Args:
            work: The clients' parameters and states.
            like: Steps of others of the same clients, which may know what is the same for these.
        """
        return BoundSteps(self, work, like) if work.is_plain and self.may_trace else None

    @property
    def may_trace(self) -> bool:
        """Whether the module's step may be traced, as far as is known."""
        return self.step.traces.allowed and not self.step.reads_index


@dataclass(frozen=True, slots=True)
class _Ready:
    """A traced step, and what stays as it is from step to step.

    Attributes:
        step: The step.
        rest: What it takes after parameters and batch.
        moved: The parameters whose directions have a constant part.
        constant: These parts, in the parameters' shapes.
    """

    step: TracedStep
    rest: Sequence[Any]
    moved: list[Tensor]
    constant: list[Tensor]


class BoundSteps:
    """The traced local steps of some clients.

    Args:
        steps: The method's.
        work: The clients' parameters and states.
        like: Steps of others of the same clients.
    """

    def __init__(self, steps: LocalSteps, work: StackedWork, like: "BoundSteps | None" = None) -> None:
        self._steps, self._step, self._work = steps, steps.step, work
        self.alone = work.active == 1
        self._views = work.alone if self.alone else work.views
        self._constants: Constants = Constants(
            work, steps.algorithm, self.alone, None if like is None else like._constants
        )
        self._known: list[KnownParts] = [] if like is None else like._known
        self._traced: dict[tuple[int, int, bool], tuple[TracedStep, Any]] = {} if like is None else like._traced
        self._smaller: dict[bool, TracedStep] = {} if like is None else like._smaller  # for 1 < examples < batch_size
        self._y = work.y[work.start] if self.alone else work.y[work.at_work]
        self._rate = -work.rate
        self._ready: dict[tuple[int, bool], _Ready] = {}
        self._made: dict[TracedStep, _Ready] = {}
        self._found: dict[Any, TracedStep | None] = {}

    def take(self, group: BatchGroup, kept: KeptAnchor | None = None) -> tuple[Tensor, dict[str, Logged]] | None:
        """Take a step, without gradients.

        Args:
            group: The batches of the clients at work.
            kept: What is kept of the gradients at the anchor on them, if anything is.

        Returns:
            The losses and what was logged, or None if no step was taken, since it cannot be traced.
        """
        leaves, spec = flatten(group.first if self.alone else group.batch)
        ready = self._ready.get((group.examples, kept is None)) if group.is_rows else None
        if ready is None:
            return self._take_first(group, leaves, spec, kept)
        loss, values = ready.step.named(self._run(ready, [*leaves, *(() if kept is None else kept.parts)]))
        return loss, self._step.logged(values)

    def take_alike(
        self, alike: Alike, kept: Sequence[KeptAnchor], each: Callable[[], None]
    ) -> tuple[Tensor, dict[str, Logged]] | None:
        """Take the steps on batches of one size that follow a first one, of which :meth:`take` has taken the step.

        Args:
            alike: The batches, the first one too.
            kept: What is kept of the gradients at the anchor on them, if anything is.
            each: Called after every step.

        Returns:
            The losses of these steps [n] and what they logged, or None if none was taken.
        """
        ready = self._ready.get((alike.examples, not kept))
        if ready is None or len(alike.batches) < 2:
            return None
        found = []
        for i, leaves in enumerate(alike.batches[1:], start=1):
            found.append(self._run(ready, [*leaves, *kept[i].parts] if kept else leaves))
            each()
        columns = {id(column[0]): column for column in zip(*found, strict=True)}  # a loss may be logged too
        stacked = {key: torch.stack(column) for key, column in columns.items()}
        loss, values = ready.step.named([stacked[id(result)] for result in found[0]])
        return loss, self._step.logged(values)

    def _run(self, ready: "_Ready", given: Sequence[Tensor]) -> Sequence[Tensor]:
        """Take a step, given what changes from step to step."""
        found = ready.step.run(*self._views, *given, *ready.rest)
        if ready.moved:
            torch._foreach_add_(ready.moved, ready.constant, alpha=self._rate)
        return found

    def _take_first(
        self, group: BatchGroup, leaves: Sequence[Tensor], spec: Any, kept: KeptAnchor | None
    ) -> tuple[Tensor, dict[str, Logged]] | None:
        """Do the same with batches of a shape that is new to these clients, or may be."""
        traced, key = self._find(group, leaves, spec, kept)
        if traced is None or not self._step.traces.allowed:
            return None
        if traced not in self._made:
            self._made[traced] = self._run_once(traced)
        ready = self._made[traced]
        expected = None
        if "step" not in self._step.checked or key not in traced.sizes_seen:
            traced.sizes_seen.add(key)
            expected = self._step.loss_of_first(self._views, leaves, spec, group.batch_idx, self.alone)
            before = self._y.clone()
        given = [*leaves, *(() if kept is None else kept.parts)]
        try:
            loss, values = traced(*self._views, *given, *ready.rest)
            is_right = expected is None or self._step.is_right(loss if self.alone else loss[0], expected, "step")
        except RuntimeError as error:
            if expected is None:
                raise
            is_right = self._step.traces.forbid_after(error, "at work")  # what is the batch's fault comes up untraced
        if not is_right:
            self._y.copy_(before)
            self._ready.clear()
            return None
        if ready.moved:
            torch._foreach_add_(ready.moved, ready.constant, alpha=self._rate)
        if group.is_rows:
            self._ready[group.examples, kept is None] = ready
        return loss, self._step.logged(values)

    def _find(
        self, group: BatchGroup, leaves: Sequence[Tensor], spec: Any, kept: KeptAnchor | None
    ) -> tuple[TracedStep | None, Any]:
        """Return the trace for batches such as these, if there is one, and what tells their kind."""
        of_rows = (group.examples, kept is None)
        if group.is_rows:  # where others of the same clients may have found it
            for count in (0, self._work.active):
                if (known := self._traced.get((count, *of_rows))) is not None and (count or not self.alone):
                    return known
        key = (spec, kept is None, *self._kinds(leaves))
        is_smaller = self.alone and group.is_rows and 1 < group.examples < (self._steps.batch_size or 0)
        if is_smaller and (kept is None) in self._smaller:
            return self._smaller[kept is None], key
        if key not in self._found:
            stands_still = self._work.skips and self._step.unused_in(group.first, group.batch_idx)
            self._found[key] = None if stands_still else self._trace(leaves, spec, group.examples, kept)
        traced = self._found[key]
        if group.is_rows and traced is not None:
            is_for_all = traced.takes_any_count and not self.alone
            self._traced[(0 if is_for_all else self._work.active, *of_rows)] = traced, key
            if is_smaller and not self._work.skips:
                self._smaller[kept is None] = traced
        return traced, key

    def fits_any_count(self, group: BatchGroup, kept: KeptAnchor | None) -> bool:
        """Whether there is a trace of such a step that takes any number of clients at once."""
        full = self._steps.batch_size
        if full is None or group.examples > full or (self._work.skips and self._step.unused_in(group.first, 0)):
            return False
        leaves, spec = flatten(group.batch)
        return self._get_any_count(self._key(spec, kept), leaves, spec, kept) is not None

    def _key(self, spec: Any, kept: KeptAnchor | None) -> tuple[Any, ...]:
        """Return what decides the function that is traced."""
        return "step", spec, self._constants.key, kept is None

    def _kinds(self, leaves: Sequence[Tensor]) -> list[Any]:
        """Return what tells the tensors of batches apart, whatever the number of clients at once."""
        return kinds(leaves) if self.alone else [(leaf.shape[1:], leaf.dtype) for leaf in leaves]

    def _run_once(self, traced: TracedStep) -> "_Ready":
        """Work out what stays as it is from step to step."""
        inputs = self._work.inputs
        inputs.server.read |= traced.notes["server"]
        inputs.cohort_grad.read |= traced.notes["cohort_grad"]
        sums, once = self._constant_parts(traced)
        both = [(view, part) for view, part in zip(self._views, sums, strict=True) if part is not None]
        moved, constant = [view for view, _ in both], [part.expand_as(view) for view, part in both]
        return _Ready(traced, (*once, self._rate), moved, constant)

    def _constant_parts(self, traced: TracedStep) -> tuple[Sequence[Tensor | None], Sequence[Tensor]]:
        """Return what :meth:`TracedStep.once` does, out of what is known of more clients where that is all there is."""
        rows = self._work.at_work
        # a gradient at the anchor may have such a part too, which differs between sizes of batches
        is_shared = not traced.takes_more and self._steps.algorithm.anchor_at is None
        if is_shared:
            for known in self._known:
                if known.has(rows, traced):
                    return known.of(rows), ()
        sums, once = traced.once(self._constants.tensors)
        found = KnownParts(rows, self.alone, traced.constant, sums, self._work.layout.shapes)
        if is_shared and found.can_be_cut:
            self._known.append(found)
        return sums, once

    def _trace(self, leaves: Sequence[Tensor], spec: Any, examples: int, kept: KeptAnchor | None) -> TracedStep | None:
        """Return the graph for batches such as these, if there is one.

        What is traced is a function of the step alone: full batches; smaller ones that several clients have at once;
        those of a single example; and others of a single client, where the graph is the same for every number, or is
        made to take any.
        """
        full = self._steps.batch_size
        if full is None or examples > full:
            return None
        key = self._key(spec, kept)
        if not self.alone:
            found = self._get_any_count(key, leaves, spec, kept)
            return found or self._get((*key, *kinds(leaves)), leaves, spec, kept)
        if examples in (1, full):
            return self._get((*key, *kinds(leaves)), leaves, spec, kept)
        if any(len(leaf) != examples for leaf in leaves):
            return None
        traced = self._get((*key, *kinds(leaves, full)), leaves, spec, kept, full)
        if traced is None:
            return None
        function = self._function(len(leaves), spec, kept)

        def of(size: int) -> list[Tensor]:
            return self._flat_of(resized(leaves, size), kept)

        if self._step.traces.fits_any_size(traced, function, of, (full - 1, 2)):
            return traced
        return self._get_any_size(key, leaves, spec, kept, full)

    def _get(
        self, key: Any, leaves: Sequence[Tensor], spec: Any, kept: KeptAnchor | None, size: int | None = None
    ) -> TracedStep | None:
        """Return the graph by its key, made with these tensors, or with batches of another size made of them."""
        function, notes = self._function(len(leaves), spec, kept), self._constants.notes

        def flat() -> list[Tensor]:
            return self._flat(leaves, kept) if size is None else self._flat_of(resized(leaves, size), kept)

        return self._step.traces.get_step(key, function, flat, len(self._views), len(self._constants.tensors), notes)

    def _get_any_count(
        self, key: Any, leaves: Sequence[Tensor], spec: Any, kept: KeptAnchor | None
    ) -> TracedStep | None:
        """Return the graph of several clients that takes any number of them, if there is one.

        A GPU, where all take a step together, does without: larger models would not fit so many times.
        """
        if self._y.device.type != "cpu":
            return None

        def of(count: int) -> list[Tensor]:
            parts = () if kept is None else kept.parts
            (y,) = resized([self._y], count)
            views = layout.stacked_views(y)  # that lie in memory as those of the clients at work
            return [*views, *resized((*leaves, *parts), count), *self._constants.of(count)]

        layout, notes = self._work.layout, self._constants.notes
        function = self._function(len(leaves), spec, kept)
        counts = (len(self._views), len(self._constants.tensors))
        key = (*key, *self._kinds(leaves))
        return self._step.traces.get_step(
            key, function, lambda: of(_COUNTS[0]), *counts, notes, again=[lambda: of(_COUNTS[1])]
        )

    def _get_any_size(
        self, key: Any, leaves: Sequence[Tensor], spec: Any, kept: KeptAnchor | None, full: int
    ) -> TracedStep | None:
        """Return the graph of a single client that takes any number of examples but one, if there is one."""
        function, notes = self._function(len(leaves), spec, kept), self._constants.notes

        def of(size: int) -> Callable[[], list[Tensor]]:
            return lambda: self._flat_of(resized(leaves, size), kept)

        first, *others = (of(size) for size in sorted({full, full - 1, 2}, reverse=True))
        counts = (len(self._views), len(self._constants.tensors))
        key = (*key, "any size", *kinds(leaves, full))
        return self._step.traces.get_step(key, function, first, *counts, notes, again=others)

    def _flat(self, leaves: Sequence[Tensor], kept: KeptAnchor | None) -> list[Tensor]:
        return [*self._views, *leaves, *(() if kept is None else kept.parts), *self._constants.tensors]

    def _flat_of(self, other: Sequence[Tensor], kept: KeptAnchor | None) -> list[Tensor]:
        """Return the same with another batch than that of which the parts were kept."""
        parts = () if kept is None else kept.parts_of(other, self._views)
        return [*self._views, *other, *parts, *self._constants.tensors]

    def _function(self, num_leaves: int, spec: Any, kept: KeptAnchor | None) -> Callable[..., Found]:
        """Return the step as a function of parameters, batch and constants: to directions, loss and logged values."""
        step, constants, work, n = self._step, self._constants, self._work, len(self._views)
        at_fixed = n + num_leaves + (0 if kept is None else len(kept.parts))

        def function(*flat: Tensor) -> Found:
            views, leaves, fixed = flat[:n], flat[n : n + num_leaves], flat[at_fixed:]
            grads, loss, values = step.take(views, leaves, spec, self.alone)
            grads = [g.add(y, alpha=d) if d else g for g, y, d in zip(grads, views, work.decay, strict=True)]
            if not constants.corrects:
                return grads, loss, values
            own, point = constants.unpack(fixed)
            if point is not None:
                if kept is None:
                    found, _, _ = step.take(point, leaves, spec, self.alone, shared=True)
                else:
                    assemble = kept.assemble if self.alone else vmap(kept.assemble)
                    found = assemble(*flat[n:at_fixed])
                anchors = [g.add(v, alpha=d) if d else g for g, v, d in zip(found, point, work.decay, strict=True)]
                for each, anchor in zip(own, anchors, strict=True):
                    each.anchor_grad = anchor
            directions = [self._steps.algorithm.correct(g, y, s) for g, y, s in zip(grads, views, own, strict=True)]
            return directions, loss, values

        return function
