"""Options of any kind become values that checkpoints can hold, and that are equal in another process."""

import enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_fed.algorithms import Algorithm, FedAvg
from lightning_fed.core.plain import as_plain, plain_options
from tests.helpers.selection import few
from tests.helpers.training import data as clients
from tests.helpers.training import parameters, seeded, trainer


class Kind(enum.Enum):
    ONE = 1


class Holds(Algorithm):
    def __init__(self, value: Any) -> None:
        self.value = value


class Unreadable:
    def __repr__(self) -> str:
        raise ValueError("no text")


LOOP: dict[str, Any] = {}
LOOP.update(a=LOOP, b=LOOP)

VALUES: dict[str, Any] = {
    "lambda": lambda g: g,
    "function": torch.sign,
    "partial": partial(torch.clamp, min=0),
    "class": Holds,
    "tensor": torch.ones(31),
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "array": np.ones(3),
    "number of NumPy": np.float64(0.5),
    "enum": Kind.ONE,
    "path": Path("a"),
    "module": torch.nn.Linear(2, 2),
    "generator": torch.Generator(),
    "method": FedAvg(),
    "nan": float("nan"),
    "set": {"b", "a"},
    "class of tensors": torch.Tensor,
    "sparse tensor": torch.eye(2).to_sparse(),
    "tensor without data": torch.empty(2, device="meta"),
    "texts": np.array(["a", None], dtype=object),
    "value that contains itself": LOOP,
    "nested": {"a": [1, (2, None)], "b": True},
}


@pytest.mark.parametrize("name", VALUES)
def test_values_of_any_kind_round_trip_without_code(name: str, tmp_path: Any) -> None:
    found = as_plain(VALUES[name])
    torch.save(found, tmp_path / "found")
    assert torch.load(tmp_path / "found", weights_only=True) == found
    assert found == as_plain(VALUES[name])
    assert " at 0x" not in repr(found)


@pytest.mark.parametrize("name", few(VALUES, ["lambda", "tensor"]))
def test_method_with_any_option_can_be_resumed(name: str, tmp_path: Any) -> None:
    def run(rounds: int, **options: Any) -> Tensor:
        run = trainer(algorithm=Holds(VALUES[name]), max_rounds=rounds)
        run.fit(model := seeded(), clients(), **options)
        run.save_checkpoint(tmp_path / f"{rounds}.ckpt")
        return parameters(model)

    run(1)
    assert torch.equal(run(2, ckpt_path=tmp_path / "1.ckpt"), run(2))


def test_plain_values_are_kept() -> None:
    value = {"a": 1, "b": [0.5, ("c", None, True)], "d": torch.float16}
    assert as_plain(value) == value
    assert [type(v) for v in as_plain([np.int64(1), np.float64(2), True])] == [int, float, bool]


def test_unreadable_option_leaves_the_others_unchanged() -> None:
    assert plain_options({"a": LOOP, "mu": 0.5}) == {"a": "builtins.dict", "mu": 0.5}
    assert as_plain(Unreadable()) == f"{__name__}.Unreadable"


def test_different_values_have_different_text() -> None:
    one, other = torch.ones(2000), torch.ones(2000)
    other[1000] = 2.0
    assert as_plain(one) != as_plain(other)
    assert as_plain(one) == as_plain(one.clone())
    generator = torch.Generator()
    before = as_plain(generator)
    torch.rand(1, generator=generator)
    assert as_plain(generator) != before


def test_small_difference_of_a_view_has_different_text() -> None:
    table = torch.tensor([[1.0, 5.0], [1.0 + 1e-6, 5.0]])
    assert as_plain(table[:1, 0]) != as_plain(table[1:, 0])
    assert as_plain(table[:1, 0]) == as_plain(torch.tensor([1.0]))
