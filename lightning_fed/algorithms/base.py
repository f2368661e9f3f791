"""The interface of a method: a few hooks, each FedAvg by default."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from lightning_fed.algorithms.base_optimizers import BaseOptimizer
from lightning_fed.core.arguments import ArgumentsRepr
from lightning_fed.core.rounds import Cohort, Run, Step, Update
from lightning_fed.core.types import State, Vector

__all__ = ["Algorithm"]


class Algorithm(ArgumentsRepr):
    """A federated method as pure functions of flat vectors; every hook defaults to FedAvg.

    A method declares what it needs (a second gradient per batch, full-batch gradients, how its messages are averaged)
    and states its formula in the hooks. All state is handed in and handed back by name, so that checkpoints, resume
    and every engine come for free: a method keeps hyper-parameters in attributes and nothing else.

    ``correct`` and ``advance`` are called on whole vectors [P], on one parameter's view or on a cohort [S, P]: they
    must be elementwise, without ``.item()`` and without in-place changes. ``second_gradient_at`` gets whole vectors.

    Example:
        >>> import torch
        >>> class SignedFedAvg(Algorithm):
        ...     def correct(self, g, y, step):
        ...         return torch.sign(g)
        >>> SignedFedAvg()
        SignedFedAvg()
    """

    reduces: Mapping[str, str] = {"delta": "weighting"}
    """How each message is averaged over the cohort: "weighting" (the run's choice), "examples", "uniform", or
    "population" (the sum over the cohort divided by N, which is |S|/N times the mean)."""

    uncompressed: tuple[str, ...] = ()
    """Messages that the run's ``compression`` leaves as they are, such as a factor by which the method multiplies."""

    aside: tuple[str, ...] = ()
    """Messages that are not averaged: :meth:`implied` reads them."""

    default_weighting: str = "examples"
    """The run's weighting when the user sets none."""

    local_work: bool = True
    """Whether clients take local steps. If not, ``local_epochs`` and ``local_steps`` stay unset."""

    anchor_at: str | None = None
    """Take a second gradient on every batch, at "x" or at the server vector of this name. A point that moves from step
    to step is for :meth:`second_gradient_at`, which is not asked if this is set."""

    full_grad_at: tuple[str, ...] = ()
    """Take full-batch client gradients before local work, at "x" and/or at server vectors of these names."""

    full_grad_for: str = "both"
    """Who reads them: everybody the average of the "cohort", each "client" its own, or "both". What nobody reads is not
    kept, so that the memory of a round does not grow with the cohort."""

    full_grad_mean: str = "weighting"
    """How they are averaged over the cohort; the values are those of :attr:`reduces`."""

    grad_cohort: str = "same"
    """Who takes the full-batch gradients that are averaged: the training cohort ("same") or its "own" cohort."""

    needs_everyone: bool = False
    """Whether all clients must take part in every round, with the same number of local steps."""

    population_loss: bool = False
    """Whether :attr:`Cohort.loss` is wanted: the mean loss over all clients at x, in eval mode."""

    uses_path_gradient: bool | None = None
    """Whether ``finish`` reads :attr:`Run.path_gradient`, which any local optimizer but plain SGD has to add up step by
    step. None stands for: if ``finish`` is overridden."""

    uses_mean_examples: bool = False
    """Whether ``mean_examples`` is read. It costs a pass over a population whose clients are built on demand."""

    uses_solver_state: bool = False
    """Whether the method mimics the user's own optimizer through :meth:`solver_state`."""

    init_client_at_start: bool = False
    """Whether ``init_client`` is given x^0 whenever a client comes for the first time, not the x of that round."""

    steps_per_batch: int = 1
    """Local steps on every batch, one after the other."""

    own_solve: "Algorithm | None" = None
    """A local solve that every client does before its work, by hooks of its own: it has the server's state and the
    client's, sends nothing, and what its ``finish`` keeps is among the client's state when the work begins."""

    own_epochs: int | None = None
    """Of an own solve: its passes over the client's data; None for as much as the client's work in the round."""

    own_batches: bool = False
    """Of an own solve: whether its batches and random layers are drawn apart from those of the client's work."""

    trains: Literal["all", "shared", "personal"] = "all"
    """Which parameters local steps move; the others stay where they are."""

    def personal_names(self, module: nn.Module) -> Sequence[str]:
        """Return patterns of the names of parameters and buffers that stay with each client, such as ``"head.*"``.

        A method never sees these parameters: they are trained along with the others, by the user's optimizer alone.
        """
        return ()

    def init_server(self, x: Vector) -> State:
        """Return the server state at x^0; it is carried from round to round and checkpointed."""
        return {}

    def init_client(self, x: Vector) -> State:
        """Return the state of a client that has not taken part yet; it is kept between its rounds."""
        return {}

    def full_grad_readers(self, round: int) -> str:
        """Return who reads full-batch gradients in a round: as :attr:`full_grad_for`, or "nobody" to take none."""
        return self.full_grad_for

    def begin_client(self, client: State, full_grad: State) -> State:
        """Return what a client works with, given its full-batch gradients by point; asked if "both" read them."""
        return client

    def begin_round(self, x: Vector, server: State, cohort: Cohort) -> State:
        """Return the server state to use in this round, given the cohort's gradients and loss."""
        return server

    def init_local(self, x: Vector, server: State, client: State) -> State:
        """Return state that lives for one client's round."""
        return {}

    def start(self, x: Vector, step: Step) -> Vector:
        """Return where a client's local work starts; its change stays ``y - x``.

        Args:
            x: The server parameters [P].
            step: What ``correct`` will read in the first step, as whole vectors; there is no second gradient yet.
        """
        return x

    def second_gradient_at(self, g: Vector, y: Vector, step: Step) -> Vector:
        """Return where to take a second gradient on the batch of a local step; a method that overrides it gets one.

        It is taken in every step anew, with the same dropout masks, and is :attr:`Step.anchor_grad` in ``correct`` and
        ``advance``. Norms over the whole vector are allowed here.

        Args:
            g: The client's gradient [P] at ``y``, coupled weight decay included.
            y: Its parameters [P].
            step: What ``correct`` will read, as whole vectors; there is no second gradient yet.
        """
        return y

    def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
        """Return the direction of a local step, given the client's gradient ``g`` at ``y``."""
        return g

    def advance(self, g: Tensor, y: Tensor, step: Step) -> State:
        """Return the local state after a step, given what ``correct`` saw: the raw gradient, and ``y`` before the step.

        The step moves ``y`` in place: a state that is to hold it keeps ``y.clone()``.
        """
        return step.local

    def solver_state(self, server: State, local: State) -> State:
        """Return optimizer statistics to load before every local step; they are dropped after it."""
        return {}

    def finish(self, y: Vector, run: Run) -> Update:
        """Return a client's messages and its new kept state after the last local step."""
        return Update(send={"delta": run.delta})

    def implied(self, send: State, server: State) -> State:
        """Return the messages of :attr:`Update.implied`, with the bits that the client has.

        Args:
            send: The messages of a client that have travelled; of several clients stacked [S, ...].
            server: The server state that clients read in the round.
        """
        return {}

    def update_server(self, x: Vector, server: State, mean: State, cohort: Cohort) -> tuple[Vector, State]:
        """Return a direction for the server optimizer, which sees its negative as the gradient, and the new state."""
        return mean["delta"], server

    def evaluate_at(self, x: Vector, server: State) -> Vector:
        """Return the parameters that validation and checkpoints show."""
        return x

    def evaluate_client_at(self, x: Vector, server: State, client: State) -> Vector:
        """Return the parameters [P] of a client's own model, given what it keeps."""
        return self.evaluate_at(x, server)

    def overrides(self, hook: str) -> bool:
        """Return whether the method has its own version of a hook.

        Args:
            hook: The hook's name, such as "correct".
        """
        return getattr(type(self), hook) is not getattr(Algorithm, hook)

    @property
    def looks_ahead(self) -> bool:
        """Whether every local step takes a second gradient at a point computed in that step."""
        return self.anchor_at is None and self.overrides("second_gradient_at")

    @property
    def reads_path_gradient(self) -> bool:
        """Whether ``finish`` reads the mean corrected direction along a client's path."""
        return self.overrides("finish") if self.uses_path_gradient is None else self.uses_path_gradient

    def options(self) -> dict[str, Any]:
        """Return the hyper-parameters by name; a checkpoint of another method or other options is refused."""
        arguments = inspect.signature(type(self)).parameters  # which may be declarations, as ``grad_cohort`` is
        public = {k: v for k, v in vars(self).items() if not k.startswith("_")}
        own = {k: v for k, v in public.items() if k in arguments or not hasattr(Algorithm, k)}
        return {k: v.options() if isinstance(v, BaseOptimizer) else v for k, v in own.items()}
