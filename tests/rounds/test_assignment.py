"""The assignment of clients to processes, and the states that move for it."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed.rounds.assignment import _balanced, assign, pack, unpack
from lightning_fed.server.participation import Participant
from lightning_fed.strategies.processes import Ranks
from tests.helpers.processes import in_processes


def dealt(steps: dict[int, int], size: int, keeps_state: bool) -> tuple[dict[int, int], Counter[int]]:
    """Return each client's rank, and the local steps of each rank."""
    cohort = [Participant(i, i, 4, steps=k) for i, k in steps.items()]
    owners = assign(cohort, Ranks(0, size), keeps_state)
    loads: Counter[int] = Counter()
    for index, rank in owners.items():
        loads[rank] += steps[index]
    return dict(owners), loads


def test_clients_stay_with_their_state_when_work_is_balanced() -> None:
    owners, _ = dealt({0: 30, 1: 30, 2: 25, 3: 28}, 2, keeps_state=True)
    assert owners == {0: 0, 1: 1, 2: 0, 3: 1}


def test_small_work_is_not_worth_a_move() -> None:
    owners, _ = dealt({0: 3, 2: 2, 1: 1}, 2, keeps_state=True)
    assert owners == {0: 0, 2: 0, 1: 1}


def test_per_client_overhead_counts_as_work() -> None:
    _, loads = dealt({0: 3, 2: 2, 4: 2, 6: 2, 1: 9}, 2, keeps_state=True)
    assert loads == {0: 7, 1: 11}  # one client moves, although both ranks have nine steps


def test_small_work_on_a_large_model_is_worth_a_move() -> None:
    cohort = [Participant(i, i, 4, steps=5) for i in (0, 2, 4, 1)]
    owners = assign(cohort, Ranks(0, 2), keeps_state=True, numel=10**7)
    assert sorted(owners.values()) == [0, 0, 1, 1]


def test_move_on_a_tiny_model_requires_more_work_to_pay_off() -> None:
    cohort = [Participant(i, i, 4, steps=1) for i in (*range(0, 24, 2), 1)]
    assert sum(assign(cohort, Ranks(0, 2), keeps_state=True).values()) > 1
    owners = assign(cohort, Ranks(0, 2), keeps_state=True, numel=100)
    assert owners == {index: index % 2 for index in owners}
    cohort += [Participant(i, i, 4, steps=1) for i in range(24, 64, 2)]
    assert sum(assign(cohort, Ranks(0, 2), keeps_state=True, numel=100).values()) > 1


def test_work_of_one_process_is_shared_when_large_enough() -> None:
    _, loads = dealt({0: 50, 2: 50, 4: 50, 6: 50}, 2, keeps_state=True)
    assert loads == {0: 100, 1: 100}


def test_moves_are_limited_by_most_moves() -> None:
    cohort = [Participant(i, i, 4, steps=50) for i in range(0, 20, 2)]
    owners = assign(cohort, Ranks(0, 2), keeps_state=True, most_moves=2)
    assert sum(rank == 1 for rank in owners.values()) == 2


@given(st.dictionaries(st.integers(0, 500), st.integers(0, 300), max_size=40), st.integers(1, 5))
def test_moves_never_increase_the_maximum_load(steps: dict[int, int], size: int) -> None:
    owners, loads = dealt(steps, size, keeps_state=True)
    at_home: Counter[int] = Counter()
    for index, k in steps.items():
        at_home[index % size] += k
    assert owners.keys() == steps.keys()
    assert all(0 <= rank < size for rank in owners.values())
    assert max(loads.values(), default=0) <= max(at_home.values(), default=0)


def moved_one_by_one(
    homes: dict[int, int], work: dict[int, int], size: int, most_moves: int, a_move: int, a_trip: int
) -> dict[int, int]:
    """Return the owners after greedy moves: each move is the best one, with the lowest index among ties."""
    loads = [sum(work[i] for i, home in homes.items() if home == rank) for rank in range(size)]
    owners, at_home = dict(homes), max(loads)
    for _ in range(most_moves):
        most, fewest = loads.index(max(loads)), loads.index(min(loads))
        left = sorted(i for i in homes if homes[i] == owners[i] == most)
        heaviest = {i: max(loads[most] - work[i], loads[fewest] + work[i]) + a_move for i in left}
        best = min(left, key=heaviest.get, default=None)
        if best is None or heaviest[best] >= loads[most]:
            break
        owners[best] = fewest
        loads[most] += a_move - work[best]
        loads[fewest] += a_move + work[best]
    return owners if max(loads) + a_trip < at_home else homes


@given(
    st.dictionaries(st.integers(0, 500), st.integers(0, 12) | st.integers(0, 300), max_size=40),
    st.integers(1, 5),
    st.sampled_from([2**31, 3]),
    st.sampled_from([(2, 25), (2, 2), (1, 1)]),
)
def test_moves_match_one_by_one_balancing(
    steps: dict[int, int], size: int, most_moves: int, costs: tuple[int, int]
) -> None:
    homes = {index: index % size for index in steps}
    limit = min(most_moves, len(homes))
    assert _balanced(homes, steps, size, most_moves, *costs) == moved_one_by_one(homes, steps, size, limit, *costs)


class Counted(dict[int, int]):
    """Counts its lookups."""

    asked = 0

    def __getitem__(self, key: int) -> int:
        self.asked += 1
        return super().__getitem__(key)


@pytest.mark.parametrize("kinds", [2, 4000])
def test_large_cohorts_are_not_scanned_for_every_move(kinds: int) -> None:
    work = Counted({i: (8000 if i % 2 == 0 else 0) + i // 2 % kinds for i in range(4000)})
    homes = {i: i % 2 for i in work}
    owners = _balanced(homes, work, 2, 2**31, 2, 25)
    assert sum(owners[i] != homes[i] for i in homes) > 500
    assert work.asked < 20 * len(homes)


STATES = {
    0: {"c": torch.arange(5, dtype=torch.float64), "n": torch.tensor(3)},
    1: {"c": torch.ones(3, 2)},
    2: {"flags": torch.tensor([True, False, True]), "none": torch.empty(0, 4)},
    4: {"half": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16), "c": torch.randn(7)},
}


def test_states_of_all_types_and_shapes_round_trip(tmp_path: Path) -> None:
    def work() -> dict[int, dict[str, torch.Tensor]]:
        torch.distributed.init_process_group("gloo", init_method="env://")
        rank = torch.distributed.get_rank()
        ranks = Ranks(rank, 2, torch.device("cpu"))
        mine = {index: state for index, state in STATES.items() if ranks.owns(index)}
        to = {index: 1 - index % 2 for index in STATES}
        kinds, sent = pack(mine, to, 2)
        letters, received = zip(*ranks.deliver(kinds, sent)(), strict=True)
        return unpack(letters, received, to, rank)

    first, second = in_processes(work, tmp_path)
    assert not first.error, first.trace
    assert first.value.keys() == {1}
    assert second.value.keys() == {0, 2, 4}
    for index, state in {**first.value, **second.value}.items():
        assert state.keys() == STATES[index].keys()
        for name, value in state.items():
            assert value.dtype == STATES[index][name].dtype
            assert torch.equal(value, STATES[index][name])
