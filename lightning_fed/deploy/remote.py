"""Remote clients: the data module of a fit, and the half of its rounds that asks them."""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch

from lightning_fed.compat.package import pl
from lightning_fed.core.arguments import check_count, kind_of
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.rounds import ClientReport, RoundReport
from lightning_fed.core.types import ClientId, State
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.partitions import check_client_ids
from lightning_fed.deploy.exchange import Exchange, Registration, Registrations
from lightning_fed.deploy.facts import changeable_facts, check_single, facts_of, optimizer_facts, rates_of
from lightning_fed.deploy.message import (
    MEASURE,
    MOST_STEPS,
    Expected,
    Message,
    check_columns,
    copied,
    prefixed,
    reply_of,
    shared_part,
)
from lightning_fed.deploy.transport import Transport
from lightning_fed.rounds.client_half import ClientHalf
from lightning_fed.rounds.client_work import gradients_together
from lightning_fed.rounds.local_plans import limited
from lightning_fed.rounds.messages import GRADIENTS, TRAIN, Reply, Task
from lightning_fed.server.asynchronous import Asynchronous
from lightning_fed.server.client_states.state import ClientStates
from lightning_fed.server.optimal_sampling import OptimalClientSampling
from lightning_fed.server.participation import Participant
from lightning_fed.server.server import Server
from lightning_fed.trainer.loop import FederatedLoop
from lightning_fed.trainer.run_state import RunState


