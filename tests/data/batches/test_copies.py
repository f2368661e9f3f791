"""A copy of a batch shares no memory that a step could write to."""

import copy
import io
from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_fed.data.batches.batches import own_copy


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


@dataclass
class Record:
    a: Tensor
    names: list[str]


class Named(dict[str, Tensor]):
    pass


class Graph:
    """Copies itself, like graphs of PyG; a shallow copy would share its tensors."""

    def __init__(self, x: Tensor) -> None:
        self.store = {"x": x}

    def clone(self) -> "Graph":
        return Graph(self.store["x"].clone())


class Nested:
    def __init__(self, inner: Any) -> None:
        self.inner = inner


def ones() -> Tensor:
    return torch.ones(2)


KINDS: dict[str, Any] = {
    "tensor": (ones(), lambda batch: batch),
    "list": ([ones(), 3, None, "text"], lambda batch: batch[0]),
    "tensors": ([ones(), ones()], lambda batch: batch[1]),
    "dict": ({"x": (ones(), None)}, lambda batch: batch["x"][0]),
    "named tuple": (Pair(ones(), ones()), lambda batch: batch.b),
    "dataclass": (Record(ones(), ["a"]), lambda batch: batch.a),
    "class of dicts": (Named(x=ones()), lambda batch: batch["x"]),
    "UserDict": (UserDict(x=ones()), lambda batch: batch["x"]),
    "array": (np.ones(2), lambda batch: batch),
    "graph": (Graph(ones()), lambda batch: batch.store["x"]),
    "object in an object": (Nested(Nested([ones()])), lambda batch: batch.inner.inner[0]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_writing_into_a_copy_keeps_the_batch(kind: str) -> None:
    batch, tensor_of = KINDS[kind]
    batch = copy.deepcopy(batch)
    found = own_copy(batch)
    assert type(found) is type(batch)
    tensor_of(found)[:] = 5
    assert tensor_of(found).sum() == 10
    assert tensor_of(batch).sum() == 2


def test_removing_from_a_copy_keeps_the_batch() -> None:
    batch = {"x": ones(), "more": UserDict(y=1)}
    found = own_copy(batch)
    found.pop("x")
    found["more"].pop("y")
    assert set(batch) == {"x", "more"}
    assert "y" in batch["more"]


def test_uncopyable_values_are_shared_and_cycles_terminate() -> None:
    file, circle = io.TextIOWrapper(io.BytesIO()), Nested(None)
    circle.inner = circle
    found = own_copy([file, circle, torch.float32, len, Nested])
    assert found[0] is file
    assert found[1] is not circle
    assert found[2:] == [torch.float32, len, Nested]
