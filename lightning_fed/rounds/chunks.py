"""Clients that work together: those that fail are found, the others' replies made, and what they keep put away."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from lightning_fed._compat import rank_zero_info
from lightning_fed.core.errors import ClientError
from lightning_fed.core.seeds import Purpose, generator
from lightning_fed.core.types import State
from lightning_fed.engines.base import ChunkResult, Engine, WorkPlan
from lightning_fed.rounds.messages import Reply
from lightning_fed.server.client_state import ClientState, ClientStates
from lightning_fed.server.compression import Compressor, compress

__all__ = ["ChunkReplies", "SoundClients"]


class SoundClients:
    """Train clients together, and find out who is to blame where that fails.

    Args:
        engine: The engine that trains them.
        drops: Whether clients that fail are left out; if not, their error is raised.
    """

    def __init__(self, engine: Engine, drops: bool) -> None:
        self.engine, self.drops = engine, drops
        self.failed: dict[int, ClientError] = {}
        self._has_told = False  # that clients failed together, and how it is found out who

    def train(self, run: Callable[[Sequence[WorkPlan]], ChunkResult], plans: Sequence[WorkPlan]) -> ChunkResult | None:
        """Train those clients that can be trained, as if the others were not there; or name who cannot.

        Args:
            run: Trains clients.
            plans: The clients' work.

        Returns:
            What came back, None if every client failed; :attr:`failed` then says why, by stored index.

        Raises:
            ClientError: If a client fails and is not to be dropped, or if something fails that is no client's own
                fault.
        """
        self.failed = {}
        return self._try(run, plans)

    def _try(self, run: Callable[[Sequence[WorkPlan]], ChunkResult], plans: Sequence[WorkPlan]) -> ChunkResult | None:
        undo = self.engine.undo_point() if self.drops else _nothing
        try:
            return run(plans)
        except ClientError as error:
            undo()
            if error.culprit is None or (len(plans) == 1 and not self.drops):
                raise
            if len(plans) == 1:
                self.failed[plans[0].participant.index] = error
                return None
            if self.drops and not self._has_told:
                self._has_told = True
                rank_zero_info(
                    f"{error} Which of them it was is found out by running them one by one; the others are then run at"
                    " once again. This is said only once."
                )
            sound = []
            for plan in plans:
                if self._try(run, [plan]) is not None:
                    sound.append(plan)
                undo()
            if len(sound) == len(plans):
                raise  # no client alone is to blame
        return self._try(run, sound) if sound else None


def _nothing() -> None:
    """Take nothing back, where the run stops anyway."""


class ChunkReplies:
    """The replies of clients that an engine has trained; on the way, what they keep is put away.

    Args:
        engine: The engine.
        result: What it returned.
        states: Where clients' states are.
        before: Stored indices, and what the method kept of these clients before.
        compressor: What makes messages small, if anything does.
        round: The round.
    """

    def __init__(
        self,
        engine: Engine,
        result: ChunkResult,
        states: ClientStates,
        before: tuple[Sequence[int], Sequence[State]],
        compressor: Compressor | None,
        round: int,
    ) -> None:
        self.engine, self.result, self.states, self.before = engine, result, states, before
        self.compressor, self.round = compressor, round

    def each(
        self,
        reply: Callable[..., Reply],
        examples: Sequence[int],
        own_examples: Sequence[int],
        failed: Mapping[int, ClientError],
    ) -> Iterator[Reply]:
        """Yield one reply of all clients, or one of each client where messages are compressed.

        Args:
            reply: Makes a reply of clients, given what it says beside the task.
            examples: How many examples each went through, in the order of the rows.
            own_examples: How many in an own solve, if there was one.
            failed: Those that failed, by stored index: clients of some rows, and others.
        """
        result, reports = self.result, self.result.reports
        clients = [who.index for who in result.participants]
        others = [index for index in failed if index not in clients]
        sound = [row for row in result.asked if row not in result.faults]
        sending = [row for row in sound if reports[row].steps or not self.engine.algorithm.local_work]
        if self.compressor is None or not sound:
            self._keep(sending)
            yield reply(
                clients + others,
                send=result.send,
                implied=result.implied,
                reports=reports,
                models=result.shared if result.sends_delta else None,
                changes=result.delta,
                buffers=self._sent_buffers(result.buffers),
                examples=examples,
                own_examples=own_examples,
                failed=failed,
            )
            return
        kept = self._kept()
        for number, row in enumerate(sound):
            is_first, sends = number == 0, row in sending
            send, size = self._compressed(self.compressor, row, kept[row]) if sends else ({}, 0)
            yield reply(
                [clients[row], *(failed if is_first else ())],
                send=send,
                reports=[reports[row]],
                changes=result.delta[row : row + 1],
                buffers=self._sent_buffers(result.buffers[row : row + 1]),
                examples=[examples[row]],
                own_examples=own_examples[row : row + 1],
                message_bytes=size,
                failed=failed if is_first else {},
            )

    def _compressed(self, compressor: Compressor, row: int, kept: State) -> tuple[State, int]:
        """Return what the server gets of a client's messages [1, ...], and its bytes; the client keeps the rest."""
        engine, index = self.engine, self.result.participants[row].index
        send = {name: value[row] for name, value in self.result.send.items() if name not in engine.algorithm.aside}
        residuals = self.states.residuals(index, send) if compressor.error_feedback else {}
        stream = generator(engine.seed, Purpose.COMPRESSION, self.round, index)
        sent, residuals, size = compress(compressor, send, residuals, stream, engine.algorithm.uncompressed)
        self._keep_one(row, kept, residuals)
        return {name: value[None] for name, value in sent.items()}, size

    def _sent_buffers(self, buffers: Sequence[State]) -> list[State]:
        """Return clients' buffers without those that stay with them."""
        personal = self.engine.buffers.personal
        return [{name: value for name, value in own.items() if name not in personal} for own in buffers]

    def _keep(self, rows: Sequence[int]) -> None:
        """Put away what several clients keep."""
        result = self.result
        if len(rows) > 1 and result.keeps_states_only:
            ordered, some = sorted(rows), len(rows) < len(result.reports)
            states = {name: value[ordered] if some else value for name, value in result.keep.items()}
            self.states.keep_all([result.participants[row].index for row in ordered], states)
            return
        kept = self._kept()
        for row in rows:
            self._keep_one(row, kept[row], {})

    def _kept(self) -> list[State]:
        """Return what each client keeps: copies of what it had, which new ones share, where that is nothing new."""
        if self.result.keep:
            return self.result.kept()
        had = dict(zip(*self.before, strict=True))
        return [{name: value.clone() for name, value in had[who.index].items()} for who in self.result.participants]

    def _keep_one(self, row: int, kept: State, residuals: State) -> None:
        result = self.result
        solver = result.solver[row] if result.solver else {}
        kept_buffers = self.engine.buffers.kept if result.buffers else ()
        buffers = {name: result.buffers[row][name] for name in kept_buffers}
        if kept or solver or buffers or residuals:
            self.states.keep(result.participants[row].index, ClientState(kept, buffers, solver, residuals).joined())
