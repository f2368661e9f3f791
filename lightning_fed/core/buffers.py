"""The module's buffers, which are exchanged separately from the parameters and never corrected."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from lightning_fed.core.devices import narrowed, widened
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import State


class Buffers:
    """Named buffers of a module, such as the running statistics of BatchNorm.

    Args:
        owners: The owning module and its name for the buffer, by qualified name. Buffers are looked up on every use,
            since a module may assign a new tensor. They include parameters that are treated as buffers.
        mode: "average": clients start from the server's buffers, and the server averages real and complex buffers by
            examples, and takes others from the largest client. "server": the clients' changes of buffers are discarded.
            "local": every client keeps its own buffers; the server's mean over the last cohort is for evaluation, and
            for clients in their first round.
        personal: The names of buffers that stay on the client in any mode and are not averaged.

    Attributes:
        owners: The same.
        kept: The names of the buffers that every client keeps.
    """

    def __init__(
        self, owners: Mapping[str, tuple[nn.Module, str]], mode: str, personal: frozenset[str] = frozenset()
    ) -> None:
        self.mode = mode
        self.personal = personal
        self.kept = frozenset(owners) if mode == "local" else personal
        self.owners = dict(owners)
        self.server: State = {}
        self.server = self.read()

    def read(self) -> State:
        """Return copies of the module's current buffers; raise if one has changed its shape."""
        values = {name: held_by(owner, key).detach().clone() for name, (owner, key) in self.owners.items()}
        for name, value in values.items():
            first = self.server.get(name, value)
            if value.shape != first.shape:
                raise FederatedError(
                    f"The buffer {name!r} has changed its shape from {list(first.shape)} to {list(value.shape)}."
                    " All clients start from the server's buffers, which are the mean of theirs, so they need one"
                    " shape. If every step makes the buffer again, register it as None, with"
                    " persistent=False, and fit a module that has not run before."
                )
        return values

    @torch.no_grad()
    def write(self, values: State) -> None:
        """Write values into the module's buffers."""
        for name, (owner, key) in self.owners.items():
            overwrite(owner, key, values[name])


def held_by(owner: nn.Module, key: str) -> torch.Tensor:
    """Return a module's buffer, or a parameter treated as one, by the module's name for it."""
    return owner.get_buffer(key) if key in owner._buffers else owner.get_parameter(key)


def overwrite(owner: nn.Module, key: str, value: torch.Tensor) -> None:
    """Set a buffer, by the module's name for it, to a copy of a value, in place if possible.

    Elements of an expanded tensor share memory and cannot be written, so such a buffer is replaced. So is one of
    another shape.
    """
    buffer = held_by(owner, key)
    if buffer.shape != value.shape or any(
        size > 1 and step == 0 for size, step in zip(buffer.shape, buffer.stride(), strict=True)
    ):
        setattr(owner, key, value.clone())
    else:
        buffer.copy_(value)


class BufferMean:
    """The mean of the cohort's buffers, by examples if real or complex, else the largest client's value.

    Among equally large clients, the smallest stored index wins, for any order of clients and processes.
    """

    def __init__(self) -> None:
        self._sums: State = {}
        self._total = 0
        self._largest = (-1, 0)  # size of the client with the picked buffers, and its index negated
        self._picked: State = {}

    def update(self, buffers: State, size: int, index: int, count: int = 1) -> None:
        """Add the buffers of a client with ``size`` examples, by its stored index.

        ``count``, the number of times it was drawn, multiplies the weight, not the size.
        """
        self._total += size * count
        picked = {}
        for name, value in buffers.items():
            if value.is_floating_point() or value.is_complex():
                term = widened(value) * (size * count)
                self._sums[name] = self._sums[name] + term if name in self._sums else term
            else:
                picked[name] = value
        self._pick((size, -index), picked)

    def _pick(self, size_and_index: tuple[int, int], buffers: State) -> None:
        if size_and_index > self._largest:
            self._largest, self._picked = size_and_index, buffers

    def merge(self, parts: Iterable["BufferMean"]) -> None:
        """Combine the parts of all processes, in the same order in each, for identical sums."""
        whole = BufferMean()
        for part in parts:
            whole._total += part._total
            for name, term in part._sums.items():
                known = whole._sums.get(name)
                whole._sums[name] = term if known is None else known + term.to(known.device)
            whole._pick(part._largest, part._picked)
        vars(self).update(vars(whole))

    def compute(self, server: State) -> State:
        """Return the mean, or the server's buffers if no client participated."""
        if self._total == 0:
            return server
        means = {name: narrowed(value / self._total, server[name]) for name, value in self._sums.items()}
        return {**server, **means, **{name: value.to(server[name].device) for name, value in self._picked.items()}}
