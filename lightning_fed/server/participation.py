"""The clients of a run: their ids and sizes, which of them have taken part, and what each counts for."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId, Weighting

__all__ = ["WEIGHTINGS", "Participant", "Participation", "Population", "no_weight", "raw_weight"]


class Population(Sequence[ClientId]):
    """The clients of a run, as a sequence of the ids that can take part: those of empty clients are left out.

    Seeds, owners and kept states go by the stored index, so that ids may be any strings or integers.

    Args:
        ids: The client ids in their stored order.
        size_of: The number of training examples of a client, by id.
        known_sizes: The sizes of all clients in order, where that costs nothing; None for clients built on demand.

    Attributes:
        sizes_are_known: Whether every size was known from the start, without building clients.

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
        self.sizes_are_known = known_sizes is not None
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


class Participation:
    """The set of clients that have taken part, by stored index. Memory is one bit for every client there is.

    Args:
        num_clients: The number of clients, N.

    Example:
        >>> taken_part = Participation(10)
        >>> taken_part.add([3, 9, 3])
        >>> len(taken_part), taken_part.bits()
        (2, tensor([8, 2], dtype=torch.uint8))
    """

    def __init__(self, num_clients: int) -> None:
        self._num_clients = num_clients
        self._bits = np.zeros(-(-num_clients // 8), dtype=np.uint8)
        self._count = 0

    def __len__(self) -> int:
        """The number of clients in the set."""
        return self._count

    def add(self, indices: Sequence[int]) -> None:
        """Add clients; some may be in the set already.

        Raises:
            IndexError: If there is no such client.
        """
        places = np.unique(np.asarray(indices, dtype=np.int64))
        if len(places) and not 0 <= places[0] <= places[-1] < self._num_clients:
            raise IndexError(f"indices from {places[0]} to {places[-1]} of {self._num_clients} clients")
        bytes_, bits = places >> 3, np.left_shift(1, places & 7).astype(np.uint8)
        self._count += int(np.count_nonzero(self._bits[bytes_] & bits == 0))
        np.bitwise_or.at(self._bits, bytes_, bits)

    def bits(self) -> torch.Tensor:
        """Return a copy of the set, uint8 [ceil(N / 8)]: client i is bit ``i % 8`` of byte ``i // 8``."""
        return torch.from_numpy(self._bits.copy())

    def saved(self) -> torch.Tensor:
        """Return a copy of the set in its smaller form: :meth:`bits`, or the stored indices of few clients, int64."""
        if 64 * self._count >= self._num_clients:
            return self.bits()
        return torch.from_numpy(np.flatnonzero(np.unpackbits(self._bits, bitorder="little")))

    def load(self, saved: torch.Tensor) -> None:
        """Replace the set by one that :meth:`saved` or :meth:`bits` has returned.

        Raises:
            ValueError: If it is not a set of as many clients.
        """
        loaded = Participation(self._num_clients)
        if saved.dtype == torch.int64 and saved.ndim == 1:
            if bool((saved.diff() <= 0).any()) or (len(saved) and not 0 <= saved[0] <= saved[-1] < self._num_clients):
                raise ValueError(f"these are not the ascending indices of some of {self._num_clients} clients")
            loaded.add(saved.tolist())
        elif saved.dtype == torch.uint8 and saved.shape == self._bits.shape:
            loaded._bits = saved.cpu().numpy().copy()
            used = self._num_clients % 8
            if used and loaded._bits[-1] >> used:
                raise ValueError(f"bits beyond the {self._num_clients} clients are set")
            loaded._count = int(np.count_nonzero(np.unpackbits(loaded._bits)))
        else:
            raise ValueError(
                f"{self._num_clients} clients take {len(self._bits)} bytes of bits, found {list(saved.shape)} of"
                f" {saved.dtype}"
            )
        self._bits, self._count = loaded._bits, loaded._count


WEIGHTINGS = ("examples", "uniform", "steps")


@dataclass(frozen=True, slots=True)
class Participant:
    """One member of a cohort.

    Attributes:
        client_id: The id.
        index: The stored index.
        size: The number of training examples, n_i.
        count: How often it was drawn: it is trained once and counts so many times in a mean.
        steps: The local steps planned for it.
    """

    client_id: ClientId
    index: int
    size: int
    count: int = 1
    steps: int = 0


def raw_weight(weighting: Weighting, member: Participant, steps: int) -> float:
    """Return a client's weight before normalisation, times how often it was drawn.

    Args:
        weighting: "examples" (n_i), "uniform", "steps" (K_i), or a function of (client_id, size, steps).
        member: The client.
        steps: The local steps K_i that it takes.

    Raises:
        FederatedError: If the name is unknown, or the weight is negative or not finite.
    """
    if weighting == "examples":
        return float(member.size * member.count)
    if weighting == "uniform":
        return float(member.count)
    if weighting == "steps":
        return float(steps * member.count)
    if not callable(weighting):
        raise FederatedError(
            f"weighting must be one of {WEIGHTINGS} or a function of (client_id, size, steps), found {weighting!r}."
        )
    weight = float(weighting(member.client_id, member.size, steps))
    if not math.isfinite(weight) or weight < 0:
        raise FederatedError(
            f"weighting must give finite weights >= 0, found {weight!r} for client {member.client_id!r} of"
            f" {member.size} examples and {steps} steps."
        )
    return weight * member.count


def no_weight(clients: Sequence[ClientId]) -> FederatedError:
    """Return the error that these clients have weight zero, all of them."""
    return FederatedError(f"weighting must give weights that are not all zero, found zeros for the clients {clients}.")
