"""The population: ids, stored indices, sizes, empty clients, and clients that have taken part."""

import inspect
import io
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed.algorithms import FedAvg
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.flat import Layout
from lightning_fed.server.participation import Participation, Population
from lightning_fed.server.sampling import BernoulliSampler, RoundRobinSampler, UniformSampler
from lightning_fed.server.server import Server, plain_sgd

SIZES: dict[Any, int] = {"a": 4, 7: 0, "c": 6, "d": 2}


class Asked:
    """Returns sizes, and records the ids that were asked for."""

    def __init__(self, sizes: dict[Any, int]) -> None:
        self.sizes, self.ids = sizes, []

    def __call__(self, client_id: Any) -> int:
        self.ids.append(client_id)
        return self.sizes[client_id]


def known() -> tuple[Population, Asked]:
    asked = Asked(SIZES)
    return Population(list(SIZES), asked, list(SIZES.values())), asked


def on_demand() -> tuple[Population, Asked]:
    asked = Asked(SIZES)
    return Population(list(SIZES), asked), asked


def test_population_is_a_sequence_of_non_empty_clients() -> None:
    population, asked = known()
    assert isinstance(population, Sequence)
    assert list(population) == ["a", "c", "d"]
    assert len(population) == 3
    assert population[1] == "c"
    assert population[1:] == ["c", "d"]
    assert population[-1] == "d"
    assert 7 not in population
    assert population.empty == [7]
    assert asked.ids == []


def test_unreadable_client_size_raises_an_error_naming_the_client() -> None:
    def size_of(client_id: Any) -> int:
        raise OSError("the disk is gone")

    population = Population(["a", "b"], size_of)
    for read in (lambda: population.size("a"), lambda: population.sizes):
        with pytest.raises(
            ClientError, match="Client 'a' failed when its number .* was read: OSError: the disk is gone"
        ) as caught:
            read()
        assert caught.value.culprit == "a"


def test_stored_indices_include_empty_clients() -> None:
    population, _ = known()
    assert [population.index_of(i) for i in ("a", 7, "c", "d")] == [0, 1, 2, 3]


@pytest.mark.parametrize("unknown", ["7", 0, "b", None, 2.0])
def test_unknown_client_is_rejected(unknown: Any) -> None:
    population, _ = known()
    with pytest.raises(
        FederatedError, match=rf"There is no client {unknown!r}\. .* data module's 4 clients, such as 'a'"
    ):
        population.index_of(unknown)
    with pytest.raises(FederatedError, match="There is no client"):
        population.size(unknown)


@pytest.mark.parametrize("unknown", [-1, 5, "0", 1.0, True, None])
def test_unknown_client_is_rejected_with_a_range_of_ids(unknown: Any) -> None:
    population = Population(range(5), lambda i: 1)
    assert population.index_of(4) == 4
    with pytest.raises(FederatedError, match=f"There is no client {unknown!r}.*5 clients, such as 0"):
        population.index_of(unknown)
    for listed in (Population([1, 0], lambda i: 1), Population([1, 0], lambda i: 1, [3, 4])):
        with pytest.raises(FederatedError, match=f"There is no client {unknown!r}"):
            listed.size(unknown)


def test_known_sizes() -> None:
    population, asked = known()
    assert population.sizes_are_known
    assert population.sizes == [4, 6, 2]
    assert population.size("c") == 6
    assert population.mean_size == 4.0
    assert asked.ids == []


def test_on_demand_sizes_are_read_one_by_one() -> None:
    population, asked = on_demand()
    assert not population.sizes_are_known
    assert population.size("c") == 6
    assert asked.ids == ["c"]
    assert len(population) == 4
    assert population.empty == []


@pytest.mark.parametrize("first", ["sizes", "mean_size"])
def test_all_sizes_are_read_only_once(first: str) -> None:
    population, asked = on_demand()
    getattr(population, first)
    assert asked.ids == list(SIZES)
    assert population.sizes == [4, 0, 6, 2]
    assert population.mean_size == known()[0].mean_size == 4.0  # empty clients do not count, although N includes them
    assert population.size("a") == 4
    assert asked.ids == list(SIZES)
    assert not population.sizes_are_known  # still False: reading sizes does not change the rounds
    assert len(population) == 4


def test_duplicate_ids_are_rejected_with_their_count() -> None:
    with pytest.raises(FederatedError, match="must be distinct, found 2 duplicates"):
        Population(["a", "b", "a", "b"], lambda i: 1)


