"""Who the clients are: ids, stored indices, sizes, and those that are empty."""

import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest

from lightning_fed.core.errors import FederatedError
from lightning_fed.server.participation import Population
from lightning_fed.server.sampling import BernoulliSampler, RoundRobinSampler, UniformSampler

SIZES: dict[Any, int] = {"a": 4, 7: 0, "c": 6, "d": 2}


class Asked:
    """Sizes, and how often they were asked for."""

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


def test_it_is_the_sequence_of_those_that_can_take_part() -> None:
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


def test_stored_indices_count_the_empty_ones_too() -> None:
    population, _ = known()
    assert [population.index_of(i) for i in ("a", 7, "c", "d")] == [0, 1, 2, 3]


@pytest.mark.parametrize("stranger", ["7", 0, "b", None, 2.0])
def test_a_stranger_is_refused_by_name(stranger: Any) -> None:
    population, _ = known()
    with pytest.raises(
        FederatedError, match=rf"There is no client {stranger!r}\. .* data module's 4 clients, such as 'a'"
    ):
        population.index_of(stranger)
    with pytest.raises(FederatedError, match="There is no client"):
        population.size(stranger)


@pytest.mark.parametrize("stranger", [-1, 5, "0", 1.0, None])
def test_a_range_of_ids_has_strangers_too(stranger: Any) -> None:
    population = Population(range(5), lambda i: 1)
    assert population.index_of(4) == 4
    with pytest.raises(FederatedError, match=f"There is no client {stranger!r}.*5 clients, such as 0"):
        population.index_of(stranger)


def test_known_sizes() -> None:
    population, asked = known()
    assert population.sizes_are_known
    assert population.sizes == [4, 6, 2]
    assert population.size("c") == 6
    assert population.mean_size == 4.0
    assert asked.ids == []


def test_sizes_on_demand_are_asked_for_one_by_one() -> None:
    population, asked = on_demand()
    assert not population.sizes_are_known
    assert population.size("c") == 6
    assert asked.ids == ["c"]
    assert len(population) == 4
    assert population.empty == []


@pytest.mark.parametrize("first", ["sizes", "mean_size"])
def test_a_pass_over_all_clients_happens_once(first: str) -> None:
    population, asked = on_demand()
    getattr(population, first)
    assert asked.ids == list(SIZES)
    assert population.sizes == [4, 0, 6, 2]
    assert population.mean_size == known()[0].mean_size == 4.0  # empty clients do not count, though N has them
    assert population.size("a") == 4
    assert asked.ids == list(SIZES)
    assert not population.sizes_are_known  # as before: what rounds do does not depend on who has asked
    assert len(population) == 4


def test_duplicates_are_counted() -> None:
    with pytest.raises(FederatedError, match="must be distinct, found 2 duplicates"):
        Population(["a", "b", "a", "b"], lambda i: 1)


@pytest.mark.parametrize("ids", [[], range(0)])
def test_no_client_is_refused(ids: Sequence[int]) -> None:
    with pytest.raises(FederatedError, match="no clients: pass clients=... or train=... with partition=..."):
        Population(ids, lambda i: 1)


def test_nothing_but_empty_clients_is_refused() -> None:
    with pytest.raises(FederatedError, match="All 3 clients are empty"):
        Population(range(3), lambda i: 0, [0, 0, 0])


def test_a_million_clients_on_demand_cost_nothing() -> None:
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
