"""A state that tracks which entries are read, since only those count as sent to clients."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lightning_fed.core.types import State


class TrackedState(dict[str, Tensor]):
    """A copy of a state that adds the names of entries to a set as they are read.

    Example:
        >>> import torch
        >>> read = set()
        >>> state = TrackedState({"c": torch.zeros(2), "d": torch.ones(2)}, read)
        >>> state["c"].sum(), read
        (tensor(0.), {'c'})
    """

    def __init__(self, state: State, read: set[str]) -> None:
        super().__init__(state)
        self.read = read

    def untracked(self) -> State:
        """Return a plain copy, without counting entries as read."""
        return dict(dict.items(self))

    def __getitem__(self, name: str) -> Tensor:
        """Return an entry, and record its name."""
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return an entry or the default."""
        self.read.add(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        """Count everything as read."""
        self.read.update(dict.keys(self))
        return super().__iter__()

    def keys(self) -> Any:
        """Count everything as read, since taking the names, as in ``{**state}``, reads the entries."""
        self.read.update(dict.keys(self))
        return super().keys()

    def items(self) -> Any:
        """Count everything as read."""
        self.read.update(dict.keys(self))
        return super().items()

    def values(self) -> Any:
        """Count everything as read."""
        self.read.update(dict.keys(self))
        return super().values()
