"""A tracked state records which entries are read."""

from collections.abc import Callable
from typing import Any

import torch

from lightning_fed.core.tracked_state import TrackedState

READS: dict[str, tuple[Callable[[TrackedState], Any], set[str]]] = {
    "an entry": (lambda s: s["c"], {"c"}),
    "get": (lambda s: s.get("c"), {"c"}),
    "a missing one by get": (lambda s: s.get("e"), {"e"}),
    "in": (lambda s: "c" in s, set()),
    "len": (len, set()),
    "names": (list, {"c", "d"}),
    "items": (lambda s: dict(s.items()), {"c", "d"}),
    "values": (lambda s: list(s.values()), {"c", "d"}),
    "keys": (lambda s: s.keys(), {"c", "d"}),
    "unpacked": (lambda s: {**s}, {"c", "d"}),
    "a dict of it": (dict, {"c", "d"}),
    "untracked": (lambda s: s.untracked(), set()),
}


def test_reads_of_a_state_are_recorded() -> None:
    for how, (read_from, expected) in READS.items():
        read: set[str] = set()
        read_from(TrackedState({"c": torch.zeros(2), "d": torch.ones(2)}, read))
        assert read == expected, how


def test_untracked_state_is_a_plain_copy() -> None:
    state = {"c": torch.zeros(2)}
    tracked = TrackedState(state, set())
    copied = tracked.untracked()
    assert type(copied) is dict
    assert copied["c"] is state["c"]
    copied["d"] = torch.ones(1)
    assert "d" not in tracked
