"""A site of a run: the data of one or several clients, and their states."""

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

from lightning_fed.compat.package import pl
from lightning_fed.compat.private import DummyLogger, TrainerFn, TrainerState, call
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.types import ClientId, State
from lightning_fed.data.batches.examples import size_of
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.partitions import check_client_ids
from lightning_fed.deploy.facts import check_facts, check_single, facts_of, optimizer_facts, rates_of
from lightning_fed.deploy.message import (
    MEASURE,
    REGISTER,
    WORDS,
    Message,
    address,
    check_columns,
    check_message,
    check_numbers,
    check_phase,
    check_registration,
    printable,
    quoted,
    reply_to,
    task_in,
    words_in,
)
from lightning_fed.deploy.site_privacy import SitePrivacy, check_budget
from lightning_fed.deploy.site_states import SiteStates, Version
from lightning_fed.engines.batch_hooks import time_by_rounds
from lightning_fed.engines.client_errors import NamesClient
from lightning_fed.rounds.local_plans import check_separate_examples
from lightning_fed.rounds.messages import LOSS, TRAIN, Reply, Task
from lightning_fed.server.client_states.state import LOCAL_STEPS, PERSONAL, ClientStates, ExpectedState
from lightning_fed.server.client_states.store import ClientStore, MemoryClientStore
from lightning_fed.server.privacy import DifferentialPrivacy
from lightning_fed.settings.module_checks import check_module
from lightning_fed.settings.settings import Settings
from lightning_fed.settings.trainer_checks import check_trainer
from lightning_fed.trainer.evaluation import ClientEvaluation, mean_loss, own_model
from lightning_fed.trainer.run_state import RunState

_log = logging.getLogger("lightning_fed.deploy.site")


