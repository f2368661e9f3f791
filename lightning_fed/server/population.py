"""Who the clients are: their ids, stored indices and sizes."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import overload

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId

__all__ = ["Population"]


class Population(Sequence[ClientId]):
    """The clients of a run, as a sequence of the ids that can take part: those of empty clients are left out.

    Seeds, owners and kept states go by the stored index, so that ids may be any strings or integers.

    Args:
        ids: The client ids in their stored order.
        size_of: The number of training examples of a client, by id.
        known_sizes: The sizes of all clients in order, where that costs nothing; None for clients built on demand.

    Raises:
        FederatedError: If there is no client, or an id appears twice.
    """

    def __init__(
        self, ids: Sequence[ClientId], size_of: Callable[[ClientId], int], known_sizes: Sequence[int] | None = None
    ) -> None:
        if len(ids) == 0:
            raise FederatedError("The data module has no clients: pass clients=... or train=... with partition=...")
        self.ids = ids
        self._size_of = size_of
        self._sizes: dict[ClientId, int] = {}
        self._index: dict[ClientId, int] | None = None
        if not isinstance(ids, range):
            self._index = {client_id: i for i, client_id in enumerate(ids)}
            if len(self._index) != len(ids):
                raise FederatedError(f"Client ids must be distinct, found {len(ids) - len(self._index)} duplicates.")
        self._mean: float | None = None
        self._known_at_once = known_sizes is not None
        self.empty: list[ClientId] = []
        if known_sizes is not None:
            self._learn(known_sizes)
            self.empty = [client_id for client_id, n in self._sizes.items() if n == 0]
        nonempty = [i for i in ids if self._sizes[i] > 0] if self.empty else ids
        if len(nonempty) == 0:
            raise FederatedError(f"All {len(ids)} clients are empty: there is nothing to train on.")
        self.eligible: Sequence[ClientId] = nonempty
        self._places = list(map(self.index_of, nonempty)) if self.empty else []  # stored indices, in order

    def _learn(self, sizes: Iterable[int]) -> None:
        self._sizes = dict(zip(self.ids, sizes, strict=True))
        self._mean = sum(self._sizes.values()) / max(1, sum(n > 0 for n in self._sizes.values()))

    def __len__(self) -> int:
        """The number of clients N."""
        return len(self.eligible)

    @overload
    def __getitem__(self, position: int) -> ClientId: ...
    @overload
    def __getitem__(self, position: slice) -> Sequence[ClientId]: ...
    def __getitem__(self, position: int | slice) -> ClientId | Sequence[ClientId]:
        """Return the id at a position."""
        return self.eligible[position]

    def index_of(self, client_id: ClientId) -> int:
        """Return the stored index of a client.

        Raises:
            FederatedError: If there is no such client.
        """
        if self._index is None:
            if isinstance(client_id, int) and client_id in self.ids:
                return self.ids.index(client_id)
        elif client_id in self._index:
            return self._index[client_id]
        raise FederatedError(
            f"There is no client {client_id!r}. The sampler must return ids of the data module's {len(self.ids)}"
            f" clients, such as {self.ids[0]!r}."
        )

    def place_of(self, client_id: ClientId) -> int:
        """Return the place of a client in this sequence.

        Raises:
            FederatedError: If there is no such client.
        """
        index = self.index_of(client_id)
        return bisect_left(self._places, index) if self.empty else index

    def size(self, client_id: ClientId) -> int:
        """Return the number of training examples of a client, n_i."""
        if client_id not in self._sizes:
            if self._mean is not None:
                self.index_of(client_id)
            return self._size_of(client_id)
        return self._sizes[client_id]

    @property
    def sizes_are_known(self) -> bool:
        """Whether every size was known from the start, without building clients."""
        return self._known_at_once

    @property
    def sizes(self) -> list[int]:
        """The sizes n_i of all clients, in order. Clients built on demand are all asked for theirs, once."""
        if self._mean is None:
            self._learn(map(self._size_of, self.ids))
        return [self._sizes[client_id] for client_id in self.eligible]

    @property
    def mean_size(self) -> float:
        """The mean of n_i over the clients that have examples; asks clients built on demand as :attr:`sizes` does."""
        if self._mean is None:
            self._learn(map(self._size_of, self.ids))
        assert self._mean is not None
        return self._mean
