"""The optimizer wrapper that applies a method's correction between backward and the user's optimizer step."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.flat import FlatParameters
from lightning_fed.core.rounds import Step
from lightning_fed.core.torch_optimizers import (
    JointOptimizer,
    coupled_decay,
    device_of,
    inner_optimizers,
    is_plain_sgd,
    known_loss,
    take_plain_step,
    without_coupled_decay,
)
from lightning_fed.core.types import State, Vector
from lightning_fed.engines.local_schedule import LocalSchedule

_NO_CONTEXT = nullcontext()
_NUMBER = ":number"  # ends the name of a statistic that is a number of Python: a tensor would round its powers


class StepPlan(NamedTuple):
    """Properties of local steps under a method and the current options of the wrapped optimizer."""

    rates: list[float]  # the learning rate of every parameter, personal ones last
    is_plain: bool  # whether the wrapped optimizer is SGD without momentum
    is_straight: bool  # whether y - x equals the sum of -lr * direction over the steps, as for plain SGD
    tracks: bool  # whether the method reads that sum, and it has to be computed step by step
    injects: bool  # whether gradients are modified before the wrapped optimizer steps
    is_bare: bool  # whether a step is one rate times a direction, and only changes parameters


@dataclass(slots=True)
class LocalWork:
    """The optimizer's view of one client's round: the hooks' inputs, and the progress so far."""

    algorithm: Algorithm
    # the inputs of `correct`, one `Step` per parameter, only needed if gradients are modified
    steps: list[Step]
    # whether `steps` is one step of whole vectors instead, with one rate for all parameters
    is_joined: bool = False
    # optimizer statistics to load before every step, per parameter, if the method keeps them
    solver: list[dict[str, Tensor]] | None = None
    # the input of `second_gradient_at`, as whole vectors; only needed if a method has that hook
    whole: Step | None = None
    # a function from a point [P] to the gradient [P] on the current batch, if the method needs it
    second_gradient: Callable[[Vector], Vector] | None = None
    num_steps: int = 0  # the number of steps taken; with several optimizers, the largest
    steps_of: int | Vector = 0  # the same, per coordinate [P] if optimizers differ; set at the end
    # the sum of the steps' learning rates, per coordinate [P] if groups differ; set at the end
    lr_sum: float | Vector = 0.0
    path: Vector | None = None  # the sum of lr_k v_k, if it differs from x - y
    still: Vector | None = None  # the sum of v_k over steps with rate zero


