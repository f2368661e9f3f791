"""CIFAR on tiny files in the true format."""

import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision import datasets

from lightning_fed.core.errors import FederatedError
from lightning_fed.data import CIFAR10, CIFAR100, BalancedDirichlet, Iid, Normalize, RandomCrop, RandomFlip

BATCHES = {
    "CIFAR10": [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"],
    "CIFAR100": ["train", "test"],
}
KEYS = {"CIFAR10": ("labels", "label_names", "batches.meta"), "CIFAR100": ("fine_labels", "fine_label_names", "meta")}


def write_pickle(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol=2))
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture(params=["CIFAR10", "CIFAR100"])
def tiny(request, tmp_path, monkeypatch):
    """Write 20 images a file and let torchvision expect their sums; return the class, the folder and the arrays."""
    theirs, (key, names, meta) = getattr(datasets, request.param), KEYS[request.param]
    num_classes, sums, arrays = int(request.param[5:]), [], []
    for i, name in enumerate(BATCHES[request.param]):
        images = np.random.RandomState(i).randint(256, size=(20, 3072)).astype(np.uint8)
        labels = [(i + k) % num_classes for k in range(20)]
        sums.append([name, write_pickle(tmp_path / theirs.base_folder / name, {"data": images, key: labels})])
        arrays.append((images.reshape(20, 3, 32, 32), labels))
    md5 = write_pickle(tmp_path / theirs.base_folder / meta, {names: [str(i) for i in range(num_classes)]})
    monkeypatch.setattr(theirs, "train_list", sums[:-1])
    monkeypatch.setattr(theirs, "test_list", sums[-1:])
    monkeypatch.setattr(theirs, "meta", {**theirs.meta, "md5": md5})
    return {"CIFAR10": CIFAR10, "CIFAR100": CIFAR100}[request.param], tmp_path, arrays


def test_cifar_is_what_its_files_hold(tiny):
    make, root, arrays = tiny
    data = make(root, partition=Iid(4))
    assert data.train is None
    assert sum(data.known_sizes) == 20 * (len(arrays) - 1)
    images, labels = data.train.tensors
    assert images.dtype == torch.uint8
    assert images.is_contiguous()
    assert images.equal(torch.from_numpy(np.concatenate([x for x, _ in arrays[:-1]])))
    assert labels.tolist() == [label for _, y in arrays[:-1] for label in y]
    [(x, y)] = data.val_dataloader()
    assert x.equal(Normalize(make._mean, make._std)(torch.from_numpy(arrays[-1][0])))
    assert y.tolist() == arrays[-1][1]


class Fires:
    """Does something when it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("fired"),)


def test_a_file_that_is_not_the_published_one_is_not_unpickled(tiny, tmp_path):
    make, root, _ = tiny
    write_pickle(root / make._folder / BATCHES[make.__name__][0], Fires())
    data = make(root)
    with pytest.raises(FederatedError, match=rf"{make.__name__}: a file in .*{make._folder}.*MD5.*Remove the folder"):
        data.setup("fit")
    assert not Path("fired").exists()


def test_cifar_is_dealt_out_as_in_fedcm_and_augmented_unless_one_says_otherwise():
    for make in (CIFAR10, CIFAR100):
        data = make()
        assert isinstance(data.partition, BalancedDirichlet)
        assert (data.num_classes, data.partition.num_clients, data.partition.alpha) == (make.num_classes, 100, 0.6)
        assert repr(data.batch_augment) == "[RandomCrop(padding=4), RandomFlip()]"
        assert repr(make(augment=RandomFlip()).batch_augment) == "RandomFlip()"
        assert make(augment=False).batch_augment is None
        own = Normalize([0.5], [0.5])
        assert make(transform=own).batch_transform is own
        partition = make(num_clients=7, alpha=0.1, seed=5).partition
        assert (partition.num_clients, partition.alpha, partition.seed) == (7, 0.1, 5)


@pytest.mark.parametrize("make", [CIFAR10, CIFAR100])
def test_a_missing_folder_is_named_with_both_ways_to_get_it(tmp_path, make):
    make(tmp_path).prepare_data()
    with pytest.raises(FederatedError, match=rf"there is no {tmp_path / make._folder}.*download=True, or unpack"):
        make(tmp_path).setup("fit")


def test_a_download_is_torchvisions(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(datasets, "CIFAR100", lambda *args, **options: calls.append((args, options)))
    CIFAR100(tmp_path, download=True).prepare_data()
    assert calls == [((tmp_path,), {"download": True})]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 0}, "alpha=0"),
        ({"num_clients": 2.5}, "num_clients=2.5"),
        ({"augment": [RandomCrop]}, "augment=RandomCrop\\) is a class"),
        ({"val_fraction": -0.1}, r"CIFAR10\(val_fraction=-0.1\)"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_read(options, message):
    with pytest.raises(FederatedError, match=message):
        CIFAR10(**options)
