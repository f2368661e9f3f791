"""Which clients have taken part, in a bit each."""

from collections.abc import Sequence

import numpy as np
import torch

__all__ = ["Seen"]


class Seen:
    """A set of clients' stored indices. Memory is an eighth of a byte for every client there is.

    Args:
        num_clients: The number of clients, N.

    Example:
        >>> seen = Seen(100)
        >>> seen.add([3, 99, 3])
        >>> len(seen), seen.indices()
        (2, tensor([ 3, 99]))
    """

    def __init__(self, num_clients: int) -> None:
        self._num_clients = num_clients
        self._bits = np.zeros(-(-num_clients // 8), dtype=np.uint8)
        self._count = 0

    def __len__(self) -> int:
        """The number of clients in the set."""
        return self._count

    def add(self, indices: Sequence[int]) -> None:
        """Add clients, those that are in it included.

        Raises:
            IndexError: If there is no such client.
        """
        places = np.unique(np.asarray(indices, dtype=np.int64))
        if len(places) and not 0 <= places[0] <= places[-1] < self._num_clients:
            raise IndexError(f"indices from {places[0]} to {places[-1]} of {self._num_clients} clients")
        bytes_, bits = places >> 3, np.left_shift(1, places & 7).astype(np.uint8)
        self._count += int(np.count_nonzero(self._bits[bytes_] & bits == 0))
        np.bitwise_or.at(self._bits, bytes_, bits)

    def indices(self) -> torch.Tensor:
        """Return the stored indices in ascending order, int64."""
        filled = np.flatnonzero(self._bits)
        row, bit = np.nonzero(np.unpackbits(self._bits[filled, None], axis=1, bitorder="little"))
        return torch.from_numpy((8 * filled[row] + bit).astype(np.int64))
