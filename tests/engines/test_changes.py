"""What counts as a module's state beside its trained parameters, and how it is restored."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from lightning_fed.engines.changes import Snapshot


def test_snapshots_look_into_collections_and_plain_objects() -> None:
    module = nn.Linear(2, 2)
    module.own, module.pairs = SimpleNamespace(value=0.0), {"a": [1, {"b": (2.0, torch.zeros(1))}]}
    module.not_a_number = float("nan")
    snapshot = taken(module)
    module.own.value = 1.0
    assert snapshot.changed() == ("attribute", "own")
    snapshot = taken(module)
    module.pairs["a"][1]["b"][1].add_(1)
    assert snapshot.changed() == ("attribute", "pairs")
    snapshot = taken(module)
    module.pairs["a"].append(2)
    module.pairs["a"][1]["c"] = module.own.value = 3.0
    snapshot.restore()
    assert (len(module.pairs["a"]), list(module.pairs["a"][1]), module.own.value) == (2, ["b"], 1.0)
    module.myself = module.pairs
    module.pairs["pairs"] = module.pairs  # ends all the same
    taken(module)
    module.many = list(range(10**6))
    snapshot = taken(module)
    module.many.append(0)
    assert snapshot.changed() == ("attribute", "many")


def taken(module: nn.Module) -> Snapshot:
    """Return a snapshot of a module, which nothing has changed yet."""
    snapshot = Snapshot([("", module)])
    assert snapshot.changed() is None
    return snapshot


def test_equal_numbers_are_no_change_and_equal_objects_are() -> None:
    module = nn.Linear(2, 2)
    module.rate, module.rates, module.pair = 0.5, {"all": [0.5, float("nan")], "pair": [1, 2]}, (1, 2)
    snapshot = taken(module)
    module.rate = module.rates["all"][0] = float("0.5")
    module.rates["all"][1] = float("nan")
    assert snapshot.changed() is None
    module.rates["all"] = module.rates.pop("all")
    assert snapshot.changed() == ("attribute", "rates")  # in another order
    module.rates["pair"] = module.rates.pop("pair")
    assert snapshot.changed() is None
    module.pair = tuple(module.rates["pair"])
    assert snapshot.changed() == ("attribute", "pair")


def test_snapshots_see_generators_arrays_hooks_and_layers() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module.array, module.generator = np.zeros(2), torch.Generator()
    snapshot = taken(module)
    module.array[0] = 1
    assert snapshot.changed() == ("attribute", "array")
    snapshot = taken(module)
    torch.rand(1, generator=module.generator)
    assert snapshot.changed() == ("attribute", "generator")
    snapshot.restore()
    assert snapshot.changed() is None
    module[0].register_forward_hook(lambda *_: None)
    assert Snapshot([("0", module[0])]).changed() is None
    module.added = nn.Identity()
    assert snapshot.changed() == ("attribute", "_modules")
    snapshot.restore()
    assert list(module._modules) == ["0"]


def test_other_objects_in_place_of_parameters_are_told_apart() -> None:
    """Whether that matters depends on who looks: an engine replaces some buffers when it writes them."""
    module = nn.BatchNorm1d(2)
    snapshot = taken(module)
    module.running_mean = module.running_mean.clone()
    assert (snapshot.changed(), snapshot.replaced()) == (None, ("attribute", "_buffers"))
    module.register_buffer("more", torch.zeros(1))
    assert snapshot.changed() == ("attribute", "_buffers")


class Node:
    """A part of a configuration that knows its parent, as those of OmegaConf do."""

    def __init__(self, parent: "Node | None" = None) -> None:
        self.parent, self.children, self.value = parent, list["Node"](), 0.0


def test_snapshots_look_into_deep_configurations() -> None:
    module = nn.Linear(2, 2)
    module.root = leaf = Node()
    for _ in range(5):
        leaf.children.append(Node(leaf))
        leaf = leaf.children[0]
    snapshot = taken(module)
    leaf.value = 1.0
    assert snapshot.changed() == ("attribute", "root")
    snapshot.restore()
    assert leaf.value == 0.0


@dataclass(frozen=True, slots=True)
class Slotted:
    value: float
    inner: list[float]


def test_snapshots_look_into_slots() -> None:
    module = nn.Linear(2, 2)
    module.own = Slotted(1.0, [1.0])
    snapshot = taken(module)
    object.__setattr__(module.own, "value", 2.0)
    assert snapshot.changed() == ("attribute", "own")
    module.own.inner.append(2.0)
    snapshot.keep_changed()
    snapshot.restore()
    assert module.own == Slotted(1.0, [1.0])
    snapshot = taken(module)
    object.__delattr__(module.own, "value")
    snapshot.restore()
    assert module.own == Slotted(1.0, [1.0])
