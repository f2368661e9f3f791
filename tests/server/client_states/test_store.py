"""Kept client states, in memory and on disk: staged, committed, discarded, saved and loaded."""

import gc
import pickle
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed.core.types import State
from lightning_fed.server.client_states import store as state_rows
from lightning_fed.server.client_states.disk_store import DiskClientStore
from lightning_fed.server.client_states.store import ClientStore, MemoryClientStore, clone_rows, clone_tensor
from tests.helpers.training import same

Make = Callable[[], ClientStore]


@pytest.fixture(params=["memory", "disk"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    numbers = iter(range(1, 100))

    def make() -> ClientStore:
        if request.param == "memory":
            return MemoryClientStore()
        return DiskClientStore(tmp_path, f"{next(numbers):016x}-0000")

    return make


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(20_000.0).view(100, 200),
        torch.arange(40_000.0).view(200, 200).t()[::2],
        torch.arange(20_000, dtype=torch.float64),
        torch.arange(40_000).to(torch.bfloat16),
        torch.arange(40_000) % 3 == 0,
        torch.tensor(2.5),
        torch.zeros(0, 3),
    ],
    ids=["plain", "strided", "double", "half", "bool", "number", "empty"],
)
def test_clone_has_equal_values_in_its_own_memory(value: torch.Tensor) -> None:
    expected = value.clone()
    copy = clone_tensor(value)
    value.zero_()
    assert (copy.dtype, copy.shape, copy.is_contiguous()) == (expected.dtype, expected.shape, True)
    assert torch.equal(copy, expected)


@pytest.mark.parametrize(
    "rows",
    [
        torch.arange(60.0).view(3, 20),
        torch.arange(60.0).view(20, 3).t(),
        torch.arange(60_000, dtype=torch.float64).view(3, 20_000),
        torch.arange(3),
        torch.zeros(3, 0),
    ],
    ids=["small", "strided", "large", "numbers", "empty"],
)
def test_row_copies_do_not_share_storage(rows: torch.Tensor) -> None:
    expected = rows.clone()
    copies = clone_rows(rows)
    rows.zero_()
    assert len(copies) == len(expected)
    for copy, row in zip(copies, expected, strict=True):
        assert torch.equal(copy, row)
        assert copy.dtype == row.dtype
        assert copy.is_contiguous()
        assert copy.untyped_storage().nbytes() == row.nbytes


def test_staged_states_become_visible_on_commit(make: Make) -> None:
    store = make()
    store.stage(4, {"c_i": torch.tensor([1.0])})
    assert store.get(4) is None
    assert len(store) == 0
    assert store.state_dict() == {}
    store.commit()
    assert len(store) == 1
    assert store.get(4)["c_i"].tolist() == [1.0]


def test_old_state_is_visible_until_commit(make: Make) -> None:
    store = make()
    for value in (1.0, 2.0):
        store.stage(0, {"c_i": torch.tensor([value])})
        if value == 2.0:
            assert store.get(0)["c_i"].tolist() == [1.0]
            assert store.state_dict()[0]["c_i"].tolist() == [1.0]
        store.commit()
    assert store.get(0)["c_i"].tolist() == [2.0]


def test_commit_keeps_other_clients_and_is_idempotent(make: Make) -> None:
    store = make()
    store.stage(0, {"h": torch.tensor(1.0)})
    store.stage(1, {"h": torch.tensor(2.0)})
    store.commit()
    store.stage(1, {"h": torch.tensor(3.0)})
    store.commit()
    store.commit()
    assert {i: float(state["h"]) for i, state in store.state_dict().items()} == {0: 1.0, 1: 3.0}


def test_discarded_states_are_never_committed(make: Make) -> None:
    store = make()
    store.stage(0, {"h": torch.tensor(1.0)})
    store.commit()
    store.stage(0, {"h": torch.tensor(2.0)})
    store.stage(1, {"h": torch.tensor(2.0)})
    store.discard()
    store.commit()
    assert float(store.get(0)["h"]) == 1.0
    assert store.get(1) is None


def test_empty_states_are_not_stored(make: Make) -> None:
    store = make()
    store.stage(0, {})
    store.commit()
    assert store.get(0) is None
    assert len(store) == 0


def test_states_are_detached(make: Make) -> None:
    store, w = make(), torch.ones(2, requires_grad=True)
    store.stage(0, {"h": 2 * w})
    store.commit()
    assert not store.get(0)["h"].requires_grad


