"""The interface of a method: a few hooks that default to FedAvg."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_fed.algorithms.base_optimizers import BaseOptimizer
from lightning_fed.core.arguments import ArgumentsRepr
from lightning_fed.core.rounds import Cohort, Run, Step, Update
from lightning_fed.core.types import State, Vector


class Algorithm(ArgumentsRepr):
    """A federated method as pure functions of flat vectors; every hook defaults to FedAvg.

    A method declares its requirements (a second gradient per batch, full-batch gradients, the averaging of its
    messages), and implements its formula in the hooks. Hooks receive and return all state by name, so that checkpoints,
    resuming and every engine work with any method. Attributes must hold only hyper-parameters.

    ``correct`` and ``advance`` are called on whole vectors [P], on one parameter's view or on a cohort [S, P]. They
    must be elementwise, without ``.item()`` or in-place changes. ``second_gradient_at`` gets whole vectors.

    Example:
        >>> import torch
        >>> class SignedFedAvg(Algorithm):
        ...     def correct(self, g, y, step):
        ...         return torch.sign(g)
        >>> SignedFedAvg()
        SignedFedAvg()
    """

    reduces: Mapping[str, str] = {"delta": "weighting"}
    """The average of each message over the cohort: "weighting" (the run's choice), "examples", "uniform", or
    "population" (the sum over the cohort divided by N, which is |S|/N times the mean)."""

    uncompressed: tuple[str, ...] = ()
    """Messages that the run's ``compression`` does not change, such as a factor that the method multiplies by."""

    aside: tuple[str, ...] = ()
    """Messages that are not averaged; :meth:`implied` reads them."""

    scales_with_means: bool = True
    """Whether scaling the means by a factor scales the server's step by it. Methods that multiply or divide means by
    each other set False. An asynchronous server refuses them: the weights of its messages do not sum to one."""

    default_weighting: str = "examples"
    """The run's weighting if the user sets none."""

    local_work: bool = True
    """Whether clients take local steps. If not, ``local_epochs`` and ``local_steps`` stay unset."""

    anchor_at: str | None = None
    """Take a second gradient on every batch, at "x" or at the server vector of this name. Override
    :meth:`second_gradient_at` instead if the point changes from step to step."""

    full_grad_at: tuple[str, ...] = ()
    """Take full-batch client gradients before local work, at "x" and/or at server vectors of these names."""

    full_grad_for: str = "both"
    """The readers of these gradients: the "cohort" reads their average, each "client" its own, or "both". Other
    gradients are not stored, so a round's memory does not grow with the cohort."""

    full_grad_mean: str = "weighting"
    """The average of these gradients over the cohort, with the values of :attr:`reduces`."""

    grad_cohort: str = "same"
    """The clients whose full-batch gradients are averaged: the training cohort ("same") or a separate one ("own")."""

    needs_everyone: bool = False
    """Whether all clients must participate in every round, with the same number of local steps."""

    population_loss: bool = False
    """Whether the method reads :attr:`Cohort.loss`, the mean loss over all clients at x, in eval mode."""

    uses_path_gradient: bool | None = None
    """Whether ``finish`` reads :attr:`Run.path_gradient`, which any local optimizer except plain SGD has to sum step by
    step. None means that ``finish`` reads it if overridden."""

    uses_mean_examples: bool = False
    """Whether the method reads ``mean_examples``, which builds every client that is built on demand."""

    uses_solver_state: bool = False
    """Whether the method mimics the user's optimizer with :meth:`solver_state`."""

    init_client_at_start: bool = False
    """Whether ``init_client`` gets x^0 when a client first participates, rather than the current x."""

    steps_per_batch: int = 1
    """The number of consecutive local steps on every batch."""

    own_solve: "Algorithm | None" = None
    """An inner solve that every client runs before its local work, as another method. It reads the server's and the
    client's state and sends nothing. The local work begins with the client state that its ``finish`` returns."""

    own_epochs: int | None = None
    """For an inner solve: the passes over the client's data; None for the length of the client's local work."""

    own_batches: bool = False
    """For an inner solve: whether it draws its own batches and random layers, apart from the client's local work."""

    trains: Literal["all", "shared", "personal"] = "all"
    """The parameters that local steps train; the others stay fixed."""

    def personal_names(self, module: nn.Module) -> Sequence[str]:
        """Return name patterns of parameters and buffers that stay on each client, such as ``"head.*"``.

        The method never sees these parameters. The user's optimizer trains them with the others, without correction.
        """
        return ()

    def init_server(self, x: Vector) -> State:
        """Return the server state at x^0, which is kept from round to round and checkpointed."""
        return {}

    def init_client(self, x: Vector) -> State:
        """Return the state of a client that has not participated yet; clients keep it between rounds."""
        return {}

    def full_grad_readers(self, round: int) -> str:
        """Return the readers of a round's full-batch gradients, as in :attr:`full_grad_for`, or "nobody"."""
        return self.full_grad_for

    def begin_client(self, client: State, full_grad: State) -> State:
        """Return the client's state for a round in which "both" read full-batch gradients, given its own by point."""
        return client

    def begin_round(self, x: Vector, server: State, cohort: Cohort) -> State:
        """Return the server state for this round, given the cohort's gradients and loss."""
        return server

    def init_local(self, x: Vector, server: State, client: State) -> State:
        """Return state that exists for one round of a client."""
        return {}

    def start(self, x: Vector, step: Step) -> Vector:
        """Return the starting point of a client's local work; its change is still ``y - x``.

        Args:
            x: The server parameters [P].
            step: The input of ``correct`` in the first step, as whole vectors, without the second gradient.
        """
        return x

    def second_gradient_at(self, g: Vector, y: Vector, step: Step) -> Vector:
        """Return the point of a second gradient on the same batch; overriding it requests that gradient.

        Every step computes it, with the same dropout masks, as :attr:`Step.anchor_grad` of ``correct`` and ``advance``.
        Norms over the whole vector are allowed here.

        Args:
            g: The client's gradient [P] at ``y``, coupled weight decay included.
            y: The client's parameters [P].
            step: The input of ``correct``, as whole vectors, without the second gradient.
        """
        return y

    def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
        """Return the direction of a local step, given the client's gradient ``g`` at ``y``."""
        return g

    def advance(self, g: Tensor, y: Tensor, step: Step) -> State:
        """Return the local state after a step, given the inputs of ``correct``: the raw gradient and the old ``y``.

        The step changes ``y`` in place, so use ``y.clone()`` to store it.
        """
        return step.local

    def solver_state(self, server: State, local: State) -> State:
        """Return optimizer statistics to load before every local step, and to discard after it."""
        return {}

    def finish(self, y: Vector, run: Run) -> Update:
        """Return a client's messages and its new client state after the last local step."""
        return Update(send={"delta": run.delta})

    def implied(self, send: State, server: State) -> State:
        """Return the messages of :attr:`Update.implied`, bit for bit as on the client.

        Args:
            send: The messages that a client sent, or those of several clients stacked [S, ...].
            server: The server state that clients read in the round.
        """
        return {}

    def update_server(self, x: Vector, server: State, mean: State, cohort: Cohort) -> tuple[Vector, State]:
        """Return the new state and a direction; the server optimizer gets the negative direction as gradient."""
        return mean["delta"], server

    def evaluate_at(self, x: Vector, server: State) -> Vector:
        """Return the parameters used for validation and checkpoints."""
        return x

    def evaluate_client_at(self, x: Vector, server: State, client: State) -> Vector:
        """Return the parameters [P] of a client's personal model, given its client state."""
        return self.evaluate_at(x, server)

    def overrides(self, hook: str) -> bool:
        """Return whether the method overrides a hook.

        Args:
            hook: The hook's name, such as "correct".
        """
        return getattr(type(self), hook) is not getattr(Algorithm, hook)

    @property
    def looks_ahead(self) -> bool:
        """True if every local step takes a second gradient at a point computed in that step."""
        return self.anchor_at is None and self.overrides("second_gradient_at")

    @property
    def reads_path_gradient(self) -> bool:
        """True if ``finish`` reads the mean corrected direction along a client's path."""
        return self.overrides("finish") if self.uses_path_gradient is None else self.uses_path_gradient

    @property
    def reads_beyond_steps(self) -> str | None:
        """The use of clients' data beyond one gradient per step, as a clause after the method's name, or None."""
        uses = {
            "whose clients take no local steps": not self.local_work,
            "whose clients compute full-batch gradients": bool(self.full_grad_at),
            "whose clients send losses": self.population_loss,
            "which takes a second gradient on every batch": self.anchor_at is not None or self.looks_ahead,
            "which takes several steps on every batch": self.steps_per_batch > 1,
            "whose clients train a second model on their data": self.own_solve is not None,
        }
        return next((use for use, holds in uses.items() if holds), None)

    def options(self) -> dict[str, Any]:
        """Return the hyper-parameters by name; resuming with other options raises."""
        arguments = inspect.signature(type(self)).parameters  # some set declarations, such as ``grad_cohort``
        public = {k: v for k, v in vars(self).items() if not k.startswith("_")}
        own = {k: v for k, v in public.items() if k in arguments or not hasattr(Algorithm, k)}
        return {k: v.options() if isinstance(v, BaseOptimizer) else v for k, v in own.items()}


def lr_sum(run: Run) -> Tensor:
    """Return the sum of a client's learning rates as a tensor, even if the engine has a plain number."""
    return torch.as_tensor(run.lr_sum, dtype=run.x.dtype, device=run.x.device)


def update_with_path(run: Run, send: State, keep: State, of_path: str) -> Update:
    """Return a client's result; the message ``of_path`` is implied if the server can compute the path's gradient.

    The method needs "lr_sum" in :attr:`Algorithm.aside`, and :func:`path_gradient` in :meth:`Algorithm.implied`.
    """
    if not run.path_follows:
        return Update(send, keep)
    return Update({**send, "lr_sum": lr_sum(run)}, keep, implied=(of_path,))


def path_gradient(send: State) -> Tensor:
    """Return :attr:`Run.path_gradient` from the messages of :func:`update_with_path`."""
    return send["delta"] / -send["lr_sum"][..., None]