class _Wrapper(Optimizer):
    """Shows an optimizer's groups, state, defaults and class name as its own.

    Schedulers, monitors and checkpoints thus see one optimizer; ``LearningRateMonitor`` prints its name.
    """

    def __init__(self, base: Optimizer, flat: FlatParameters) -> None:
        self._base: Optimizer | None = None  # until set, assignments in Optimizer.__init__ have no effect
        super().__init__([torch.zeros(0)], base.defaults)
        self._base = base
        self.flat = flat
        self.__class__ = type(type(base).__name__, (type(self),), {})

    @property
    def base(self) -> Optimizer:
        """The wrapped optimizer."""
        assert self._base is not None
        return self._base

    optimizer = base  # the name that ``LearningRateMonitor`` looks for: schedulers belong to the wrapped optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's parameter groups."""
        return [] if self._base is None else self._base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._base is not None:
            self._base.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state."""
        return {} if self._base is None else self._base.state

    @state.setter
    def state(self, state: Any) -> None:
        if self._base is not None:
            self._base.state = state

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state dict."""
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state dict."""
        self.base.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise, since the federated vector has a fixed layout."""
        if self._base is not None:
            raise FederatedError(
                "A parameter group was added during training, which would change what clients and server exchange."
                " Put every parameter to be trained into configure_optimizers()."
            )

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Register a hook that runs after the correction, right before the wrapped optimizer's step."""
        return self.base.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """Register a hook that runs right after the wrapped optimizer's step."""
        return self.base.register_step_post_hook(hook)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients as the wrapped optimizer does."""
        self.base.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        """Return a public attribute of the wrapped optimizer, such as ``train`` of a schedule-free one."""
        base = self.__dict__.get("_base")
        if base is None or name.startswith("_"):  # such as whether it unscales gradients itself
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(base, name)

    def __repr__(self) -> str:
        """Return the wrapped optimizer as text."""
        return f"FederatedOptimizer({self.base!r})"


class _Share(NamedTuple):
    """The parameters that one of the wrapped optimizers trains."""

    optimizer: Optimizer
    first_group: int  # the index of its first parameter group among all groups
    members: Sequence[int]  # the indices of its parameters in the vector


class FederatedOptimizer(_Wrapper):
    """Wraps the user's optimizer and corrects each gradient right before its step.

    One ``step(closure)`` is:

    1. run the closure, if any (forward, backward, clipping); under a gradient scaler it has already run and
       the gradients are unscaled and finite;
    2. pass every gradient, plus coupled weight decay, to the method's ``correct``. If the method looks ahead, first
       pass all of them to ``second_gradient_at``, and take the gradient at that point on the same batch;
    3. step the user's optimizer without coupled decay. One of another package gets the loss, which it may read.

    A module with manual optimization may have several optimizers: their :class:`JointOptimizer` is then wrapped.
    The module steps :attr:`parts`, and each part corrects its own gradients.
    """

    plan: StepPlan
    """The properties of the current client's local steps."""

    def __init__(self, base: Optimizer, flat: FlatParameters) -> None:
        super().__init__(base, flat)
        self.work: LocalWork | None = None  # the current client's
        index = {id(p): i for i, group in enumerate(base.param_groups) for p in group["params"]}
        self._groups = [index[id(p)] for p in flat.params]
        own = base.parts if isinstance(base, JointOptimizer) else [base]
        foreign = [part for part in own if not type(part).__module__.startswith("torch.optim.")]
        self._inner = [inner for part in foreign for inner in inner_optimizers(part)]
        self.readers = [part for part in foreign if "closure" in signature(type(part).step).parameters]  # of the loss
        self.clip: Callable[[], None] | None = None  # clips corrected gradients
        self.schedule: LocalSchedule | None = None  # sets the options of each local step
        self.refuse_frozen: Callable[[Sequence[int]], None] | None = None  # if the module steps its optimizers itself
        first, self._all = 0, _Share(base, 0, range(len(flat.params)))
        self.parts: list[OptimizerPart] = []  # the optimizers, if there are several
        for part in own if len(own) > 1 else ():
            end = first + len(part.param_groups)
            members = [i for i, group in enumerate(self._groups) if first <= group < end]
            self.parts.append(OptimizerPart(self, _Share(part, first, members)))
            first = end

    @property
    def wrapped(self) -> list[Optimizer]:
        """The user's optimizers, and those that they wrap."""
        return [self.base, *(part.base for part in self.parts), *self._inner]

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state dict, with the initial options if there is a schedule by local step."""
        state = self.base.state_dict()
        if self.schedule is not None:
            self.schedule.at_start(state["param_groups"])
        return state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients as the wrapped optimizer does."""
        if set_to_none and type(self.base).zero_grad is Optimizer.zero_grad:
            for p in self.flat.params:
                p.grad = None
        else:
            self.base.zero_grad(set_to_none)

    @property
    def decay(self) -> list[float]:
        """The coupled weight decay of every parameter: part of the client's loss, and so of every gradient."""
        base = self.base
        if len(base.param_groups) == 1:
            return [coupled_decay(base, base.param_groups[0])] * len(self._groups)
        of_groups = [coupled_decay(base, group) for group in base.param_groups]
        return [of_groups[g] for g in self._groups]

    @property
    def rates(self) -> list[float]:
        """The learning rate of every parameter, personal ones last."""
        groups = self.base.param_groups
        return [float(groups[g]["lr"]) for g in self._groups]

    def plan_of(self, algorithm: Algorithm) -> StepPlan:
        """Return the properties of local steps under a method, with the wrapped optimizer's current options."""
        rates, is_plain, reads_path = self.rates, is_plain_sgd(self.base), algorithm.reads_path_gradient
        is_straight = is_plain and not algorithm.overrides("start")
        tracks = reads_path and not is_straight
        stands_still = reads_path and 0 in rates[: self.flat.num_shared]  # the path is a plain mean there
        advances = algorithm.overrides("advance")
        corrects = advances or algorithm.overrides("correct") or algorithm.trains != "all"
        injects = corrects or self.clip is not None or tracks or stands_still
        is_bare = is_plain and rates.count(rates[0]) == len(rates) and not (tracks or stands_still or advances)
        is_bare = is_bare and self.schedule is None
        return StepPlan(rates, is_plain, is_straight, tracks, injects, is_bare)

    def begin(self, work: LocalWork, kept: State | None = None, first_step: int = 0, steps: int = 0) -> None:
        """Start a client's local work, from the optimizer state that it kept, if any (see :meth:`solver_state`).

        The client begins at ``first_step`` of its schedule, and takes at most ``steps`` steps.
        """
        if self.schedule is not None:
            self.schedule.begin(first_step, steps)
        if kept:
            self._load_solver(solver_entries(kept, len(self.flat.params)))
        else:
            self.base.state.clear()
            for inner in self._inner:  # a failed client may have left state
                inner.state.clear()
        self.work, self.plan = work, self.plan_of(work.algorithm)
        self._lr_sums = [0.0] * len(self.base.param_groups)
        self._counts = [0] * len(self._lr_sums)
        self._advances = work.algorithm.overrides("advance")

    def end(self) -> None:
        """End a client's local work, and discard the optimizer's state."""
        work = self.work
        assert work is not None
        work.lr_sum, work.steps_of, self.work = self._lr_sum(), work.num_steps, None
        if self.parts:
            work.steps_of = self._check_counts(work.algorithm, work.num_steps)
        self.base.state.clear()
        for inner in self._inner:
            inner.state.clear()
        if self.schedule is not None:
            self.schedule.rest()

    def drop_resting_gradients(self) -> None:
        """Drop the gradients of parameters that the method does not train now: clipping must not see them."""
        trains = "all" if self.work is None else self.work.algorithm.trains
        if trains != "all":
            shared = self.flat.num_shared
            for p in self.flat.params[:shared] if trains == "personal" else self.flat.params[shared:]:
                p.grad = None

    def counts(self) -> dict[str, float]:
        """Return the numbers in attributes of the wrapped optimizers, which are not reset for the next client."""
        return {
            f"{type(optimizer).__name__}.{name}": value
            for optimizer in (self.base, *self._inner)
            for name, value in vars(optimizer).items()
            if type(value) in (int, float)
        }

    def step(self, closure: Callable[[], Any] | None = None, share: _Share | None = None) -> Any:  # type: ignore[override]
        """Take one local step: closure, correction, the wrapped optimizer's step; return the closure's result.

        If there is no gradient at all (``training_step`` returned None), no step is taken or counted. With several
        wrapped optimizers, ``share`` is the one that steps.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = self.work
        if work is None:
            raise FederatedError("The federated optimizer was stepped outside a client's local work.")
        base, first, members = share or self._all
        self.flat.gather()  # training_step may have assigned to `.data`
        params = self.flat.params
        for i in members:
            if params[i].grad is not None:
                break
        else:
            return loss
        if self.plan.injects:
            if self.refuse_frozen is not None:
                self.refuse_frozen(members)
            self._inject(work, members)
            if self.clip is not None:
                self.clip()
            if self.plan.tracks or any(group["lr"] == 0 for group in base.param_groups):
                self._track(work, members)
        if work.solver is not None:
            self._load_solver(work.solver)
        if not take_plain_step(base, has_decay=self.plan.injects):
            with without_coupled_decay(base) if self.plan.injects else _NO_CONTEXT:
                if loss is not None and base in self.readers:
                    base.step(closure=known_loss(base, loss))
                else:
                    base.step()
        if work.solver is not None:
            base.state.clear()
        for i, group in enumerate(base.param_groups, first):
            self._lr_sums[i] += float(group["lr"])
            self._counts[i] += 1
        work.num_steps = max(self._counts)
        if self.schedule is not None:
            self.schedule.advance()
        return loss

    @torch.no_grad()
    def _inject(self, work: LocalWork, members: Sequence[int]) -> None:
        algorithm, shared, groups = work.algorithm, self.flat.num_shared, self.base.param_groups
        correct, advance = algorithm.correct, algorithm.advance
        self._decay = self.decay  # a hook may have changed it since the last step
        if work.second_gradient is not None:
            self._look_ahead(work, work.second_gradient)
        corrects_joined = work.is_joined and algorithm.trains != "personal"
        if corrects_joined:
            self._correct_joined(work)
        for i in members:
            if i < shared and corrects_joined:
                continue
            p, decay = self.flat.params[i], self._decay[i]
            if (i < shared and algorithm.trains == "personal") or (i >= shared and algorithm.trains == "shared"):
                p.grad = None
                continue
            y = p.data
            g = torch.zeros_like(y) if p.grad is None else p.grad
            if decay:
                g = g.add(y, alpha=decay)
            if i >= shared:  # the method does not see personal parameters
                p.grad = g
                continue
            step = work.steps[i]
            step.lr = groups[self._groups[i]]["lr"]
            p.grad = correct(g, y, step)
            if self._advances:
                step.local = advance(g, y, step)

    def _correct_joined(self, work: LocalWork) -> None:
        """Correct the gradients of all exchanged parameters as one vector."""
        (step,), algorithm, groups = work.steps, work.algorithm, self.base.param_groups
        g, y = self._joined_gradient(), self.flat.y
        step.lr = groups[0]["lr"] if len(groups) == 1 else self.spread(self.rates)
        direction = algorithm.correct(g, y, step)
        for p, part in zip(self.flat.params, self.flat.layout.views(direction), strict=False):
            p.grad = part
        if self._advances:
            step.local = algorithm.advance(g, y, step)

    def _joined_gradient(self) -> Vector:
        """Return a copy of the gradient [P] of the exchanged parameters, plus coupled weight decay."""
        flat = self.flat
        params = flat.params[: flat.num_shared]
        g = flat.layout.joined([torch.zeros_like(p.data) if p.grad is None else p.grad for p in params])
        decay = self._decay[: flat.num_shared]
        if len(set(decay)) == 1:
            return g.add_(flat.y, alpha=decay[0]) if decay[0] else g
        for part, view, own in zip(flat.layout.views(g), flat.views, decay, strict=False):
            if own:
                part.add_(view, alpha=own)
        return g

    def _look_ahead(self, work: LocalWork, second_gradient: Callable[[Vector], Vector]) -> None:
        """Compute the second gradient at the method's point, before any correction."""
        layout, whole = self.flat.layout, work.whole
        assert whole is not None
        whole.lr = self.spread(self.rates)
        if self._advances:
            whole.local = layout.joined_state([step.local for step in work.steps], whole.local)
        found = second_gradient(work.algorithm.second_gradient_at(self._joined_gradient(), self.flat.y, whole))
        for step, part in zip(work.steps, [found] if work.is_joined else layout.views(found), strict=True):
            step.anchor_grad = part

    @torch.no_grad()
    def _track(self, work: LocalWork, members: Sequence[int]) -> None:
        """Add the corrected directions to the path, with each coordinate's group rate."""
        rates = self.rates
        if work.path is None:
            work.path, work.still = torch.zeros_like(self.flat.y), torch.zeros_like(self.flat.y)
        assert work.still is not None
        paths, stills = self.flat.layout.views(work.path), self.flat.layout.views(work.still)
        for i in members:
            grad = self.flat.params[i].grad
            if i >= len(paths) or grad is None:  # personal, or it does not move
                continue
            if rates[i] == 0:
                stills[i].add_(grad)
            elif self.plan.tracks:
                paths[i].add_(grad, alpha=rates[i])

    def _load_solver(self, solver: list[dict[str, Tensor]]) -> None:
        base = self.base
        base.state.clear()
        for p, number, entries in zip(self.flat.params, self._groups, solver, strict=True):
            if entries:
                group = base.param_groups[number]
                base.state[p] = {
                    name.removesuffix(_NUMBER): value.item()
                    if name.endswith(_NUMBER)
                    else value.to(device_of(name, p, group), copy=True)
                    for name, value in entries.items()
                }

    def placed(self, state: State) -> State:
        """Return a server state with the wrapped optimizer's statistics on the device where it reads them."""
        if not any(name.startswith("solver.") for name in state):
            return state
        found = dict(state)
        for key, value in state.items():
            if key.startswith("solver."):
                _, i, name = key.split(".", 2)
                p, group = self.flat.params[int(i)], self.base.param_groups[self._groups[int(i)]]
                found[key] = value.to(device_of(name, p, group))
        return found

    def solver_state(self) -> State:
        """Return copies of the wrapped optimizer's state, by ``solver.<parameter>.<name>``."""
        found: State = {}
        for i, p in enumerate(self.flat.params):
            for name, value in self.base.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    found[f"solver.{i}.{name}"] = value.detach().clone()
                elif value is not None:
                    dtype = torch.float64 if isinstance(value, float) else None
                    found[f"solver.{i}.{name}{_NUMBER}"] = torch.tensor(value, dtype=dtype)
        return found

    @torch.no_grad()
    def advance_solver(self, state: State, g: Vector, x: Vector) -> State:
        """Return the wrapped optimizer's statistics after one gradient [P] at a point x [P], without moving parameters.

        ``state`` is as :meth:`solver_state` returns it, empty before the first gradient; ``g`` includes coupled decay.
        """
        flat = self.flat
        kept = flat.y.clone()
        grads = [p.grad for p in flat.params]
        flat.y.copy_(x)
        for p, part in zip(flat.params, flat.layout.views(g), strict=True):
            p.grad = part.clone()
        try:
            self._load_solver(solver_entries(state, len(flat.params)))
            with without_coupled_decay(self.base):
                self.base.step()
            return self.solver_state()
        finally:
            self.base.state.clear()
            flat.y.copy_(kept)
            for p, grad in zip(flat.params, grads, strict=True):
                p.grad = grad

    def _lr_sum(self) -> float | Vector:
        """Return the sum of the learning rates of the steps so far; per coordinate [P] if groups differ."""
        return self.spread([self._lr_sums[g] for g in self._groups])

    def _check_counts(self, algorithm: Algorithm, most: int) -> int | Vector:
        """Return the steps of several optimizers per coordinate; raise if a method reads the mean over zero steps."""
        counts = [self._counts[g] for g in self._groups]
        if most > 0 and algorithm.reads_path_gradient and 0 in counts[: self.flat.num_shared]:
            own = ", ".join(
                f"{part.base.__class__.__name__}: {self._counts[part.share.first_group]}" for part in self.parts
            )
            raise ClientError(
                f"One of the module's optimizers took no step for this client ({own}), and"
                f" {type(algorithm).__name__} reads the mean direction of each one's steps. Give clients enough batches"
                " for every optimizer to step, or use a method that sends the model alone, such as FedAvg."
            )
        return most if len(set(counts)) == 1 else torch.as_tensor(self.spread(counts))

    def spread(self, of_parameters: Sequence[float]) -> float | Vector:
        """Return the common number of all exchanged parameters, or one per coordinate [P] if they differ."""
        of_parameters = of_parameters[: self.flat.num_shared]
        if len(set(of_parameters)) == 1:
            return of_parameters[0]
        sizes = zip(self.flat.layout.sizes, of_parameters, strict=True)
        parts = [torch.full((n,), value, dtype=self.flat.y.dtype) for n, value in sizes]
        return torch.cat(parts).to(self.flat.y.device)

    def path_gradient(self, work: LocalWork, x: Vector) -> Vector:
        """Return the mean corrected direction along the path, weighted by rates unless all are zero."""
        if not self.plan.tracks and not self.plan.is_straight:
            raise undeclared_path(work.algorithm)
        if work.num_steps == 0:
            return torch.zeros_like(x)
        moved = work.path if self.plan.tracks and work.path is not None else x - self.flat.y
        lr_sum = self._lr_sum()
        if isinstance(lr_sum, float) and lr_sum != 0:  # rounded as in the message: servers compute the same
            return moved / torch.tensor(lr_sum, dtype=x.dtype)
        rates = torch.as_tensor(lr_sum, dtype=x.dtype, device=x.device)
        still = work.still if work.still is not None else torch.zeros_like(x)
        steps = self.spread([self._counts[g] for g in self._groups]) if self.parts else work.num_steps
        return torch.where(rates == 0, still / steps, moved / torch.where(rates == 0, 1.0, rates))


