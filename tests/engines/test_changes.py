"""What counts as a module's state beside its trained parameters, and how it is restored."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import nn

from lightning_fed.engines.changes import Snapshot, marks


def test_marks_and_snapshots_look_into_collections_and_plain_objects() -> None:
    module = nn.Linear(2, 2)
    module.own, module.pairs = SimpleNamespace(value=0.0), {"a": [1, {"b": (2.0, torch.zeros(1))}]}
    module.not_a_number = float("nan")
    before = marks(module)
    assert marks(module) == before
    module.own.value = 1.0
    assert marks(module) != before
    before = marks(module)
    module.pairs["a"][1]["b"][1].add_(1)
    assert marks(module) != before
    snapshot = Snapshot([module])
    module.pairs["a"].append(2)
    module.pairs["a"][1]["c"] = module.own.value = 3.0
    snapshot.restore()
    assert (len(module.pairs["a"]), list(module.pairs["a"][1]), module.own.value) == (2, ["b"], 1.0)
    module.myself = module.pairs
    module.pairs["pairs"] = module.pairs  # ends all the same
    assert marks(module)
    module.many = list(range(10**6))
    assert marks(module) == marks(module)


class Node:
    """A part of a configuration that knows its parent, as those of OmegaConf do."""

    def __init__(self, parent: "Node | None" = None) -> None:
        self.parent, self.children, self.value = parent, list["Node"](), 0.0


def test_marks_and_snapshots_look_into_deep_configurations() -> None:
    module = nn.Linear(2, 2)
    module.root = leaf = Node()
    for _ in range(5):
        leaf.children.append(Node(leaf))
        leaf = leaf.children[0]
    before, snapshot = marks(module), Snapshot([module])
    assert marks(module) == before
    leaf.value = 1.0
    assert marks(module) != before
    snapshot.restore()
    assert leaf.value == 0.0


@dataclass(frozen=True, slots=True)
class Slotted:
    value: float
    inner: list[float]


def test_marks_and_snapshots_look_into_slots() -> None:
    module = nn.Linear(2, 2)
    module.own = Slotted(1.0, [1.0])
    snapshot, before = Snapshot([module]), marks(module)
    object.__setattr__(module.own, "value", 2.0)
    assert marks(module) != before
    module.own.inner.append(2.0)
    snapshot.keep_changed()
    snapshot.restore()
    assert module.own == Slotted(1.0, [1.0])
    snapshot = Snapshot([module])
    object.__delattr__(module.own, "value")
    snapshot.restore()
    assert module.own == Slotted(1.0, [1.0])
