"""Clients that answer tasks while no fit is running."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import torch

from lightning_fed.compat.package import pl
from lightning_fed.compat.private import DummyLogger, TrainerFn, TrainerState, call
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId, State
from lightning_fed.deploy.facts import check_single, optimizer_facts
from lightning_fed.engines.batch_hooks import time_by_rounds
from lightning_fed.rounds.local_plans import check_separate_examples
from lightning_fed.rounds.messages import LOSS, TRAIN, Reply, Task
from lightning_fed.server.client_states.state import LOCAL_STEPS, PERSONAL, ClientStates, ExpectedState
from lightning_fed.server.client_states.store import ClientStore
from lightning_fed.settings.module_checks import check_module
from lightning_fed.settings.trainer_checks import check_trainer
from lightning_fed.trainer.evaluation import ClientEvaluation, mean_loss, own_model
from lightning_fed.trainer.run_state import RunState


class ClientsOutsideFit:
    """Answer tasks for clients, with module, data, strategy and precision set up as for a fit, and none running.

    Rounds may come in any order, any number of times. The module and the data module get the hooks that begin and end a
    fit. The module also gets those that begin and end an epoch, around each client's work in a round. Callbacks get the
    hooks of clients and batches.

    The data of ``clients`` (by default of all) is here. ``among`` has the ids of all clients if the data module does
    not.
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
        check_single(trainer, need, self.trainer.fit_loop.round)
        self._round: int | None = None  # whose hooks have been called
        self._has_begun = False  # the clients' work in it
        self._is_ready = False
        try:
            self._set_up(module, datamodule)
            trainer._logger_connector.reset_results()
            run: RunState = self.trainer.fit_loop.run_state
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
        self._personal = flat.personal.clone()  # of a new client
        self.start = flat.y.clone()  # x^0, if the module here began as the server's
        self.base = State() if self.prepared.lora is None else self.prepared.lora.weights
        self._base = {name: value.clone() for name, value in self.base.items()}  # at the start
        self._here = set(map(self.population.index_of, self.work.plans.clients))

    def _set_up(self, module: pl.LightningModule, datamodule: pl.LightningDataModule) -> None:
        """Do what Lightning does before a fit loop runs."""
        trainer = self.trainer
        check_trainer(trainer)
        trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, pl.callbacks.ProgressBar)]  # of a fit
        trainer.loggers = [DummyLogger()] if trainer.loggers else []  # the server's log; here they would make folders
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
        """Return what the clients of a task keep in a store, which the caller commits once the replies are sent."""
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
        """Use other base weights of adapters, with ``lora="exact"``; none for those of the start."""
        for name, own in self.base.items():
            own.copy_(base.get(name, self._base[name]))

    def planned_steps(self, client_id: ClientId, round: int) -> int:
        """Return the local steps that the trainer plans for a client in a round."""
        return sum(member.steps for member in self.work.participants({client_id: 1}, round))

    def costs(self, task: Task, index: int) -> tuple[int, int, int]:
        """Return the batches in an epoch of a client, the steps of its task, and the most of them in an epoch."""
        (plan,) = self.work.plans_of(task, [index])
        return plan.batches.num_batches(), plan.participant.steps, max(plan.epochs, default=0)

    def answer(self, task: Task, states: ClientStates, plateaus: Sequence[Mapping[str, Any]] = ()) -> Iterator[Reply]:
        """Yield the replies of the clients that a task names and that are here; each is valid until the next one.

        Client states go to ``states``. ``plateaus`` are those of ``PreparedModule.set_round``.
        """
        clients = [index for index in task.clients if index in self._here]
        task = replace(task, server=self.prepared.optimizer.placed(task.server))
        self._begin(task, clients, plateaus)
        while True:
            replies = self._replies(task, clients, states)
            try:
                first = list(islice(replies, 1))
                break
            except (FederatedError, RuntimeError) as error:  # no reply is out yet, so the work may start again
                if (restart := self.work.restart_after(error)) is None:
                    raise
            self.work.restart(task.round, restart)
            self.work.begin(task.round, self.work.members(task, clients))
        yield from chain(first, replies)
        if task.phase == TRAIN:
            self.work.end_training()
            call._call_lightning_module_hook(self.trainer, "on_train_epoch_end")
            self._round = None
        self.trainer._logger_connector.reset_results()

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
        """Return what is measured of one client, between rounds.

        "loss" is its mean training loss. "val" and "train" are what ``validation_step`` logs on its validation set or
        training set, after some local steps of fine-tuning. Given what the client keeps, its own model is measured.
        """
        engine, index = self.work.engine, self.population.index_of(client_id)
        if task.round != self._round:
            self.forget_round()  # whose rates are replaced here
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

    def _begin(self, task: Task, clients: Sequence[int], plateaus: Sequence[Mapping[str, Any]]) -> None:
        if task.round != self._round:
            self.prepared.set_round(task.round, plateaus)
            self.prepared.begin_round(task.first_step)
            call._call_lightning_module_hook(self.trainer, "on_train_epoch_start")
            self._round, self._has_begun = task.round, False
        if task.phase != LOSS and not self._has_begun:
            self.work.begin(task.round, self.work.members(task, clients))
            self._has_begun = True  # local work continues from this round's gradients

    def forget_round(self) -> None:
        """Restart the round with the next task, after a client has failed or a measure of another round."""
        self._round = None
        self.work.end()
        self.trainer._logger_connector.reset_results()

    def close(self) -> None:
        """Do what Lightning does after a fit: the module is then free for others, with the values of the start."""
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
