"""Which traces there are of the local step, for any number of clients or of examples."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_fed.engines.vectorized.anchor_traces import KeptAnchor
from lightning_fed.engines.vectorized.batches import BatchGroup
from lightning_fed.engines.vectorized.clients import Clients
from lightning_fed.engines.vectorized.local_step import Given, LocalStep, Taken
from lightning_fed.tracing.traces import Found, Trace, kinds, resized

__all__ = ["StepTraces"]

_CLIENTS = (5, 7)  # numbers of clients with which a trace that takes any is made, whoever is at work


class StepTraces:
    """Traces of the local step of some clients on batches of one kind.

    Args:
        step: The local step.
        clients: The clients at work.
        group: Their batches.
        kept: What is kept of the gradients at the anchor on them, if anything is.
        in_place: Whether parameters are moved by the trace.
    """

    def __init__(
        self, step: LocalStep, clients: Clients, group: BatchGroup, kept: KeptAnchor | None, in_place: bool
    ) -> None:
        self.step, self.clients, self.group, self.kept, self.in_place = step, clients, group, kept, in_place

    def find(self, full: int | None) -> Trace | None:
        """Return the trace of such a step, if there can be one.

        What is traced depends on the step alone. Several clients take one that fits any number of them, or all of the
        chunk together one of their own; on a GPU only that, as larger models would not fit so many times. A single
        client takes one for its full batches, one for batches of a single example, and one that fits any other size.

        Args:
            full: The examples in a full batch; None where batches have no size in common.
        """
        y, examples = self.step.work.y, self.group.examples
        if full is None or examples > full:
            return None
        if not self.clients.is_one:
            trace = self._of_any_size(_CLIENTS) if y.device.type == "cpu" else None
            return trace or (self._exact() if self.clients.count == len(y) else None)
        if examples in (1, full):
            return self._exact()
        if any(len(leaf) != examples for leaf in self.group.leaves):
            return None
        return self._of_any_size((full - 1, 2) if full > 3 else (2,))

    def _exact(self) -> Trace | None:
        """Return a trace for this number of clients and of examples."""
        return self._get(kinds(self.group.leaves), self._inputs, (0,))

    def _of_any_size(self, sizes: Sequence[int]) -> Trace | None:
        """Return a trace for any number of clients at once; of a single client, for any number of examples."""
        rows = tuple((leaf.shape[1:], leaf.dtype) for leaf in self.group.leaves)
        return self._get(("any", rows), self._of_examples if self.clients.is_one else self._of_clients, sizes)

    def _get(self, kind: Any, inputs: Callable[[int], list[Tensor]], sizes: Sequence[int]) -> Trace | None:
        step, work = self.step, self.step.work
        reads = (work.step_inputs.key, tuple(step.local)) if step.shared else ()
        adds = (tuple(work.decay), work.clip)
        key = ("step", self.in_place, self.clients.is_one, self.kept is None, reads, adds, self.group.spec)
        return step.module.traces.get(
            (*key, kind),
            self._function,
            inputs,
            sizes,
            moves=len(self.clients.views) if self.in_place else 0,
            constants=len(step.shared) + len(step.own),
            notes=work.step_inputs.read,
        )

    def _inputs(self, _: int) -> list[Tensor]:
        """Return the tensors of the step at hand."""
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
        views = self.step.work.layout.stacked_views(y)  # that lie in memory as those of the clients at work
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

        def of_one(given: Given) -> Taken:
            return step(step.module.gradient, given, spec, 0, shared, assemble)

        taken: Taken = self.clients.each(of_one, (Given(0, 0, 0, 0, 0, None),))(given)  # type: ignore[arg-type]
        new = [state[name] for state in taken.local for name in step.local]
        return [*taken.directions, *new], taken.loss, step.module.with_sizes(taken.values)


def _cut(flat: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
    """Return tensors in groups of so many."""
    rest = iter(flat)
    return [[next(rest) for _ in range(count)] for count in counts]
