"""Detection and restoration of changes in a module's state, except in its trained parameters."""

import logging
import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_fed.engines.changes import Snapshot, TensorCopies, attribute_tensors, numbers_in, parts_of


def test_snapshots_cover_collections_and_plain_objects() -> None:
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
    module.pairs["pairs"] = module.pairs  # a cycle must not hang the snapshot
    taken(module)
    module.many = list(range(10**6))
    snapshot = taken(module)
    module.many.append(0)
    assert snapshot.changed() == ("attribute", "many")


def taken(module: nn.Module) -> Snapshot:
    """Return a snapshot of an unchanged module."""
    snapshot = Snapshot([("", module)])
    assert snapshot.changed() is None
    return snapshot


def test_snapshots_compare_numbers_by_value_and_objects_by_identity() -> None:
    module = nn.Linear(2, 2)
    module.rate, module.rates, module.pair = 0.5, {"all": [0.5, float("nan")], "pair": [1, 2]}, (1, 2)
    snapshot = taken(module)
    module.rate = module.rates["all"][0] = float("0.5")
    module.rates["all"][1] = float("nan")
    assert snapshot.changed() is None
    module.rates["all"] = module.rates.pop("all")
    assert snapshot.changed() == ("attribute", "rates")  # the order changed
    module.rates["pair"] = module.rates.pop("pair")
    assert snapshot.changed() is None
    module.pair = tuple(module.rates["pair"])
    assert snapshot.changed() == ("attribute", "pair")


def test_snapshots_cover_generators_arrays_hooks_and_layers() -> None:
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


def test_replaced_parameter_objects_are_reported_separately() -> None:
    """The caller decides whether this matters: an engine replaces some buffers when it writes them."""
    module = nn.BatchNorm1d(2)
    snapshot = taken(module)
    module.running_mean = module.running_mean.clone()
    assert (snapshot.changed(), snapshot.changed(replaced=True)) == (None, ("attribute", "running_mean"))
    module.register_buffer("more", torch.zeros(1))
    assert snapshot.changed() == ("attribute", "_buffers")


class Node:
    """A configuration node that references its parent, as in OmegaConf."""

    def __init__(self, parent: "Node | None" = None) -> None:
        self.parent, self.children, self.value = parent, list["Node"](), 0.0


def test_snapshots_cover_deep_configurations() -> None:
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


def test_snapshots_cover_slots() -> None:
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


class Frozen(OrderedDict):  # type: ignore[type-arg]
    """Rejects updates, as the configurations of diffusers do."""

    def update(self, *_: Any, **__: Any) -> None:
        raise TypeError("frozen")


class Named(set):  # type: ignore[type-arg]
    """Cannot be copied without its name."""

    def __init__(self, name: str, items: list[int]) -> None:
        super().__init__(items)
        self.name = name


def test_unwritable_or_uncopyable_collections_are_not_modified() -> None:
    module = nn.Linear(2, 2)
    module.config, module.named, module.waiting = Frozen(rate=1), Named("labels", [1, 2]), deque([1, 2])
    position, snapshot = iter(module.waiting), taken(module)
    snapshot.restore()
    assert (module.config, next(position)) == ({"rate": 1}, 1)
    module.named.add(3)
    assert snapshot.changed() == ("attribute", "named")
    snapshot.restore()
    assert (module.named, module.named.name) == ({1, 2}, "labels")


class Delegates:
    """Looks up missing attributes in its data."""

    __slots__ = ("data",)

    def __getattr__(self, name: str) -> Any:
        return self.data[name]


class Hides:
    @property
    def __dict__(self) -> Any:
        raise RuntimeError("hidden")


