"""What stays as it is from local step to local step: what a correction may read, and what it adds to directions."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.rounds import Step
from lightning_fed.core.types import State
from lightning_fed.core.watched import Watched
from lightning_fed.engines.vectorized.stacked import StackedWork
from lightning_fed.tracing.traces import TracedStep, resized

__all__ = ["Constants", "KnownParts"]


@dataclass(frozen=True, slots=True)
class KnownParts:
    """The constant parts of the directions of some adjacent clients.

    Attributes:
        rows: The clients.
        alone: Whether it is a single one, whose parts have no dimension for clients.
        constant: Of every parameter, whether there is such a part.
        parts: The parts, [n, *shape] where they differ from client to client.
        shapes: The parameters' shapes.
    """

    rows: slice
    alone: bool
    constant: list[bool]
    parts: Sequence[Tensor | None]
    shapes: Sequence[Sequence[int]]

    @property
    def can_be_cut(self) -> bool:
        """Whether each part is a parameter's, or one of each client's."""
        if self.alone:
            return True
        count = self.rows.stop - self.rows.start
        shapes = (((*shape,), (count, *shape)) for shape in self.shapes)
        return all(p is None or tuple(p.shape) in own for p, own in zip(self.parts, shapes, strict=True))

    def has(self, rows: slice, traced: TracedStep) -> bool:
        """Whether those of certain clients are among them, for a traced step."""
        return self.rows.start <= rows.start and rows.stop <= self.rows.stop and self.constant == traced.constant

    def of(self, rows: slice) -> list[Tensor | None]:
        """Return those of certain clients; a single one's without a dimension for clients."""
        if self.alone:
            return list(self.parts)
        start, stop = rows.start - self.rows.start, rows.stop - self.rows.start
        at = start if stop - start == 1 else slice(start, stop)
        return [
            part if part is None or part.ndim == len(shape) else part[at]
            for part, shape in zip(self.parts, self.shapes, strict=True)
        ]


class Constants:
    """What ``correct`` may read that stays as it is from step to step, as tensors in a fixed order.

    Args:
        work: The clients' work.
        algorithm: The method.
        alone: Whether a single client is at work.
        like: The same of others of the same clients.
    """

    def __init__(self, work: StackedWork, algorithm: Algorithm, alone: bool, like: "Constants | None" = None) -> None:
        self.corrects, self.alone, self.layout = work.corrects, alone, work.layout
        self.anchor_at = algorithm.anchor_at
        self.notes: dict[str, set[str]] = {"server": set(), "cohort_grad": set()}
        self._states: dict[str, Sequence[str]] = {} if like is None else like._states
        self._all: list[tuple[Tensor, bool]] = [] if like is None else like._all  # and whether it is the clients' own
        self._at: int | slice = work.start if alone else work.at_work
        self._decay = tuple(work.decay)
        if self.corrects and like is None:
            self._collect(work)

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors; a single client's without a dimension for clients."""
        return [value[self._at] if is_own else value for value, is_own in self._all]

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """What decides the function that is traced, the same for any number of clients at once."""
        kinds = [(t.shape[1:] if is_own else t.shape, t.dtype) for t, is_own in self._all]
        return (self.alone, self._decay, tuple(self._states.items()), *kinds)

    def of(self, count: int) -> list[Tensor]:
        """Return the tensors of so many clients, made of those of these, who are several."""
        both = zip(self.tensors, self._all, strict=True)
        return [resized([value], count)[0] if is_own else value for value, (_, is_own) in both]

    def _collect(self, work: StackedWork) -> None:
        """List the tensors of all clients."""
        inputs = work.inputs
        mean = torch.tensor(inputs.mean_examples, dtype=inputs.x.dtype)
        self._all = [(inputs.x, False), (work.examples, True), (mean.to(inputs.x.device), False)]
        for name, state, is_own in (
            ("server", inputs.server.unwatched(), False),
            ("cohort_grad", inputs.cohort_grad.unwatched(), False),
            ("client", work.clients, True),
            ("local", work.local, True),
            ("full_grad", work.full_grad, True),
        ):
            self._states[name] = tuple(state)
            self._all += [(value, is_own) for value in state.values()]

    def unpack(self, tensors: Sequence[Tensor]) -> tuple[list[Step], list[Tensor] | None]:
        """Return one :class:`Step` per parameter, and the parameters at the anchor, if there is one."""
        x, examples, mean = tensors[:3]
        rest = iter(tensors[3:])
        states = {name: {key: next(rest) for key in keys} for name, keys in self._states.items()}
        steps = []
        cut = {
            name: self.layout.state_views(state) if self.alone or name in self.notes else self._own(state)
            for name, state in states.items()
        }
        for i, (part, shape) in enumerate(zip(self.layout.views(x), self.layout.shapes, strict=True)):
            size = examples if self.alone else examples.view(-1, *[1] * len(shape))
            server = Watched(cut["server"][i], self.notes["server"])
            grads = Watched(cut["cohort_grad"][i], self.notes["cohort_grad"])
            client, local, full_grad = (cut[name][i] for name in ("client", "local", "full_grad"))
            steps.append(Step(part, server, client, local, None, full_grad, grads, size, mean))
        if self.anchor_at is None:
            return steps, None
        return steps, self.layout.views(x if self.anchor_at == "x" else states["server"][self.anchor_at])

    def _own(self, state: State) -> list[State]:
        """Cut the clients' states: vectors [S, P] into [S, *shape], a number per client [S] into [S, 1, ...]."""
        layout = self.layout
        return [
            {
                name: self._cut(value, i) if value.shape[1:] == (layout.numel,) else value.view(-1, *[1] * len(shape))
                for name, value in state.items()
            }
            for i, shape in enumerate(layout.shapes)
        ]

    def _cut(self, value: Tensor, i: int) -> Tensor:
        start, layout = sum(self.layout.sizes[:i]), self.layout
        return value[:, start : start + layout.sizes[i]].view(len(value), *layout.shapes[i])