def test_loading_restores_the_states_of_another_store(make: Make) -> None:
    store, other = make(), make()
    store.stage(3, {"h": torch.tensor([1.0])})
    store.commit()
    other.load_state_dict(store.state_dict())
    other.commit()
    assert list(other.state_dict()) == [3]
    assert torch.equal(other.get(3)["h"], store.get(3)["h"])


def test_saved_states_do_not_change_with_the_store(make: Make) -> None:
    store = make()
    store.stage(0, {"h": torch.tensor(1.0)})
    store.commit()
    saved = store.state_dict()
    store.stage(0, {"h": torch.tensor(2.0)})
    store.stage(1, {"h": torch.tensor(2.0)})
    store.commit()
    assert list(saved) == [0]
    assert float(saved[0]["h"]) == 1.0


@pytest.mark.thorough
@pytest.mark.parametrize("way", [deepcopy, lambda store: pickle.loads(pickle.dumps(store))], ids=["copied", "pickled"])
def test_copy_outlives_the_store(make: Make, way: Callable[[ClientStore], ClientStore]) -> None:
    store = make()
    store.stage_all([4, 1], {"h": torch.arange(6.0).view(2, 3)})
    store.commit()
    copied, expected = way(store), store.state_dict()
    store.stage(1, {"h": torch.zeros(3)})
    store.commit()
    del store
    gc.collect()
    assert same(copied.get(4), expected[4])
    assert len(copied) == 2


def test_string_indices_are_loaded_as_ints(make: Make) -> None:
    store = make()
    store.load_state_dict({"7": {"h": torch.tensor(1.0)}})
    assert float(store.get(7)["h"]) == 1.0


def test_process_loads_only_the_states_of_its_clients(make: Make) -> None:
    store = make()
    store.load_state_dict({i: state_of(i) for i in range(5)}, lambda i: i % 2 == 1)
    assert store.state_dict().keys() == {1, 3}


def test_states_round_trip_with_identical_bits(make: Make) -> None:
    store = make()
    rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    state = {
        "row": rows[1], "column": rows[:, 1], "again": rows[1], "nan": torch.tensor([torch.nan, -0.0, torch.inf]),
        "half": rows[0].bfloat16(), "count": torch.tensor(3), "flags": torch.tensor([True, False]),
        "none": torch.empty(0, 2),
    }  # fmt: skip
    store.stage(9, state)
    store.commit()
    kept = store.get(9)
    assert kept.keys() == state.keys()
    for name, value in state.items():
        assert (kept[name].shape, kept[name].dtype) == (value.shape, value.dtype)
        assert kept[name].numpy(force=True).tobytes() == value.numpy().tobytes() if name != "half" else True
    assert torch.equal(kept["half"], state["half"])


def test_clients_may_keep_states_of_different_shapes(make: Make) -> None:
    store = make()
    for index in range(3):
        store.stage(index, {f"v{index}": torch.full((index,), 1.0 * index)})
    store.commit()
    assert {i: {k: v.tolist() for k, v in s.items()} for i, s in store.state_dict().items()} == {
        0: {"v0": []}, 1: {"v1": [1.0]}, 2: {"v2": [2.0, 2.0]},
    }  # fmt: skip


# ------------------------------------------------------------------ several clients at once


def state_of(seed: int, kind: str = "usual") -> State:
    generator = torch.Generator().manual_seed(seed)
    c = torch.randn(3, 2, generator=generator, dtype=torch.float64)
    if kind == "wide":
        return {"c_i": c.float(), "n": torch.tensor(seed)}
    return {"c_i": c, "n": torch.tensor(seed)} if kind == "usual" else {"h": c.bfloat16()}