def test_proxies_and_delegating_objects_are_not_queried() -> None:
    module = nn.Linear(2, 2)
    node, gone = Node(), Node()
    module.delegates, module.empty, module.hides = Delegates(), Delegates(), Hides()
    module.delegates.data = {"value": 1}
    module.node, module.owners = weakref.proxy(node), [weakref.proxy(module), weakref.proxy(gone)]
    del gone
    assert [name for name, _ in parts_of(module)] == [""]
    snapshot = taken(module)
    module.delegates.data["value"] = 2
    assert snapshot.changed() == ("attribute", "delegates")


def test_logger_level_cache_is_not_a_change() -> None:
    module = nn.Linear(2, 2)
    module.log_of_steps = logging.getLogger(f"{__name__}.{id(module)}")
    snapshot = taken(module)
    module.log_of_steps.debug("a step")
    assert snapshot.changed() is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensor_views_of_any_dtype_are_compared_and_restored() -> None:
    module, made = nn.Linear(2, 2), torch.ones(3, dtype=torch.complex64) * 1j
    module.conjugate, module.negative = made.conj(), made.conj().imag
    module.low, module.mask = torch.zeros(20_000).to(torch.float8_e4m3fn), torch.zeros(20_000, dtype=torch.bool)
    module.nested = torch.nested.nested_tensor([torch.ones(2)])
    copies = TensorCopies(attribute_tensors([("", module)]))
    assert list(copies.changed()) == []
    module.mask.data[7], module.low.data[7] = True, 1.0
    made.data[0] = 0
    assert [name for (_, name), *_ in copies.changed()] == ["conjugate", "negative", "low", "mask"]
    copies.restore()
    assert (module.negative.tolist(), module.mask.sum()) == ([-1.0] * 3, 0)


def test_changed_array_entries_are_restored() -> None:
    module = nn.Linear(2, 2)
    module.bank, module.scalar, module.times = np.zeros((40, 50)), np.array(1.0), np.zeros(2, "datetime64[s]")
    snapshot = taken(module)
    module.bank.T[7, 3], module.scalar[...], module.times[0] = 1, 2, 7
    assert snapshot.changed() == ("attribute", "bank")
    snapshot.keep_changed()
    snapshot.restore()
    assert (module.bank.sum(), float(module.scalar), int(module.times[0].astype(int))) == (0, 1, 0)


@pytest.mark.parametrize("tensor", [torch.tensor(3).expand(1), torch.arange(3, 9).view(2, 3)[:1, 0]])
def test_number_of_a_view_with_any_stride_is_read(tensor: torch.Tensor) -> None:
    assert tensor.stride() != (1,)
    assert numbers_in(tensor) == numbers_in(torch.tensor([3]))
    assert numbers_in(tensor) != numbers_in(torch.tensor([4]))


def test_large_column_is_compared_whole() -> None:
    holder = nn.Linear(2, 2)
    holder.column = torch.zeros(20_000, 5)[:, :1].as_strided((20_000, 1), (1, 5))
    copies = TensorCopies(attribute_tensors(parts_of(holder)))
    assert list(copies.changed()) == []
    holder.column.data[7] = 1
    assert [key for key, *_ in copies.changed()] == [("attribute", "column")]


class Labeled(torch.Tensor):
    """A tensor whose last dimension must keep its size, as pina's labels ask for."""

    def reshape(self, *shape: Any) -> torch.Tensor:  # type: ignore[override]
        raise ValueError("another shape than the labels")


def test_numbers_of_a_tensor_subclass_are_compared() -> None:
    held = torch.arange(6.0).reshape(3, 2).as_subclass(Labeled)
    before = numbers_in(held)
    assert numbers_in(held.clone()) == before
    held.add_(1.0)
    assert numbers_in(held) != before


class Irrep(tuple):
    """A tuple without a length, as in e3nn."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_contents_of_a_tuple_without_a_length_are_compared() -> None:
    module, inner = nn.Linear(2, 2), SimpleNamespace(value=0.0)
    module.kinds = [Irrep((1, inner))]
    snapshot = taken(module)
    assert snapshot.changed() is None
    inner.value = 1.0
    assert snapshot.changed() == ("attribute", "kinds")
