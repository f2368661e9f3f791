"""The clients of a run: their ids, sizes, weights and participation."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from lightning_fed.core.arguments import kind_of
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.types import ClientId, Weighting


class Population(Sequence[ClientId]):
    """The sequence of client ids that can participate; clients without examples are left out.

    Seeds, owners and client states use the stored index, so ids may be any strings or integers. ``size_of`` returns a
    client's number of training examples; ``known_sizes`` is None for clients built on demand.
    """

    def __init__(
        self, ids: Sequence[ClientId], size_of: Callable[[ClientId], int], known_sizes: Sequence[int] | None = None
    ) -> None:
        if len(ids) == 0:
            raise FederatedError("The data module has no clients: pass clients=... or train=... with partition=...")
        self.ids = ids
        self._size_of = size_of
        self._index: dict[ClientId, int] | None = None
        if not isinstance(ids, range):
            self._index = {client_id: i for i, client_id in enumerate(ids)}
            if len(self._index) != len(ids):
                raise FederatedError(f"Client ids must be distinct, found {len(ids) - len(self._index)} duplicates.")
        self.sizes_are_known = known_sizes is not None  # known from the start, without building clients
        self._sizes: dict[ClientId, int] = {} if known_sizes is None else dict(zip(ids, known_sizes, strict=True))
        self._empty = [index for index, n in enumerate(self._sizes.values()) if n == 0]
        self.empty: list[ClientId] = [ids[index] for index in self._empty]
        self.eligible: Sequence[ClientId] = [i for i in ids if self._sizes[i] > 0] if self.empty else ids
        if len(self.eligible) == 0:
            raise FederatedError(f"All {len(ids)} clients are empty: there is nothing to train on.")

    def __len__(self) -> int:
        """The number of clients N."""
        return len(self.eligible)

    def __getitem__(self, position: Any) -> Any:
        """Return the id at a position, or those at several."""
        return self.eligible[position]

    def index_of(self, client_id: ClientId) -> int:
        """Return the stored index of a client; raise if the id is unknown."""
        if isinstance(client_id, bool | float):  # it may equal an int id
            pass
        elif self._index is None:
            if isinstance(client_id, int) and client_id in self.ids:
                return self.ids.index(client_id)
        elif client_id in self._index:
            return self._index[client_id]
        raise FederatedError(
            f"There is no client {client_id!r}. The sampler must return ids of the data module's {len(self.ids)}"
            f" clients, such as {self.ids[0]!r}."
        )

    def place_of(self, client_id: ClientId) -> int:
        """Return the position of a client in this sequence."""
        index = self.index_of(client_id)
        return index - bisect_left(self._empty, index)

    def size(self, client_id: ClientId) -> int:
        """Return the number of training examples of a client, n_i."""
        self.index_of(client_id)  # raises if the id is unknown
        return self._sizes[client_id] if client_id in self._sizes else self._read_size(client_id)

    def _read_size(self, client_id: ClientId) -> int:
        """Return the size of a client built on demand; raise an error with its id if that fails."""
        try:
            return self._size_of(client_id)
        except FederatedError:
            raise
        except Exception as error:
            raise ClientError(
                f"Client {client_id!r} failed when its number of examples was read: {type(error).__name__}: {error}",
                client_id,
            ) from error

    @property
    def sizes(self) -> list[int]:
        """The sizes n_i of all clients, in order. For clients built on demand, the first access gets all sizes."""
        if not self._sizes:
            self._sizes = {client_id: self._read_size(client_id) for client_id in self.ids}
        return [self._sizes[client_id] for client_id in self.eligible]

    @cached_property
    def mean_size(self) -> float:
        """The mean of n_i over clients that have examples; the first access may get all :attr:`sizes`."""
        sizes = self.sizes
        return sum(sizes) / max(1, sum(n > 0 for n in sizes))


class Participation:
    """The set of clients that have participated, by stored index; one bit per client of the run.

    Example:
        >>> taken_part = Participation(10)
        >>> taken_part.add([3, 9, 3])
        >>> len(taken_part), taken_part.saved()
        (2, tensor([8, 2], dtype=torch.uint8))
    """

    def __init__(self, num_clients: int) -> None:
        self._num_clients = num_clients
        self._bits = np.zeros(-(-num_clients // 8), dtype=np.uint8)  # client i is bit i % 8 of byte i // 8

    def __len__(self) -> int:
        """The number of clients in the set."""
        return int.from_bytes(self._bits.tobytes(), "little").bit_count()

    def add(self, indices: Sequence[int]) -> None:
        """Add clients; some may already be in the set."""
        places = np.asarray(indices, dtype=np.int64)
        np.bitwise_or.at(self._bits, places >> 3, np.left_shift(1, places & 7).astype(np.uint8))

    def saved(self) -> torch.Tensor:
        """Return a copy in the smaller of two forms: bits, uint8 [ceil(N / 8)], or sorted indices, int64."""
        indices = np.flatnonzero(np.unpackbits(self._bits, bitorder="little"))
        return torch.from_numpy(self._bits.copy() if 64 * len(indices) >= self._num_clients else indices)

    def load(self, saved: torch.Tensor) -> None:
        """Replace the set with the result of :meth:`saved`; raise a ValueError if it is for other clients."""
        count, found = self._num_clients, saved.cpu().numpy()
        if saved.dtype == torch.int64 and saved.ndim == 1:
            if (np.diff(found) <= 0).any() or (len(found) and not 0 <= found[0] <= found[-1] < count):
                raise ValueError(f"these are not the ascending indices of some of {count} clients")
            self._bits = np.zeros_like(self._bits)
            self.add(found.tolist())
        elif saved.dtype == torch.uint8 and saved.shape == self._bits.shape:
            if np.unpackbits(found, bitorder="little")[count:].any():
                raise ValueError(f"bits beyond the {count} clients are set")
            self._bits = found.copy()
        else:
            raise ValueError(
                f"{count} clients take {len(self._bits)} bytes of bits, found {list(saved.shape)} of {saved.dtype}"
            )


@dataclass(frozen=True, slots=True)
class Participant:
    """One member of a cohort."""

    client_id: ClientId
    index: int  # the stored index
    size: int  # the number of training examples, n_i
    count: int = 1  # how often it was drawn. It trains once, and counts `count` times in a mean
    steps: int = 0  # the local steps planned for it
    # its weight in a sum that is an unbiased estimate of the mean over all clients; None for the mean over the cohort
    share: float | None = None


def unbiased(
    members: Sequence[Participant], chances: Any, population: Population, weighting: Weighting
) -> list[Participant]:
    """Return independently drawn members with their shares w_i / p_i.

    ``chances`` has the probabilities p_i [N] of the population's clients. ``weighting`` is "examples" or "uniform".
    """
    try:
        found = torch.as_tensor(chances, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        found = None
    if found is None or found.shape != (len(population),):
        shape = kind_of(chances) if found is None else f"the shape {list(found.shape)}"
        raise FederatedError(
            f"The sampler's probabilities() must return a number for each of the {len(population)} clients, in their"
            f" order, found {shape}."
        )
    total, weighted = (sum(population.sizes) if weighting == "examples" else len(population)), []
    for member in members:
        p = float(found[population.place_of(member.client_id)])
        if member.count > 1 or not 0 < p <= 1:
            raise FederatedError(
                f"The sampler drew client {member.client_id!r} {member.count} times, and gives its probability as {p}:"
                " a sampler with probabilities() draws a client at most once, and with a probability in (0, 1]."
            )
        weight = member.size if weighting == "examples" else 1
        weighted.append(replace(member, share=weight / total / p))
    return weighted


def raw_weight(weighting: Weighting, member: Participant, steps: int) -> float:
    """Return a client's weight for a number of steps before normalization, times how often it was drawn."""
    if member.share is not None:
        return member.share
    if isinstance(weighting, str):
        return float(member.count * {"examples": member.size, "uniform": 1, "steps": steps}[weighting])
    found = weighting(member.client_id, member.size, steps)
    try:
        weight = float(found)
    except (TypeError, ValueError):
        weight = math.nan
    if not 0 <= weight < math.inf:
        raise FederatedError(
            f"weighting must give finite weights >= 0, found {found!r} for client {member.client_id!r} of"
            f" {member.size} examples and {steps} steps."
        )
    return weight * member.count


def no_weight(clients: Sequence[ClientId]) -> FederatedError:
    """Return the error for clients whose weights are all zero."""
    return FederatedError(f"weighting must give weights that are not all zero, found zeros for the clients {clients}.")
