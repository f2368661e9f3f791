"""What a client keeps, sorted by what it is for; states that cannot be this run's are refused."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import overload

import torch

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import State
from lightning_fed.server.server import Server

__all__ = ["KeptParts", "Stacked", "parts_of", "residuals_of"]

_BUFFER, _SOLVER, _RESIDUAL = "buffer.", "solver.", "residual."


@dataclass
class KeptParts:
    """What one client keeps, by name.

    Attributes:
        own: The method's state.
        buffers: The module's buffers, where every client has its own.
        solver: The local optimizer's state, as ``solver.<parameter>.<name>``, where clients keep it.
        residuals: What compression left out, by message.
    """

    own: State
    buffers: State = field(default_factory=dict)
    solver: State = field(default_factory=dict)
    residuals: State = field(default_factory=dict)

    def joined(self) -> State:
        """Return all of it, as a store keeps it."""
        state = {**self.own, **self.solver}
        for prefix, part in ((_BUFFER, self.buffers), (_RESIDUAL, self.residuals)):
            for name, value in part.items():
                state[prefix + name] = value
        return state


class Stacked(Sequence[State]):
    """States of several clients, stacked.

    Args:
        together: The states [S, ...]; not empty.
    """

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
        """Return the state of one client, or those of some."""
        found = {name: value[at] for name, value in self.together.items()}
        return Stacked(found) if isinstance(at, slice) else found


def parts_of(server: Server, index: int, state: State) -> KeptParts:
    """Return what a client keeps, checked against the method, the model and its buffers.

    Checksums tell damaged files, but not sound ones of another run.

    Args:
        server: The server's side.
        index: The client's stored index.
        state: What it keeps.

    Raises:
        FederatedError: Naming the client, and what is not as in this run.
    """
    parts = KeptParts({})
    if not state and not server.new_client:
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
        _difference(parts.own, server.new_client)
        or (parts.buffers and _difference(parts.buffers, server.buffers))
        or (parts.solver and _solver_fault(parts.solver, len(server.step.layout.sizes)))
    )
    if fault:
        raise _strange(server, index, fault)
    return parts


def residuals_of(server: Server, index: int, send: State, state: State) -> State:
    """Return what compression left out of a client's messages before.

    Args:
        server: The server's side.
        index: The client's stored index.
        send: Its new messages.
        state: What it keeps.

    Raises:
        FederatedError: If it does not go with them.
    """
    residuals = parts_of(server, index, state).residuals
    if fault := _difference(residuals, {name: value for name, value in send.items() if name in residuals}):
        raise _strange(server, index, fault)
    return residuals


def _strange(server: Server, index: int, fault: str) -> FederatedError:
    return FederatedError(
        f"What client {server.ids[index]!r} keeps is not of this run: {fault}. The checkpoint, or the files of client"
        " states that it refers to, are another run's: resume from one of this run's own. Or"
        f" {type(server.algorithm).__name__}.finish keeps something else than its init_client."
    )


def _difference(found: State, wanted: State) -> str:
    """Return in which name, shape or type kept values differ from what they should be; nothing if in none."""
    for name, like in wanted.items():
        value = found.get(name)
        if value is None:
            return f"it has no {name!r}"
        both_float = value.is_floating_point() and like.is_floating_point()
        if value.shape != like.shape or (both_float and value.dtype != like.dtype):
            return f"{name!r} is {_shown(value)}, and {_shown(like)} here"
    return ""


def _solver_fault(found: State, num_params: int) -> str:
    """Return which state is of no parameter of the model; nothing if none is. Shapes are the optimizer's own affair."""
    for name in found:
        number = name.split(".")[1]
        if not number.isdecimal() or int(number) >= num_params:
            return f"it has {name!r}, and the model has {num_params} parameters"
    return ""


def _shown(value: torch.Tensor) -> str:
    return f"{list(value.shape)} of {value.dtype}"
