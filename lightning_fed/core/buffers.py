"""The module's buffers, which travel beside the parameter vector and are never corrected."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from lightning_fed.core.devices import narrowed, widened
from lightning_fed.core.types import State

__all__ = ["BufferMean", "Buffers", "overwrite"]


class Buffers:
    """Named buffers of a module, such as the running statistics of BatchNorm.

    Args:
        owners: The owning module and its own name for the buffer, by qualified name. Buffers are looked up there every
            time, since a module may assign a new tensor.
        mode: "average": clients start from the server's buffers, and the server takes their mean, by examples for
            floating-point buffers, from the largest client for the others. "server": what clients do to buffers is
            dropped. "local": every client keeps its own and starts from it; the server's mean is for evaluation only.
        personal: The names of buffers that stay with the client, whatever the mode: they are not averaged either.

    Attributes:
        kept: The names of those that every client keeps.
    """

    def __init__(
        self, owners: Mapping[str, tuple[nn.Module, str]], mode: str, personal: frozenset[str] = frozenset()
    ) -> None:
        self.mode = mode
        self.personal = personal
        self.kept = frozenset(owners) if mode == "local" else personal
        self._owners = dict(owners)
        self.server = self.read()

    def read(self) -> State:
        """Return copies of the buffers as the module has them now."""
        return {name: owner.get_buffer(key).detach().clone() for name, (owner, key) in self._owners.items()}

    @torch.no_grad()
    def write(self, values: State) -> None:
        """Put values into the module's buffers."""
        for name, (owner, key) in self._owners.items():
            overwrite(owner, key, values[name])


def overwrite(owner: nn.Module, key: str, value: torch.Tensor) -> None:
    """Set a buffer to a value, in place where that is possible.

    Elements of an expanded tensor share memory and cannot be written to, so such a buffer is replaced.

    Args:
        owner: The module that has the buffer.
        key: The module's name for it.
        value: The value; it is copied.
    """
    buffer = owner.get_buffer(key)
    if any(size > 1 and step == 0 for size, step in zip(buffer.shape, buffer.stride(), strict=True)):
        setattr(owner, key, value.clone())
    else:
        buffer.copy_(value)


class BufferMean:
    """The mean of the cohort's buffers: by examples where they are floating-point, else the largest client's.

    Of equally large clients the one with the smallest stored index is taken, in whatever order and process they come.
    """

    def __init__(self) -> None:
        self._sums: State = {}
        self._total = 0
        self._largest = (-1, 0)  # size of the client whose buffers are picked, and its index negated
        self._picked: State = {}

    def update(self, buffers: State, size: int, index: int, count: int = 1) -> None:
        """Add one client's buffers.

        Args:
            buffers: The buffers.
            size: Its number of examples.
            index: Its stored index.
            count: How often it was drawn: it counts so many times in the mean, and is no larger for that.
        """
        self._total += size * count
        picked = {}
        for name, value in buffers.items():
            if value.is_floating_point():
                term = widened(value) * (size * count)
                self._sums[name] = self._sums[name] + term if name in self._sums else term
            else:
                picked[name] = value
        self._pick((size, -index), picked)

    def _pick(self, size_and_index: tuple[int, int], buffers: State) -> None:
        if size_and_index > self._largest:
            self._largest, self._picked = size_and_index, buffers

    def merge(self, parts: Iterable["BufferMean"]) -> None:
        """Combine the parts of all processes, in the same order in each, so that sums have the same bits."""
        whole = BufferMean()
        for part in parts:
            whole._total += part._total
            for name, term in part._sums.items():
                known = whole._sums.get(name)
                whole._sums[name] = term if known is None else known + term.to(known.device)
            whole._pick(part._largest, part._picked)
        vars(self).update(vars(whole))

    def compute(self, server: State) -> State:
        """Return the mean; the server's own buffers if no client took part."""
        if self._total == 0:
            return server
        means = {name: narrowed(value / self._total, server[name]) for name, value in self._sums.items()}
        return {**server, **means, **{name: value.to(server[name].device) for name, value in self._picked.items()}}
