"""Kept client states: staged, committed, discarded, saved and loaded."""

import torch

from lightning_fed.server.client_store import ClientStore

CPU = torch.device("cpu")


def test_staged_states_become_visible_with_the_commit() -> None:
    store = ClientStore()
    store.stage(4, {"c_i": torch.tensor([1.0])})
    assert store.get(4) is None
    assert len(store) == 0
    assert store.state_dict() == {}
    store.commit()
    assert len(store) == 1
    assert store.get(4)["c_i"].tolist() == [1.0]


def test_the_old_state_is_seen_until_the_commit() -> None:
    store = ClientStore()
    for value in (1.0, 2.0):
        store.stage(0, {"c_i": torch.tensor([value])})
        if value == 2.0:
            assert store.get(0)["c_i"].tolist() == [1.0]
            assert store.state_dict()[0]["c_i"].tolist() == [1.0]
        store.commit()
    assert store.get(0)["c_i"].tolist() == [2.0]


def test_a_commit_leaves_the_others_alone_and_happens_once() -> None:
    store = ClientStore()
    store.stage(0, {"h": torch.tensor(1.0)})
    store.stage(1, {"h": torch.tensor(2.0)})
    store.commit()
    store.stage(1, {"h": torch.tensor(3.0)})
    store.commit()
    store.commit()
    assert {i: float(state["h"]) for i, state in store.state_dict().items()} == {0: 1.0, 1: 3.0}


def test_discarded_states_never_come() -> None:
    store = ClientStore()
    store.stage(0, {"h": torch.tensor(1.0)})
    store.commit()
    store.stage(0, {"h": torch.tensor(2.0)})
    store.stage(1, {"h": torch.tensor(2.0)})
    store.discard()
    store.commit()
    assert float(store.get(0)["h"]) == 1.0
    assert store.get(1) is None


def test_clients_without_state_take_no_room() -> None:
    store = ClientStore()
    store.stage(0, {})
    store.commit()
    assert store.get(0) is None
    assert len(store) == 0


def test_states_are_detached() -> None:
    store, w = ClientStore(), torch.ones(2, requires_grad=True)
    store.stage(0, {"h": 2 * w})
    store.commit()
    assert not store.get(0)["h"].requires_grad


def test_loading_replaces_everything() -> None:
    store, other = ClientStore(), ClientStore()
    store.stage(3, {"h": torch.tensor([1.0])})
    store.commit()
    other.stage(5, {"h": torch.tensor([9.0])})
    other.commit()
    other.stage(6, {"h": torch.tensor([9.0])})
    other.load_state_dict(store.state_dict(), CPU)
    other.commit()
    assert list(other.state_dict()) == [3]
    assert torch.equal(other.get(3)["h"], store.get(3)["h"])


def test_what_was_saved_does_not_change_with_the_store() -> None:
    store = ClientStore()
    store.stage(0, {"h": torch.tensor(1.0)})
    store.commit()
    saved = store.state_dict()
    store.stage(0, {"h": torch.tensor(2.0)})
    store.stage(1, {"h": torch.tensor(2.0)})
    store.commit()
    assert list(saved) == [0]
    assert float(saved[0]["h"]) == 1.0


def test_indices_come_back_as_ints() -> None:
    store = ClientStore()
    store.load_state_dict({"7": {"h": torch.tensor(1.0)}}, CPU)
    assert float(store.get(7)["h"]) == 1.0