class RemoteClients(FederatedDataModule):
    """The clients of a run on remote sites, and the server's own validation set.

    A fit with them is like any other fit. It asks the clients when a simulation calls its engine. Callbacks, loggers,
    validation, early stopping, checkpoints and ``ckpt_path`` work as usual. The parameters have the same bits::

        trainer.fit(model, RemoteClients(transport, client_ids, val=val), ckpt_path="last")

    Before the first round all clients must register. See ``docs/deploy.md``.

    Args:
        transport: Sends messages to the clients' sites; see :class:`lightning_fed.deploy.Transport`.
        client_ids: The clients' ids, in the order of their stored indices.
        val: The validation set of the server model, as for :class:`lightning_fed.FederatedDataModule`.
        max_examples: The largest number of examples that a client may have. A client's weight is the number that its
            site states.
        batch_size: The batch size that the data module of every site must have. With None, sites may differ, with a
            warning in the log.
        agree_on: The columns whose words the sites agree on before the first round: each sends its own, and all get the
            sorted words of all. ``val`` may then be a function that returns the validation set, given the words by
            column.
        evaluation: Evaluation arguments of ``FederatedDataModule``: ``test``, ``eval_batch_size``, ``transform`` and
            the like.

    Raises:
        FederatedError: If the ids or the transport are invalid. In a fit: if the trainer runs several
            processes or an asynchronous server, or clients do not register.
    """

    _val_may_come = False  # although setup is overridden

    def __init__(
        self,
        transport: Transport,
        client_ids: Sequence[ClientId],
        val: Any = None,
        max_examples: int | None = None,
        batch_size: int | None = None,
        agree_on: Sequence[str] = (),
        **evaluation: Any,
    ) -> None:
        name = type(self).__name__
        self._agree_on = check_columns(name, "agree_on", agree_on)
        self._make_val = val if self._agree_on and callable(val) else None
        self._val_may_come = self._make_val is not None
        super().__init__(val=None if self._make_val else val, **evaluation)
        if not callable(getattr(transport, "exchange", None)):
            raise FederatedError(f"{name}(transport={kind_of(transport)}): a transport has a method exchange.")
        self._max_examples = None if max_examples is None else check_count(name, "max_examples", max_examples)
        self._asked_batch_size = None if batch_size is None else check_count(name, "batch_size", batch_size, least=1)
        self.transport = transport
        self.client_ids = list(check_client_ids(name, client_ids))
        self._sites: Registrations | None = None
        self._stated: tuple[pl.LightningModule, dict[str, str]] | None = None

    def setup(self, stage: str) -> None:
        """Check the trainer, and record the facts of it and of the untrained module that sites must share."""
        loop = None if self.trainer is None else self.trainer.fit_loop
        if stage != "fit" or not isinstance(loop, FederatedLoop):
            return
        trainer: Any = self.trainer
        check_single(trainer, "Remote clients are asked by a trainer of one process")
        if isinstance(loop.settings.aggregator, Asynchronous):
            raise FederatedError(
                f"asynchronous={type(loop.settings.aggregator).__name__}(...) has a simulated clock, and real clients"
                " take real time. Leave it unset."
            )
        if isinstance(loop.settings.aggregator, OptimalClientSampling):
            raise FederatedError(
                f"aggregator={loop.settings.aggregator!r} cannot be combined with {type(self).__name__}: it decides who"
                " sends an update once all norms are known, and a site replies once. Pass"
                " sampler=UpdateNormSampler(...), which uses the norms of earlier rounds."
            )
        if self._make_val is not None:
            loop.epoch_loop.val_loop._restarting = True  # skips Lightning's sanity check before there are words
        module = trainer.lightning_module
        if self._stated is None or self._stated[0] is not module:  # it is trained in a second fit
            self._stated = module, facts_of(trainer, module)

    def connect_clients(self) -> "RemoteWork":
        """Register all clients, and return the half of the round that reaches them."""
        trainer: Any = self.trainer
        run: RunState = trainer.fit_loop.run_state
        assert self._stated is not None
        words = self._known_words(trainer.fit_loop)
        versions = run.sites.get("versions") or {}
        if any(isinstance(version, int) for version in versions.values()):
            raise FederatedError(
                "The run was begun with an earlier version of lightning_fed, whose sites kept states under other names."
                " Continue with that version, or start a new run."
            )
        earlier = run.sites.get("numbers")  # a checkpoint of an earlier version has none
        run.sites = {"run": run.sites.get("run") or secrets.token_hex(8), "versions": versions, "numbers": earlier}
        self._sites = sites = Registrations(self.client_ids, self._max_examples, self._asked_batch_size, earlier)
        facts = {**self._stated[1], **optimizer_facts(trainer)}
        exchange = Exchange(self.transport, trainer, sites, run.sites["run"], facts)
        if self._agree_on:
            run.sites["words"] = words = words or exchange.agree(self._agree_on)
            if self._make_val is not None:
                self.val = self._make_val(words)
        exchange.register(words)
        run.sites["numbers"] = sites.numbers()
        sizes = [known.batch_size for known in sites.known.values() if known.batch_size]
        self.batch_size = min(sizes, default=1)
        return RemoteWork(trainer, exchange)

    def _known_words(self, loop: FederatedLoop) -> dict[str, list[str]]:
        """Return the words that the sites of a run have agreed on, empty before its first round."""
        words: dict[str, list[str]] = loop.run_state.sites.get("words", {})
        if loop.round == 0:
            return {}
        if sorted(words) != sorted(self._agree_on):
            raise FederatedError(
                f"The sites have agreed on the words of {sorted(words) or 'no columns'} when the run began, and the run"
                f" continues with agree_on={self._agree_on}. Pass the same columns, or start a new run."
            )
        return words

    def _known(self, client_id: ClientId) -> Registration:
        if self._sites is None or client_id not in self._sites.known:
            raise FederatedError(f"The size of client {client_id!r} is not known before it has registered, in a fit.")
        return self._sites.known[client_id]

    @property
    def known_sizes(self) -> list[int]:
        """Each client's number of examples, in the order of ``client_ids``."""
        return [self._known(client_id).size for client_id in self.client_ids]

    def client_size(self, client_id: ClientId) -> int:
        """Return a client's number of examples."""
        return self._known(client_id).size

    def batches_in_epoch(self, client_id: ClientId, size: int) -> int:
        """Return the batches in a local epoch of a client, as its site has registered them."""
        return self._known(client_id).batches

    def client_val_dataset(self, client_id: ClientId) -> Any:
        """Return an object with the length of a client's validation set, None if it has none."""
        size = self._known(client_id).val_size
        return range(size) if size else None

    def client_dataset(self, client_id: ClientId) -> NoReturn:
        """Refuse: the data is not here."""
        raise FederatedError(
            f"The data of client {client_id!r} are on its site. Callbacks and hooks that read clients' data on the"
            " server, such as a callback that measures gradients, work in a simulation only. Leave them out of"
            " callbacks."
        )


