"""Taking local steps: through a trace where there is one, as PyTorch runs them where there is none."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_fed.core.errors import FederatedError
from lightning_fed.engines.vectorized.anchors import KeptAnchor
from lightning_fed.engines.vectorized.batches import BatchGroup
from lightning_fed.engines.vectorized.chunk_work import ChunkWork
from lightning_fed.engines.vectorized.clients import Clients
from lightning_fed.engines.vectorized.local_step import Given, LocalStep, Taken
from lightning_fed.engines.vectorized.means import ChunkMeans
from lightning_fed.engines.vectorized.module_step import ModuleStep
from lightning_fed.tracing.traces import Found, Trace, Values, kinds, resized

__all__ = ["LocalSteps"]

_CLIENTS = (5, 7)  # numbers of clients with which a trace that takes any is made, whoever is at work


@dataclass(frozen=True, slots=True)
class _Bound:
    """A trace for some clients and one kind of batches, with what stays as it is from step to step.

    Attributes:
        trace: The trace.
        rest: What it takes after parameters, batch, states of this round and kept parts.
        moving: The parameters whose directions have a constant part.
        constant: These parts.
        unused: The parameters that stand still, since the losses do not depend on them.
    """

    trace: Trace
    rest: Sequence[Any]
    moving: list[Tensor]
    constant: list[Tensor]
    unused: frozenset[int]


class LocalSteps:
    """Takes the local steps of the clients of a chunk.

    Args:
        module: The module's step.
        work: The clients' work.
        batch_size: The examples in a full batch; None where batches have no size in common.
        means: Takes losses, and what is logged.
    """

    def __init__(self, module: ModuleStep, work: ChunkWork, batch_size: int | None, means: ChunkMeans) -> None:
        self.module, self.work, self.batch_size, self.means = module, work, batch_size, means
        self.step = LocalStep(module, work)
        self._rate = -work.rates[0]
        self._may_trace = module.traces.allowed and not module.reads_index
        self._bound: dict[Any, _Bound | None] = {}  # by clients and kinds of batches

    def take(
        self, clients: Clients, groups: Sequence[BatchGroup], kept: KeptAnchor | None, may_trace: bool = True
    ) -> None:
        """Take a step.

        Args:
            clients: The clients at work.
            groups: Their batches.
            kept: What is kept of the gradients at the anchor on them, if anything is.
            may_trace: Whether batches of these shapes come often enough for a trace.
        """
        group = groups[0]
        if len(groups) > 1 or not (may_trace and self._may_trace and self.module.traces.allowed):
            self._take_untraced(clients, groups)
            return
        kind = group.examples if group.is_rows else (group.spec, kinds(group.leaves))
        key = (clients.rows, kind, kept is None)
        if key not in self._bound:
            bound = self._bound[key] = self._bind(clients, group, kept)
            if bound is not None and not self._is_right(bound, clients, group, kept):
                self._bound.clear()
                bound = None
            elif bound is not None:
                return  # the step is taken
        bound = self._bound.get(key)
        if bound is None:
            self._take_untraced(clients, groups)
        else:
            self._take_traced(bound, clients, group, kept)

    # ------------------------------------------------------------------ as PyTorch runs them

    def _take_untraced(self, clients: Clients, groups: Sequence[BatchGroup]) -> None:
        """Take a step; where batches differ in shape, directions are taken shape by shape before all clients move."""
        work, directions = self.work, self.work.memory.delta
        unused = self._unused_by_all(groups) if work.skips else frozenset[int]()
        for group in groups:
            among = clients if len(groups) == 1 else Clients(work.y, group.clients, work.layout)
            taken = self.step.untraced(among, group)
            self._note(group, taken.loss, self.module.with_sizes(taken.values))
            if taken.local:
                work.keep_local(among, taken.local)
            if len(groups) == 1:
                work.move(clients, taken.directions, unused)
            else:
                among.put(directions, taken.directions)
        if len(groups) > 1:
            work.move(clients, clients.cut(directions), unused)

    def _unused_by_all(self, groups: Sequence[BatchGroup]) -> frozenset[int]:
        """Return the parameters that the losses do not depend on.

        Raises:
            FederatedError: If that differs from client to client.
        """
        sets = {self.module.unused(group.first, group.spec, group.batch_idx) for group in groups}
        if len(sets) > 1:
            some = frozenset.union(*sets) - frozenset.intersection(*sets)
            raise FederatedError(
                f"engine='vectorized' cannot step clients at once whose losses depend on"
                f" {self.module.flat.names[min(some)]!r} for some of them only, with this optimizer. Use chunk_size=1,"
                " or engine='sequential'."
            )
        return sets.pop()

    def _note(self, group: BatchGroup, loss: Tensor, values: Values) -> None:
        self.means.add(group.clients, group.examples, loss, values)

    # ------------------------------------------------------------------ through traces

    def _take_traced(self, bound: _Bound, clients: Clients, group: BatchGroup, kept: KeptAnchor | None) -> None:
        results = self._run(bound, clients, group, kept)
        loss, values = self._moved(bound, clients, results)
        self._note(group, loss, values)

    def _run(self, bound: _Bound, clients: Clients, group: BatchGroup, kept: KeptAnchor | None) -> Sequence[Tensor]:
        local = clients.of(list(self.step.local.values()))
        parts = () if kept is None else kept.parts
        return bound.trace(*clients.views, *group.leaves, *local, *parts, *bound.rest)

    def _moved(self, bound: _Bound, clients: Clients, results: Sequence[Tensor]) -> tuple[Tensor, Values]:
        """Do what the trace has left of a step, and return the loss and what was logged."""
        first, loss, values = bound.trace.named(results)
        if bound.moving:
            torch._foreach_add_(bound.moving, bound.constant, alpha=self._rate)
        if first:
            n, names = len(clients.views), list(self.step.local)
            flat = iter(first[n:])
            self.work.move(clients, first[:n], bound.unused)
            if self.step.advances:
                self.work.keep_local(clients, [{name: next(flat) for name in names} for _ in range(n)])
        return loss, values

    def _bind(self, clients: Clients, group: BatchGroup, kept: KeptAnchor | None) -> _Bound | None:
        """Return a trace of such a step with what stays as it is, None if there can be none."""
        work, step = self.work, self.step
        unused = self.module.unused(group.first, group.spec, group.batch_idx) if work.skips else frozenset[int]()
        trace = self._find(clients, group, kept, in_place=work.is_plain and not unused)
        if trace is None or not self.module.traces.allowed:
            return None
        for name, read in trace.notes.items():
            work.step_inputs.read[name] |= read
        sums, once = trace.once([*step.shared, *clients.of(step.own)])
        both = [(view, part) for view, part in zip(clients.views, sums, strict=False) if part is not None]
        constant = [part.expand_as(view) for view, part in both]
        return _Bound(trace, (*once, self._rate), [view for view, _ in both], constant, unused)

    def _is_right(self, bound: _Bound, clients: Clients, group: BatchGroup, kept: KeptAnchor | None) -> bool:
        """Take the first step of a trace; compare its loss with the module's own, once a round and for new shapes."""
        module, y = self.module, clients.y
        kind = kinds(group.leaves) if clients.is_one else tuple((leaf.shape[1:], leaf.dtype) for leaf in group.leaves)
        expected = None
        if "step" not in module.compared or kind not in bound.trace.checked:
            bound.trace.checked.add(kind)
            point = clients.views if clients.is_one else [v[0] for v in clients.views]
            with module.drawing_nothing():
                expected = module.own_loss(point, group.first, group.spec, group.batch_idx)
            before = y.clone()
        try:
            results = self._run(bound, clients, group, kept)
            loss = bound.trace.named(results)[1]
            is_right = expected is None or module.is_right(loss if clients.is_one else loss[0], expected, "step")
        except RuntimeError as error:
            if expected is None:
                raise
            is_right = module.traces.forbid_after(error, "at work")  # an error of the batch comes up untraced
        if not is_right:
            y.copy_(before)
            return False
        self._note(group, *self._moved(bound, clients, results))
        return True

    def _find(self, clients: Clients, group: BatchGroup, kept: KeptAnchor | None, in_place: bool) -> Trace | None:
        """Return the trace of such a step, if there can be one.

        What is traced depends on the step alone. Several clients take one that fits any number of them, or all of the
        chunk together one of their own; on a GPU only that, as larger models would not fit so many times. A single
        client takes one for its full batches, one for batches of a single example, and one that fits any other size.
        """
        full, n, examples, leaves = self.batch_size, clients.count, group.examples, group.leaves
        if full is None or examples > full:
            return None
        get = _Getter(self, clients, group, kept, in_place)
        if not clients.is_one:
            trace = get.any_number(_CLIENTS) if self.work.y.device.type == "cpu" else None
            return trace or (get.exact() if n == len(self.work.y) else None)
        if examples in (1, full):
            return get.exact()
        if any(len(leaf) != examples for leaf in leaves):
            return None
        return get.any_number((full - 1, 2) if full > 3 else (2,))


