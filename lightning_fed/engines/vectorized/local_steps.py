"""Local steps, through a trace if there is one."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from lightning_fed.core.devices import is_out_of_memory
from lightning_fed.engines.base import OnlySequentialError
from lightning_fed.engines.vectorized.batches import BatchGroup, are_rows
from lightning_fed.engines.vectorized.chunk_work import ChunkWork
from lightning_fed.engines.vectorized.clients import ChunkMeans, Clients
from lightning_fed.engines.vectorized.local_step import DIMS, LocalStep, StepInput, StepOutput
from lightning_fed.engines.vectorized.module_step import ModuleStep, OwnStep, Sizes
from lightning_fed.tracing.traces import Found, Trace, kinds, resized

_LEAST_RATE = 1e5  # in units of rounding: the smallest rate whose moves are compared as directions
_CLIENTS = (5, 7)  # numbers of clients that record a trace for any number, regardless of the current clients


@dataclass(slots=True)
class _Bound:
    """A trace for some clients and one kind of batch, with the inputs that do not change between steps."""

    trace: Trace
    rest: Sequence[Any]  # inputs after parameters, batch and states of this round
    moving: list[Tensor]  # parameters whose directions have a constant part
    constant: list[Tensor]  # the constant parts
    unused: frozenset[int]  # parameters that stay fixed, since the losses do not depend on them
    sizes: Sizes | None = None  # batch sizes of logged values; None before the first step, which is compared if due


class LocalSteps:
    """Takes the local steps of some adjacent clients of a chunk; ``batch_size`` is None if batches have no common size.

    The clients ``rows`` of the chunk begin their work here.
    """

    def __init__(
        self, module: ModuleStep, work: ChunkWork, rows: range, batch_size: int | None, means: ChunkMeans
    ) -> None:
        self.module, self.work, self.batch_size, self.means = module, work, batch_size, means
        self.step = LocalStep(module, work, rows)
        self._rates, self._rate = work.rates, -work.rates[0]
        self._may_trace = not module.reads_index
        self._bound: dict[Any, _Bound | None] = {}  # by clients and kinds of batches
        self._of_chunk: dict[Trace, tuple[Sequence[Tensor | None], Sequence[Tensor]]] = {}  # see _once

    def run(self, clients: Clients, groups: Sequence[BatchGroup], may_trace: bool) -> None:
        """Take a step of clients on their batches; ``may_trace`` if their shapes recur often enough for a trace."""
        if self.work.rates != self._rates:  # a schedule has moved them
            self._rates, self._rate = self.work.rates, -self.work.rates[0]
            if self.step.use_rates():
                self._bound, self._of_chunk = {}, {}
        if len(groups) == 1 and may_trace and self._may_trace and self.module.traces.allowed:
            (group,) = groups
            key = (clients.rows, group.kind)
            if key not in self._bound:
                self._bound[key] = self._bind(clients, group)
            while (bound := self._bound[key]) is not None:
                if self._run_traced(bound, clients, group):
                    return
                is_outdated = bound.trace.round < self.module.traces.round
                self._bound[key] = self._bind(clients, group) if is_outdated else None  # no trace for such batches
        self._run_untraced(clients, groups)

    # ------------------------------------------------------------------ without traces

    def _run_untraced(self, clients: Clients, groups: Sequence[BatchGroup]) -> None:
        """Take a step; if batches differ in shape, compute directions shape by shape before all clients move."""
        work, directions = self.work, self.work.memory.delta
        unused = self._unused_by_all(groups) if work.skips else frozenset[int]()
        for group in groups:
            among = clients if len(groups) == 1 else Clients(work.y, group.clients, work.layout)
            output = self.step.untraced(among, group)
            self.means.add(group.clients, group.examples, output.loss, output.values, self.module.sizes)
            if output.local:
                work.keep_local(among, output.local)
            if len(groups) == 1:
                work.move(clients, output.directions, unused)
            else:
                among.put(directions, output.directions)
        if len(groups) > 1:
            work.move(clients, clients.cut(directions), unused)

    def _unused_by_all(self, groups: Sequence[BatchGroup]) -> frozenset[int]:
        """Return the parameters that no loss depends on."""
        sets = {self.module.unused(group.first, group.spec, group.batch_idx) for group in groups}
        if len(sets) > 1:
            some = frozenset.union(*sets) - frozenset.intersection(*sets)
            raise OnlySequentialError(
                f"engine='vectorized' cannot step clients at once whose losses depend on"
                f" {self.module.flat.names[min(some)]!r} for some of them only, with this optimizer. Use chunk_size=1,"
                " or engine='sequential'."
            )
        return sets.pop()

    # ------------------------------------------------------------------ with traces

    def _bind(self, clients: Clients, group: BatchGroup) -> _Bound | None:
        """Return a trace of such a step with its constant inputs, or None if it cannot be traced."""
        work = self.work
        unused = self.module.unused(group.first, group.spec, group.batch_idx) if work.skips else frozenset[int]()
        trace = self._trace(clients, group, work.is_bare and not unused)
        if trace is None or not self.module.traces.allowed or trace.checked.get(kinds(group.first), {}) is None:
            return None
        for name, read in trace.notes.items():
            work.read[name] |= read
        sums, once = self._once(trace, clients)
        bound = _Bound(trace, (*once, self._rate), [], [], unused)
        for view, part in zip(clients.views, sums, strict=False):
            if part is not None:
                bound.moving.append(view)
                bound.constant.append(part.expand_as(view))
        return bound

    def _trace(self, clients: Clients, group: BatchGroup, in_place: bool) -> Trace | None:
        """Return the trace of such a step, with or without moving parameters in place, or None.

        The trace only depends on the step. Several clients use a trace for any number of clients, or one for all of the
        chunk. On an accelerator, small chunks only use the latter: a large model may not fit for other numbers.
        A single client uses one trace for full batches, one for a single example, and one for any other size.
        """
        step, work, full, examples = self.step, self.work, self.batch_size, group.examples
        if full is None or examples > full:
            return None
        tries: list[tuple[int, ...]] = []  # sizes that record a trace for any size; () for the step's size
        if not clients.is_one:
            # on an accelerator, only if that number of clients fits anyway
            tries += [_CLIENTS] if work.y.device.type == "cpu" or len(work.y) >= max(_CLIENTS) else []
            tries += [()] if clients.count == len(work.y) else []
        elif examples in (1, full):
            tries.append(())
        elif are_rows(group.leaves, examples):
            tries.append((full - 1, 2) if full > 3 else (2,))
        for sizes in tries:
            shapes = tuple([(leaf.shape[1:] if sizes else leaf.shape, leaf.dtype) for leaf in group.leaves])
            key = ("step", in_place, clients.is_one, step.key, tuple(work.decay), work.clip, group.spec)
            trace = self.module.traces.get(
                (*key, bool(sizes), shapes),
                partial(self._function, clients, group),
                partial(self._inputs, clients, group),
                sizes or (0,),
                moves=len(clients.views) if in_place else 0,
                constants=len(step.shared) + len(step.own),
                notes=work.read,
            )
            if trace is not None:
                return trace
        return None

    def _inputs(self, clients: Clients, group: BatchGroup, size: int) -> list[Tensor]:
        """Return the tensors of a step, unchanged or resized to ``size`` clients, or examples of a single client."""
        step, views, leaves = self.step, clients.views, group.leaves
        local, own = clients.of(step.local.values()), clients.of(step.own)
        if size and clients.is_one:
            leaves = resized(leaves, size)
        elif size:
            (y,) = resized([clients.y], size)
            views = self.work.layout.stacked_views(y)  # with the memory layout of the current clients' views
            leaves, local, own = (resized(each, size) for each in (leaves, local, own))
        return [*views, *leaves, *local, *step.shared, *own]

    def _function(self, clients: Clients, group: BatchGroup, *flat: Tensor) -> Found:
        """Take the step as a function of the tensors that :meth:`_inputs` returns."""
        step, rest = self.step, iter(flat)
        counts = (len(clients.views), len(group.leaves), len(step.local))
        views, leaves, local = (list(islice(rest, count)) for count in counts)
        shared, own = list(islice(rest, len(step.shared))), list(rest)
        names = list(step.local)
        inputs = StepInput(views, leaves, own, dict(zip(names, local, strict=True)), shared, step.point(shared))

        def of_one(inputs: StepInput) -> StepOutput:
            return step(self.module.gradient, inputs, group.spec, 0)

        output: StepOutput = clients.each(of_one, (DIMS,))(inputs)
        new = [state[name] for state in output.local for name in names]
        return [*output.directions, *new], output.loss, output.values

    def _once(self, trace: Trace, clients: Clients) -> tuple[Sequence[Tensor | None], Sequence[Tensor]]:
        """Return the result of :meth:`Trace.once`; for several clients, compute it once per chunk if it can be split.

        This saves 10 % of a round of W2 with SCAFFOLD, where groups of clients change all the time.
        """
        step, count = self.step, len(self.work.y)
        if not clients.is_one:
            if trace not in self._of_chunk:
                self._of_chunk[trace] = trace.once([*step.shared, *step.own])
            sums, once = self._of_chunk[trace]
            if clients.count == count:
                return sums, once
            stacked = [(count, *shape) for shape in self.work.layout.shapes]
            if not once and all(part is None or part.shape == like for part, like in zip(sums, stacked, strict=False)):
                return [None if part is None else part[clients.at] for part in sums], once
        return trace.once([*step.shared, *clients.of(step.own)])

    def _run_traced(self, bound: _Bound, clients: Clients, group: BatchGroup) -> bool:
        """Take a step through its trace; return False, with nothing changed, if the trace is wrong."""
        if bound.sizes is None:
            found = self._run_checked(bound, clients, group)
            if found is None:
                return False
        else:
            found = self._call(bound, clients, group)
        results, loss, values = found
        assert bound.sizes is not None
        if bound.moving:
            torch._foreach_add_(bound.moving, bound.constant, alpha=self._rate)
        if results:  # directions, and new states of this round
            n, names = len(clients.views), list(self.step.local)
            if self.step.advances:  # before the move, since they may be views of the current parameters
                new, count = iter(results[n:]), self.module.flat.num_shared
                self.work.keep_local(clients, [{name: next(new) for name in names} for _ in range(count)])
            self.work.move(clients, results[:n], bound.unused)
        self.means.add(group.clients, group.examples, loss, values, bound.sizes)
        return True

    def _call(self, bound: _Bound, clients: Clients, group: BatchGroup, factor: float | None = None) -> Found:
        local = clients.of(self.step.local.values()) if self.step.local else ()
        rest = bound.rest if factor is None else (*bound.rest[:-1], factor)
        return bound.trace(*clients.views, *group.leaves, *local, *rest)

    # ------------------------------------------------------------------ traces and the module

    def _run_checked(self, bound: _Bound, clients: Clients, group: BatchGroup) -> Found | None:
        """Take a bound trace's first step; compare it with the module's unless that was done in this round.

        A trace for any number of examples is compared on batches of every size. Numbers that Python computes from the
        size may differ at sizes other than the recorded ones. Sizes where the trace is wrong run untraced.

        Return None, with nothing changed, if the trace is wrong or fails.
        """
        module, trace, kind = self.module, bound.trace, kinds(group.first)
        is_new = kind not in trace.checked
        if trace in module.compared and not is_new:
            bound.sizes = trace.checked[kind]
            return self._call(bound, clients, group)
        before = clients.y.clone()
        point = before if clients.is_one else before[0]
        with module.same_draws_as_trial(several=False):
            if self.step.is_gradient:
                views = self.work.layout.views(point)
                own: Sequence[Tensor | None]
                own, own_loss, own_values = module.own_gradient(views, group.first, group.spec, group.batch_idx)
            else:
                own, own_loss, own_values = self.step.of_module(clients, group)
        expected = OwnStep(own_loss, own_values, module.sizes)
        # a short move has too few digits of its direction: first try a move with rate 1
        rate, eps = -self._rate, torch.finfo(point.dtype).eps
        is_tried = bool(trace.graph.moves) and rate < _LEAST_RATE * eps
        error: RuntimeError | None = None
        what: str | None = None
        try:
            found = self._call(bound, clients, group, factor=-1.0 if is_tried else None)
            if trace.graph.moves:
                moved = point - (clients.y if clients.is_one else clients.y[0])
                directions = self.work.layout.views(moved if is_tried else moved.div_(rate))
                if bound.moving:
                    self._add_constants(directions, bound, clients)
            else:
                directions = _first_of(found[0][: len(clients.views)], clients)
            if is_tried:
                clients.y.copy_(before)
            loss, values = _of_first(found, clients)
            what = module.difference(
                loss,
                directions,
                own_loss,
                own,
                point,
                lambda: self._again(clients, group, before).directions,
                1.0 if is_tried or not trace.graph.moves else rate,
            ) or _other_log(values, expected, trace.checked.get(kind))
            if what is None and (name := module.other_value(values, own_values)) is not None:
                # an accuracy may depend on rounding of several clients at once: compare with the traced function
                untraced = self._again(clients, group, before).values
                if name not in untraced or not module.agrees(values[name], untraced[name]):
                    what = f"gives another value of self.log({name!r}, ...)"
            if what is None and is_tried:
                found = self._call(bound, clients, group)
        except RuntimeError as raised:
            if is_out_of_memory(raised):
                raise
            error = raised
        if error is None and what is None:
            module.compared.add(trace)
            bound.sizes = trace.checked[kind] = expected.sizes
            return found
        clients.y.copy_(before)
        if module.is_outdated(trace, what or "fails otherwise"):
            return None
        takes_any_size = clients.is_one and group.examples not in (1, self.batch_size)
        if is_new and takes_any_size:
            trace.checked[kind] = None
        elif error is not None:
            module.traces.forbid_after(error, "at work")  # an error of the batch recurs untraced
        else:
            module.give_up(str(what))
        return None

    def _add_constants(self, directions: Sequence[Tensor], bound: _Bound, clients: Clients) -> None:
        """Add the constant parts of the first client's directions."""
        constant = {id(view): part for view, part in zip(bound.moving, bound.constant, strict=True)}
        for direction, view in zip(directions, clients.views, strict=True):
            if id(view) in constant:
                (part,) = _first_of([constant[id(view)]], clients)
                direction.add_(part)

    def _again(self, clients: Clients, group: BatchGroup, before: Tensor) -> StepOutput:
        """Return the first client's step of the traced function at the parameters ``before``, without the trace."""
        after = clients.y.clone()
        clients.y.copy_(before)
        with torch.no_grad():
            again = self._function(clients, group, *self._inputs(clients, group, 0))
        clients.y.copy_(after)
        return StepOutput(_first_of(again[0][: len(clients.views)], clients), [], *_of_first(again, clients))


def _other_log(values: dict[str, Tensor], expected: OwnStep, sizes: Sizes | None) -> str | None:
    """Return how the module's logging differs from its trace's, except for values; None if it does not.

    ``sizes`` are the batch sizes that the module logged with on earlier such batches, if any.
    """
    if values.keys() != expected.values.keys():
        return f"logs other names ({', '.join(map(repr, expected.values))})"
    for name, size in expected.sizes.items():
        if sizes is not None and size != sizes[name]:
            return f"gives another batch_size of self.log({name!r}, ...)"
    return None


def _first_of(results: Sequence[Tensor], clients: Clients) -> list[Tensor]:
    """Return the first client's part of results."""
    return list(results) if clients.is_one else [result[0] for result in results]


def _of_first(found: Found, clients: Clients) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and logged values of the first of some clients."""
    _, loss, values = found
    return (loss, values) if clients.is_one else (loss[0], {name: value[0] for name, value in values.items()})
