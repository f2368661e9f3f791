"""The messages of a cohort held until all are there, for rules that look at all of them at once."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_fed.core.errors import ClientError
from lightning_fed.core.types import State, Vector
from lightning_fed.server.aggregation.mean import Aggregation, Alone, Exchange, accumulation_dtype
from lightning_fed.server.participation import Participant, no_weight

__all__ = ["Combine", "HeldAggregation", "not_finite"]

Combine: TypeAlias = Callable[[Tensor, Tensor, Callable[[Tensor], Tensor]], Tensor]
"""From messages [S, P], weights [S] and a function that sums over processes to one message [P]."""


class HeldAggregation(Aggregation):
    """The messages of a cohort, held until all are there.

    Args:
        combine: What makes one message of them; see :meth:`RobustAggregator.combine`.
        weighted: Whether it weights clients; else a client that was drawn twice is there twice.
        arguments: Those of :class:`Aggregation`.
    """

    sums_models = False

    def __init__(self, combine: Combine, weighted: bool, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._combine, self._weighted = combine, weighted
        self._held: dict[int, State] = {}
        self._by_rank: list[list[int]] = []
        self._shapes: dict[str, torch.Size] = {}
        self._ranks: Exchange = Alone()

    def add(self, index: int, steps: int, send: State, model: Vector | None = None) -> None:
        """Hold one client's messages; see :meth:`Aggregation.add`.

        Raises:
            ClientError: If a message is not finite.
        """
        self._check_names(send)
        copies: dict[tuple[int, torch.Size], Tensor] = {}  # a tensor sent under two names is held once
        own: State = {}
        for name, value in send.items():
            if not bool(torch.isfinite(value).all()):
                raise not_finite(self._members[index], name)
            self._shapes[name] = value.shape
            key = value.data_ptr(), value.shape
            if key not in copies:
                copies[key] = value.detach().clone()
            own[name] = copies[key]
        self._note_steps({index: steps})
        self._held[index] = own

    def outline(self) -> dict[str, Any]:
        """Return what other processes need to know before messages are exchanged."""
        steps = {index: self._steps[index] for index in sorted(self._held)}
        return {"steps": steps, "shapes": {name: tuple(shape) for name, shape in self._shapes.items()}}

    def reduce(self, outlines: Sequence[Mapping[str, Any]], ranks: Exchange, x: Vector) -> None:
        """Learn which process holds what; messages are exchanged when they are combined."""
        self._ranks = ranks
        self._by_rank = [list(outline["steps"]) for outline in outlines]
        for outline in outlines:
            self._note_steps(outline["steps"])
            self._shapes.update({name: torch.Size(shape) for name, shape in outline["shapes"].items()})

    def mean(self, x: Vector) -> tuple[State, Vector | None]:
        """Return what the rule makes of the messages; all processes must call it."""
        by_rank = self._by_rank or [sorted(self._held)]
        there = [index for indices in by_rank for index in indices]
        if not there:
            return {}, None
        counts = [len(indices) for indices in by_rank]
        return {name: self._combined(name, there, counts, x) for name in self.reduces}, None

    def _combined(self, name: str, there: Sequence[int], counts: Sequence[int], x: Vector) -> Tensor:
        """Return the combined message.

        Args:
            name: The message.
            there: The clients' stored indices, in the order in which processes hold their messages.
            counts: How many each process holds.
            x: The server parameters [P].
        """
        shape, ranks = self._shapes[name], self._ranks
        mine = [self._held[index].pop(name).reshape(-1) for index in sorted(self._held)]
        rows = torch.stack(mine).to(x.dtype) if mine else x.new_empty(0, shape.numel())
        del mine
        columns = ranks.columns(rows, counts)
        del rows
        order = sorted(range(len(there)), key=there.__getitem__)
        if order != list(range(len(there))):
            columns = columns[order]
        weights, repeats = self._weights(self.reduces[name], sorted(there))
        if max(repeats) > 1:
            columns = columns.repeat_interleave(torch.tensor(repeats, device=columns.device), dim=0)
        whole = torch.zeros(shape.numel(), dtype=accumulation_dtype(x.device), device=x.device)
        if columns.shape[1] or ranks.size > 1:
            part = self._combine(columns, weights.to(columns.device), self._sum)
            whole.tensor_split(ranks.size)[ranks.rank].copy_(part)
        ranks.sum([whole])
        scale = len(there) / self.population if self.reduces[name] == "population" else 1.0
        return (whole * scale).to(x.dtype).view(shape)

    def _sum(self, part: Tensor) -> Tensor:
        self._ranks.sum([part])
        return part

    def _weights(self, rule: str, there: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Return the clients' weights [S], and how often each message counts where weights are equal."""
        members = [self._members[index] for index in there]
        if rule == "population":  # a sum over clients, in which nobody counts twice
            return torch.full((len(there),), 1 / len(there), dtype=torch.float64), [1] * len(there)
        if not self._weighted:
            repeats = [member.count for member in members]
            return torch.full((sum(repeats),), 1 / sum(repeats), dtype=torch.float64), repeats
        raw = torch.tensor([self._raw[rule][index] for index in there], dtype=torch.float64)
        if not raw.sum() > 0:
            raise no_weight([member.client_id for member in members])
        return raw / raw.sum(), [1] * len(there)


def not_finite(member: Participant, name: str) -> ClientError:
    """Return the error that a client sent a message that is not finite."""
    return ClientError(
        f"Client {member.client_id!r} sent a message {name!r} that is not finite. Lower the learning rate, clip"
        " gradients, or look at its data.",
        member.client_id,
    )