class FederatedSite(AbstractContextManager["FederatedSite"]):
    """Answer a server's tasks with data that stay on this site.

    A task may arrive twice, even after the process was killed. The same task gets the same answer. Client states stay
    on this site's own disk, and only the method's messages leave it. Several runs may alternate.

    The site does what its own trainer would do, and no more. The page "What a server can do to a site" of the
    documentation lists the limits. The logger ``lightning_fed.deploy.site`` logs every answer and every refusal.

    Args:
        trainer: A trainer with the arguments of the server's trainer, in one process.
        model: The module, constructed as on the server.
        data: A data module with the clients of this site alone.
        client_id: The client, or a list of clients.
        state_dir: A folder for their states, which no other site uses. With ``client_privacy``, it also has the secret
            of the noise, and the account of its clients' privacy budget spent in all runs.
        max_epsilon: With ``client_privacy``, the largest epsilon that a client may spend in all runs: the site answers
            no task beyond it. It refuses a trainer without ``client_privacy``.
        delta: The delta of this epsilon, by default that of ``client_privacy``.
        share_words: The columns whose words may leave the site, if the sites of a run agree on them.

    Raises:
        FederatedError: If the trainer, the folder or the ids cannot be used.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        model: pl.LightningModule,
        data: FederatedDataModule,
        client_id: ClientId | Sequence[ClientId],
        state_dir: str | os.PathLike[str],
        max_epsilon: float | None = None,
        delta: float | None = None,
        share_words: Sequence[str] = (),
    ) -> None:
        one = isinstance(client_id, (int, str))
        self.client_ids = list(check_client_ids(type(self).__name__, [client_id] if one else client_id))
        self._trainer, self._model, self._data = trainer, model, data
        loop: Any = trainer.fit_loop
        self._settings: Settings = loop.settings
        self._shared = check_columns(type(self).__name__, "share_words", share_words)
        self._facts = facts_of(trainer, model)
        privacy = self._settings.client_privacy
        check_budget(max_epsilon, delta, privacy)
        self._states = SiteStates(Path(state_dir))
        self._privacy: SitePrivacy | None = None
        if privacy is not None:
            try:
                self._privacy = SitePrivacy(Path(state_dir) / "privacy", privacy, max_epsilon, delta)
            except FederatedError:
                self._states.close()  # the next site may use the folder once it is repaired
                raise
        self._clients: ClientsOutsideFit | None = None
        self._agreed: dict[str, Any] = {}  # the agreement of a run that ``_clients`` was made for
        self._run = ""  # the run of the last task

    def answer(self, task: Message) -> Message:
        """Return the reply to a task.

        Args:
            task: The task.

        Raises:
            FederatedError: If it is of another method, model or version, for another client, or if this site lacks a
                state that it needs.
        """
        start = time.monotonic()
        try:
            reply = self._answer(task)
        except FederatedError as error:
            _log.warning("%s refused: %s", _title(task), printable(str(error)))  # the error may quote the message
            raise
        except Exception:
            with self._sealed():
                raise
        header = reply.header
        if "failed" in header:
            what = f"failed: {header['failed']}"
        elif header["phase"] == WORDS:
            what = ", ".join(f"{len(words)} words of {name!r}" for name, words in header["words"].items())
        elif header["phase"] == REGISTER:
            what = f"{header['size']} examples, run {header['run']}"
        else:
            report = header.get("report") or {}
            work = f"{header['examples']} examples, {report['steps']} steps, " if "steps" in report else ""
            seconds, down, up = time.monotonic() - start, _kilobytes(task), _kilobytes(reply)
            what = f"{work}{seconds:.1f} s, {down:.1f} kB in, {up:.1f} kB out"
            if self._privacy is not None:
                spent = self._privacy.epsilon(task.client)
                what += f", epsilon {spent:.4g} at delta {self._privacy.delta:g} spent in all"
        _log.info("%s: %s", _title(task), what)
        return reply

    def _answer(self, task: Message) -> Message:
        check_message(task, "The task for")
        run, client_id = task.header["run"], task.header.get("client")
        if client_id not in self.client_ids:
            here = ", ".join(map(repr, self.client_ids))
            raise FederatedError(f"The site of {here} has received a task for client {client_id!r}.")
        if task.header["phase"] == REGISTER:
            return self._register(task)
        if task.header["phase"] == WORDS:
            return self._share(task)
        check_phase(task, self._settings)
        agreed = self._states.agreed(run)
        if agreed is None:
            why = (
                f"The site of client {client_id!r} has not registered for run {run}, or has lost its state_dir since."
                " The server registers it for a later round, or when it is started again."
            )
            return Message({**address(task), "failed": why, "unregistered": True})
        return self._work(task, self._made(agreed, run, client_id))

    def _share(self, task: Message) -> Message:
        """Return the words of the requested columns, if the site's operator shares them."""
        asked: Any = task.header.get("columns")
        columns = asked if isinstance(asked, list) else [asked]
        self._check_shared(columns, task.client)
        with self._sealed():
            return Message({**address(task), "words": dict(self._data.column_words(columns))})

    def _check_shared(self, columns: Sequence[Any], client_id: ClientId) -> None:
        """Refuse columns that are not shared: the server could test which of its words are here."""
        if wrong := [name for name in columns if name not in self._shared]:
            raise FederatedError(
                f"The server asks for the words of column {quoted(wrong[0])}, and the site of client {client_id!r}"
                f" lets those of {self._shared or 'none'} leave. Its operator may add columns to share_words."
            )

    def _register(self, task: Message) -> Message:
        check_registration(task)
        header, client_id = task.header, task.client
        clients, words = list(header["clients"]), words_in(task, "The server's registration request")
        self._check_shared(list(words), client_id)
        for own in self.client_ids:
            if own not in clients:
                raise FederatedError(f"The server has no client {own!r}. Its client_ids must name all clients.")
        agreed = {"clients": clients, "words": words, "facts": dict(header["facts"])}
        made = self._made(agreed, header["run"], client_id)
        self._states.agree(header["run"], agreed)
        with self._sealed():
            val = self._data.client_val_dataset(client_id)
            facts = {
                **made.amounts(client_id),
                "batch_size": self._data.batch_size,
                "val_size": 0 if val is None else size_of(val),
                "columns": list(self._data.describe_columns()),
            }
        return Message({**address(task), **facts})

    def _made(self, agreed: dict[str, Any], run: str, client_id: ClientId) -> "ClientsOutsideFit":
        """Return the object that answers for the clients in a run, created at the first task.

        Raise if the settings here are not the server's. This process may have started after the registration.
        """
        made = self._clients
        if made is None or self._agreed != agreed:
            self._leave()
            check_facts(self._facts, agreed["facts"], client_id)
            with self._sealed():
                self._data.use_words(agreed["words"])
                made = ClientsOutsideFit(self._trainer, self._model, self._data, self.client_ids, agreed["clients"])
            self._clients = made
            check_facts(made.optimizer_facts, agreed["facts"], client_id)
            self._agreed = agreed
        elif self._run != run:
            made.forget_round()  # a round of another run may have the same number
        self._run = run
        return made

    def _work(self, message: Message, clients: "ClientsOutsideFit") -> Message:
        client_id, header = message.client, message.header
        index = clients.population.index_of(client_id)
        if self._privacy is not None:
            clients.work.use_seed(self._privacy.seed(message))
        with self._sealed():
            planned, here = clients.planned_steps(client_id, header["round"]), clients.amounts(client_id)
        for name, number in here.items():
            if header.get(name) != number:
                raise FederatedError(
                    f"Client {client_id!r} has {name}={number} here, and the server plans with"
                    f" {name}={quoted(header.get(name))}: its data have changed since it registered. Undo that, or"
                    " start the server again, with which all clients register."
                )
        check_numbers(message, planned, self._trainer)
        task, sent, base = task_in(message, index, clients.start, clients.buffers, clients.base)
        clients.use_base(base)
        version, store, plateaus = (header["state"], header["of"]), MemoryClientStore(), header["plateaus"]
        needs_state = task.phase != MEASURE or header["own"]
        kept = sent or (self._states.read(header["run"], client_id, index, version) if needs_state else None)
        if kept:
            store.stage(index, kept)
            store.commit()
        states = clients.states(task, store)
        if task.phase == MEASURE:
            what, steps, own = header["what"], header["local_steps"], states if header["own"] else None
            with NamesClient(client_id, task.round, "its measure", lambda: None):
                found = clients.measure(client_id, what, steps, task, plateaus, own)
            return Message({**address(message), "measured": found})
        privacy, aggregator = self._privacy, self._settings.aggregator
        bound = aggregator.max_norm if isinstance(aggregator, DifferentialPrivacy) else None

        def work() -> Message:
            try:
                with self._sealed():
                    replies = clients.answer(task, states, plateaus, header["rates"])
                    found = [reply_to(message, reply, bound, timed=privacy is None) for reply in replies]
            except FederatedError as error:
                clients.forget_round()
                if not isinstance(error, ClientError):
                    raise
                return Message({**address(message), "failed": str(error)})
            if len(found) != 1:
                raise FederatedError(f"Client {client_id!r} has {len(found)} replies to one task.")
            return found[0]

        if privacy is None:
            reply = work()
        else:
            with self._sealed():
                costs = clients.costs(task, index)
            reply = privacy.answer(message, *costs, work)
        if task.phase == TRAIN and "failed" not in reply.header:
            store.commit()
            self._keep(message, index, version, (task.round + 1, header["fit"]), store.get(index) or {})
        return reply

    @contextmanager
    def _sealed(self) -> Iterator[None]:
        """Under record-level privacy, keep errors from work on data here, since they may describe an example."""
        try:
            yield
        except Exception as error:
            if self._privacy is None:
                raise
            _log.exception("The work on the data of %s has failed", self.client_ids)
            if self._clients is not None:
                self._clients.forget_round()
            raise FederatedError(
                f"The site of {', '.join(map(repr, self.client_ids))} has failed in its work. Its own log has the"
                " reason, which does not leave it under client_privacy."
            ) from error

    def _keep(self, task: Message, index: int, before: Version, version: Version, state: State) -> None:
        if self._settings.clients_keep_state:
            self._states.write(task.header["run"], index, before, version, state)
        elif state:
            name = type(self._settings.algorithm).__name__
            raise FederatedError(
                f"{name}.finish keeps {sorted(state)} for client {task.client!r}, and its init_client returns no state."
                " The server would not ask the site for it. Override init_client, so that it returns a new client's"
                " state."
            )

    def _leave(self) -> None:
        self._agreed = {}
        if self._clients is not None:
            self._clients.close()
            self._clients = None

    def close(self) -> None:
        """Release the module and the folder."""
        self._leave()
        self._states.close()

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


