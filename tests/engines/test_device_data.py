"""Copies of data on an accelerator: kept if they fit, until the originals are freed or change."""

import pytest
import torch
from torch import Tensor

from lightning_fed.data.batches.batches import RepeatedBatches, TensorBatches
from lightning_fed.data.batches.settings import BatchSettings
from lightning_fed.engines.device_data import DeviceData


def test_device_copy_is_renewed_after_a_write_and_freed_with_original(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = DeviceData(torch.device("meta"))
    monkeypatch.setattr(data, "free", lambda: 2 * 4 * 8)
    x, y = torch.zeros(2), torch.zeros(100)
    ((copy,),) = data.of_each((x,))
    assert copy.device.type == "meta"
    assert data.of_each((copy, x)) == [(copy, copy)]
    assert data.of_each((x, y))[0][1] is y, "it takes more than a quarter of the free memory"
    x.add_(1)
    assert data.of_each((x,))[0][0] is not copy
    del x, y
    assert not data._copies


def test_all_device_copies_together_use_a_share_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    data, originals = DeviceData(torch.device("meta")), [torch.zeros(10) for _ in range(5)]  # 40 bytes each
    memory = 400

    def free() -> int:
        return memory - sum(copy.nbytes for _, copy in data._copies.values() if copy is not None)

    monkeypatch.setattr(data, "free", free)
    kept = [data.of_each((tensor,))[0][0] is not tensor for tensor in originals]
    assert kept == [True, True, False, False, False], "a quarter of what would be free without them"
    together = [torch.zeros(1), torch.zeros(100)]
    assert data.of_each(*[(t,) for t in together]) == [(t,) for t in together], "they stay or go together"
    data.clear()
    assert data.of_each((originals[4],))[0][0] is not originals[4]


def test_only_batches_of_tensor_rows_are_placed_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    data = DeviceData(torch.device("meta"))
    monkeypatch.setattr(data, "free", lambda: 10**6)
    x: Tensor = torch.zeros(4, 2)
    rows, changed = TensorBatches((x,), None, BatchSettings(2)), BatchSettings(2, transform=lambda batch: batch)
    placed = data.to_device(rows)
    assert isinstance(placed, TensorBatches)
    assert placed.tensors[0].device.type == "meta"
    repeated = data.to_device(RepeatedBatches(rows, 3))
    assert isinstance(repeated, RepeatedBatches)
    assert repeated.num_batches() == 6
    transformed = TensorBatches((x,), None, changed)
    assert data.to_device(transformed) is transformed
    assert DeviceData(torch.device("cpu")).to_device(rows) is rows


def test_out_of_memory_device_gets_no_more_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    data, x, y = DeviceData(torch.device("meta")), torch.zeros(2), torch.zeros(2)
    monkeypatch.setattr(data, "free", lambda: 10**6)
    assert data.of_each((x,))[0][0] is not x
    data.give_up()
    assert data.of_each((x, y)) == [(x, y)]
