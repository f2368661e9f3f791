"""The server of a run whose clients are elsewhere: a state machine that any transport can drive."""

import os
import secrets
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from lightning_fed.callbacks.base import FederatedCallback
from lightning_fed.compat.package import pl
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import RoundReport
from lightning_fed.core.types import ClientId, State
from lightning_fed.data.partitions.partition import check_client_ids
from lightning_fed.deploy.announced import Announcements
from lightning_fed.deploy.facts import check_new, facts_of
from lightning_fed.deploy.handoff import Handoff
from lightning_fed.deploy.message import FORMAT, HELLO, MEASURE, Message, check_message, shared_part
from lightning_fed.deploy.remote import Asked, RemoteClients, RemoteData
from lightning_fed.deploy.replies import reply_of
from lightning_fed.rounds.messages import TRAIN
from lightning_fed.server.asynchronous.base import Asynchronous

__all__ = ["FederatedServer"]


class FederatedServer(AbstractContextManager["FederatedServer"]):
    """Run the server's half of a :class:`lightning_fed.FederatedTrainer`'s rounds; clients answer from elsewhere.

    It is driven by whatever carries messages::

        while tasks := server.tasks():
            for reply in transport.exchange(tasks.values()):  # in any order
                server.receive(reply)
            report = server.close_phase()  # of the round, after its last phase

    The rounds are those of ``trainer.fit``: callbacks, loggers, checkpoints and validation on the server's own data
    work as in a simulation, and the parameters have its bits. Before the first round, all clients are to say hello.

    Args:
        trainer: The trainer, with the arguments of a simulation; of one process.
        model: The module; it holds the server's parameters when all rounds are done.
        client_ids: The clients' ids, in the order of their stored indices.
        val: A validation set of the server's own, as the argument of
            :class:`lightning_fed.FederatedDataModule`.

    Raises:
        FederatedError: If the trainer runs several processes or has run rounds before, or ids are no ids.
    """

    def __init__(
        self, trainer: pl.Trainer, model: pl.LightningModule, client_ids: Sequence[ClientId], val: Any = None
    ) -> None:
        self.trainer: Any = trainer
        self.model = model
        self.client_ids = list(check_client_ids(type(self).__name__, client_ids))
        check_new(trainer, "A server takes a trainer of one process that has run no round")
        loop: Any = trainer.fit_loop
        self._loop = loop
        if isinstance(loop.settings.aggregator, Asynchronous):
            raise FederatedError(
                f"asynchronous={type(loop.settings.aggregator).__name__}(...) goes by a simulated clock, and real"
                " clients take the time that they take. Leave it unset."
            )
        self._facts, self._val = facts_of(trainer, model), val
        self._index = {client_id: index for index, client_id in enumerate(self.client_ids)}
        self._sites = Announcements(self.client_ids)
        self._checkpoint: str | None = None
        self._run, self._versions = secrets.token_hex(8), dict[int, int]()
        self._fit = Handoff(self._run_fit)
        self._asked: Asked | None = None  # the phase at hand, after hello
        self._shared: State = {}  # the tensors of its task
        self._answered: set[ClientId] = set()
        self._is_greeting = True
        self._report: RoundReport | None = None

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from a checkpoint, of a simulation or of such a server, before the first phase is closed.

        Args:
            path: The checkpoint.

        Raises:
            FederatedError: If the run has begun, or the file is not a checkpoint of federated rounds.
        """
        if not self._is_greeting or self._answered:
            raise FederatedError("A checkpoint is loaded before the first message is received.")
        checkpoint = os.fspath(path)
        try:
            saved = torch.load(checkpoint, map_location="meta", weights_only=True, mmap=True)
            noted: dict[str, Any] = saved["loops"]["fit_loop"]["state_dict"].get("sites", {})
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
            raise FederatedError(f"{checkpoint} is no checkpoint of federated rounds: {found}") from error
        self._checkpoint = checkpoint
        self._run, self._versions = noted.get("run", self._run), dict(noted.get("versions", {}))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the checkpoint of the last completed round, the one that a simulation writes.

        Args:
            path: Where it goes.

        Raises:
            FederatedError: Before the first round has begun.
        """
        if self._is_greeting:
            raise FederatedError("There is nothing to save before the clients have said hello.")
        self.trainer.save_checkpoint(os.fspath(path))

    @property
    def phase(self) -> str | None:
        """The phase at hand; None when all rounds are done."""
        if self._is_greeting:
            return HELLO
        return None if self._asked is None else self._asked.task.phase

    def tasks(self) -> dict[ClientId, Message]:
        """Return what is asked of each client in the phase at hand; nothing when all rounds are done."""
        asked = self._asked
        return {c: self._greeting(c) if asked is None else self._message(asked, c) for c in self._those_asked()}

    def greetings(self) -> dict[ClientId, Message]:
        """Return what to ask of clients that have not said hello in time, at any time while rounds are run.

        A client whose reply is received takes part from the next round on.
        """
        return {client_id: self._greeting(client_id) for client_id in self._sites.silent() if self._asked is not None}

    def _those_asked(self) -> list[ClientId]:
        """Return who is asked in the phase at hand: of those asked by the round, who is there."""
        if self._is_greeting:
            return self.client_ids
        asked = () if self._asked is None else self._asked.task.clients
        return [self.client_ids[index] for index in asked if self.client_ids[index] not in self._sites.absent]

    def _greeting(self, client_id: ClientId) -> Message:
        header = {"format": FORMAT, "run": self._run, "phase": HELLO, "round": 0, "attempt": 0, "client": client_id}
        return Message({**header, "facts": self._facts, "clients": self.client_ids})

    def _message(self, asked: Asked, client_id: ClientId) -> Message:
        task, index = asked.task, self._index[client_id]
        configs = self.trainer.lr_scheduler_configs
        header = {
            "format": FORMAT,
            "run": self._run,
            "phase": task.phase,
            "round": task.round,
            "attempt": asked.attempt,
            "client": client_id,
            "steps": task.steps.get(index),
            "mean_examples": None if task.mean_examples != task.mean_examples else task.mean_examples,
            "plateaus": [config.scheduler.state_dict() for config in configs if config.reduce_on_plateau],
            "state": self._versions.get(index, 0),
            **({"what": asked.what, "local_steps": asked.steps, "own": asked.own} if asked.what else {}),
        }
        kept: State = {}
        if (task.phase == TRAIN or asked.own) and index not in self._versions:
            kept = self._loop.state.clients.get(index) or {}
        held = {f"keep.{name}": value.detach().cpu().clone() for name, value in kept.items()}
        return Message(header, {**self._shared, **held})

    def receive(self, message: Message) -> None:
        """Take in a reply of the phase at hand; replies may come in any order, and a second copy changes nothing.

        Args:
            message: The reply.

        Raises:
            FederatedError: If it is of another run, phase or client, comes too late, or holds what cannot be. The round
                goes on without it, and the client may answer again.
            ClientError: If the client has failed and is not to be dropped; the run ends.
        """
        check_message(message, "The server")
        header, phase = message.header, self.phase
        client_id = header.get("client")
        who = f"The reply of client {client_id!r}"
        if not isinstance(client_id, (int, str)) or client_id not in self._index:
            raise FederatedError(f"{who} is of no client of this run.")
        if header["run"] != self._run:
            raise FederatedError(f"{who} is of run {header['run']}, and this is run {self._run}.")
        if header["phase"] == HELLO and client_id in self._sites.absent:
            self._sites.take(client_id, header)
            return
        asked = self._asked
        at = (HELLO, 0, 0) if asked is None else (asked.task.phase, asked.task.round, asked.attempt)
        if phase is None or (header["phase"], header["round"], header["attempt"]) != at:
            now = "all rounds are done" if phase is None else f"{at[0]!r} of round {at[1]} (attempt {at[2]}) is at hand"
            found = f"{header['phase']!r} of round {header['round']} (attempt {header['attempt']})"
            raise FederatedError(f"{who} is to {found}, and {now}.")
        if client_id in self._answered:
            return
        if asked is None:
            self._sites.take(client_id, header)
        else:
            index = self._index[client_id]
            if index not in asked.task.clients:
                raise FederatedError(f"{who}: it was not asked in this phase.")
            self._go_on(reply_of(message, index, asked.task, self._loop.settings.algorithm))
        self._answered.add(client_id)

    def missing(self) -> list[ClientId]:
        """Return the clients that are asked in the phase at hand and have not answered."""
        return [client_id for client_id in self._those_asked() if client_id not in self._answered]

    def close_phase(self) -> RoundReport | None:
        """Go on to the next phase.

        Clients that have not answered leave the round with ``on_client_error="drop"``; such that have not said hello
        fail in every round for which they are drawn, until they do; see :meth:`greetings`.

        Returns:
            The report of the round, after its last phase; else None.

        Raises:
            FederatedError: If clients have not answered and are not to be dropped; they may still do so.
            ClientError: If too many are missing; the run ends.
        """
        if (missing := self.missing()) and not self._loop.settings.drops_failed:
            shown = ", ".join(map(repr, missing[:5])) + (", ..." if len(missing) > 5 else "")
            raise FederatedError(
                f"{len(missing)} clients have not answered to {self.phase!r}: {shown}. Wait for them, or let the run go"
                " on without them by on_client_error='drop'."
            )
        if self._is_greeting:
            self._sites.close()
            self._is_greeting = False
        self._go_on(None)
        if self.phase == MEASURE:
            return None  # by callbacks at the end of the round, which is not quite over
        report, self._report = self._report, None
        return report

    def _go_on(self, reply: Any) -> None:
        """Let the rounds go on with a reply, or, given None, without those that are missing."""
        before, self._asked = self._asked, None  # which stays so if the run ends with an error
        self._asked = self._fit.resume(reply)
        if self._asked is None or before is None or self._asked.task is not before.task:
            self._answered = set()
            self._shared = {} if self._asked is None else shared_part(self._asked.task, self._loop.state.moved_buffers)

    def _run_fit(self) -> None:
        trainer, clients = self.trainer, partial(RemoteClients, sites=self._sites, handoff=self._fit)
        self._loop.run_state.use_sites(clients, {"run": self._run, "versions": self._versions})
        trainer.callbacks.insert(0, _Reports(self))
        trainer.fit(self.model, RemoteData(self._sites.known, self._val), ckpt_path=self._checkpoint)

    def end_round(self, report: RoundReport) -> None:
        """Take note of a completed round."""
        self._report = report
        if self._sites.admit():
            self._loop.run_state.load_population()
        if self._loop.settings.clients_keep_state:
            for client_id in report.clients:
                self._versions[self._index[client_id]] = report.round + 1

    def close(self) -> None:
        """End the run where it is."""
        self._fit.close()
        self._asked = None

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


class _Reports(FederatedCallback):
    """Tell a server of completed rounds, before any checkpoint is written."""

    def __init__(self, server: FederatedServer) -> None:
        self._server = server

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round_report: RoundReport) -> None:
        """Tell of one."""
        self._server.end_round(round_report)