def _title(task: Message) -> str:
    header = task.header if hasattr(task.header, "get") else {}
    return f"round {header.get('round')!r:.20} {header.get('phase')!r:.30} for client {header.get('client')!r:.40}"


def _kilobytes(message: Message) -> float:
    return sum(value.nbytes for value in message.tensors.values()) / 1000


class ClientsOutsideFit:
    """Answer tasks for clients, with module, data, strategy and precision set up as for a fit, but without one.

    Rounds may arrive in any order, any number of times. The module and the data module get the hooks at the start and
    end of a fit. The module also gets the epoch's start and end hooks around each client's work in a round. Callbacks
    get the hooks of clients and batches.

    The data of ``clients`` (by default, of all clients) is here. ``among`` has the ids of all clients if the data
    module does not.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        datamodule: pl.LightningDataModule,
        clients: Sequence[ClientId] | None = None,
        among: Sequence[ClientId] | None = None,
    ) -> None:
        self.trainer: Any = trainer
        need = "Clients work outside a fit with a trainer of one process that has run none"
        loop: Any = trainer.fit_loop
        check_single(trainer, need, loop.round)
        self._round: int | None = None  # the round whose start hooks were called
        self._has_begun = False  # whether the clients' work in it has begun
        self._is_ready = False
        self._unsent: set[str] = set()  # names of logged values that stay here
        try:
            self._set_up(module, datamodule)
            trainer._logger_connector.reset_results()
            run: RunState = loop.run_state
            self.prepared, self.population, self.work = run.prepare_without_fit(clients, among)
            check_separate_examples(self.work.plans)
            call._call_lightning_module_hook(trainer, "on_train_start")
            self._is_ready = True
        except BaseException:
            self.close()
            raise
        flat = self.prepared.flat
        self.optimizer_facts = optimizer_facts(trainer)
        self.device, self.buffers = flat.y.device, self.prepared.buffers.read()
        self._personal = flat.personal.clone()  # a new client's parameters
        self.start = flat.y.clone()  # x^0, if the module here began as the server's
        self.base = State() if self.prepared.lora is None else self.prepared.lora.weights
        self._base = {name: value.clone() for name, value in self.base.items()}  # at the start
        self._here = set(map(self.population.index_of, self.work.plans.clients))

    def _set_up(self, module: pl.LightningModule, datamodule: pl.LightningDataModule) -> None:
        """Run Lightning's setup before a fit loop."""
        trainer = self.trainer
        check_trainer(trainer)
        trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, pl.callbacks.ProgressBar)]  # no fit runs
        trainer.loggers = [DummyLogger()] if trainer.loggers else []  # the server logs; these would make folders
        trainer.strategy._lightning_module = module
        trainer.state.fn, trainer.training = TrainerFn.FITTING, True
        trainer._data_connector.attach_data(module, datamodule=datamodule)
        check_module(trainer)
        time_by_rounds(trainer)
        trainer.strategy.connect(module)
        trainer._callback_connector._attach_model_callbacks()
        trainer._callback_connector._attach_model_logging_functions()
        trainer.strategy.setup_environment()
        trainer._data_connector.prepare_data()
        call._call_setup_hook(trainer)
        call._call_configure_model(trainer)
        trainer.strategy.setup(trainer)
        call._call_lightning_module_hook(trainer, "on_fit_start")

    def states(self, task: Task, store: ClientStore) -> ClientStates:
        """Return the client states of a task in a store; the caller commits it once the replies are complete."""
        algorithm, prepared = self.work.algorithm, self.prepared

        def new() -> State:
            own = {PERSONAL: self._personal} if self._personal.numel() else {}
            own |= {LOCAL_STEPS: torch.tensor(0)} if self.work.settings.local_schedule == "continue" else {}
            x = self.start if algorithm.init_client_at_start else task.x
            return {**algorithm.init_client(x), **own}

        kept = {name: prepared.buffers.server[name] for name in prepared.buffers.kept}
        like = {name: value.to("meta") for name, value in new().items()}
        method, num_parameters = type(algorithm).__name__, len(prepared.flat.params)
        expected = ExpectedState(method, like, kept, num_parameters, self.population.ids, self.device)
        return ClientStates(new, store, expected)

    def use_base(self, base: State) -> None:
        """Set base weights of adapters, with ``lora="exact"``; missing ones return to their values at the start."""
        for name, own in self.base.items():
            own.copy_(base.get(name, self._base[name]))

    def amounts(self, client_id: ClientId) -> dict[str, int]:
        """Return a client's numbers of examples and batches, with which a server plans its work."""
        batches = self.trainer.datamodule.client_batches(client_id)
        return {"size": batches.size, "batches": batches.num_batches() if batches.size else 0}

    def planned_steps(self, client_id: ClientId, round: int) -> int:
        """Return the local steps that the trainer plans for a client in a round."""
        return sum(member.steps for member in self.work.participants({client_id: 1}, round))

    def costs(self, task: Task, index: int) -> tuple[int, int, int]:
        """Return a client's batches per epoch, the steps of its task, and the most steps in one epoch."""
        (plan,) = self.work.plans_of(task, [index])
        return plan.batches.num_batches(), plan.participant.steps, max(plan.epochs, default=0)

    def answer(
        self,
        task: Task,
        states: ClientStates,
        plateaus: Sequence[Mapping[str, Any]] = (),
        rates: str | None = None,
    ) -> Iterator[Reply]:
        """Yield the replies of a task's clients that are here; each is valid until the next one.

        Client states go to ``states``. ``PreparedModule.set_round`` gets ``plateaus``. ``rates`` are the server's
        learning rates at the start of the round.
        """
        clients = [index for index in task.clients if index in self._here]
        task = replace(task, server=self.prepared.optimizer.placed(task.server))
        self._begin(task, clients, plateaus, rates)
        while True:
            replies = self._replies(task, clients, states)
            try:
                first = list(islice(replies, 1))
                break
            except (FederatedError, RuntimeError) as error:  # no reply is out yet, so the work may restart
                if (restart := self.work.restart_after(error)) is None:
                    raise
            self.work.restart(task.round, restart)
            self.work.begin(task.round, self.work.members(task, clients))
        yield from chain(first, replies)
        if task.phase == TRAIN:
            self._warn_of_unsent()
            self.work.end_training()
            call._call_lightning_module_hook(self.trainer, "on_train_epoch_end")
            self._round = None
        self.trainer._logger_connector.reset_results()

    def _warn_of_unsent(self) -> None:
        """Log once the logged values of local steps that stay here: a reply has only means."""
        unsent = self.trainer.fit_loop.epoch_loop._results.without_client_mean - self._unsent
        if unsent:
            self._unsent |= unsent
            _log.warning(
                "Replies have means alone, and local steps log metric objects, sums or extremes as %s: these stay here,"
                " and the server does not log them. Log the value of each batch, self.log(name, metric(...)).",
                ", ".join(map(repr, sorted(unsent))),
            )

    def _replies(self, task: Task, clients: Sequence[int], states: ClientStates) -> Iterator[Reply]:
        for chunk in self.work.chunks(task, clients):
            chunk = [index for index in chunk if index in clients]  # another client's gradient would be another reply
            for reply in self.work.answer(task, chunk, states):
                yield reply
                self.work.call_end_hooks([report.client_id for report in reply.reports])

    def measure(
        self,
        client_id: ClientId,
        what: str,
        steps: int,
        task: Task,
        plateaus: Sequence[Mapping[str, Any]] = (),
        kept: ClientStates | None = None,
    ) -> dict[str, float]:
        """Return a measurement of one client, between rounds.

        "loss" is its mean training loss. "val" and "train" are the values that ``validation_step`` logs on its
        validation or training set, after ``steps`` local steps of fine-tuning. ``kept`` selects its own model.
        """
        engine, index = self.work.engine, self.population.index_of(client_id)
        if task.round != self._round:
            self.forget_round()  # set_round replaces its rates
        self.prepared.set_round(task.round, plateaus)
        self.prepared.begin_round(task.first_step)
        x, buffers = torch.cat([task.x, self._personal]), task.buffers
        if kept is not None:
            (own,) = kept.of_each([index])
            x, buffers = own_model(self.work.algorithm, task.x, task.server, own), {**buffers, **own.buffers}
        if what != "loss":
            return ClientEvaluation(engine).of_client(x, buffers, client_id, index, what, steps, task.round)
        engine.buffers.write(buffers)
        batches = self.trainer.datamodule.client_batches(client_id)
        with engine.losses_at(x, task.round) as loss_of:
            return {"loss": mean_loss(client_id, loss_of(batches, index), batches.size)}

    def _begin(
        self, task: Task, clients: Sequence[int], plateaus: Sequence[Mapping[str, Any]], rates: str | None
    ) -> None:
        if task.round != self._round:
            self.prepared.set_round(task.round, plateaus)
            self.prepared.begin_round(task.first_step)
            call._call_lightning_module_hook(self.trainer, "on_train_epoch_start")
            if rates is not None and rates != (own := rates_of(self.trainer)):
                raise FederatedError(
                    f"Clients of this site begin round {task.round} with the learning rates {own}, and the server says"
                    f" {quoted(rates)}. Give both the same schedules, and set rates in hooks of the module: those of"
                    " the server's callbacks are not called here."
                )
            self._round, self._has_begun = task.round, False
        if task.phase != LOSS and not self._has_begun:
            self.work.begin(task.round, self.work.members(task, clients))
            self._has_begun = True  # local work continues from this round's gradients

    def forget_round(self) -> None:
        """Make the next task restart the round, after a client's failure or a measure of another round."""
        self._round = None
        self.work.end()
        self.trainer._logger_connector.reset_results()

    def close(self) -> None:
        """Run Lightning's teardown of a fit; the module is then free for others, with its values at the start."""
        trainer = self.trainer
        if trainer.state.fn is None:
            return
        if self._is_ready:
            call._call_lightning_module_hook(trainer, "on_train_end")
            self.use_base({})
            self.prepared.flat.bind()
            self.prepared.flat.whole.copy_(torch.cat([self.start, self._personal]))
            self.prepared.buffers.write(self.buffers)
        trainer._teardown()
        if self._is_ready:
            call._call_lightning_module_hook(trainer, "on_fit_end")
            call._call_teardown_hook(trainer)
        trainer.state = TrainerState()
        self._is_ready = False
