"""FedBN: the layers that stay with the clients."""

import pytest
from torch import nn

from lightning_fed import FederatedError
from lightning_fed.algorithms import FedBN


def test_batch_norm_state_stays_local_at_any_depth():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.GroupNorm(1, 3), nn.BatchNorm1d(3)))
    own = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert FedBN().personal_names(model) == [f"{layer}.{name}" for layer in ("1", "2.1") for name in own]


def test_frozen_or_missing_batch_norm_parameters_are_not_kept():
    frozen, plain = nn.BatchNorm2d(3), nn.BatchNorm2d(3, affine=False, track_running_stats=False)
    frozen.requires_grad_(False)
    assert FedBN().personal_names(nn.ModuleDict({"a": frozen, "b": plain})) == [
        "a.running_mean",
        "a.running_var",
        "a.num_batches_tracked",
    ]


def test_error_without_batch_norm_suggests_alternatives():
    with pytest.raises(FederatedError, match="Sequential has none. Use FedAvg, or FedPer"):
        FedBN().personal_names(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