class OptimizerPart(_Wrapper):
    """One of several optimizers of a module with manual optimization; it corrects gradients like a single one.

    In the module, ``self.optimizers()`` returns it.
    """

    def __init__(self, whole: FederatedOptimizer, share: _Share) -> None:
        super().__init__(share.optimizer, whole.flat)
        self._whole, self.share, self.readers = whole, share, whole.readers

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one local step of its parameters; see :meth:`FederatedOptimizer.step`."""
        return self._whole.step(closure, self.share)


FederatedOptimizer.step.hooked = True  # type: ignore[attr-defined]  # the wrapped step runs hooks and profiling
OptimizerPart.step.hooked = True  # type: ignore[attr-defined]


def undeclared_path(algorithm: Algorithm) -> FederatedError:
    """Return the error for a method that reads the mean direction of steps that were not tracked."""
    return FederatedError(
        f"{type(algorithm).__name__} reads run.path_gradient, but declares uses_path_gradient=False: set it to True."
    )


def solver_entries(state: State, num_params: int) -> list[dict[str, Tensor]]:
    """Group statistics named ``solver.<parameter>.<name>`` by parameter."""
    entries: list[dict[str, Tensor]] = [{} for _ in range(num_params)]
    for key, value in state.items():
        if key.startswith("solver."):
            _, i, name = key.split(".", 2)
            entries[int(i)][name] = value
    return entries
