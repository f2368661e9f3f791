"""A round, told as its steps: the server asks, clients answer, phase by phase, until the server can take its step."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

from lightning_fed.callbacks.base import call_round_hook
from lightning_fed.compat.private import rank_zero_info
from lightning_fed.core.errors import FederatedError
from lightning_fed.rounds.assignment import TravellingStates, assign
from lightning_fed.rounds.client_work import ClientWork
from lightning_fed.rounds.cohort import CohortSampling, DrawnCohort, Faults
from lightning_fed.rounds.lone_examples import check_lone_examples
from lightning_fed.rounds.messages import LOSS, TRAIN, Task
from lightning_fed.rounds.server_round import ServerRound
from lightning_fed.server.server import Server
from lightning_fed.strategies.processes import Ranks, Sent, metrics_alone

__all__ = ["Rounds"]

Told: TypeAlias = dict[str, Any]
"""What a process tells the others of its part in a round."""

_MOVED_BYTES = 2**27  # of client states of one vector that may be elsewhere than they are kept, all held for the round


class Rounds:
    """Run the rounds of a fit, up to the server's step.

    Both halves are in every process, and what passes between them is handed over by reference. Several processes draw
    the same cohort and each answers for its own part of it; no task is sent, and sums of replies are exchanged.

    Args:
        server: The server's side of the run.
        sampling: Draws cohorts.
        work: Answers for clients.
        ranks: The processes that share the clients.

    Attributes:
        at_work: The server's half of the round at work; None between rounds.
    """

    def __init__(self, server: Server, sampling: CohortSampling, work: ClientWork, ranks: Ranks) -> None:
        self.server, self.sampling, self.work, self.ranks = server, sampling, work, ranks
        self.settings, self.trainer = sampling.settings, work.trainer
        self.at_work: ServerRound | None = None
        self._faults, self._cohort = Faults(), DrawnCohort()
        self._restart_reason: str | None = None  # of the round at work, with another engine

    def draw(self) -> None:
        """Draw the next round's cohort."""
        s, number = self.settings, self.server.round
        self._faults = faults = Faults(s.drops_failed, s.max_failed_share, s.max_update_ratio, number)
        self._cohort = self.sampling.draw(number, partial(self.work.hello, round=number, failed=faults.add))
        if not self._cohort.members and not faults.causes and not s.is_private:
            rank_zero_info(f"Nobody takes part in round {number}: it changes nothing.")

    def check_batches(self) -> None:
        """Refuse clients with a batch of one example that the module cannot train on, before any client works.

        It looks at all clients if their sizes are known, or else at the cohort that is drawn; at that one too if the
        user's own sampler decides who is ever drawn.

        Raises:
            FederatedError: Naming a client and the ways out.
        """
        population, cohort = self.sampling.population, self._cohort
        is_users = not type(self.settings.sampler).__module__.startswith("lightning_fed.")
        if population.sizes_are_known and not is_users:
            check_lone_examples(self.work, zip(population, population.sizes, strict=True))
        else:
            drawn = {who.client_id: who.size for who in (*cohort.members, *cohort.gradient_members)}
            check_lone_examples(self.work, drawn.items())

    def run(self, tell: Callable[[], Told]) -> tuple[ServerRound, list[Told]]:
        """Let the clients of the cohort work; those that fail on the way are left out, if that is what is asked for.

        Args:
            tell: Returns what this process tells the others when its clients are done.

        Returns:
            The server's half, ready to be closed, and what all processes have told.
        """
        work, faults = self.work, self._faults
        undo = work.engine.undo_point() if self.settings.drops_failed or work.may_restart else None
        failed_before = dict(faults.causes)
        while (told := self._try(tell)) is None:
            assert undo is not None
            undo()
            self.server.clients.discard()
            if self._restart_reason is not None:
                faults.causes, faults.refused = dict(failed_before), set()
                work.restart(self.server.round, self._restart_reason)
            call_round_hook(self.trainer, "on_round_restart", self.server.round)
        assert self.at_work is not None
        return self.at_work, told

    def leave(self) -> None:
        """Let go of the round at work."""
        self.at_work, self._cohort = None, DrawnCohort()
        self.work.end()

    def _try(self, tell: Callable[[], Told]) -> list[Told] | None:
        """Let the clients work; return None if the round must start again.

        That is so if some failed whose part others depend on, or if the engine cannot run them and another one can.
        """
        ranks, split, told = self.ranks, self.work.engine.split, [Told()]
        if self.settings.drops_failed:  # data may have failed to load in some processes only
            self._faults.merge(ranks.gather(self._faults.causes))
        server_round = ServerRound(self.server, self.settings, self.sampling.population, self._cohort, self._faults)
        self.at_work, members, x = server_round, server_round.members, self.server.x
        asked = [*members.values(), *server_round.gradient_members.values()]
        keeps_state, most_moves = self.settings.clients_keep_state, max(1, _MOVED_BYTES // x.nbytes)
        owners = assign(asked, ranks, keeps_state, most_moves, x.numel())
        states = TravellingStates(self.server, ranks, {i: owners[i] for i in members} if keeps_state else None)
        with split.in_step(), metrics_alone(self.trainer):
            self.work.begin(self.server.round, [m for i, m in members.items() if owners[i] == ranks.rank])
            for task in server_round.phases():
                answers = ranks.exchange_and_deliver(partial(self._answer, task, server_round, owners, states, tell))
                outlines = [outline for outline, _ in answers]
                self._restart_reason = next((o["restart"] for o in outlines if "restart" in o), None)
                if self._restart_reason is not None:
                    return None
                if task.phase == TRAIN:
                    if states.moves:
                        states.take_home([outline["travelling"] for outline in outlines], [part for _, part in answers])
                    told = [outline["told"] for outline in outlines]
                    told = split.gather(told[0]) if split.size > 1 else told
                if not server_round.close_phase(outlines, ranks):
                    return None
        return told

    def _answer(
        self,
        task: Task,
        server_round: ServerRound,
        owners: Mapping[int, int],
        states: TravellingStates,
        tell: Callable[[], Told],
    ) -> tuple[Told, Sent]:
        """Answer a task for this process's clients, and return what other processes need of it."""
        ranks, work, trains = self.ranks, self.work, task.phase == TRAIN
        owner = ranks.home_of if task.phase == LOSS else owners.__getitem__
        if trains and states.moves:
            states.send()
        chunks = work.chunks(task, [index for index in task.clients if owner(index) == ranks.rank])
        if trains and states.moves:
            chunks = states.last(chunks)
        server_round.expect(chain.from_iterable(chunks))
        try:
            for clients in chunks:
                for reply in work.answer(task, clients, states):
                    work.call_end_hooks(server_round.receive(reply))
        except FederatedError as error:
            if (reason := work.reason_to_restart(error)) is None:
                raise
            states.settle()
            return {"restart": reason}, [()] * ranks.size
        if not trains:
            return server_round.outline(), [()] * ranks.size
        work.end_training()
        travelling, sent = states.leaving()
        return {**server_round.outline(), "travelling": travelling, "told": tell()}, sent