class _Getter:
    """Gets traces of the step of some clients on batches of one kind.

    Args:
        steps: The local steps.
        clients: The clients at work.
        group: Their batches.
        kept: What is kept of the gradients at the anchor on them.
        in_place: Whether parameters are moved by the trace.
    """

    def __init__(
        self, steps: LocalSteps, clients: Clients, group: BatchGroup, kept: KeptAnchor | None, in_place: bool
    ) -> None:
        self.step, self.work, self.clients, self.group, self.kept = steps.step, steps.work, clients, group, kept
        self.traces, self.in_place = steps.module.traces, in_place

    def exact(self) -> Trace | None:
        """Return a trace for this number of clients and of examples."""
        return self._get(kinds(self.group.leaves), lambda _: self._inputs(), (0,))

    def any_number(self, sizes: Sequence[int]) -> Trace | None:
        """Return a trace for any number of clients at once; of a single client, for any number of examples."""
        rows = tuple((leaf.shape[1:], leaf.dtype) for leaf in self.group.leaves)
        return self._get(("any", rows), self._of_examples if self.clients.is_one else self._of_clients, sizes)

    def _get(self, kind: Any, inputs: Callable[[int], list[Tensor]], sizes: Sequence[int]) -> Trace | None:
        step, work = self.step, self.work
        reads = (work.step_inputs.key, tuple(step.local)) if step.shared else ()
        adds = (tuple(work.decay), work.clip)
        key = ("step", self.in_place, self.clients.is_one, self.kept is None, reads, adds, self.group.spec)
        return self.traces.get(
            (*key, kind),
            self._function,
            inputs,
            sizes,
            moves=len(self.clients.views) if self.in_place else 0,
            constants=len(step.shared) + len(step.own),
            notes=work.step_inputs.read,
        )

    def _inputs(self) -> list[Tensor]:
        parts = () if self.kept is None else self.kept.parts
        return self._joined(self.clients.views, self.group.leaves, parts)

    def _of_examples(self, size: int) -> list[Tensor]:
        """Return the tensors of a step on a batch of another size, made of the examples of this one."""
        views, leaves = self.clients.views, resized(self.group.leaves, size)
        parts = () if self.kept is None else self.kept.parts_of(leaves, views)
        return self._joined(views, leaves, parts)

    def _of_clients(self, count: int) -> list[Tensor]:
        """Return the tensors of a step of another number of clients, made of these."""
        (y,) = resized([self.clients.y], count)
        views = self.work.layout.stacked_views(y)  # that lie in memory as those of the clients at work
        parts = () if self.kept is None else resized(self.kept.parts, count)
        local, own = (self.clients.of(each) for each in (list(self.step.local.values()), self.step.own))
        tensors = [*views, *resized(self.group.leaves, count), *resized(local, count), *parts]
        return [*tensors, *self.step.shared, *resized(own, count)]

    def _joined(self, views: Sequence[Tensor], leaves: Sequence[Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
        local, own = (self.clients.of(each) for each in (list(self.step.local.values()), self.step.own))
        return [*views, *leaves, *local, *parts, *self.step.shared, *own]

    def _function(self, *flat: Tensor) -> Found:
        """Take the step as a function of parameters, batch, states of this round, kept parts and constants."""
        step, kept, spec = self.step, self.kept, self.group.spec
        counts = [len(self.clients.views), len(self.group.leaves), len(step.local)]
        counts += [0 if kept is None else len(kept.parts), len(step.shared), len(step.own)]
        views, leaves, local, parts, shared, own = _cut(flat, counts)
        given = Given(views, leaves, parts, own, dict(zip(step.local, local, strict=True)), step.point(shared))
        assemble = None if kept is None else kept.assemble

        def take(given: Given) -> Taken:
            return step(step.module.gradient, given, spec, 0, shared, assemble)

        taken: Taken = self.clients.each(take, (Given(0, 0, 0, 0, 0, None),))(given)  # type: ignore[arg-type]
        new = [state[name] for state in taken.local for name in step.local]
        return [*taken.directions, *new], taken.loss, step.module.with_sizes(taken.values)


def _cut(flat: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
    """Return tensors in groups of so many."""
    rest = iter(flat)
    return [[next(rest) for _ in range(count)] for count in counts]
