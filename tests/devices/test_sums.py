"""Sums over clients use little of a device's memory."""

from typing import Any

import pytest
import torch

from lightning_fed.server.aggregation import mean
from tests.devices.conftest import Place
from tests.helpers.aggregation import cohort


def test_aggregation_converts_messages_in_bounded_blocks(
    place: Place, mini: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, numel, block = 128, 20_000, 2**16
    monkeypatch.setattr(mean, "_BLOCK_ON_DEVICE", block)
    rows = torch.randn(count, numel)
    found = []
    for device in (torch.device("cpu"), place.device):
        aggregation, here = mean.Aggregation({"m": "uniform"}, "examples", cohort([1] * count), count), rows.to(device)
        before = mini.core.memory(0)["used"]
        mini.core.reset_peak(0)
        aggregation.update(dict.fromkeys(range(count), 1), {"m": here})
        taken = mini.core.memory(0)["peak"] - before
        found.append(aggregation.compute(torch.zeros(numel, device=device))[0]["m"].cpu())
    assert 8 * numel <= taken < 8 * (4 * numel + 4 * block)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-7)
