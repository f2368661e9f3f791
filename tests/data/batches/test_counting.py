"""The number of examples in a batch, and its use as the weight of losses, gradients and logged values."""

from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

from lightning_fed import FederatedDataModule
from lightning_fed.core.errors import FederatedError
from lightning_fed.data.batches.counting import count_examples, possible_counts, sampled_length
from tests.helpers.detection import Buckets, Detection, collate


def images(*heights):
    return tuple(torch.zeros(3, height, 4) for height in heights)


@dataclass
class Pair:
    name: str
    x: torch.Tensor


Named = namedtuple("Named", ["x", "y"])


X = torch.zeros(3, 2)


@pytest.mark.parametrize(
    ("batch", "examples"),
    [
        (X, 3),
        ([X, torch.zeros(3)], 3),
        ((None, X), 3),
        ({"ids": ["a", "b", "c"], "x": {"y": X}, "rate": 0.5}, 3),
        (Pair("a", X), 3),
        (Named(X, torch.zeros(3)), 3),
        (["a", "b"], 2),
        ((images(4, 4, 4, 4), ({}, {}, {}, {})), 4),
        ((images(4, 5), (torch.zeros(7, 4), torch.zeros(1, 4))), 2),
        ({"image": images(4, 5), "boxes": [torch.zeros(2, 4), torch.zeros(0, 4)]}, 2),
        ([(X, torch.zeros(3, 5)), torch.zeros(3)], 3),  # a list of columns within a batch
        (SimpleNamespace(num_graphs=5, x=torch.zeros(31, 2)), 5),
        ([SimpleNamespace(num_graphs=3), torch.zeros(3)], 3),
        (pack_sequence([torch.zeros(4), torch.zeros(2)]), 2),
    ],
)
def test_consistent_batch_gives_its_number_of_examples(batch, examples):
    assert count_examples(batch) == examples


@pytest.mark.parametrize(
    "batch",
    [
        [X, torch.zeros(5)],
        {"x": torch.zeros(7, 3, 2), "y": torch.zeros(3)},  # time first
        [torch.tensor(1.0), X],
        {"x": X, "scale": torch.tensor(2.0)},
        {"ids": ["a"], "x": X},
        ["a", 3],
        object(),
        [{"image": torch.zeros(3, 4, 4), "boxes": torch.zeros(2, 4)} for _ in range(4)],
    ],
)
def test_ambiguous_batch_requires_batch_size_of(batch):
    with pytest.raises(FederatedError, match="not clear.*batch_size_of"):
        count_examples(batch)
    assert count_examples(batch, lambda _: 4) == 4
    for wrong in (1.5, None, -1, True):
        with pytest.raises(FederatedError, match="batch_size_of returned"):
            count_examples(batch, lambda _, wrong=wrong: wrong)


def test_possible_counts_include_other_readings_of_a_batch():
    assert possible_counts([torch.zeros(3, 4, 4)] * 5) == [3, 5]
    assert possible_counts([X, torch.zeros(3)]) == [3]


def test_batch_length_is_known_before_loading():
    plain = DataLoader(Detection(), batch_size=4, collate_fn=collate)
    assert [sampled_length(plain, k) for k in range(4)] == [4, 4, 2, None]
    assert sampled_length(DataLoader(Detection(), batch_sampler=[[1, 2]]), 0) == 2
    for other in (DataLoader(Detection(), batch_sampler=Buckets(None)), DataLoader(Detection(), batch_size=None), [1]):
        assert sampled_length(other, 0) is None


def test_batch_size_of_must_be_a_function():
    with pytest.raises(FederatedError, match="batch_size_of=4.*function of a batch"):
        FederatedDataModule(clients=[Detection()], batch_size_of=4)
