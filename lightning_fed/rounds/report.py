"""What a round's report says of traffic and drift."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.types import State
from lightning_fed.rounds.messages import Reply
from lightning_fed.server.aggregation.mean import Exchange, accumulation_dtype

__all__ = ["Drift", "Traffic"]

_BLOCK = 2**16  # numbers that are converted to float64 at once


class Traffic:
    """What travels in a round: of the server's state what clients read, of gradients and messages what is used."""

    def __init__(self, algorithm: Algorithm, x: Tensor) -> None:
        self._vector = x.nbytes
        self._points = set(algorithm.full_grad_at) - {"x"}
        self._messages = 0
        self.server: set[str] = set()  # entries of the server state that clients read
        self.cohort_grad: set[str] = set()  # mean gradients that clients read
        self.gradients: set[str] = set()  # mean gradients that the server reads
        self.clients: set[int] = set()
        self.gradient_clients: set[int] = set()

    def add_messages(self, reply: Reply, rows: Sequence[int]) -> None:
        """Add the messages of some rows, all of one size; a tensor sent under two names travels once."""
        if reply.message_bytes is not None:
            self._messages += reply.message_bytes
            return
        once: dict[int | str, int] = {}
        for name, value in reply.send.items():
            if name not in reply.implied:
                own = value[rows[0]]
                once[own.data_ptr() if own.numel() > 1 else name] = own.nbytes
        self._messages += len(rows) * sum(once.values())

    def merge(self, others: Iterable["Traffic"]) -> None:
        """Add what other processes have."""
        for other in others:
            self._messages += other._messages
            self.server |= other.server
            self.cohort_grad |= other.cohort_grad
            self.clients |= other.clients

    def total(
        self, state: State, buffers_up: int, buffers_down: int, completed: int, refused: int, everyone: int
    ) -> tuple[int, int]:
        """Return the bytes up and down.

        Args:
            state: The server state of the round.
            buffers_up: The bytes of the buffers that any client has changed, which each one sends.
            buffers_down: The bytes of the buffers that are no longer those of x^0, which each one is sent.
            completed: The clients that sent something back.
            refused: Those that did so too, but whose messages, as large as the others', were not used.
            everyone: The clients that evaluate the population's loss; none if nobody asked for it.
        """
        involved = self.clients | self.gradient_clients
        once, then = self._vector, len(self.cohort_grad) * self._vector + buffers_down
        for name, value in state.items():
            if name in self._points:
                once += value.nbytes
            elif name in self.server:
                then += value.nbytes
        down = len(involved) * once + len(self.clients) * then
        down += max(0, everyone - len(involved)) * self._vector
        gradients = len(self.gradient_clients) * len(self.gradients | self.cohort_grad) * self._vector
        messages = self._messages + self._messages // max(1, completed) * refused
        return messages + gradients + (completed + refused) * buffers_up + everyone * 8, down


class Drift:
    """How far the clients' changes d_i lie from their weighted mean: the root of the weighted mean of the squares.

    Squares are those of the differences to a reference, the first client's change. From zero they would cancel where
    clients change alike: in float32, below a thousandth of the changes, nothing but rounding would be left.
    """

    def __init__(self) -> None:
        self._reference: Tensor | None = None  # [P]; from settle() on the mean of this process's clients
        self._own: Tensor | None = None  # the weighted sum [P] of differences that nobody else sums
        self._squares = 0.0
        self.weight = 0.0  # the sum of those of this process's clients; from merge() on of all

    def add(self, deltas: Tensor, weights: Sequence[float], is_summed: bool) -> None:
        """Add the changes of several clients.

        Args:
            deltas: The changes [S, P].
            weights: Their weights.
            is_summed: Whether the aggregation sums the clients' models with these weights.
        """
        if self._reference is None:
            self._reference = deltas[0].clone()
        several = max(1, _BLOCK // len(self._reference))  # clients whose differences are computed at once
        norms: list[Tensor] = []
        for start in range(0, len(deltas), several):
            differences = deltas[start : start + several] - self._reference
            norms.append(torch.linalg.vector_norm(differences, dim=1))
            if not is_summed:
                own = differences.new_tensor(weights[start : start + several]) @ differences
                self._own = own if self._own is None else self._own.add_(own)
        self._squares += sum(w * norm**2 for w, norm in zip(weights, torch.cat(norms).tolist(), strict=True))
        self.weight += sum(weights)

    def settle(self, x: Tensor, models: Tensor | None, models_weight: float) -> None:
        """Take the mean of this process's clients, and the squares around it.

        Args:
            x: The server parameters [P].
            models: The weighted sum [P] of the models that the aggregation sums in this process, if there is one.
            models_weight: The sum of their weights.
        """
        if self._reference is None or self.weight == 0:
            return
        blocks, nothing = x.split(_BLOCK), [None] * -(-len(x) // _BLOCK)
        ys: Sequence[Tensor | None] = nothing if models is None else models.split(_BLOCK)
        owns: Sequence[Tensor | None] = nothing if self._own is None else self._own.split(_BLOCK)
        for r, x_, y, own in zip(self._reference.split(_BLOCK), blocks, ys, owns, strict=True):
            dtype = accumulation_dtype(x.device)
            offset = torch.zeros_like(r, dtype=dtype) if own is None else own.to(dtype)
            if y is not None:
                offset += y - models_weight * (x_.to(dtype) + r)
            self._squares -= float(offset.square().sum()) / self.weight
            r += offset / self.weight
        self._own = None

    def merge(self, weights: Sequence[float], ranks: Exchange, x: Tensor) -> None:
        """Put the parts of all processes together, each of which has settled its own.

        Args:
            weights: The sums of weights of all processes.
            ranks: The processes.
            x: The server parameters [P].
        """
        total = sum(weights)
        mine = torch.zeros_like(x) if self._reference is None else self._reference
        mean = mine * (self.weight / total if total else 0.0)
        ranks.sum([mean])
        squares = self._squares + self.weight * float(torch.linalg.vector_norm(mine - mean)) ** 2
        sums = torch.tensor([squares], dtype=accumulation_dtype(x.device), device=x.device)
        ranks.sum([sums])
        self._squares, self.weight = float(sums), total

    def value(self) -> float:
        """The drift; nan if there are no clients."""
        return math.sqrt(max(0.0, self._squares / self.weight)) if self.weight else math.nan