class RemoteWork(ClientHalf):
    """Ask clients on their sites for a round's work, all clients of a phase at once."""

    def __init__(self, trainer: Any, exchange: Exchange) -> None:
        self.trainer, self._exchange, self._sites = trainer, exchange, exchange.sites
        self._loop, self._settings = trainer.fit_loop, trainer.fit_loop.settings
        self._facts = changeable_facts(trainer)  # the sites' values
        self._fit = secrets.token_hex(4)  # sites store states by it: another server may continue the same run
        self._attempt = -1  # the number of earlier starts of the round
        self._measured_in, self._measured = -1, 0  # the round, and the measurements in it
        self._replied: dict[ClientId, tuple[ClientReport, int]] = {}  # and the examples that each processed

    @property
    def engine_names(self) -> list[str]:
        """A placeholder: no engine runs in this process."""
        return ["elsewhere"]

    def participants(
        self, drawn: Mapping[ClientId, int], round: int, failed: Callable[[ClientError], None] | None = None
    ) -> list[Participant]:
        """Return the drawn clients that have registered and have examples; see :meth:`ClientHalf.participants`."""
        members, self._attempt = [], -1
        for client_id, count in drawn.items():
            known = self._sites.known[client_id]
            try:
                steps = self._steps_of(client_id)
            except ClientError as error:
                if failed is None:
                    raise
                failed(error)
                continue
            if known.size:
                index = self._loop.population.index_of(client_id)
                members.append(Participant(client_id, index, known.size, count, steps))
        return members

    def _steps_of(self, client_id: ClientId) -> int:
        """Return the local steps of a client in a round; raise if it cannot take part."""
        if client_id in self._sites.unregistered:
            raise ClientError(f"Client {client_id!r} has not registered.", client_id)
        trainer, settings, batches = self.trainer, self._settings, self._sites.known[client_id].batches
        batches = limited(batches, trainer.limit_train_batches) * settings.algorithm.steps_per_batch
        steps: int = settings.steps(batches, trainer.accumulate_grad_batches)
        if steps > MOST_STEPS and settings.local_schedule == "total":
            raise ClientError(
                f"Client {client_id!r} has {steps:,} local steps in a round, and local_schedule='total' allows"
                f" {MOST_STEPS:,}: the schedules of all clients continue from there.",
                client_id,
            )
        return steps

    def _refuse_changes(self, round: int) -> None:
        for name, now in changeable_facts(self.trainer).items():
            if now != self._facts[name]:
                raise FederatedError(
                    f"A callback has changed {name} from {self._facts[name]} to {now} by round {round}, and sites keep"
                    " what they have started with. Leave it as it is, or let the method compute it from cohort.round in"
                    " begin_round: its server's state is sent to the sites."
                )

    def begin(self, round: int, members: Sequence[Participant], reads_later: bool = False) -> None:
        """Begin a round, or begin it again; reports arrive complete."""
        self._attempt += 1
        self._fit = secrets.token_hex(4)  # a late copy of an earlier start's task stores its state apart
        self._replied = {}

    def chunks(self, task: Task, clients: Sequence[int]) -> list[Sequence[int]]:
        """Return all clients as one chunk: they are asked at once."""
        return [clients] if clients else []

    def answer(self, task: Task, clients: Sequence[int], states: ClientStates) -> Iterator[Reply]:
        """Yield the replies as they arrive.

        Gradients of small models are grouped as in a simulation, so their sum has the same bits.
        """
        most = gradients_together(task.x) if task.phase == GRADIENTS else 1
        replies = self._ask(task, self._attempt)
        if most == 1:
            for reply in replies:
                yield reply
                for report, examples in zip(reply.reports, reply.examples, strict=True):
                    self._replied[report.client_id] = report, examples
            return
        waiting = {reply.clients[0]: reply for reply in replies}
        group: list[Reply] = []
        for own in (*map(waiting.get, clients), None):
            if group and (own is None or own.failed or len(group) == most):
                yield _joined(group)
                group = []
            if own is not None and own.failed:
                yield own
            elif own is not None:
                group.append(own)

    def _ask(self, task: Task, attempt: int, **measure: Any) -> Iterator[Reply]:
        """Yield the replies of a task's registered clients; ``measure`` describes a measurement."""
        self._refuse_changes(task.round)
        ids, versions = self._loop.population.ids, self._loop.run_state.sites["versions"]
        lora = self._loop.state.lora
        shared = shared_part(task, self._loop.state.moved_buffers, None if lora is None else lora.moved_weights)
        header = {
            **self._exchange.head(task.phase, task.round, attempt),
            "fit": self._fit,
            "mean_examples": None if task.mean_examples != task.mean_examples else task.mean_examples,
            "first_step": task.first_step,
            "rates": rates_of(self.trainer),
            "plateaus": [c.scheduler.state_dict() for c in self.trainer.lr_scheduler_configs if c.reduce_on_plateau],
            **measure,
        }
        tasks = {}
        for index in task.clients:
            if ids[index] in self._sites.unregistered:
                continue
            kept: State = {}
            if (task.phase == TRAIN or measure.get("own")) and index not in versions:
                kept = self._loop.state.clients.get(index) or {}
            held = prefixed("keep", {name: copied(value) for name, value in kept.items()})
            version, fit = versions.get(index, (0, "0" * 8))
            known = self._sites.known[ids[index]]
            own = {"client": ids[index], "steps": task.steps.get(index), "state": version, "of": fit}
            own |= {"size": known.size, "batches": known.batches}
            tasks[ids[index]] = Message({**header, **own}, {**shared, **held})

        algorithm, expected = self._settings.algorithm, Expected({}, frozenset(), False)
        if task.phase == TRAIN:
            expected = Expected.of(algorithm, self._loop.prepared.optimizer, task, self._loop.state.new_client())
            settings = self._settings
            if settings.compression or settings.attack or settings.is_private:  # their sites send modified changes
                expected = replace(expected, model=False)

        def read(message: Message) -> Reply:
            if message.header.get("unregistered") is True:  # its site has lost its folder
                self._sites.unregistered.add(message.client)
            index = self._loop.population.index_of(message.client)
            size = self._sites.known[message.client].size
            return reply_of(message, index, size, task, algorithm, expected, measure.get("what", ""))

        return self._exchange.ask(tasks, read)

    def measure_on_sites(  # type: ignore[override]
        self, what: str, steps: int, client_ids: Sequence[ClientId], own: bool
    ) -> dict[ClientId, dict[str, float]]:
        """Return the sites' measurements of the clients that answer; see :class:`ClientHalf`."""
        server: Server = self._loop.state
        if self._measured_in != server.round:
            self._measured_in, self._measured = server.round, 0
        self._measured += 1
        indices = tuple(map(self._loop.population.index_of, client_ids))
        x, state = (server.x, server.state) if own else (server.evaluation_x(), State())
        first_step = self._settings.first_step(server.round, server.longest_steps)
        task = Task(server.round, MEASURE, indices, {}, x, state, buffers=server.buffers, first_step=first_step)
        replies = self._ask(task, self._measured - 1, what=what, local_steps=steps, own=own)
        found = {report.client_id: dict(report.metrics) for reply in replies for report in reply.reports}
        return {client_id: found[client_id] for client_id in client_ids if client_id in found}

    def end_training(self) -> None:
        """Log the values that clients have logged, like the engine of a simulation during their work."""
        results = self._loop.epoch_loop._results
        for client_id in sorted(self._replied, key=self._loop.population.index_of):
            report, examples = self._replied[client_id]
            for name, value in report.metrics.items():
                flags = {"on_step": False, "on_epoch": True, "batch_size": examples}
                results.log("training_step", name, torch.tensor(value, dtype=torch.float64), **flags)

    def savepoint(self) -> Callable[[], None]:
        """Return a function that undoes all logging from here on."""
        undo: Callable[[], None] = self._loop.epoch_loop._results.savepoint()
        return undo

    def completed(self, report: RoundReport) -> None:
        """Record the states that the clients keep now, and let clients that registered late take part."""
        run = self._loop.run_state
        if self._settings.clients_keep_state:
            version = report.round + 1, self._fit
            versions = dict.fromkeys(map(self._loop.population.index_of, report.clients), version)
            run.sites = {**run.sites, "versions": {**run.sites["versions"], **versions}}
        if self._sites.accept_late():
            run.sites = {**run.sites, "numbers": self._sites.numbers()}
            run.load_population()

    def end(self) -> None:
        """Release the replies of the round."""
        self._replied = {}


def _joined(replies: Sequence[Reply]) -> Reply:
    """Return the gradients of one or several clients as one reply."""
    first = replies[0]
    points = {point for reply in replies for point in reply.norms}
    return replace(
        first,
        clients=[reply.clients[0] for reply in replies],
        send={name: torch.cat([reply.send[name] for reply in replies]) for name in first.send},
        norms={point: {i: n for reply in replies for i, n in reply.norms.get(point, {}).items()} for point in points},
        server_read=frozenset().union(*(reply.server_read for reply in replies)),
        cohort_grad_read=frozenset().union(*(reply.cohort_grad_read for reply in replies)),
    )
