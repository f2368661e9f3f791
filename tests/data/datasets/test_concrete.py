"""The strength of concrete: standardised by the training part, and split in sorted order.

Set ``LIGHTNING_FED_DATA`` to a folder with ``concrete/Concrete_Data.csv`` for the published file.
"""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_fed import FederatedTrainer
from lightning_fed.core.errors import FederatedError
from lightning_fed.data import Concrete, Iid
from lightning_fed.models import LinearRegression

NAMES = ["Cement", "Slag", "Ash", "Water", "Plasticizer", "Coarse", "Fine", "Age", "strength"]


def write(root, table, names=NAMES):
    path = root / "concrete" / "Concrete_Data.csv"
    path.parent.mkdir(exist_ok=True)
    lines = [",".join(names), *(",".join(map(str, row)) for row in table)]
    path.write_text("\ufeff" + "\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def root(tmp_path):
    table = np.random.RandomState(0).lognormal(size=(50, 9)).round(3)
    table[:, 4] = 7  # a constant feature
    write(tmp_path, table)
    return str(tmp_path)


def whole(data):
    return [torch.cat(parts) for parts in zip(*(data.client_dataset(i)[:] for i in data.client_ids), strict=True)]


def test_clients_are_sorted_by_the_target(root):
    data = Concrete(root, num_clients=3)
    assert data.num_clients == 3
    data.setup("fit")
    assert data.known_sizes == [14, 13, 13]
    assert len(data.val) == 10
    x, y = data.client_dataset(0).tensors
    assert (list(x.shape), x.dtype, list(y.shape), y.dtype) == ([14, 8], torch.float32, [14, 1], torch.float32)
    strengths = whole(data)[1].flatten()
    assert torch.equal(strengths, strengths.sort().values)


@pytest.mark.parametrize("standardize_target", [False, True])
def test_data_is_standardized_by_the_training_part(root, standardize_target):
    data = Concrete(root, num_clients=3, standardize_target=standardize_target)
    data.setup("fit")
    x, y = whole(data)
    varying = [0, 1, 2, 3, 5, 6, 7]
    assert x[:, varying].mean(0).abs().max() < 1e-5
    assert (x[:, varying].std(0, correction=0) - 1).abs().max() < 1e-5
    assert x[:, 4].abs().max() < 1e-5
    assert (abs(y.mean()) < 1e-5) == standardize_target
    assert (data.val.tensors[0].mean(0).abs() > 1e-3).any()
    plain = Concrete(root, num_clients=3)
    plain.setup("fit")
    _, strengths = whole(plain)
    if standardize_target:
        standard = (strengths - strengths.mean()) / strengths.std(correction=0)
        assert torch.allclose(y, standard, atol=1e-5)


def test_clients_can_be_sorted_by_a_feature_or_unsorted(root):
    data = Concrete(root, num_clients=4, sort_by="Water")
    data.setup("fit")
    water = whole(data)[0][:, 3]
    assert torch.equal(water, water.sort().values)
    means = [c.tensors[1].mean().item() for c in map(Concrete(root, 4, sort_by=None).client_dataset, range(4))]
    assert means != sorted(means) or max(means) - min(means) < 2
    with pytest.raises(FederatedError, match=r"sort_by='Lime'\): .* has 'target' and the columns \['Cement'"):
        Concrete(root, sort_by="Lime").setup("fit")


def test_test_part_depends_only_on_the_seed(root):
    parts = []
    for options in ({}, {"num_clients": 2}, {"seed": 1}):
        data = Concrete(root, **options)
        data.setup("test")
        parts.append(data.test.tensors[1])
    assert torch.equal(parts[0], parts[1])
    assert not torch.equal(parts[0], parts[2])
    data = Concrete(root, test_fraction=0)
    data.setup("fit")
    assert data.val is None
    assert sum(data.known_sizes) == 50


def test_custom_partition_is_used(root):
    data = Concrete(root, partition=Iid(num_clients=4))
    data.setup("fit")
    assert data.num_clients == 4
    assert sum(data.known_sizes) == 40


def test_corrupt_and_missing_files_are_rejected(tmp_path):
    with pytest.raises(FederatedError, match=r"there is no .*Concrete_Data.csv.*archive.ics.uci.edu.*Or set root"):
        Concrete(str(tmp_path)).setup("fit")
    write(tmp_path, [range(8)], NAMES[:8])
    with pytest.raises(FederatedError, match="the heading must have 9 columns"):
        Concrete(str(tmp_path)).setup("fit")
    write(tmp_path, [range(9), [*range(3), "wet", *range(5)]])
    with pytest.raises(FederatedError, match="column 'Water' must hold finite numbers; line 3 holds 'wet'"):
        Concrete(str(tmp_path)).setup("fit")
    write(tmp_path, [range(9), range(8)])
    with pytest.raises(FederatedError, match="line 3: 8 fields under a heading of 9"):
        Concrete(str(tmp_path)).setup("fit")
    write(tmp_path, [range(9), range(9)])
    with pytest.raises(FederatedError, match="2 training mixtures for num_clients=10"):
        Concrete(str(tmp_path)).setup("fit")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"num_clients": 0}, "num_clients=0"), ({"test_fraction": 1}, "test_fraction"), ({"seed": 0.5}, "seed=0.5")],
)
def test_invalid_options_are_rejected_at_construction(options, message):
    with pytest.raises(FederatedError, match=message):
        Concrete(**options)


def test_linear_regression_trains(root):
    data = Concrete(root, num_clients=5, standardize_target=True)
    trainer = FederatedTrainer(max_rounds=2, local_epochs=1, seed=0, logger=False, enable_progress_bar=False)
    trainer.fit(LinearRegression(Concrete.num_features, lr=0.01), data)
    assert trainer.callback_metrics["val_loss"] > 0


def test_published_file_has_the_known_statistics():
    folder = os.environ.get("LIGHTNING_FED_DATA")
    if not folder or not Path(folder, "concrete").exists():
        pytest.skip("LIGHTNING_FED_DATA names no folder with concrete/Concrete_Data.csv")
    data = Concrete(folder)
    data.setup("fit")
    assert (data.num_clients, sum(data.known_sizes), len(data.val)) == (10, 824, 206)
    strengths = torch.cat([whole(data)[1], data.val.tensors[1]])
    assert [strengths.min().item(), strengths.max().item()] == pytest.approx([2.33, 82.6])
    assert strengths.mean().item() == pytest.approx(35.818, abs=1e-3)
