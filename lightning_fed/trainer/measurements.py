"""What callbacks may ask of a run, without leaving a trace in it, and log of it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from lightning_fed.core.arguments import check_count, check_one_of
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.seeds import Purpose, derive_seed, generator, preserved_random_state, seed_global
from lightning_fed.core.types import ClientId, State, Vector
from lightning_fed.data.batches.batches import ClientBatches
from lightning_fed.engines.base import Engine
from lightning_fed.rounds.client_work import ClientWork
from lightning_fed.rounds.round import Rounds
from lightning_fed.rounds.server_round import ServerRound
from lightning_fed.server.aggregation.privacy import DifferentialPrivacy
from lightning_fed.server.asynchronous.base import Asynchronous
from lightning_fed.server.client_states.state import ClientStates
from lightning_fed.server.participation import Population
from lightning_fed.server.server import Server
from lightning_fed.settings.settings import Settings
from lightning_fed.strategies.processes import Ranks
from lightning_fed.trainer.client_evaluation import ClientEvaluation, mean_loss, own_model
from lightning_fed.trainer.server_model import ShownModel

__all__ = ["Inspection"]


class Inspection(ShownModel):
    """The side of :class:`lightning_fed.FederatedLoop` that callbacks look at: ``trainer.fit_loop.full_gradient(...)``.

    What is measured leaves no trace, and is a function of (seed, round, client).
    """

    settings: Settings
    population: Population | None = None
    _restored: dict[str, Any] | None = None  # a checkpoint's state, until a fit uses it
    rounds_elsewhere = 0  # done in processes that a launcher started, and that have ended
    clients: ClientWork | None = None
    ask_sites: Callable[[str, int, Sequence[ClientId], bool], dict[ClientId, dict[str, float]]] | None = None
    """Where clients are on sites of their own, what measures them there: given what, local steps, whom and whether with
    their own models."""
    _rounds: Rounds | None = None
    _ranks = Ranks()  # that share the clients

    @property
    def round(self) -> int:
        """The number of completed rounds."""
        if self._restored is not None:
            return int(self._restored["round"])
        if self._state is None:
            return self.rounds_elsewhere if self.prepared is None else self.prepared.round
        return self._state.round

    @property
    def epsilon(self) -> float | None:
        """The privacy spent in the completed rounds, None without differential privacy."""
        aggregator = self.settings.aggregator
        return aggregator.epsilon(self.round) if isinstance(aggregator, DifferentialPrivacy) else None

    @property
    def is_asynchronous(self) -> bool:
        """Whether the server steps when some answers have arrived, by a simulated clock."""
        return isinstance(self.settings.aggregator, Asynchronous)

    @property
    def arrived(self) -> float:
        """The simulated seconds at which the answers had arrived of which the last step is made.

        Raises:
            FederatedError: In a synchronous run.
        """
        run = self.settings.aggregator
        if not isinstance(run, Asynchronous):
            raise FederatedError("fit_loop.arrived is of asynchronous runs: pass asynchronous=FedBuff(...).")
        return run.between().time

    @property
    def state(self) -> Server:
        """The server's side of the run.

        Raises:
            FederatedError: Before the first fit, and after one that resumed a finished run and had nothing to do, or
                that ran in processes which have ended.
        """
        if self._state is None:
            self.check_is_here("The server state")
            raise FederatedError(
                "There is no server state before trainer.fit(), nor after a fit that had nothing to do since all"
                " rounds of its checkpoint were done."
            )
        return self._state

    def check_is_here(self, what: str) -> None:
        """Refuse to hand out what has ended with the processes that held it.

        Raises:
            FederatedError: Naming it, and where it is to be had.
        """
        if self.rounds_elsewhere:
            raise FederatedError(
                f"{what} after round {self.rounds_elsewhere - 1} has ended with the processes that the trainer started."
                " Read or save it in a callback, such as ModelCheckpoint, or resume from a checkpoint."
            )

    @property
    def server(self) -> State:
        """The method's server state after the last completed round, by name."""
        return self.state.state

    @property
    def _at_work(self) -> ServerRound | None:
        """The server's half of the round at work."""
        return None if self._rounds is None else self._rounds.at_work

    @property
    def _engine(self) -> Engine:
        if self.clients is None:
            raise FederatedError("Clients can be measured once this trainer has begun a fit; a copy has not.")
        return self.clients.engine

    @property
    def round_state(self) -> State:
        """The server state that clients read in the current round; outside of one, :attr:`server`."""
        return self.server if self._at_work is None else self._at_work.state

    def full_gradient(self, client_id: ClientId, point: Vector) -> Vector:
        """Return the full-batch gradient [P] of a client's training loss at a point [P], for callbacks that measure.

        It leaves no trace, and is a function of (seed, round, client) like every other gradient.

        Raises:
            FederatedError: If there is no such client, or the point is no vector of the model's size.
        """
        batches, index = self._client(client_id)
        self._check_vectors("full_gradient", point=point)
        with self._leaving_the_module(), preserved_random_state(point.device):
            return self._engine.gradient_at(point, batches, self.round, index)

    def training_loss(self, client_id: ClientId) -> float:
        """Return :meth:`training_losses` of one client.

        Raises:
            FederatedError: If it has no examples, or is on a site that does not answer.
        """
        losses = self.training_losses([client_id])
        if client_id not in losses:
            raise FederatedError(f"The site of client {client_id!r} has not answered, and its loss is unknown.")
        return losses[client_id]

    def hessian_vector(self, client_id: ClientId, point: Vector, vector: Vector) -> Vector:
        """Return the full-batch Hessian of a client's training loss at a point [P], times a vector [P].

        The Hessian is that of :meth:`full_gradient`, with the same dropout masks for every vector.

        Raises:
            FederatedError: If the model has an operation that cannot be differentiated twice, or point or vector are
                not of the model's size.
        """
        batches, index = self._client(client_id)
        self._check_vectors("hessian_vector", point=point, vector=vector)
        with self._leaving_the_module(), preserved_random_state(point.device):
            return self._engine.hessian_vector_at(point, vector, batches, self.round, index)

    def batch_gradients(self, client_id: ClientId, point: Vector, most: int) -> Iterator[Vector]:
        """Yield the gradients [P] at a point [P] of the first batches of a client's local epoch, at most so many.

        They leave no trace, and are a function of (seed, round, client); no fit trains on batches in this order.

        Raises:
            FederatedError: If there is no such client, or the point is no vector of the model's size.
        """
        batches, index = self._client(client_id)
        self._check_vectors("batch_gradients", point=point)
        engine, place = self._engine, (Purpose.MEASUREMENT, self.round, index)
        for number, (batch, size) in enumerate(islice(batches.epoch(generator(engine.seed, *place)), most)):
            with self._leaving_the_module(), preserved_random_state(point.device):
                seed_global(derive_seed(derive_seed(engine.seed, *place), Purpose.TRAINING, number), point.device)
                gradient = engine.gradients.full(point, [(batch, size)], size, engine.optimizer.decay)
            yield gradient

    def evaluate_client(
        self, client_id: ClientId, on: str = "val", steps: int = 0, own: bool = False
    ) -> dict[str, float]:
        """Return what ``validation_step`` logs of the server model on one client's own examples, by name.

        It leaves no trace, and is a function of (seed, round, client).

        Args:
            client_id: The client.
            on: "val" for the client's own validation set, "train" for its training set.
            steps: Local steps of fine-tuning on the client's training set, with the user's optimizer, before that.
            own: Whether to evaluate the client's own model instead; of a client that this process keeps.

        Raises:
            FederatedError: If the client has no validation set, or ``validation_step`` logs nothing.
        """
        assert self.population is not None
        index = self.population.index_of(client_id)
        check_one_of("evaluate_client", "on", on, ("val", "train"))
        steps = check_count("evaluate_client", "steps", steps, least=0)
        state = self.state
        x, buffers = self._own_model(index) if own else (torch.cat([state.shown(), state.personal]), state.buffers)
        with self._leaving_the_module():
            return ClientEvaluation(self._engine).of_client(x, buffers, client_id, index, on, steps, self.round)

    def evaluate_clients(
        self, client_ids: Sequence[ClientId], on: str = "val", steps: int = 0, own: bool = False
    ) -> dict[ClientId, dict[str, float]]:
        """Return :meth:`evaluate_client` of several clients, by client; those on sites of their own are asked at once.

        Of clients on sites, such that do not answer and are not to be waited for are left out.
        """
        if self.ask_sites is not None:
            return self.ask_sites(on, steps, client_ids, own)
        if not own:
            return {client_id: self.evaluate_client(client_id, on, steps) for client_id in client_ids}
        assert self.population is not None
        here = [i for i in client_ids if self._ranks.owns(self.population.index_of(i))]
        parts = self._ranks.gather({i: self.evaluate_client(i, on, steps, own=True) for i in here})
        found = {client_id: logged for part in parts for client_id, logged in part.items()}
        return {client_id: found[client_id] for client_id in client_ids}

    def training_losses(self, client_ids: Sequence[ClientId]) -> dict[ClientId, float]:
        """Return the mean training loss f_i of clients at the server model, in eval mode and without augmentation.

        It leaves no trace, and is a function of (seed, round, client). Clients on sites: see :meth:`evaluate_clients`.

        Raises:
            FederatedError: If a client has no examples.
        """
        if self.ask_sites is not None:
            asked = self.ask_sites("loss", 0, client_ids, False)
            return {client_id: found["loss"] for client_id, found in asked.items()}
        engine, losses = self._engine, {}
        with self.showing_server_model(), engine.losses_at(self.state.shown(), self.round) as loss_of:
            for client_id in client_ids:
                batches, index = self._client(client_id)
                total = sum(engine.split.gather(loss_of(batches, index)))
                losses[client_id] = mean_loss(client_id, total, batches.size)
        return losses

    def _check_vectors(self, owner: str, **vectors: Any) -> None:
        size = self.state.x.numel()
        for name, vector in vectors.items():
            if not isinstance(vector, Tensor) or vector.shape != (size,) or not vector.is_floating_point():
                found = f"shape {list(vector.shape)}" if isinstance(vector, Tensor) else type(vector).__name__
                raise FederatedError(f"{owner}({name}=...): {name} must be a vector of {size:,} floats, found {found}.")

    def log_round(self, values: dict[str, float]) -> None:
        """Write a round's values to the loggers, and let callbacks monitor them."""
        connector = self.trainer._logger_connector
        connector._callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})
        connector.log_metrics({name: torch.tensor(value) for name, value in values.items()}, step=self.round)

    def gather(self, record: Any) -> list[Any]:
        """Return the record of every process, in the order of ranks, for callbacks that measure; all must call it."""
        return self._ranks.gather(record)

    def client_state(self, client_id: ClientId) -> State | None:
        """Return what a client keeps after the last completed round; None where another process holds it."""
        assert self.population is not None
        index = self.population.index_of(client_id)
        return self.state.client_state(index) if self._ranks.owns(index) else None

    def _client(self, client_id: ClientId) -> tuple[ClientBatches, int]:
        assert self.population is not None
        return self.trainer.datamodule.client_batches(client_id), self.population.index_of(client_id)

    @property
    def local_steps(self) -> int:
        """The optimizer steps that the client at work has taken so far in this round."""
        work = self._engine.optimizer.work
        return 0 if work is None else work.num_steps

    @property
    def client_model(self) -> tuple[Vector, State] | None:
        """The parameters [P] and buffers of the client whose hooks are called, if training."""
        prepared = self.prepared
        return None if prepared is None else (self._engine.parameters_at_work.clone(), prepared.buffers.read())

    def _own_model(self, index: int) -> tuple[Vector, State]:
        """Return the parameters [P + Q] and buffers of a client's own model, by stored index."""
        state = self.state
        (kept,) = ClientStates(state.new_client, state.clients, state.expected_state).of_each([index])
        return own_model(state.algorithm, state.x, state.state, kept), {**state.buffers, **kept.buffers}

    @contextmanager
    def showing_client_model(self, client_id: ClientId) -> Iterator[None]:
        """Let the module hold a client's own model inside, and afterwards what it held before; between rounds of a fit.

        It is the one to save or to use for this client, where clients have models of their own; else the server's.

        Raises:
            FederatedError: If no fit is running, or another process, or a site, keeps what the client has.
        """
        if self.prepared is None or self.population is None:
            raise FederatedError(
                "showing_client_model works while a fit is running: use it in a callback's on_round_end."
            )
        index = self.population.index_of(client_id)
        if self.ask_sites is not None or not self._ranks.owns(index):
            raise FederatedError(f"What client {client_id!r} keeps, its own model included, is not in this process.")
        with self._leaving_the_module():
            x, buffers = self._own_model(index)
            self.prepared.flat.restore()
            self.prepared.flat.whole.copy_(x)
            self.prepared.buffers.write(buffers)
            yield
