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
        >>> seen = Seen(10)
        >>> seen.add([3, 9, 3])
        >>> len(seen), seen.bits()
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

    def bits(self) -> torch.Tensor:
        """Return a copy of the set, uint8 [ceil(N / 8)]: client i is bit ``i % 8`` of byte ``i // 8``."""
        return torch.from_numpy(self._bits.copy())

    def saved(self) -> torch.Tensor:
        """Return a copy of the set in its smaller form: :meth:`bits`, or the stored indices of few clients, int64."""
        if 64 * self._count >= self._num_clients:
            return self.bits()
        filled = np.flatnonzero(self._bits)
        row, bit = np.nonzero(np.unpackbits(self._bits[filled, None], axis=1, bitorder="little"))
        return torch.from_numpy((8 * filled[row] + bit).astype(np.int64))

    def load(self, saved: torch.Tensor) -> None:
        """Replace the set by one that :meth:`saved` or :meth:`bits` has returned.

        Raises:
            ValueError: If it is not a set of as many clients.
        """
        loaded = Seen(self._num_clients)
        if saved.dtype == torch.int64 and saved.ndim == 1:
            if bool((saved.diff() <= 0).any()) or (len(saved) and not 0 <= saved[0] <= saved[-1] < self._num_clients):
                raise ValueError(f"these are not the ascending indices of some of {self._num_clients} clients")
            loaded.add(saved.tolist())
        elif saved.dtype == torch.uint8 and saved.shape == self._bits.shape:
            loaded._bits = saved.cpu().numpy().copy()
            used = self._num_clients % 8
            if used and loaded._bits[-1] >> used:
                raise ValueError(f"bits beyond the {self._num_clients} clients are set")
            loaded._count = int(_ONES[loaded._bits].sum(dtype=np.int64))
        else:
            raise ValueError(
                f"{self._num_clients} clients take {len(self._bits)} bytes of bits, found {list(saved.shape)} of"
                f" {saved.dtype}"
            )
        self._bits, self._count = loaded._bits, loaded._count


_ONES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1, dtype=np.uint8)  # in each byte
