"""Measurements of clients for callbacks during a run, without a trace in it."""

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
from lightning_fed.engines.client_errors import NamesClient
from lightning_fed.server.client_states.state import ClientStates
from lightning_fed.server.participation import Population
from lightning_fed.trainer.evaluation import ClientEvaluation, mean_loss, own_model
from lightning_fed.trainer.run_state import RunState


class Measurements:
    """Measures gradients, losses and metrics of single clients; :class:`lightning_fed.FederatedLoop` exposes it.

    A measurement leaves no trace, and is a function of (seed, round, client). The loop's methods of the same names
    document the arguments.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run

    def full_gradient(self, client_id: ClientId, point: Vector) -> Vector:
        """Return the full-batch gradient [P] of a client's training loss at a point [P]."""
        self._check_vectors("full_gradient", point=point)
        with self._naming(client_id), self._run.preserving_module(), preserved_random_state(point.device):
            batches, index = self._client(client_id)
            return self._run.engine.gradient_at(point, batches, self._run.round, index)

    def hessian_vector(self, client_id: ClientId, point: Vector, vector: Vector) -> Vector:
        """Return the full-batch Hessian of a client's training loss at a point [P], times a vector [P]."""
        self._check_vectors("hessian_vector", point=point, vector=vector)
        with self._naming(client_id), self._run.preserving_module(), preserved_random_state(point.device):
            batches, index = self._client(client_id)
            return self._run.engine.hessian_vector_at(point, vector, batches, self._run.round, index)

    def batch_gradients(self, client_id: ClientId, point: Vector, most: int) -> Iterator[Vector]:
        """Yield the gradients [P] at a point [P] of the first ``most`` batches of a client's local epoch."""
        self._check_vectors("batch_gradients", point=point)
        with self._naming(client_id):
            batches, index = self._client(client_id)
            engine, key = self._run.engine, (Purpose.MEASUREMENT, self._run.round, index)
            for number, (batch, size) in enumerate(islice(batches.epoch(generator(engine.seed, *key)), most)):
                with self._run.preserving_module(), preserved_random_state(point.device):
                    seed_global(derive_seed(derive_seed(engine.seed, *key), Purpose.TRAINING, number), point.device)
                    gradient = engine.gradients.full(point, [(batch, size)], size, engine.optimizer.decay)
                yield gradient

    def training_losses(self, client_ids: Sequence[ClientId]) -> dict[ClientId, float]:
        """Return the mean training loss f_i of clients at the server's model."""
        if (ask_sites := self._ask_sites) is not None:
            return {client_id: found["loss"] for client_id, found in ask_sites("loss", 0, client_ids, False).items()}
        engine, losses = self._run.engine, {}
        with (
            self._run.showing_server_model(),
            engine.losses_at(self._run.server.evaluation_x(), self._run.round) as loss_of,
        ):
            for client_id in client_ids:
                with self._naming(client_id, "its training loss"):
                    batches, index = self._client(client_id)
                    total = sum(engine.split.gather(loss_of(batches, index)))
                    losses[client_id] = mean_loss(client_id, total, batches.size)
        return losses

    def evaluate_client(self, client_id: ClientId, on: str, steps: int, own: bool) -> dict[str, float]:
        """Return the values that ``validation_step`` logs on one client's own examples."""
        index = self._population.index_of(client_id)
        check_one_of("evaluate_client", "on", on, ("val", "train"))
        steps = check_count("evaluate_client", "steps", steps, least=0)
        server = self._run.server
        x, buffers = (
            self._own_model(index) if own else (torch.cat([server.evaluation_x(), server.personal]), server.buffers)
        )
        with self._naming(client_id), self._run.preserving_module():
            evaluation = ClientEvaluation(self._run.engine)
            return evaluation.of_client(x, buffers, client_id, index, on, steps, self._run.round)

    def evaluate_clients(
        self, client_ids: Sequence[ClientId], on: str, steps: int, own: bool
    ) -> dict[ClientId, dict[str, float]]:
        """Return :meth:`evaluate_client` of several clients, by client."""
        if (ask_sites := self._ask_sites) is not None:
            return ask_sites(on, steps, client_ids, own)
        if not own:
            return {client_id: self.evaluate_client(client_id, on, steps, own) for client_id in client_ids}
        ranks = self._run.ranks
        here = [i for i in client_ids if ranks.owns(self._population.index_of(i))]
        parts = ranks.gather({i: self.evaluate_client(i, on, steps, own) for i in here})
        found = {client_id: logged for part in parts for client_id, logged in part.items()}
        return {client_id: found[client_id] for client_id in client_ids}

    @contextmanager
    def showing_client_model(self, client_id: ClientId) -> Iterator[None]:
        """Load a client's own model into the module, and restore the module on exit."""
        prepared = self._run.prepared
        if prepared is None or self._run.population is None:
            raise FederatedError(
                "showing_client_model works while a fit is running: use it in a callback's on_round_end."
            )
        index = self._population.index_of(client_id)
        if self._ask_sites is not None or not self._run.ranks.owns(index):
            raise FederatedError(f"The state of client {client_id!r}, with its own model, is kept by another process.")
        with self._run.preserving_module():
            x, buffers = self._own_model(index)
            prepared.flat.bind()
            prepared.flat.whole.copy_(x)
            prepared.buffers.write(buffers)
            yield

    @property
    def _ask_sites(self) -> Callable[[str, int, Sequence[ClientId], bool], dict[ClientId, dict[str, float]]] | None:
        """The function that measures clients on remote sites; None for local clients."""
        return None if self._run.clients is None else self._run.clients.measure_on_sites

    @property
    def _population(self) -> Population:
        assert self._run.population is not None
        return self._run.population

    @contextmanager
    def _naming(self, client_id: ClientId, what: str = "its measure") -> Iterator[None]:
        """Add the client and the round to any error inside, except for a ``FederatedError``, which is complete."""
        try:
            yield
        except FederatedError:
            raise
        except Exception:
            with NamesClient(client_id, self._run.round, what, lambda: None):
                raise

    def _client(self, client_id: ClientId) -> tuple[ClientBatches, int]:
        return self._run.trainer.datamodule.client_batches(client_id), self._population.index_of(client_id)

    def _own_model(self, index: int) -> tuple[Vector, State]:
        """Return the parameters [P + Q] and buffers of a client's own model, by stored index."""
        server = self._run.server
        (kept,) = ClientStates(server.new_client, server.clients, server.expected_state).of_each([index])
        return own_model(server.algorithm, server.x, server.state, kept), {**server.buffers, **kept.buffers}

    def _check_vectors(self, owner: str, **vectors: Any) -> None:
        size = self._run.server.x.numel()
        for name, vector in vectors.items():
            if not isinstance(vector, Tensor) or vector.shape != (size,) or not vector.is_floating_point():
                found = f"shape {list(vector.shape)}" if isinstance(vector, Tensor) else type(vector).__name__
                raise FederatedError(f"{owner}({name}=...): {name} must be a vector of {size:,} floats, found {found}.")
