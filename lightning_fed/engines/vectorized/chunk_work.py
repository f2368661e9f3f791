"""The local work of the clients of a chunk, on stacked parameters [S, P], and their local optimizer and clipping."""

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.compat.package import pl
from lightning_fed.core.devices import is_out_of_memory
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import Run, Update
from lightning_fed.core.torch_optimizers import STEP_COUNTS, without_coupled_decay
from lightning_fed.core.types import State, Vector
from lightning_fed.engines.base import OnlySequentialError, RoundInputs
from lightning_fed.engines.local_schedule import MOVED
from lightning_fed.engines.optimizer import FederatedOptimizer, StepPlan, solver_entries, undeclared_path
from lightning_fed.engines.vectorized.clients import ChunkMemory, Clients, of_each, stack_states
from lightning_fed.server.client_states.state import PERSONAL, method_part, with_kept
from lightning_fed.server.participation import Participant

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
)
"""Optimizers whose step on stacked parameters equals each client's step."""


@dataclass(frozen=True, slots=True)
class Clipping:
    """Gradient clipping, client by client."""

    value: float  # the largest norm, or the largest absolute value
    algorithm: str  # "norm" or "value"
    corrected: bool  # whether to clip the corrected gradient instead of the client's

    @staticmethod
    def of(trainer: pl.Trainer) -> "Clipping | None":
        """Return the trainer's gradient clipping, or None."""
        corrected = trainer.fit_loop.corrected_clip
        value, algorithm = corrected or (trainer.gradient_clip_val, trainer.gradient_clip_algorithm or "norm")
        if not value:
            return None
        return Clipping(float(value), str(getattr(algorithm, "value", algorithm)), corrected is not None)

    def __call__(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return one client's clipped gradients, one tensor per parameter."""
        if self.algorithm == "value":
            return [g.clamp(-self.value, self.value) for g in grads]
        norms = torch.stack([torch.linalg.vector_norm(g) for g in grads])
        scale = (self.value / (torch.linalg.vector_norm(norms) + 1e-6)).clamp(max=1.0)
        return [g * scale for g in grads]


class StackedOptimizer:
    """The user's local optimizer, which steps the current clients' parameters from a new state."""

    def __init__(self, optimizer: FederatedOptimizer) -> None:
        base = optimizer.base
        self._base = copy.copy(base)
        self._base.state = defaultdict(dict)
        self._positions = {id(p): i for i, p in enumerate(optimizer.flat.params)}
        self._shapes = optimizer.flat.whole_layout.shapes
        self._groups, self._is_scheduled = base.param_groups, optimizer.schedule is not None
        self._views: Sequence[Tensor] = []

    def step(
        self,
        views: Sequence[Tensor],
        directions: Sequence[Tensor],
        solver: Sequence[dict[str, Tensor]] | None,
        skipped: frozenset[int],
    ) -> None:
        """Move parameters along directions, which include coupled weight decay, by the optimizer.

        ``views`` are those of the chunk's first clients, at most as many as in the last step. The method's statistics
        (``solver``, per parameter) are loaded before and discarded after. Parameters at ``skipped`` stay fixed.
        """
        base = self._base
        if views is not self._views:
            self._narrow(views)
        if self._is_scheduled:
            for own, group in zip(base.param_groups, self._groups, strict=True):
                own.update({name: group[name] for name in MOVED if name in group})
        for i, (view, direction) in enumerate(zip(views, directions, strict=True)):
            view.grad = None if i in skipped else direction.contiguous()
        if solver is not None:
            base.state = defaultdict(dict)
            for view, shape, entries in zip(views, self._shapes, solver, strict=True):
                if entries:
                    base.state[view] = {k: _spread(k, v, shape, view) for k, v in entries.items()}
        with without_coupled_decay(base):
            base.step()
        for view in views:
            view.grad = None

    def _narrow(self, views: Sequence[Tensor]) -> None:
        """Keep the parameters of the remaining clients, and their rows of the state."""
        base, old = self._base, self._views
        states = [base.state.get(view, {}) for view in old]
        self._views = views
        base.param_groups = [
            {
                **group,
                "fused": False,  # fused kernels mistake parts of a matrix for contiguous memory
                "params": [views[self._positions[id(p)]] for p in group["params"] if id(p) in self._positions],
            }
            for group in self._groups
        ]
        base.state = defaultdict(dict)
        for view, before, state in zip(views, old, states, strict=False):
            rows: Any = slice(len(view)) if view.ndim == before.ndim else 0  # one client has no client dimension
            base.state[view] = {
                k: v[rows] if isinstance(v, Tensor) and v.shape == before.shape and k not in STEP_COUNTS else v
                for k, v in state.items()
            }
        if not old and isinstance(base, torch.optim.Adagrad):  # it creates its state in __init__
            for group in base.param_groups:
                start = group["initial_accumulator_value"]
                for p in group["params"]:
                    base.state[p] = {"step": torch.tensor(0.0), "sum": torch.full_like(p, start)}


def _spread(name: str, value: Tensor, shape: torch.Size, view: Tensor) -> Tensor:
    """Return a parameter's statistic for every client; those that only depend on steps are shared."""
    if name in STEP_COUNTS or value.shape != shape:
        return value.clone()
    return value.expand_as(view).clone()


class ChunkWork:
    """Parameters, states and optimizer of the S clients of a chunk; states are stacked: vectors [S, P], numbers [S]."""

    def __init__(
        self,
        algorithm: Algorithm,
        optimizer: FederatedOptimizer,
        plan: StepPlan,
        inputs: RoundInputs,
        participants: Sequence[Participant],
        clients: State,
        memory: ChunkMemory,
        clip: Clipping | None,
    ) -> None:
        self.algorithm, self.optimizer, self.inputs, self.clip = algorithm, optimizer, inputs, clip
        flat, x = optimizer.flat, inputs.x
        self.layout, self.shared_layout, self.memory = flat.whole_layout, flat.layout, memory
        self.decay, self.rates = optimizer.decay, plan.rates  # per parameter; the rates at the current step
        self._counts = [who.steps for who in participants]
        self._starts = [0] * len(participants)  # each client's first step in its schedule
        self._rate_sums = dict[int, list[list[float]]]()  # by first step: parameters' sums of rates after each step
        self._sums = list[list[float]]()  # the sums of the clients that have begun last
        self.y = memory.y[: len(participants)]  # [S, P + Q]
        self.shared, self._personal = self.y[:, : flat.numel], self.y[:, flat.numel :]
        self.shared.copy_(x)
        if PERSONAL in clients:
            self._personal.copy_(clients[PERSONAL])
        self.clients = method_part(clients) if clients else clients
        full_grad = [inputs.full_grad.get(who.index, {}) for who in participants] if inputs.full_grad else [{}]
        self.full_grad = stack_states(full_grad, range(len(full_grad)))  # by point
        self.examples = torch.tensor([who.size for who in participants], dtype=x.dtype, device=x.device)
        self._num_steps = torch.tensor(self._counts, dtype=x.dtype, device=x.device)
        self.local: State = {}  # states of this round
        if algorithm.overrides("init_local"):
            local = of_each(
                lambda client, _: dict(algorithm.init_local(x, inputs.server, client).items()),
                (self.clients, self.examples),
                len(self.y),
            )
            self.local = {name: value.clone() for name, value in local.items()}
        self.read: dict[str, set[str]] = {"server": set(), "cohort_grad": set()}  # the names that were read
        self.sends_delta, self.implied = False, tuple[str, ...]()  # see ChunkResult
        self._follows = False  # see Run.path_follows
        self.is_bare = plan.is_bare and clip is None
        self._path = torch.zeros_like(self.y) if plan.tracks else None
        self._still: Tensor | None = None
        self._use_plan(plan)
        self._solver: list[dict[str, Tensor]] | None = None
        if algorithm.uses_solver_state:
            self._solver = solver_entries(algorithm.solver_state(inputs.server, self.local), len(self.layout.sizes))
        may_differ = optimizer.schedule is not None and len(optimizer.param_groups) > 1
        is_uniform = plan.is_plain and len(set(self.rates)) == 1 and not may_differ
        self._base = None if is_uniform else StackedOptimizer(optimizer)

    def _use_plan(self, plan: StepPlan) -> None:
        """Set the properties that depend on the rates of clients' first steps.

        If :attr:`skips`, a parameter that the loss does not depend on stays fixed; a zero gradient would move it.
        """
        self.plan, self.rates = plan, plan.rates
        self.skips = not plan.injects and (any(self.decay) or not plan.is_plain)
        if self.algorithm.reads_path_gradient and 0 in self._shared_rates and self._still is None:
            self._still = torch.zeros_like(self.y)

    @property
    def _shared_rates(self) -> list[float]:
        return self.rates[: self.optimizer.flat.num_shared]

    def begin(self, clients: range, first_step: int) -> None:
        """Begin the work of clients, the longest first, at a step of the schedule by local step."""
        schedule, optimizer = self.optimizer.schedule, self.optimizer
        assert schedule is not None
        schedule.begin(first_step, self._counts[clients.start])
        self._use_plan(optimizer.plan_of(self.algorithm))
        self._base = None if self._base is None else StackedOptimizer(optimizer)  # with a new state
        self._sums = self._rate_sums[first_step] = [[0.0] * len(self.rates)]
        for row in clients:
            self._starts[row] = first_step

    def begin_step(self) -> None:
        """Go to the next step of the clients that have begun last, with rates from the schedule by local step."""
        schedule = self.optimizer.schedule
        assert schedule is not None
        if len(self._sums) > 1:
            schedule.advance()
        self.rates = self.optimizer.rates
        self._sums.append([total + rate for total, rate in zip(self._sums[-1], self.rates, strict=True)])

    @torch.no_grad()
    def move(self, clients: Clients, directions: Sequence[Tensor], unused: frozenset[int]) -> None:
        """Move clients along directions, which have the shapes of their views and include coupled weight decay.

        If :attr:`skips`, parameters at the positions ``unused`` stay fixed: the losses do not depend on them.
        """
        self._track(clients, directions)
        skipped = unused if self.skips else frozenset()
        if self._base is not None:
            self._base.step(clients.views, directions, self._solver, skipped)
            return
        moving = [i for i in range(len(directions)) if i not in skipped]
        views = [clients.views[i] for i in moving]
        torch._foreach_add_(views, [directions[i] for i in moving], alpha=-self.rates[0])

    def _track(self, clients: Clients, directions: Sequence[Tensor]) -> None:
        """Add directions to the path, with each coordinate's group rate."""
        for path, of_rate_zero in ((self._path, False), (self._still, True)):
            if path is None:
                continue
            for part, direction, rate in zip(clients.cut(path), directions, self.rates, strict=True):
                if (rate == 0 and self._still is not None) == of_rate_zero:
                    part.add_(direction, alpha=1.0 if of_rate_zero else rate)

    def keep_local(self, clients: Clients, columns: Sequence[State]) -> None:
        """Replace states of this round with new ones, given per parameter; non-vectors are the same in all."""
        for name, whole in self.local.items():
            if whole.shape == self.shared.shape:
                clients.put(whole, [column[name] for column in columns])
            else:
                whole[clients.at] = columns[0][name]

    def finish(self) -> tuple[Tensor, State, State]:
        """Return changes ``y - x`` [S, P], messages and new client states [S, ...]."""
        inputs, y = self.inputs, self.shared
        inputs.server.read |= self.read["server"]
        inputs.cohort_grad.read |= self.read["cohort_grad"]
        delta = torch.sub(y, inputs.x, out=self.memory.delta[: len(y), : y.shape[1]])
        lr_sum = self._lr_sum()
        self._follows = self.plan.is_straight and self._has_one_rate(lr_sum)
        path = {"gradient": self._path_gradient(delta, lr_sum)} if self.algorithm.reads_path_gradient else {}
        own = {
            "client": self.clients,
            "local": self.local,
            "full_grad": self.full_grad,
            "num_examples": self.examples,
            "num_steps": self._num_steps,
            "lr_sum": lr_sum,
        }
        try:
            send, keep = of_each(self._finish_one, (y, delta, own, path), len(y))
        except Exception as error:
            if isinstance(error, FederatedError) or is_out_of_memory(error) or len(y) == 1:
                raise
            raise OnlySequentialError(
                f"engine='vectorized' cannot run {type(self.algorithm).__name__}.finish for several clients at once"
                f" ({error}). Use tensor operations only, or engine='sequential'."
            ) from error
        schedule, local_steps = self.optimizer.schedule, None
        if schedule is not None and schedule.mode == "continue":
            local_steps = [first + count for first, count in zip(self._starts, self._counts, strict=True)]
        return delta, send, with_kept(keep, self.clients, self._personal, local_steps)

    def _finish_one(self, y: Vector, change: Vector, own: dict[str, Any], path: State) -> tuple[State, State]:
        """Return one client's messages and new state."""
        run = Run(
            x=self.inputs.x,
            delta=change,
            server=self.inputs.server,
            cohort_grad=self.inputs.cohort_grad,
            mean_examples=self.inputs.mean_examples,
            path=lambda: path["gradient"] if path else self._undeclared(),
            path_follows=self._follows,
            **own,
        )
        update: Update = self.algorithm.finish(y, run)
        self.sends_delta, self.implied = update.send.get("delta") is change, update.implied
        return update.send, update.keep

    def _lr_sum(self) -> Tensor:
        """Return the sum of the rates of each client's steps: [S], or [S, P] if groups differ."""
        steps, shared = self._num_steps, self._shared_rates
        if self.optimizer.schedule is not None:
            each = zip(self._starts, self._counts, strict=True)
            sums = [self._rate_sums[first][count][: len(shared)] for first, count in each]
            if all(len(set(own)) == 1 for own in sums):
                return steps.new_tensor([own[0] for own in sums])
            return torch.stack([self._spread(own) for own in sums])
        if len(set(shared)) == 1:
            return steps * shared[0]
        return steps[:, None] * self._spread(shared)

    def _has_one_rate(self, lr_sum: Tensor) -> bool:
        """Return whether each client that moves has one sum of rates, not zero."""
        if self.optimizer.schedule is not None:
            return lr_sum.ndim == 1 and bool(lr_sum[self._num_steps > 0].all())
        rates = set(self._shared_rates)
        return len(rates) == 1 and 0 not in rates

    def _spread(self, of_parameters: Sequence[float]) -> Tensor:
        """Return a number of each exchanged parameter, per coordinate [P]."""
        sizes = zip(self.shared_layout.sizes, of_parameters, strict=True)
        return torch.cat([self._num_steps.new_full((m,), value) for m, value in sizes])

    def _path_gradient(self, delta: Tensor, lr_sum: Tensor) -> Tensor:
        """Return the mean direction of each client [S, P]."""
        rates = lr_sum if lr_sum.ndim == 2 else lr_sum[:, None]
        divisor = torch.where(rates == 0, 1.0, rates)  # clients without steps have not moved either
        path, still = (sums if sums is None else sums[:, : delta.shape[1]] for sums in (self._path, self._still))
        mean = delta / -divisor if path is None else path / divisor
        if still is not None:
            mean = torch.where(rates == 0, still / self._num_steps[:, None].clamp(min=1), mean)
        return mean

    def _undeclared(self) -> Vector:
        raise undeclared_path(self.algorithm)
