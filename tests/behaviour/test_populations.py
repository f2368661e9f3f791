"""Clients built on demand: a run visits only the clients that take part, however large the population."""

import tracemalloc
import weakref
from collections import Counter

import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_fed import FederatedCallback, FederatedDataModule, algorithms
from tests.helpers.selection import few
from tests.helpers.training import CLASSES, FEATURES, Trajectory, parameters, same, seeded, trainer


class OnDemand(FederatedDataModule):
    """Records the clients that a run asks for."""

    def __init__(self, num_clients):
        super().__init__(batch_size=4)
        self.num_clients = num_clients
        self.visited = set()
        self.built = Counter()

    def client_dataset(self, client_id):
        self.visited.add(client_id)
        self.built[client_id] += 1
        stream = torch.Generator().manual_seed(client_id)
        return TensorDataset(torch.randn(8, FEATURES, generator=stream), torch.arange(8) % CLASSES)

    def client_size(self, client_id):
        self.visited.add(client_id)
        return 8


def run(num_clients, algorithm, **kwargs):
    """Return the data module, the trajectory, the trainer and the peak of Python's allocations in bytes."""
    path, data = Trajectory(), OnDemand(num_clients)
    federated = trainer(algorithm=algorithm, clients_per_round=5, callbacks=path, **kwargs)
    tracemalloc.start()
    try:
        federated.fit(seeded(), data)
        return data, path, federated, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("method", few(["FedAvg", "Scaffold", "Mime", "FedDyn"], ["Scaffold", "Mime"]))
def test_only_cohort_clients_are_visited_and_kept(method):
    options = {"alpha": 0.1} if method == "FedDyn" else {}
    algorithm = getattr(algorithms, method)(**options)
    data, path, federated, _ = run(10**6, algorithm, max_rounds=2)
    cohorts = {client for cohort in path.cohorts for client in cohort}
    assert len(cohorts) == 10
    assert data.visited == cohorts
    assert set(federated.fit_loop.state.clients.state_dict()) <= cohorts


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_client_in_both_cohorts_is_built_once_per_round(engine):
    def gradients(seed, round):
        return [4, 5, 6, 7]

    algorithm, data = algorithms.FedDane(mu=0.1), OnDemand(1000)
    run = trainer(algorithm=algorithm, engine=engine, sampler=lambda seed, round: [3, 4, 5], gradient_sampler=gradients)
    run.fit(seeded(), data)
    tried = {0: 1} if engine == "vectorized" else {}  # the trial step builds client 0
    assert data.built == {3: 3, 4: 3, 5: 3, 6: 3, 7: 3, **tried}


def test_client_data_is_released_after_each_round():
    class Held(OnDemand):
        def __init__(self):
            super().__init__(1000)
            self.made = []

        def client_dataset(self, client_id):
            dataset = super().client_dataset(client_id)
            self.made.append(weakref.ref(dataset.tensors[0]))
            return dataset

    class Count(FederatedCallback):
        def on_train_epoch_start(self, trainer, pl_module):
            counts.append(sum(ref() is not None for ref in trainer.datamodule.made))

    counts = []
    run = trainer(algorithm=algorithms.FedDane(mu=0.1), engine="sequential", clients_per_round=8, callbacks=Count())
    run.fit(seeded(), Held())
    assert max(counts) <= 1, counts


def test_empty_clients_do_not_affect_inverse_size_scaling():
    """FedDyn's local work is the same for listed clients, with empty ones known, and for clients built on demand."""

    class Some(OnDemand):
        def client_dataset(self, client_id):
            whole = super().client_dataset(client_id)
            return TensorDataset(*(tensor[: self.client_size(client_id)] for tensor in whole.tensors))

        def client_size(self, client_id):
            return (0, 8, 4, 0)[client_id]

    def ends(data):
        path, algorithm = Trajectory(), algorithms.FedDyn(alpha=0.1, alpha_scaling="inverse_size")
        trainer(
            algorithm=algorithm, sampler=lambda seed, round: [1, 2], max_rounds=1, callbacks=path, local_steps=3
        ).fit(seeded(), data)
        return path.ends

    some = Some(4)
    listed = FederatedDataModule(clients=[some.client_dataset(i) for i in range(4)], batch_size=4)
    assert same(ends(some), ends(listed))


@pytest.mark.thorough
def test_memory_does_not_grow_with_the_population():
    run(10**3, algorithms.Scaffold(), max_rounds=1)  # makes the allocations that happen only once
    small, large = (run(n, algorithms.Scaffold(), max_rounds=2)[3] for n in (10**3, 10**6))
    assert large - small < 500_000  # half a byte per client


@pytest.mark.thorough
def test_checkpoint_does_not_grow_with_the_population(tmp_path):
    sizes = []
    for num_clients in (10**3, 10**6):
        federated = run(num_clients, algorithms.Scaffold(), max_rounds=1)[2]
        federated.save_checkpoint(tmp_path / "last.ckpt")
        sizes.append((tmp_path / "last.ckpt").stat().st_size)
    assert sizes[1] < sizes[0] + 1000
    resumed = trainer(algorithm=algorithms.Scaffold(), clients_per_round=5, max_rounds=2)
    resumed.fit(model := seeded(), OnDemand(10**6), ckpt_path=tmp_path / "last.ckpt")
    straight = run(10**6, algorithms.Scaffold(), max_rounds=2)[1]
    assert torch.equal(parameters(model), straight.models[-1])
