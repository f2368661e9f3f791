"""A state remembers what was read of it."""

from collections.abc import Callable
from typing import Any

import torch

from lightning_fed.core.watched import Watched

READS: dict[str, tuple[Callable[[Watched], Any], set[str]]] = {
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
    "unwatched": (lambda s: s.unwatched(), set()),
}


def test_what_is_read_of_a_state_is_noted() -> None:
    for how, (read_from, expected) in READS.items():
        read: set[str] = set()
        read_from(Watched({"c": torch.zeros(2), "d": torch.ones(2)}, read))
        assert read == expected, how


def test_a_state_without_a_watch_is_a_plain_copy() -> None:
    state = {"c": torch.zeros(2)}
    watched = Watched(state, set())
    copied = watched.unwatched()
    assert type(copied) is dict
    assert copied["c"] is state["c"]
    copied["d"] = torch.ones(1)
    assert "d" not in watched
