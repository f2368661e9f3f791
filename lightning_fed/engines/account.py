"""What a round's report says of traffic and drift."""

import math
from collections.abc import Iterable, Sequence

import torch

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.types import State
from lightning_fed.engines.plan import WorkPlan

__all__ = ["Drift", "Traffic", "gradients_computed"]


def gradients_computed(algorithm: Algorithm, plans: Sequence[WorkPlan], gradient_plans: Sequence[WorkPlan]) -> int:
    """Return how many gradients of single examples a round takes.

    Args:
        algorithm: The method, which may take a second gradient on every batch, and full-batch gradients.
        plans: The work of the clients that completed it.
        gradient_plans: That of the clients whose full-batch gradients are averaged.
    """
    local = sum(plan.batches.num_examples(batches) for plan in plans for batches in plan.epochs)
    own = plans if algorithm.full_grad_for != "cohort" else ()
    sizes = {plan.participant.index: plan.participant.size for plan in (*gradient_plans, *own)}
    per_batch = 1 if algorithm.anchor_at is None else 2
    return per_batch * local + len(algorithm.full_grad_at) * sum(sizes.values())


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

    def take_in(self, send: State, clients: int = 1) -> None:
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


class Drift:
    """The spread of client changes around their weighted mean, from their norms and the sum of the changes."""

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None
        self._squares = 0.0
        self._weight = 0.0

    def add(self, norm: float, weight: float, delta: torch.Tensor | None) -> None:
        """Add one client's change: its norm, its weight, and itself [P] where nobody else adds it up."""
        self._squares += weight * norm**2
        self._weight += weight
        if delta is not None:
            self._sum = delta * weight if self._sum is None else self._sum.add_(delta, alpha=weight)

    def outline(self) -> tuple[float, float, bool]:
        """Return what other processes need to know before the sums are reduced."""
        return self._squares, self._weight, self._sum is not None

    def merge(self, outlines: Sequence[tuple[float, float, bool]], x: torch.Tensor) -> list[torch.Tensor]:
        """Take in everybody's :meth:`outline`, and return the sum that is to be reduced, if there is one."""
        self._squares = sum(squares for squares, _, _ in outlines)
        self._weight = sum(weight for _, weight, _ in outlines)
        if self._sum is None and any(has_sum for _, _, has_sum in outlines):
            self._sum = torch.zeros_like(x)
        return [] if self._sum is None else [self._sum]

    def value(self, change: torch.Tensor | None) -> float:
        """The square root of the weighted mean of the squared distances from the mean.

        Args:
            change: The weighted sum [P] of the changes that were not added here.
        """
        if self._weight == 0:
            return math.nan
        parts = [part for part in (self._sum, change) if part is not None]
        mean_norm = float(torch.linalg.vector_norm(sum(parts[1:], parts[0]))) / self._weight if parts else 0.0
        return math.sqrt(max(0.0, self._squares / self._weight - mean_norm**2))


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(value.numel() * value.element_size() for value in tensors)
