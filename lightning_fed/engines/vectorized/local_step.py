"""The local step of one client: gradient, second gradient, correction."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_fed.core.rounds import Step
from lightning_fed.core.seeds import capture_random_state
from lightning_fed.core.tracked_state import TrackedState
from lightning_fed.core.types import State
from lightning_fed.engines.base import per_parameter
from lightning_fed.engines.vectorized.batches import BatchGroup
from lightning_fed.engines.vectorized.chunk_work import ChunkWork
from lightning_fed.engines.vectorized.clients import Clients, of_each
from lightning_fed.engines.vectorized.module_step import ModuleStep

Gradient: TypeAlias = Callable[
    [Sequence[Tensor], Sequence[Tensor], Any, int], tuple[Sequence[Tensor | None], Tensor, dict[str, Tensor]]
]
"""A function from a point, a batch's tensors, its structure and index to gradients, loss and logged values."""

_Clip: TypeAlias = Callable[[list[Tensor]], list[Tensor]]


class StepInput(NamedTuple):
    """Inputs of one client's local step; with a leading client dimension if there are several."""

    y: Sequence[Tensor]  # the parameters, one tensor each
    leaves: Sequence[Tensor]  # the tensors of the batch
    own: Sequence[Tensor]  # the method's inputs of this client
    local: State  # the client's states of this round
    shared: Sequence[Tensor]  # the method's inputs that all clients share
    point: Sequence[Tensor]  # the parameters at the anchor, shared by all clients; empty without anchor


DIMS: Any = StepInput(y=0, leaves=0, own=0, local=0, shared=None, point=None)  # type: ignore[arg-type]
"""The dimension of clients in each input."""


class StepOutput(NamedTuple):
    """Results of a local step, before parameters move."""

    directions: list[Tensor]  # one per parameter
    local: list[State]  # this round's states after the step, once per parameter; empty if unchanged
    loss: Tensor
    values: dict[str, Tensor]  # logged values by name


