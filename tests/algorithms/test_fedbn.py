"""FedBN: which layers stay with the clients."""

import pytest
from torch import nn

from lightning_fed import FederatedError
from lightning_fed.algorithms import FedBN


def test_it_keeps_what_batch_normalisation_trains_and_counts_at_any_depth():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.GroupNorm(1, 3), nn.BatchNorm1d(3)))
    own = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert FedBN().personal_names(model) == [f"{layer}.{name}" for layer in ("1", "2.1") for name in own]


def test_what_is_frozen_or_not_there_is_not_kept():
    frozen, plain = nn.BatchNorm2d(3), nn.BatchNorm2d(3, affine=False, track_running_stats=False)
    frozen.requires_grad_(False)
    assert FedBN().personal_names(nn.ModuleDict({"a": frozen, "b": plain})) == [
        "a.running_mean",
        "a.running_var",
        "a.num_batches_tracked",
    ]


def test_a_module_without_such_layers_is_told_what_to_use_instead():
    with pytest.raises(FederatedError, match="Sequential has none. Use FedAvg, or FedPer"):
        FedBN().personal_names(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
