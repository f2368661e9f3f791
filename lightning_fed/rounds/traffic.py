"""What travels in a round."""

from collections.abc import Iterable, Sequence

import torch

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.types import State

__all__ = ["Traffic"]


class Traffic:
    """What travels in a round: of the server's state what clients read, of gradients and messages what is used."""

    def __init__(self, algorithm: Algorithm, x: torch.Tensor) -> None:
        self._vector = _bytes([x])
        self._points = set(algorithm.full_grad_at) - {"x"}
        self._messages = 0
        self.server: set[str] = set()  # entries of the server state that clients read
        self.cohort_grad: set[str] = set()  # mean gradients that clients read
        self.gradients: set[str] = set()  # mean gradients that the server reads
        self.clients: set[int] = set()
        self.gradient_clients: set[int] = set()

    def add_messages(self, send: State, clients: int = 1) -> None:
        """Add a client's messages, those of so many like it; a tensor sent under two names travels once."""
        once = {value.data_ptr() if value.numel() > 1 else name: value for name, value in send.items()}
        self._messages += clients * _bytes(list(once.values()))

    def add_bytes(self, size: int) -> None:
        """Add the size of one client's messages where they are compressed."""
        self._messages += size

    def merge(self, others: Iterable["Traffic"]) -> None:
        """Add what other processes have."""
        for other in others:
            self._messages += other._messages
            self.server |= other.server
            self.cohort_grad |= other.cohort_grad
            self.clients |= other.clients

    def total(self, state: State, buffers: int, completed: int, refused: int, everyone: int) -> tuple[int, int]:
        """Return the bytes up and down.

        Args:
            state: The server state of the round.
            buffers: The bytes of one transfer of the module's buffers.
            completed: The clients that sent something back.
            refused: Those that did so too, but whose messages, as large as the others', were not used.
            everyone: The clients that evaluate the population's loss; none if nobody asked for it.
        """
        involved = self.clients | self.gradient_clients
        once = self._vector + _bytes([state[name] for name in self._points if name in state])
        then = _bytes([state[name] for name in self.server - self._points]) + len(self.cohort_grad) * self._vector
        down = len(involved) * once + len(self.clients) * (then + buffers)
        down += max(0, everyone - len(involved)) * self._vector
        gradients = len(self.gradient_clients) * len(self.gradients | self.cohort_grad) * self._vector
        messages = self._messages + self._messages // max(1, completed) * refused
        return messages + gradients + (completed + refused) * buffers + everyone * 8, down


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(value.numel() * value.element_size() for value in tensors)
