"""The output of a trained chunk: messages to the server, possibly attacked or compressed, and states to the store."""

from collections.abc import Iterator, Sequence
from typing import Any

from lightning_fed.core.seeds import Purpose, generator
from lightning_fed.core.types import State
from lightning_fed.engines.base import ChunkResult, Engine
from lightning_fed.server.aggregation.compression import compress
from lightning_fed.server.attacks import attacked
from lightning_fed.server.client_states.state import ClientState, ClientStates, Stacked
from lightning_fed.settings.settings import Settings


class Outgoing:
    """Passes on the messages and states of a chunk of clients; ``attackers`` has the stored indices of bad ones."""

    def __init__(self, engine: Engine, settings: Settings, attackers: frozenset[int] = frozenset()) -> None:
        self.engine, self.compressor = engine, settings.compression
        self.attack, self.attackers = settings.attack, attackers

    def of(
        self, result: ChunkResult, before: Sequence[State], round: int, states: ClientStates
    ) -> Iterator[tuple[slice, dict[str, Any]]]:
        """Stage the clients' new states, and yield the rows of each reply with its messages.

        There is one reply for all clients, or one per client if messages are compressed or a client is bad. ``before``
        is the clients' states before the work, in the order of :attr:`ChunkResult.asked`.
        """
        sound = [row for row in result.asked if row not in result.faults]
        sending = sound
        if self.engine.algorithm.local_work:
            sending = [row for row in sound if result.reports[row].steps]
        is_attacked = bool(self.attackers) and any(result.participants[row].index in self.attackers for row in sending)
        if not sound or (self.compressor is None and not is_attacked):
            self._stage_all(result, before, states, sending)
            models = result.shared if result.sends_delta else None
            together = {"send": result.send, "implied": result.implied, "models": models, "changes": result.delta}
            yield slice(None), together
            return
        kept = self._new_states(result, before)
        for row in sound:
            at = slice(row, row + 1)
            sent: dict[str, Any] = {"send": State(), "message_bytes": 0}
            if row in sending:
                sent, residuals = self._sent(result, row, round, states)
                self._stage(result, states, row, kept[row], residuals)
            yield at, {**sent, "changes": result.delta[at]}

    def _sent(self, result: ChunkResult, row: int, round: int, states: ClientStates) -> tuple[dict[str, Any], State]:
        """Return one client's messages [1, ...] after the attack and compression, and its residuals."""
        algorithm, index = self.engine.algorithm, result.participants[row].index
        is_attacker = index in self.attackers
        if not is_attacker and self.compressor is None:
            at = slice(row, row + 1)
            models = result.shared[at] if result.sends_delta else None
            send = {name: value[at] for name, value in result.send.items()}
            return {"send": send, "implied": result.implied, "models": models, "message_bytes": None}, {}
        send = {name: value[row] for name, value in result.send.items() if name not in algorithm.aside}
        if is_attacker:
            assert self.attack is not None
            stream = generator(self.engine.seed, Purpose.ATTACK, round, index)
            vectors = {name: value for name, value in send.items() if name not in algorithm.uncompressed}
            send = {**send, **attacked(self.attack, vectors, stream)}
        residuals, size = State(), None
        if self.compressor is not None:
            residuals = states.residuals(index, send) if self.compressor.error_feedback else {}
            stream = generator(self.engine.seed, Purpose.COMPRESSION, round, index)
            send, residuals, size = compress(self.compressor, send, residuals, stream, algorithm.uncompressed)
        return {"send": {name: value[None] for name, value in send.items()}, "message_bytes": size}, residuals

    def _stage_all(
        self, result: ChunkResult, before: Sequence[State], states: ClientStates, rows: Sequence[int]
    ) -> None:
        """Stage the states of several clients, at once if they only contain the method's state."""
        if len(rows) > 1 and result.keep and not result.solver and not result.buffers:
            ordered, some = sorted(rows), len(rows) < len(result.reports)
            keep = {name: value[ordered] if some else value for name, value in result.keep.items()}
            states.stage_all([result.participants[row].index for row in ordered], keep)
            return
        had_none = not isinstance(before, Stacked) and not any(before)
        if had_none and not (result.keep or result.solver or result.buffers):
            return
        kept = self._new_states(result, before)
        for row in rows:
            self._stage(result, states, row, kept[row], {})

    def _new_states(self, result: ChunkResult, before: Sequence[State]) -> list[State]:
        """Return each client's new state; if unchanged, a copy of the old one, which new clients share."""
        if result.keep:
            return result.new_states()
        kept: list[State] = [{}] * len(result.reports)
        for row, had in zip(result.asked, before, strict=True):
            kept[row] = {name: value.clone() for name, value in had.items()}
        return kept

    def _stage(self, result: ChunkResult, states: ClientStates, row: int, kept: State, residuals: State) -> None:
        """Stage the state of one client."""
        solver = result.solver[row] if result.solver else {}
        names = self.engine.buffers.kept if result.buffers else ()
        buffers = {name: result.buffers[row][name] for name in names}
        if kept or solver or buffers or residuals:
            states.stage(result.participants[row].index, ClientState(kept, buffers, solver, residuals).joined())
