"""Splitting of batches, and batches that cannot be split."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_fed import FederatedError
from lightning_fed.strategies.split import NO_EXAMPLES, BatchSplit, part_of
from tests.helpers.training import same


@dataclass
class Sample:
    x: Tensor
    names: list[str]


class Pair(NamedTuple):
    x: Tensor
    scale: Tensor


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("examples", [1, 2, 5, 12])
def test_parts_cover_every_example_once_with_the_largest_first(examples: int, size: int) -> None:
    parts = [BatchSplit(rank=rank, size=size).cut(torch.arange(examples), examples) for rank in range(size)]
    counts = [own for _, own in parts]
    assert torch.equal(torch.cat([part for part, own in parts if own]), torch.arange(examples))
    assert all((part is NO_EXAMPLES) == (own == 0) for part, own in parts)
    assert counts[0] == max(counts) <= min(counts) + 1


def test_nested_batches_are_split_in_tensors_and_string_lists() -> None:
    x, names = torch.arange(6).view(3, 2), ["a", "b", "c"]
    rows = slice(1, 3)
    assert part_of(Sample(x, names), 3, rows).names == ["b", "c"]
    found = part_of({"pair": Pair(x, torch.tensor(2.0)), "list": [x, (names, 5)]}, 3, rows)
    assert same(found["pair"].x, x[1:])
    assert found["pair"].scale == 2.0
    assert same(found["list"][0], x[1:])
    assert found["list"][1] == (["b", "c"], 5)


IMAGES = tuple(torch.zeros(3, 8, 8) for _ in range(3))  # three images of three channels


@pytest.mark.parametrize(
    "batch",
    [[torch.zeros(3), torch.zeros(2, 3)], {"x": object()}, (IMAGES, ({}, {}, {})), {"image": IMAGES}],
    ids=["tensor", "object", "images", "named images"],
)
def test_unsplittable_batches_are_rejected(batch: Any) -> None:
    message = "batch of 3 examples holds an? .*(shape|object|tuple of 3 tensors).*strategy='clients'"
    with pytest.raises(FederatedError, match=message):
        part_of(batch, 3, slice(0, 1))


def test_image_tuples_are_split_and_ambiguous_tuples_are_rejected() -> None:
    images = tuple(torch.full((3, 2, 2), float(i)) for i in range(4))
    part, targets = part_of((images, ({"id": 0}, {"id": 1}, {"id": 2}, {"id": 3})), 4, slice(1, 3))
    assert [float(image[0, 0, 0]) for image in part] == [1.0, 2.0]
    assert [t["id"] for t in targets] == [1, 2]
    with pytest.raises(FederatedError, match="may be 3 examples or 3 columns"):
        part_of((images[:3], torch.arange(3)), 3, slice(0, 2))
    columns = [[torch.zeros(2, 3), torch.ones(2, 3)], torch.arange(2)]  # the format of default_collate
    (first, second), y = part_of(columns, 2, slice(0, 1))
    assert first.shape == second.shape == (1, 3)
    assert y.tolist() == [0]