@pytest.mark.parametrize("ids", [[], range(0)])
def test_empty_population_is_rejected(ids: Sequence[int]) -> None:
    with pytest.raises(FederatedError, match="no clients: pass clients=... or train=... with partition=..."):
        Population(ids, lambda i: 1)


def test_population_of_empty_clients_is_rejected() -> None:
    with pytest.raises(FederatedError, match="All 3 clients are empty"):
        Population(range(3), lambda i: 0, [0, 0, 0])


def test_million_on_demand_clients_use_little_memory() -> None:
    asked = Asked(dict.fromkeys(range(3), 1))
    tracemalloc.start()
    population = Population(range(10**6), asked)
    cohorts = [sampler(0, 3, population) for sampler in (UniformSampler(50), RoundRobinSampler(50))]
    indices = [[population.index_of(i) for i in cohort] for cohort in cohorts]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert indices == cohorts
    assert cohorts[1] == list(range(150, 200))
    assert asked.ids == []
    assert peak < 500_000


def test_empty_clients_are_never_drawn() -> None:
    population, _ = known()
    assert BernoulliSampler(1.0)(0, 0, population) == ["a", "c", "d"]
    assert UniformSampler(1.0)(0, 0, population) == ["a", "c", "d"]
    assert [RoundRobinSampler(1)(0, r, population) for r in range(3)] == [["a"], ["c"], ["d"]]


# ------------------------------------------------------------------ participation


@given(st.integers(1, 70).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.lists(st.integers(0, n - 1))))))
def test_participation_behaves_like_a_set(case: tuple[int, list[list[int]]]) -> None:
    num_clients, rounds = case
    seen, wanted = Participation(num_clients), set[int]()
    for indices in rounds:
        seen.add(indices)
        wanted.update(indices)
        assert len(seen) == len(wanted)
    bits = np.packbits([i in wanted for i in range(num_clients)], bitorder="little")
    assert seen.saved().tolist() in (sorted(wanted), bits.tolist())
    assert seen.saved().nbytes <= bits.nbytes
    for form in (seen.saved(), torch.from_numpy(bits), torch.tensor(sorted(wanted), dtype=torch.int64)):
        again = Participation(num_clients)
        again.load(form)
        assert len(again) == len(wanted)
        assert torch.equal(again.saved(), seen.saved())
        again.add(range(num_clients))
        assert len(again) == num_clients
    assert len(seen) == len(wanted), "what was saved is a copy"


@pytest.mark.parametrize("clients", [10**5, pytest.param(10**6, marks=pytest.mark.thorough)])
def test_participation_uses_one_bit_per_client(clients: int) -> None:
    tracemalloc.start()
    seen = Participation(clients)
    for start in range(0, clients, 10**4):
        seen.add(range(start, start + 10**4))
    own = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, inspect.getfile(Participation))])
    tracemalloc.stop()
    held = sum(trace.size for trace in own.traces)  # other threads of the process take memory too
    assert len(seen) == clients
    assert 0.12 * clients < held < 0.13 * clients


@pytest.mark.parametrize(
    "bits",
    [
        torch.zeros(1, dtype=torch.uint8),
        torch.zeros(3, dtype=torch.uint8),
        torch.zeros(2, 1, dtype=torch.uint8),
        torch.zeros(2, dtype=torch.int64),
        torch.tensor([3, 12]),
        torch.tensor([-1, 3]),
        torch.tensor([0, 16], dtype=torch.uint8),
    ],
)
def test_bits_of_another_population_are_rejected(bits: torch.Tensor) -> None:
    seen = Participation(12)
    seen.add([3, 11])
    with pytest.raises(ValueError, match="12 clients"):
        seen.load(bits)
    assert len(seen) == 2


@pytest.mark.parametrize("clients", [10**4, pytest.param(10**6, marks=pytest.mark.thorough)])
def test_checkpoint_stores_one_bit_per_client(clients: int) -> None:
    server = Server(FedAvg(), torch.zeros(2), Layout([torch.Size([2])]), plain_sgd, None, range(clients), 0)
    empty = io.BytesIO()
    torch.save(server.state_dict(), empty)
    server.count(range(clients), 0, 0)
    full = io.BytesIO()
    torch.save(server.state_dict(), full)
    assert len(empty.getvalue()) < 5000
    assert len(full.getvalue()) < clients / 8 + 5000
    other = Server(FedAvg(), torch.zeros(2), Layout([torch.Size([2])]), plain_sgd, None, range(clients), 0)
    full.seek(0)
    other.load_state_dict(torch.load(full, weights_only=True))
    assert other.seen == clients
