"""What callbacks may measure of clients during a run, without leaving a trace in it."""

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
from lightning_fed.server.client_states.state import ClientStates
from lightning_fed.server.participation import Population
from lightning_fed.trainer.evaluation import ClientEvaluation, mean_loss, own_model
from lightning_fed.trainer.run_state import RunState


class Measurements:
    """The part of :class:`lightning_fed.FederatedLoop` that measures gradients, losses and metrics of single clients.

    A measurement leaves no trace, and is a function of (seed, round, client).
    """

    run_state: RunState

    def full_gradient(self, client_id: ClientId, point: Vector) -> Vector:
        """Return the full-batch gradient [P] of a client's training loss at a point [P].

        Raises:
            FederatedError: If there is no such client, or the point is not a vector of the model's size.
        """
        batches, index = self._client(client_id)
        self._check_vectors("full_gradient", point=point)
        with self.run_state.preserving_module(), preserved_random_state(point.device):
            return self.run_state.engine.gradient_at(point, batches, self.run_state.round, index)

    def hessian_vector(self, client_id: ClientId, point: Vector, vector: Vector) -> Vector:
        """Return the full-batch Hessian of a client's training loss at a point [P], times a vector [P].

        The Hessian is that of :meth:`full_gradient`, with the same dropout masks for every vector.

        Raises:
            FederatedError: If the model has an operation that cannot be differentiated twice, or point or vector are
                not of the model's size.
        """
        batches, index = self._client(client_id)
        self._check_vectors("hessian_vector", point=point, vector=vector)
        with self.run_state.preserving_module(), preserved_random_state(point.device):
            return self.run_state.engine.hessian_vector_at(point, vector, batches, self.run_state.round, index)

    def batch_gradients(self, client_id: ClientId, point: Vector, most: int) -> Iterator[Vector]:
        """Yield the gradients [P] at a point [P] of the first ``most`` batches of a client's local epoch.

        They leave no trace, and are a function of (seed, round, client); no fit trains on batches in this order.

        Raises:
            FederatedError: If there is no such client, or the point is not a vector of the model's size.
        """
        batches, index = self._client(client_id)
        self._check_vectors("batch_gradients", point=point)
        engine, key = self.run_state.engine, (Purpose.MEASUREMENT, self.run_state.round, index)
        for number, (batch, size) in enumerate(islice(batches.epoch(generator(engine.seed, *key)), most)):
            with self.run_state.preserving_module(), preserved_random_state(point.device):
                seed_global(derive_seed(derive_seed(engine.seed, *key), Purpose.TRAINING, number), point.device)
                gradient = engine.gradients.full(point, [(batch, size)], size, engine.optimizer.decay)
            yield gradient

    def training_loss(self, client_id: ClientId) -> float:
        """Return :meth:`training_losses` of one client.

        Raises:
            FederatedError: If it has no examples, or is on a site that does not answer.
        """
        losses = self.training_losses([client_id])
        if client_id not in losses:
            raise FederatedError(f"The site of client {client_id!r} has not answered, and its loss is unknown.")
        return losses[client_id]

    def training_losses(self, client_ids: Sequence[ClientId]) -> dict[ClientId, float]:
        """Return the mean training loss f_i of clients at the server model, in eval mode and without augmentation.

        Clients on sites: see :meth:`evaluate_clients`.

        Raises:
            FederatedError: If a client has no examples.
        """
        if (ask_sites := self._ask_sites) is not None:
            return {client_id: found["loss"] for client_id, found in ask_sites("loss", 0, client_ids, False).items()}
        engine, losses = self.run_state.engine, {}
        with (
            self.run_state.showing_server_model(),
            engine.losses_at(self.run_state.server.evaluation_x(), self.run_state.round) as loss_of,
        ):
            for client_id in client_ids:
                batches, index = self._client(client_id)
                total = sum(engine.split.gather(loss_of(batches, index)))
                losses[client_id] = mean_loss(client_id, total, batches.size)
        return losses

    def evaluate_client(
        self, client_id: ClientId, on: str = "val", steps: int = 0, own: bool = False
    ) -> dict[str, float]:
        """Return what ``validation_step`` logs of the server model on one client's own examples, by name.

        Args:
            client_id: The client.
            on: "val" for the client's own validation set, "train" for its training set.
            steps: Local steps of fine-tuning on the client's training set, with the user's optimizer, before that.
            own: Whether to evaluate the client's own model instead; of a client that this process keeps.

        Raises:
            FederatedError: If the client has no validation set, or ``validation_step`` logs nothing.
        """
        index = self._population.index_of(client_id)
        check_one_of("evaluate_client", "on", on, ("val", "train"))
        steps = check_count("evaluate_client", "steps", steps, least=0)
        server = self.run_state.server
        x, buffers = (
            self._own_model(index) if own else (torch.cat([server.evaluation_x(), server.personal]), server.buffers)
        )
        with self.run_state.preserving_module():
            evaluation = ClientEvaluation(self.run_state.engine)
            return evaluation.of_client(x, buffers, client_id, index, on, steps, self.run_state.round)

    def evaluate_clients(
        self, client_ids: Sequence[ClientId], on: str = "val", steps: int = 0, own: bool = False
    ) -> dict[ClientId, dict[str, float]]:
        """Return :meth:`evaluate_client` of several clients, by client; remote clients are asked at once.

        Clients on sites that do not answer are left out.
        """
        if (ask_sites := self._ask_sites) is not None:
            return ask_sites(on, steps, client_ids, own)
        if not own:
            return {client_id: self.evaluate_client(client_id, on, steps, own) for client_id in client_ids}
        ranks = self.run_state.ranks
        here = [i for i in client_ids if ranks.owns(self._population.index_of(i))]
        parts = ranks.gather({i: self.evaluate_client(i, on, steps, own) for i in here})
        found = {client_id: logged for part in parts for client_id, logged in part.items()}
        return {client_id: found[client_id] for client_id in client_ids}

    @contextmanager
    def showing_client_model(self, client_id: ClientId) -> Iterator[None]:
        """Let the module hold a client's personal model inside, and then restore it; between rounds of a fit.

        This is the model to save or to use for this client. It is the server's if clients have no personal models.

        Raises:
            FederatedError: If no fit is running, or if another process or a site has the client's state.
        """
        prepared = self.run_state.prepared
        if prepared is None or self.run_state.population is None:
            raise FederatedError(
                "showing_client_model works while a fit is running: use it in a callback's on_round_end."
            )
        index = self._population.index_of(client_id)
        if self._ask_sites is not None or not self.run_state.ranks.owns(index):
            raise FederatedError(f"The state of client {client_id!r}, with its own model, is kept by another process.")
        with self.run_state.preserving_module():
            x, buffers = self._own_model(index)
            prepared.flat.restore()
            prepared.flat.whole.copy_(x)
            prepared.buffers.write(buffers)
            yield

    @property
    def _ask_sites(self) -> Callable[[str, int, Sequence[ClientId], bool], dict[ClientId, dict[str, float]]] | None:
        """The measurements of clients on remote sites; None if they are here."""
        return None if self.run_state.clients is None else self.run_state.clients.measure_on_sites

    @property
    def _population(self) -> Population:
        assert self.run_state.population is not None
        return self.run_state.population

    def _client(self, client_id: ClientId) -> tuple[ClientBatches, int]:
        return self.run_state.trainer.datamodule.client_batches(client_id), self._population.index_of(client_id)

    def _own_model(self, index: int) -> tuple[Vector, State]:
        """Return the parameters [P + Q] and buffers of a client's own model, by stored index."""
        server = self.run_state.server
        (kept,) = ClientStates(server.new_client, server.clients, server.expected_state).of_each([index])
        return own_model(server.algorithm, server.x, server.state, kept), {**server.buffers, **kept.buffers}

    def _check_vectors(self, owner: str, **vectors: Any) -> None:
        size = self.run_state.server.x.numel()
        for name, vector in vectors.items():
            if not isinstance(vector, Tensor) or vector.shape != (size,) or not vector.is_floating_point():
                found = f"shape {list(vector.shape)}" if isinstance(vector, Tensor) else type(vector).__name__
                raise FederatedError(f"{owner}({name}=...): {name} must be a vector of {size:,} floats, found {found}.")