class LocalStep:
    """The local step of a chunk's clients; it also sets the starting points of the clients ``rows``.

    The method's inputs are ``shared`` by all clients and steps, each client's ``own`` [S, ...], and the clients' states
    of the round, ``local`` [S, ...]. All are empty if it reads nothing. ``key`` is equal for any number of clients.
    """

    def __init__(self, module: ModuleStep, work: ChunkWork, rows: range) -> None:
        self.module, self.work, self.algorithm = module, work, work.algorithm
        self.advances, self.looks_ahead = self.algorithm.overrides("advance"), self.algorithm.looks_ahead
        self._layout, self._decay = work.shared_layout, work.decay
        clip = work.clip
        self._own_clip: _Clip = clip if clip is not None and not clip.corrected else _keep
        self._corrected_clip: _Clip = clip if clip is not None and clip.corrected else _keep
        starts = self.algorithm.overrides("start")
        self._reads = starts or self.advances or self.algorithm.overrides("correct")
        self.is_gradient = not self._reads and clip is None and not any(self._decay) and self.algorithm.trains == "all"
        self.shared, self.own, self.local = list[Tensor](), list[Tensor](), State()
        self.key: tuple[Any, ...] = ()
        if self._reads:
            self._read()
        if starts:
            at = slice(rows.start, rows.stop)
            start: Any = of_each(
                lambda own, local: self.algorithm.start(work.inputs.x, self._whole(self.shared, own, local)),
                (tuple([value[at] for value in self.own]), {name: value[at] for name, value in self.local.items()}),
                len(rows),
            )
            work.shared[at] = start

    def use_rates(self) -> bool:
        """Read the rates of the current step; return whether the method's inputs contain them."""
        if self._reads:
            self._read()
        return self._reads

    def _read(self) -> None:
        """Arrange the method's inputs as tensors in a fixed order."""
        work, x = self.work, self.work.inputs.x
        server, cohort_grad = work.inputs.server.untracked(), work.inputs.cohort_grad.untracked()
        mean = torch.tensor(work.inputs.mean_examples, dtype=x.dtype, device=x.device)
        rate = torch.as_tensor(work.optimizer.spread(work.rates), dtype=x.dtype, device=x.device)
        self.shared = [x, mean, rate, *server.values(), *cohort_grad.values()]
        self.own = [work.examples, *work.clients.values(), *work.full_grad.values()]
        self.local = work.local
        self._shared_names = [list(server), list(cohort_grad)]
        self._own_names = [list(work.clients), list(work.full_grad)]
        names = (*self._shared_names, *self._own_names, list(self.local))
        shapes = [(value.shape, value.dtype) for value in self.shared]
        shapes += [(value.shape[1:], value.dtype) for value in self.own]
        self.key = (*map(tuple, names), *shapes)

    # ------------------------------------------------------------------ the step

    def __call__(
        self,
        gradient: Gradient,
        given: StepInput,
        spec: Any,
        batch_idx: int,
        draw_again: Callable[[], None] | None = None,
    ) -> StepOutput:
        """Take a step of one client, as a function of tensors.

        Before the second gradient, ``draw_again`` restores the random states of the first.
        """
        found, loss, values = gradient(given.y, given.leaves, spec, batch_idx)
        if (stays := self._fixed_positions()) is not None:  # clipping must not see fixed parameters
            found = [None if i in stays else g for i, g in enumerate(found)]
        g = self._completed(found, given.y, self._own_clip)
        if not self._reads:
            return StepOutput(self._corrected_clip(self._moving(g)), [], loss, values)
        whole = self._whole(given.shared, given.own, given.local)
        steps = per_parameter(whole, self._layout)
        point = self._ahead(g, given.y, whole) if self.looks_ahead else given.point
        if point:
            point = [*point, *given.y[len(point) :]]  # personal parameters come last
            if draw_again is not None:
                draw_again()
            found, _, _ = gradient(point, given.leaves, spec, batch_idx)
            for step, anchor_grad in zip(steps, self._completed(found, point, _keep), strict=False):
                step.anchor_grad = anchor_grad
        each = list(zip(g, given.y, steps, strict=False))
        v = [self.algorithm.correct(*one) for one in each]
        local = [self.algorithm.advance(*one) for one in each] if self.advances else []
        return StepOutput(self._corrected_clip(self._moving([*v, *g[len(v) :]])), local, loss, values)

    def _completed(self, grads: Sequence[Tensor | None], at: Sequence[Tensor], clip: _Clip) -> list[Tensor]:
        """Return clipped gradients, zero for parameters that the loss ignores, plus coupled weight decay."""
        clipped = clip([torch.zeros_like(v) if g is None else g for g, v in zip(grads, at, strict=True)])
        return [g.add(v, alpha=d) if d else g for g, v, d in zip(clipped, at, self._decay, strict=True)]

    def _ahead(self, g: Sequence[Tensor], y: Sequence[Tensor], whole: Step) -> list[Tensor]:
        """Return the point of the method's second gradient, given the first one."""
        layout, n = self._layout, self.module.flat.num_shared
        return layout.views(self.algorithm.second_gradient_at(layout.joined(g[:n]), layout.joined(y[:n]), whole))

    def _moving(self, directions: list[Tensor]) -> list[Tensor]:
        """Return directions, with zeros for parameters that must stay fixed."""
        for i in self._fixed_positions() or ():
            directions[i] = torch.zeros_like(directions[i])
        return directions

    def _fixed_positions(self) -> range | None:
        """Return the positions of parameters that must stay fixed, or None."""
        trains, flat = self.algorithm.trains, self.module.flat
        if trains == "all":
            return None
        return range(flat.num_shared) if trains == "personal" else range(flat.num_shared, len(flat.params))

    def untraced(self, clients: Clients, group: BatchGroup) -> StepOutput:
        """Take a step of some clients on their batches, without a trace."""
        module, point, draw_again, dims = self.module, self.point(self.shared), None, DIMS
        gradient: Gradient = module.own_gradient if clients.is_one else module.gradient
        if (point or self.looks_ahead) and module.is_random:
            draw_again = capture_random_state(self.work.y.device)
            if point and not clients.is_one:  # the same draws, in the same order, as at the clients' own parameters
                point, dims = [v.expand(clients.count, *v.shape) for v in point], DIMS._replace(point=0)
        local = dict(zip(self.local, clients.of(self.local.values()), strict=True))
        given = StepInput(clients.views, group.leaves, clients.of(self.own), local, self.shared, point)

        def take(given: StepInput) -> StepOutput:
            return self(gradient, given, group.spec, group.batch_idx, draw_again)

        with torch.no_grad(), module.same_draws_as_trial(several=not clients.is_one):
            taken: StepOutput = clients.each(take, (dims,))(given)
        if clients.is_one and not point and not self.looks_ahead:  # otherwise, the last gradient was at another point
            module.check_bound(clients.views)
        return taken

    def of_module(self, clients: Clients, group: BatchGroup) -> tuple[list[Tensor], Tensor, dict[str, Tensor]]:
        """Return directions, loss and values of the first of some clients by the module itself, to compare a trace."""
        row = clients.rows[0]
        y = clients.views if clients.is_one else self.work.layout.views(clients.y[0])
        local = {name: value[row] for name, value in self.local.items()}
        own = [value[row] for value in self.own]
        given = StepInput(y, group.first, own, local, self.shared, self.point(self.shared))
        with torch.no_grad():
            taken = self(self.module.own_gradient, given, group.spec, group.batch_idx)
        return taken.directions, taken.loss, taken.values

    # ------------------------------------------------------------------ inputs of the method

    def point(self, shared: Sequence[Tensor]) -> list[Tensor]:
        """Return the parameters at the anchor, x or an entry of the server state; empty without anchor."""
        name = self.algorithm.anchor_at
        if name is None or not self._reads:
            return []
        return self._layout.views(shared[0 if name == "x" else 3 + self._shared_names[0].index(name)])

    def _whole(self, shared: Sequence[Tensor], own: Sequence[Tensor], local: State) -> Step:
        """Return the input of whole-vector hooks for one client."""
        x, mean, lr, *states = shared
        examples, *own_states = own
        server, cohort_grad = _named(self._shared_names, states)
        client, full_grad = _named(self._own_names, own_states)
        server = TrackedState(server, self.work.read["server"])
        cohort_grad = TrackedState(cohort_grad, self.work.read["cohort_grad"])
        return Step(x, server, client, local, None, full_grad, cohort_grad, examples, mean, lr)


def _keep(g: list[Tensor]) -> list[Tensor]:
    return g


def _named(names: Sequence[Sequence[str]], tensors: Sequence[Tensor]) -> list[State]:
    """Return states of consecutive tensors, given the names in each state."""
    rest = iter(tensors)
    return [{name: next(rest) for name in state} for state in names]
