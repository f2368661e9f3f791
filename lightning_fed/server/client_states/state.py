"""One client's state by purpose, and checks that a stored state belongs to this run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import overload

import torch
from torch import Tensor

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId, State
from lightning_fed.server.client_states.store import ClientStore

_CPU = torch.device("cpu")
_BUFFER, _SOLVER, _RESIDUAL = "buffer.", "solver.", "residual."

PERSONAL = "personal.parameters"
"""The name of a client's personal parameters [Q], next to the method's state."""

LOCAL_STEPS = "schedule.steps"
"""The name of a client's count of local steps over all its rounds, if its schedule counts them."""


@dataclass
class ClientState:
    """One client's state, by name."""

    own: State  # the method's state and the personal parameters
    buffers: State = field(default_factory=dict)  # the module's buffers, if every client has its own
    # the local optimizer's state, as `solver.<parameter>.<name>`, if clients keep it
    solver: State = field(default_factory=dict)
    residuals: State = field(default_factory=dict)  # the residuals of compression, by message

    def joined(self) -> State:
        """Return all parts in one mapping, as a store saves it."""
        state = {**self.own, **self.solver}
        for prefix, part in ((_BUFFER, self.buffers), (_RESIDUAL, self.residuals)):
            for name, value in part.items():
                state[prefix + name] = value
        return state


def method_part(client: State) -> State:
    """Return a client's state without personal parameters and its count of steps, which methods do not use."""
    return {name: value for name, value in client.items() if name not in (PERSONAL, LOCAL_STEPS)}


def with_kept(keep: State, client: State, personal: Tensor, local_steps: int | Sequence[int] | None = None) -> State:
    """Return clients' states with the parts that methods do not use: personal parameters [Q] or [S, Q], step counts.

    ``keep`` has the method's new states. If it is empty, the states in ``client`` are kept.
    """
    more = {PERSONAL: personal} if personal.shape[-1] else {}
    if local_steps is not None:
        more[LOCAL_STEPS] = torch.tensor(local_steps)
    return {**(keep or client), **more} if more else keep


class Stacked(Sequence[State]):
    """States [S, ...] of several clients, stacked; not empty."""

    def __init__(self, together: State) -> None:
        self.together = together

    def __len__(self) -> int:
        """The number of clients."""
        return len(next(iter(self.together.values())))

    @overload
    def __getitem__(self, at: int) -> State: ...
    @overload
    def __getitem__(self, at: slice) -> "Stacked": ...
    def __getitem__(self, at: int | slice) -> "State | Stacked":
        """Return the state of one client, or the stacked states of several."""
        part = {name: value[at] for name, value in self.together.items()}
        return Stacked(part) if isinstance(at, slice) else part


@dataclass(frozen=True, slots=True)
class ExpectedState:
    """The names, shapes and types that a run expects in a client's state."""

    method: str
    own: State  # the state of a new client
    buffers: State  # the module's buffers that clients keep
    num_parameters: int  # the number of trained tensors, personal ones included
    ids: Sequence[ClientId]  # the client ids in their stored order
    device: torch.device = _CPU  # the device of the training

    def to_device(self, state: State) -> State:
        """Return a state on the device of the training."""
        return state if self.device.type == "cpu" else {name: value.to(self.device) for name, value in state.items()}

    def sorted(self, index: int, state: State) -> ClientState:
        """Check a client's state against method, model and buffers; return it on the device of the training.

        The local optimizer's state stays in host memory, where :class:`FederatedOptimizer` reads it. Checksums
        detect damaged files, but not intact files of another run.
        """
        parts = ClientState({})
        if not state and not self.own:
            return parts
        for name, value in state.items():
            if name.startswith(_SOLVER):
                parts.solver[name] = value
            elif name.startswith(_BUFFER):
                parts.buffers[name.removeprefix(_BUFFER)] = value
            elif name.startswith(_RESIDUAL):
                parts.residuals[name.removeprefix(_RESIDUAL)] = value
            else:
                parts.own[name] = value
        fault = (
            _difference(parts.own, self.own)
            or (parts.buffers and _difference(parts.buffers, self.buffers))
            or (parts.solver and _solver_fault(parts.solver, self.num_parameters))
        )
        if fault:
            raise self.mismatch(index, fault)
        parts.own, parts.buffers, parts.residuals = map(self.to_device, (parts.own, parts.buffers, parts.residuals))
        return parts

    def mismatch(self, index: int, fault: str) -> FederatedError:
        """Return the error for a client's state that is not from this run."""
        return FederatedError(
            f"The stored state of client {self.ids[index]!r} does not belong to this run: {fault}. The checkpoint, or"
            " the files of client states that it refers to, are another run's: resume from one of this run's own. Or"
            f" {self.method}.finish keeps another state than its init_client returns."
        )


class ClientStates:
    """The states of a round's clients: read from the last rounds, and collected for the next."""

    def __init__(self, new: Callable[[], State], store: ClientStore, expected: ExpectedState) -> None:
        self.new, self.store, self.expected = new, store, expected

    def of(self, index: int) -> State | None:
        """Return one client's stored state in host memory, or None if it has not participated yet."""
        return self.store.get(index)

    def of_each(self, indices: Sequence[int]) -> list[ClientState]:
        """Return the checked states of several clients; new clients share their initial values."""
        new: ClientState | None = None
        states = []
        for index in indices:
            if (state := self.of(index)) is not None:
                states.append(self.expected.sorted(index, state))
                continue
            new = new or ClientState(self.new())
            states.append(new)
        return states

    def of_all(self, indices: Sequence[int]) -> Stacked | None:
        """Return the method's states of several clients at once; None if :meth:`of_each` is needed."""
        if len(indices) == 1 or not self.expected.own:
            return None
        together = self.store.stacked(indices, self.new())
        return None if together is None else Stacked(self.expected.to_device(together))

    def residuals(self, index: int, send: State) -> State:
        """Return a client's compression residuals, which must match its messages."""
        if (state := self.of(index)) is None:
            return {}
        residuals = self.expected.sorted(index, state).residuals
        if fault := _difference(residuals, {name: value for name, value in send.items() if name in residuals}):
            raise self.expected.mismatch(index, fault)
        return residuals

    def stage(self, index: int, state: State) -> None:
        """Stage a client's new state until the round is complete."""
        self.store.stage(index, state)

    def stage_all(self, indices: Sequence[int], states: State) -> None:
        """Stage copies of several clients' states [S, ...]."""
        self.store.stage_all(indices, states)


def _difference(state: State, wanted: State) -> str:
    """Describe the first name, shape or type that differs from the expected one, or return an empty text."""
    for name, like in wanted.items():
        value = state.get(name)
        if value is None:
            return f"it has no {name!r}"
        both_float = value.is_floating_point() and like.is_floating_point()
        if value.shape != like.shape or (both_float and value.dtype != like.dtype):
            return f"{name!r} is {_format(value)}, and {_format(like)} here"
    return ""


def _solver_fault(state: State, num_params: int) -> str:
    """Describe the first entry without a parameter of the model, or return an empty text. Shapes are not checked."""
    for name in state:
        number = name.split(".")[1]
        if not number.isdecimal() or int(number) >= num_params:
            return f"it has {name!r}, and the model has {num_params} parameters"
    return ""


def _format(value: torch.Tensor) -> str:
    return f"{list(value.shape)} of {value.dtype}"