@pytest.fixture(scope="module")
def few_rows() -> Iterator[None]:
    """Start with two rows, so that they run out early."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_rows, "_FIRST", 2)
        yield


def stacked(states: Sequence[State]) -> State:
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


@pytest.mark.parametrize("size", [3, 20_000], ids=["small", "large"])
def test_batched_staging_matches_staging_per_client(make: Make, size: int) -> None:
    store, rows = make(), {"c_i": torch.randn(4, size), "n": torch.arange(4)}
    store.stage_all([7, 1, 5, 2], rows)
    expected = {name: value.clone() for name, value in rows.items()}
    for value in rows.values():
        value.zero_()
    assert len(store) == 0
    store.commit()
    assert len(store) == 4
    for row, index in enumerate([7, 1, 5, 2]):
        assert same(store.get(index), {name: value[row] for name, value in expected.items()})
        assert all(v.untyped_storage().nbytes() == v.nbytes for v in store.state_dict()[index].values())


def test_returned_states_do_not_alias_the_store() -> None:
    store = MemoryClientStore()
    store.stage_all([0, 1], stacked([state_of(0), state_of(1)]))
    store.commit()
    saved, found = store.state_dict(), store.stacked([1, 4], state_of(9))
    assert same(found, stacked([state_of(1), state_of(9)]))
    for state in (store.get(0), found, saved[1]):
        for value in state.values():
            value.zero_()
    assert same(store.state_dict(), {0: state_of(0), 1: state_of(1)})
    assert same(store.stacked([4, 0], state_of(8)), stacked([state_of(8), state_of(0)]))


def test_store_grows_with_the_number_of_clients() -> None:
    store = MemoryClientStore()
    for start in range(0, 300, 30):
        store.stage_all(range(start, start + 30), stacked([state_of(i) for i in range(start, start + 30)]))
        store.commit()
    assert same(store.state_dict(), {i: state_of(i) for i in range(300)})


def test_out_of_memory_on_commit_keeps_existing_states(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise MemoryError

    store = MemoryClientStore()
    store.stage_all([0, 1], stacked([state_of(0), state_of(1)]))
    store.commit()
    monkeypatch.setattr(state_rows, "_new_rows", none)
    store.stage_all(range(1, 99), stacked([state_of(i + 5) for i in range(98)]))
    with pytest.raises(MemoryError):
        store.commit()
    assert same(store.state_dict(), {0: state_of(0), 1: state_of(1)})


def test_state_with_another_layout_replaces_the_old_one() -> None:
    store = MemoryClientStore()
    store.stage_all([0, 1], stacked([state_of(0), state_of(1)]))
    store.commit()
    store.stage(1, state_of(5, "other"))
    store.commit()
    assert len(store) == 2
    assert store.stacked([0, 1], state_of(9)) is None
    assert same(store.get(1), state_of(5, "other"))
    store.stage_all([2, 1], stacked([state_of(2), state_of(6)]))
    store.commit()
    assert same(store.stacked([1, 2, 0], state_of(9)), stacked([state_of(6), state_of(2), state_of(0)]))


def test_large_states_are_not_stacked() -> None:
    store, rows = MemoryClientStore(), {"c_i": torch.randn(4, 20_000)}
    store.stage_all(range(4), rows)
    store.commit()
    assert store.stacked([0, 1], {"c_i": rows["c_i"][0]}) is None


def test_saved_empty_state_is_not_treated_as_missing() -> None:
    store = MemoryClientStore()
    store.load_state_dict({0: state_of(0), 1: {}})
    assert store.get(1) == {}
    assert store.stacked([0, 1], state_of(9)) is None


KINDS = st.sampled_from(["usual", "usual", "wide", "other"])
ACTION = st.one_of(
    st.tuples(st.just("one"), st.integers(0, 9), st.integers(0, 99), KINDS),
    st.tuples(st.just("several"), st.lists(st.integers(0, 9), unique=True, min_size=1), KINDS),
    st.tuples(st.sampled_from(["commit", "commit", "discard", "reload"])),
)


@pytest.mark.usefixtures("few_rows")
@given(st.lists(ACTION, max_size=25), st.lists(st.integers(0, 11), unique=True, min_size=1))
def test_row_store_behaves_like_a_dictionary(actions: list[tuple[Any, ...]], asked: list[int]) -> None:
    store, kept, staged = MemoryClientStore(), dict[int, State](), dict[int, State]()
    for number, (action, *rest) in enumerate(actions):
        if action == "one":
            index, seed, kind = rest
            if index not in staged:  # a client returns from a round only once
                staged[index] = state_of(seed, kind)
                store.stage(index, staged[index])
        elif action == "several":
            indices, kind = rest
            if indices := [index for index in indices if index not in staged]:
                states = [state_of(100 * number + index, kind) for index in indices]
                staged.update(zip(indices, states, strict=True))
                store.stage_all(indices, stacked(states))
        elif action == "reload":
            saved, store = store.state_dict(), MemoryClientStore()
            store.load_state_dict(saved)
            staged = {}
        else:
            getattr(store, action)()
            kept.update(staged if action == "commit" else {})
            staged = {}
        assert same(dict(sorted(store.state_dict().items())), dict(sorted(kept.items())))
        assert len(store) == len(kept)
        assert all(same(store.get(index), kept.get(index)) for index in asked)
        if (found := store.stacked(asked, state_of(1))) is not None:
            assert same(found, stacked([kept.get(index, state_of(1)) for index in asked]))
