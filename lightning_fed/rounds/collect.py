"""What comes back from the clients of a round: messages are put together, and what clients keep is held."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_fed.core.buffers import BufferMean, Buffers
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.seeds import Purpose, generator
from lightning_fed.core.types import State, Vector
from lightning_fed.engines.base import ChunkResult
from lightning_fed.rounds.report import Drift, Traffic
from lightning_fed.rounds.travelling_states import Guests
from lightning_fed.server.aggregation import Aggregation
from lightning_fed.server.client_state import KeptParts
from lightning_fed.server.compression import Compressor, compress
from lightning_fed.server.server import Server
from lightning_fed.strategies.processes import Ranks, Sent

__all__ = ["Intake"]


class Intake:
    """Takes in what the clients of a round send and keep.

    Args:
        server: The server's side.
        ranks: The processes that share the clients.
        aggregation: Puts messages together.
        guests: Holds what clients keep.
        traffic: Counts what they send.
        buffers: The module's buffers.
        compressor: What makes messages small, if anything does.
        keeps_state: Whether it is known that clients keep anything.

    Attributes:
        rule: How the message "delta" is weighted.
        drift: The spread of the clients' changes.
        mean_buffers: The mean of the buffers that clients ended with.
    """

    def __init__(
        self,
        server: Server,
        ranks: Ranks,
        aggregation: Aggregation,
        guests: Guests,
        traffic: Traffic,
        buffers: Buffers,
        compressor: Compressor | None,
        keeps_state: bool,
    ) -> None:
        self.server, self.ranks, self.aggregation, self.guests = server, ranks, aggregation, guests
        self.traffic, self.buffers, self.compressor, self.keeps_state = traffic, buffers, compressor, keeps_state
        self.rule = server.algorithm.reduces.get("delta", "examples")
        self.drift, self.mean_buffers = Drift(), BufferMean()

    @property
    def takes_several(self) -> bool:
        """Whether messages are summed and nothing else, so that several clients' may be at once."""
        return type(self.aggregation).add is Aggregation.add and self.compressor is None

    def take_several(self, result: ChunkResult, rows: Sequence[int], keep: Sequence[State]) -> None:
        """Take in what several clients of a chunk send and keep.

        Args:
            result: What came back from the chunk.
            rows: The clients, in ascending order.
            keep: What each client of the chunk keeps; empty where that is what came back, and nothing else.

        Raises:
            FederatedError: If they keep something that was not announced.
        """
        some = len(rows) < len(result.reports)
        send = {name: value[rows] if some else value for name, value in result.send.items()}
        models = (result.y[rows] if some else result.y) if self._sums_models(result) else None
        steps = {result.participants[row].index: result.reports[row].steps for row in rows}
        self.aggregation.add_all(steps, send, models)
        self.traffic.take_in({name: value[rows[0]] for name, value in result.send.items()}, len(rows))
        if not keep:
            self._check_announced(result.keep)
            kept = {name: value[rows] if some else value for name, value in result.keep.items()}
            self.guests.keep_all([result.participants[row].index for row in rows], kept)
        for row in rows:
            if keep:
                self._keep(result, row, keep[row], {})
        self._note_drift(result, rows)

    def take(self, result: ChunkResult, row: int, keep: State) -> None:
        """Take in what one client sends and keeps; see :meth:`take_several`."""
        index = result.participants[row].index
        send = {name: value[row] for name, value in result.send.items()}
        residuals: State = {}
        if self.compressor is not None:
            send, residuals = self._compressed(self.compressor, index, send)
        else:
            self.traffic.take_in(send)
        model = result.y[row] if self._sums_models(result) else None
        self.aggregation.add(index, result.reports[row].steps, send, model)
        self._keep(result, row, keep, residuals)
        self._note_drift(result, [row])

    def settle(self) -> None:
        """Finish what this process's clients alone decide, before anything is summed over processes."""
        self.drift.settle(self.server.x, *self.aggregation.models)

    def outline(self) -> tuple[dict[str, Any], Sent]:
        """Return what other processes need of this one's part, apart from the sums of messages.

        Returns:
            What all of them need, and as bytes what the clients keep whose state is kept by each.
        """
        guests, sent = self.guests.leaving()
        outline = {
            "aggregation": self.aggregation.outline(),
            "buffers": self.mean_buffers,
            "drift": self.drift.weight,
            "traffic": self.traffic,
            "guests": guests,
        }
        return outline, sent

    def merge(self, outlines: Sequence[Mapping[str, Any]], received: Sequence[torch.Tensor], x: Vector) -> None:
        """Put the parts of all processes together.

        Args:
            outlines: What everybody's :meth:`outline` says.
            received: The bytes that came with it.
            x: The server parameters [P].
        """
        self.guests.take_home([outline["guests"] for outline in outlines], received)
        self.aggregation.reduce([outline["aggregation"] for outline in outlines], self.ranks, x)
        self.drift.merge([outline["drift"] for outline in outlines], self.ranks, x)
        self.mean_buffers = BufferMean.merged(outline["buffers"] for outline in outlines)
        self.traffic.merge(outline["traffic"] for i, outline in enumerate(outlines) if i != self.ranks.rank)

    def _sums_models(self, result: ChunkResult) -> bool:
        """Whether the clients' models are summed instead of their changes."""
        return result.sends_delta and self.aggregation.sums_models and self.compressor is None

    def _keep(self, result: ChunkResult, row: int, keep: State, residuals: State) -> None:
        """Hold what a client keeps, and its part of the mean of the buffers."""
        who = result.participants[row]
        own_buffers = result.buffers[row] if result.buffers else {}
        if not (keep or residuals or result.solver or own_buffers):
            return
        self._check_announced(keep)
        solver = result.solver[row] if result.solver else {}
        if residuals or solver or own_buffers:
            own = own_buffers if self.buffers.mode == "local" else {}
            keep = KeptParts(keep, own, solver, residuals).joined()
        self.guests.keep(who.index, keep)
        if self.buffers.mode != "server" and own_buffers:
            self.mean_buffers.add(own_buffers, who.size, who.index, who.count)

    def _check_announced(self, keep: State) -> None:
        if keep and not self.keeps_state and self.ranks.size > 1:
            raise FederatedError(
                f"{type(self.server.algorithm).__name__}.finish keeps {sorted(keep)} without an init_client that says"
                " what a new client has: several processes would not know where to look for it. Override init_client."
            )

    def _note_drift(self, result: ChunkResult, rows: Sequence[int]) -> None:
        weights = self.aggregation.weights([result.participants[row].index for row in rows], self.rule)
        deltas = result.delta if len(rows) == len(result.reports) else result.delta[rows]
        self.drift.add(deltas, weights, self._sums_models(result) and self.rule != "population")

    def _compressed(self, compressor: Compressor, index: int, send: State) -> tuple[State, State]:
        """Return what the server gets of a client's messages, and what the client keeps of what it does not get."""
        stream = generator(self.server.seed, Purpose.COMPRESSION, self.server.round, index)
        own = self.guests.residuals_of(index, send) if compressor.error_feedback else {}
        got, residuals, size = compress(compressor, send, own, stream, self.server.algorithm.uncompressed)
        self.traffic.add_bytes(size)
        return got, residuals
