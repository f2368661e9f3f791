"""The local work of several clients at once, on stacked parameters [S, P]."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import Run, Step, Update
from lightning_fed.core.types import State, Vector
from lightning_fed.engines.base import RoundInputs
from lightning_fed.engines.vectorized.optimizer import Clipping, StackedOptimizer
from lightning_fed.engines.vectorized.stack import Stack
from lightning_fed.optim import FederatedOptimizer, overrides, solver_entries

__all__ = ["StackedWork"]


class StackedWork:
    """Parameters, states and optimizer of S clients that step together; those with fewer steps leave from the end.

    Where steps are plain, adjacent clients may also step without the others: see :meth:`plain_steps`.

    Args:
        algorithm: The method.
        optimizer: The wrapped local optimizer, which gives rates, decay and options.
        inputs: What the server hands out.
        clients: The clients' kept states, stacked: vectors [S, P], numbers [S].
        full_grad: Their full-batch gradients by point [S, P].
        stack: Where their parameters go.
        sizes: Their numbers of examples.
        steps: Their numbers of steps, in descending order where they step together.
        clip: How gradients are clipped, if they are.

    Attributes:
        skips: Whether a parameter that a loss does not depend on stands still, where a gradient of zero would move it.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        optimizer: FederatedOptimizer,
        inputs: RoundInputs,
        clients: State,
        full_grad: State,
        stack: Stack,
        sizes: Sequence[int],
        steps: Sequence[int],
        clip: Clipping | None,
    ) -> None:
        self.algorithm, self.optimizer, self.inputs = algorithm, optimizer, inputs
        self.clients, self.full_grad, self.num_steps, self.clip = clients, full_grad, steps, clip
        self.layout = optimizer.flat.layout
        x = inputs.x
        self.stack, self._spans = stack, stack.spans
        self.y = stack.y[: len(sizes)].copy_(x)
        self.examples = torch.tensor(sizes, dtype=x.dtype, device=x.device)
        self.corrects = overrides(algorithm, "correct")
        self._advances = overrides(algorithm, "advance")
        self._injects = optimizer.injects(algorithm)
        self.decay, self._rates = optimizer.decay, optimizer.rates
        self.skips = not self._injects and (any(self.decay) or not optimizer.is_plain)
        self.local = self._init_local()
        self._path = torch.zeros_like(self.y) if optimizer.tracks(algorithm) else None
        stands_still = optimizer.needs_path(algorithm) and 0 in self._rates
        self._still = torch.zeros_like(self.y) if stands_still else None
        self._solver: list[dict[str, Tensor]] | None = None
        if algorithm.uses_solver_state:
            self._solver = solver_entries(algorithm.solver_state(inputs.server, self.local), len(self.layout.sizes))
        decays = any(self.decay) and not self._injects
        self._is_uniform = len(set(self._rates)) == 1 and not decays
        self._base = None if optimizer.is_plain else StackedOptimizer(optimizer)
        self.is_plain = self.plain_steps(algorithm, optimizer, clip)
        self._steps: list[Step] = []
        self.start = self.active = 0
        self.narrow(len(sizes))

    @staticmethod
    def plain_steps(algorithm: Algorithm, optimizer: FederatedOptimizer, clip: Clipping | None) -> bool:
        """Whether local steps are nothing but one rate times a direction, which leaves nothing behind but parameters.

        Args:
            algorithm: The method.
            optimizer: The wrapped local optimizer.
            clip: How gradients are clipped, if they are.
        """
        rates = set(optimizer.rates)
        sums = optimizer.tracks(algorithm) or (optimizer.needs_path(algorithm) and 0 in rates)
        one_rate = optimizer.is_plain and clip is None and len(rates) == 1
        return one_rate and not (sums or overrides(algorithm, "advance"))

    def _init_local(self) -> State:
        if not overrides(self.algorithm, "init_local"):
            return {}
        local = _each(
            lambda client, _: dict(self.algorithm.init_local(self.inputs.x, self.inputs.server, client).items()),
            (self.clients, self.examples),
        )
        return {name: value.clone() for name, value in local.items()}

    # ------------------------------------------------------------------ who is still at work

    def narrow(self, active: int, start: int = 0) -> None:
        """Go on with the first ``active`` clients only; with as many from another one on where steps are plain."""
        if (active, start) == (self.active, self.start):
            return
        self._store_local()
        self.active, self.start = active, start
        cut = self.stack.cut(start, start + active)
        self.columns, self.views, self.alone = cut.columns, cut.views, cut.alone
        if self._base is not None:
            self._base.narrow(self.columns)
        self._steps = []

    @property
    def at_work(self) -> slice:
        """The rows of the clients at work."""
        return slice(self.start, self.start + self.active)

    def _make_steps(self) -> list[Step]:
        """Cut everything that ``correct`` may read into columns, one :class:`Step` per parameter."""
        inputs, layout = self.inputs, self.layout
        x, server, cohort_grad = inputs.per_parameter(layout, flat=True)
        examples = self.examples[self.at_work, None]
        columns: tuple[Sequence[Any], ...] = (
            x,
            server,
            self._columns(self.clients),
            self._columns(self.local),
            [None] * len(server),
            self._columns(self.full_grad),
            cohort_grad,
            [examples] * len(server),
            [inputs.mean_examples] * len(server),
        )
        return [Step(*row) for row in zip(*columns, strict=True)]

    def _columns(self, state: State) -> list[State]:
        """Cut stacked vectors [S, P] into columns [n, n_p]; a number per client [S] becomes [n, 1]."""
        n, shape, rows = self.active, (len(self.y), self.layout.numel), self.at_work
        return [
            {k: v[rows, a : a + m] if v.shape == shape else v[rows].reshape(n, -1) for k, v in state.items()}
            for a, m in self._spans
        ]

    def _store_local(self) -> None:
        """Put the local states of the clients at work where they outlast their work."""
        if not (self._advances and self._steps):
            return
        for name, whole in self.local.items():
            parts = [step.local[name] for step in self._steps]
            is_vector = whole.shape == self.y.shape
            new = torch.cat([p.expand(self.active, -1) for p in parts], dim=1) if is_vector else parts[0]
            whole[: self.active] = new.reshape(self.active, *whole.shape[1:])

    # ------------------------------------------------------------------ one local step of everybody at work

    @property
    def takes_raw(self) -> bool:
        """Whether a step is nothing but the same rate times the gradients: :meth:`take_raw_step` will do."""
        return self._is_uniform and not self._injects and self.clip is None and self._base is None

    @property
    def rate(self) -> float:
        """The learning rate of such a step."""
        return self._rates[0]

    @torch.no_grad()
    def take_raw_step(self, grads: Sequence[Tensor]) -> None:
        """Step a single client, given its gradients in the parameters' shapes."""
        torch._foreach_add_(self.alone, list(grads), alpha=-self._rates[0])

    @torch.no_grad()
    def take_step(
        self,
        grads: Sequence[Tensor],
        anchors: Sequence[Tensor] | None = None,
        unused: frozenset[int] = frozenset(),
    ) -> None:
        """Correct the gradients and step.

        Args:
            grads: Each parameter's gradients [n, n_p] of the n clients at work.
            anchors: Their gradients at the anchor, likewise, with weight decay.
            unused: Positions of the parameters that their losses do not depend on; looked at if :attr:`skips`.
        """
        skipped = unused if self.skips else frozenset()
        if self.clip is not None and not self.clip.corrected:
            grads = self.clip(grads)
        if self._injects:
            grads = [self._corrected(i, g, None if anchors is None else anchors[i]) for i, g in enumerate(grads)]
            if self.clip is not None and self.clip.corrected:
                grads = self.clip(grads)
        self._track(grads)
        if self._base is not None:
            self._base.step(grads, self._solver, self._injects, skipped)
            return
        if self._is_uniform:
            torch._foreach_add_(self.columns, list(grads), alpha=-self._rates[0])
            return
        for i, (y, g, rate, decay) in enumerate(zip(self.columns, grads, self._rates, self.decay, strict=True)):
            if i in skipped:
                continue
            if decay and not self._injects:
                g = g.add(y, alpha=decay)
            y.add_(g, alpha=-rate)

    def _corrected(self, i: int, g: Tensor, anchor: Tensor | None) -> Tensor:
        y = self.columns[i]
        g = g.add(y, alpha=self.decay[i]) if self.decay[i] else g
        if not (self.corrects or self._advances):
            return g
        if not self._steps:
            self._steps = self._make_steps()
        step = self._steps[i]
        step.anchor_grad = anchor
        out = self.algorithm.correct(g, y, step)
        if self._advances:
            step.local = self.algorithm.advance(g, step)
        return out

    def _track(self, grads: Sequence[Tensor]) -> None:
        """Add the corrected directions to the path, per coordinate with its group's rate."""
        for (a, m), g, rate in zip(self._spans, grads, self._rates, strict=True):
            if rate == 0 and self._still is not None:
                self._still[: self.active, a : a + m] += g
            elif self._path is not None:
                self._path[: self.active, a : a + m].add_(g, alpha=rate)

    # ------------------------------------------------------------------ the end of the round

    def finish(self) -> tuple[Tensor, State, State, bool]:
        """Return changes ``y - x`` [S, P], messages and kept states [S, ...], and whether "delta" is the changes."""
        delta = torch.sub(self.y, self.inputs.x, out=self.stack.delta[: len(self.y)])
        return delta, *self._finish(delta)

    def _finish(self, delta: Tensor) -> tuple[State, State, bool]:
        self._store_local()
        if not overrides(self.algorithm, "finish"):
            return {"delta": delta}, {}, True
        if len(delta) == 1:
            return self._finish_alone(delta)
        sends_delta = False

        def finish_one(y: Vector, change: Vector, own: dict[str, Any]) -> tuple[State, State]:
            nonlocal sends_delta
            run = Run(
                x=self.inputs.x,
                delta=change,
                server=self.inputs.server,
                cohort_grad=self.inputs.cohort_grad,
                mean_examples=self.inputs.mean_examples,
                path=lambda: self._undeclared() if "path" not in own else own["path"],
                **{name: value for name, value in own.items() if name != "path"},
            )
            update: Update = self.algorithm.finish(y, run)
            sends_delta = update.send.get("delta") is change
            return update.send, update.keep

        try:
            send, keep = _each(finish_one, (self.y, delta, self._of_each_client(delta)))
        except FederatedError:
            raise
        except Exception as error:
            raise FederatedError(
                f"engine='vectorized' cannot run {type(self.algorithm).__name__}.finish for several clients at once"
                f" ({error}). Use tensor operations only, or engine='sequential'."
            ) from error
        return send, keep, sends_delta

    def _finish_alone(self, delta: Tensor) -> tuple[State, State, bool]:
        """Do the same for a single client, without the cost of ``vmap``."""
        sums = [rate * self.num_steps[0] for rate in self._rates]
        lr_sum = sums[0] if len(set(sums)) == 1 else self._lr_sum(self._steps_taken())[0]
        run = Run(
            x=self.inputs.x,
            delta=delta[0],
            server=self.inputs.server,
            client={name: value[0] for name, value in self.clients.items()},
            local={name: value[0] for name, value in self.local.items()},
            full_grad={name: value[0] for name, value in self.full_grad.items()},
            cohort_grad=self.inputs.cohort_grad,
            num_examples=float(self.examples[0]),
            mean_examples=self.inputs.mean_examples,
            num_steps=self.num_steps[0],
            lr_sum=lr_sum,
            path=partial(self._path_alone, delta, lr_sum),
        )
        update = self.algorithm.finish(self.y[0], run)
        send, keep = ({k: v[None] for k, v in state.items()} for state in (update.send, update.keep))
        return send, keep, update.send.get("delta") is run.delta

    def _path_alone(self, delta: Tensor, lr_sum: float | Tensor) -> Vector:
        if not self.optimizer.needs_path(self.algorithm):
            return self._undeclared()
        if isinstance(lr_sum, float) and self._path is None and self._still is None:
            return delta[0] / -(lr_sum or 1.0)  # in numbers, for the sake of small models
        steps = self._steps_taken()
        return self._path_gradient(delta, steps, self._lr_sum(steps))[0]

    def _steps_taken(self) -> Tensor:
        return torch.tensor(self.num_steps, dtype=self.inputs.x.dtype, device=self.inputs.x.device)

    def _of_each_client(self, delta: Tensor) -> dict[str, Any]:
        """Return what ``finish`` may read that is a client's own, stacked."""
        steps = self._steps_taken()
        lr_sum = self._lr_sum(steps)
        own = {
            "client": self.clients,
            "local": self.local,
            "full_grad": self.full_grad,
            "num_examples": self.examples,
            "num_steps": steps,
            "lr_sum": lr_sum,
        }
        if self.optimizer.needs_path(self.algorithm):
            own["path"] = self._path_gradient(delta, steps, lr_sum)
        return own

    def _lr_sum(self, steps: Tensor) -> Tensor:
        """The sum of the rates of each client's steps: [S], or [S, P] where groups differ."""
        if len(set(self._rates)) == 1:
            return steps * self._rates[0]
        rates = [steps.new_full((m,), rate) for m, rate in zip(self.layout.sizes, self._rates, strict=True)]
        return steps[:, None] * torch.cat(rates)

    def _path_gradient(self, delta: Tensor, steps: Tensor, lr_sum: Tensor) -> Tensor:
        rates = lr_sum if lr_sum.ndim == 2 else lr_sum[:, None]
        divisor = torch.where(rates == 0, 1.0, rates)  # who took no step has not moved either
        mean = delta / -divisor if self._path is None else self._path / divisor
        if self._still is None:
            return mean
        return torch.where(rates == 0, self._still / steps[:, None].clamp(min=1), mean)

    def _undeclared(self) -> Vector:
        raise FederatedError(
            f"{type(self.algorithm).__name__} reads run.path_gradient, but declares uses_path_gradient=False: set it to"
            " True."
        )


def _each(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call a function of one client's tensors for every client."""
    leaves, spec = pytree.tree_flatten(arguments)
    if len(leaves[0]) > 1:
        return vmap(function)(*arguments)
    one = pytree.tree_unflatten([leaf[0] for leaf in leaves], spec)  # does without the cost of vmap
    return pytree.tree_map(lambda value: value[None], function(*one))
