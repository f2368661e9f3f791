"""MNIST, EMNIST and CIFAR: on tiny files in the real format, and on the published ones if available.

Set ``LIGHTNING_FED_DATA`` to a folder with ``MNIST/raw`` and ``EMNIST/raw`` for the published ones."""

import gzip
import hashlib
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision import datasets

from lightning_fed import FederatedTrainer
from lightning_fed.core.errors import FederatedError
from lightning_fed.data import (
    CIFAR10,
    CIFAR100,
    EMNIST,
    MNIST,
    BalancedDirichlet,
    Iid,
    Normalize,
    PowerLaw,
    RandomCrop,
    RandomFlip,
)
from lightning_fed.models import MLPClassifier
from tests.helpers.image_files import SPLITS, idx, write_emnist, write_idx, write_mnist, write_part


def test_validation_images_are_taken_from_the_clients_if_requested(tmp_path):
    (images, _), _ = write_mnist(tmp_path)
    splits = []
    for seed in (0, 1):
        data = MNIST(tmp_path, partition=Iid(3, seed=seed), val_fraction=0.25)
        assert sum(data.known_sizes) == 45
        clients = torch.cat([data.client_batches(i).pick(torch.arange(15))[0] for i in range(3)])
        splits.append(torch.cat([x for x, _ in data.val_dataloader()]))
        everything = torch.cat([clients / 255, splits[-1]])
        assert sorted(everything.flatten(1).sum(1).tolist()) == sorted((images / 255).flatten(1).sum(1).tolist())
        assert len(data.test) == 20
    assert splits[0].equal(splits[1])


def test_failed_download_suggests_a_remedy(tmp_path, monkeypatch):
    def fetch(root, **options):
        raise RuntimeError("Error downloading train-images-idx3-ubyte.gz")

    monkeypatch.setattr(datasets, "MNIST", fetch)
    with pytest.raises(FederatedError, match="download to .* failed: Error downloading.* put train-"):
        MNIST(tmp_path, download=True).prepare_data()


def test_mismatched_labels_are_rejected_with_the_file(tmp_path):
    write_mnist(tmp_path)
    labels = tmp_path / "MNIST" / "raw" / "t10k-labels-idx1-ubyte"
    write_idx(labels, np.arange(19) % 10, packed=False)
    with pytest.raises(FederatedError, match="t10k-labels-idx1.*20 images and 19 labels"):
        MNIST(tmp_path).setup("fit")
    write_idx(labels, np.arange(20), packed=False)
    with pytest.raises(FederatedError, match="t10k-labels-idx1.*labels run from 0 to 19.*10 classes"):
        MNIST(tmp_path).setup("fit")
    write_emnist(tmp_path, "letters")
    write_idx(tmp_path / "EMNIST" / "raw" / "emnist-letters-train-labels-idx1-ubyte", np.zeros(130), packed=False)
    with pytest.raises(FederatedError, match="emnist-letters-train-labels-idx1.*labels run from -1"):
        EMNIST(tmp_path, split="letters").setup("fit")


def test_images_of_the_wrong_size_are_rejected(tmp_path):
    write_mnist(tmp_path)
    write_part(tmp_path / "MNIST" / "raw", "train", 10, 10, side=27)
    with pytest.raises(FederatedError, match=r"train-images-idx3-ubyte.*27x27.*28x28"):
        MNIST(tmp_path).setup("fit")


@pytest.mark.parametrize("packed", [False, True])
def test_mnist_matches_its_files(tmp_path, packed):
    (images, labels), (test_images, test_labels) = write_mnist(tmp_path, packed)
    data = MNIST(tmp_path, num_clients=4, partition=Iid(4))
    assert data.train is None  # nothing is read until it is needed
    assert data.num_clients == 4
    assert data.known_sizes == [15] * 4
    stored = data.train.tensors
    assert stored[0].dtype == torch.uint8
    assert stored[0].equal(images[:, None])
    assert stored[1].equal(labels)
    [(x, y)] = data.val_dataloader()
    assert x.equal(test_images[:, None] / 255)
    assert y.equal(test_labels)
    assert data.val is data.test
    [x] = data.predict_dataloader()
    assert x.equal(test_images[:, None] / 255)
    if not packed:
        theirs = datasets.MNIST(tmp_path, train=True, download=False)
        assert theirs.data.equal(stored[0][:, 0])
        assert theirs.targets.equal(stored[1])


def test_mnist_partition_defaults_to_fedprox(tmp_path):
    partition = MNIST(tmp_path).partition
    assert isinstance(partition, PowerLaw)
    assert (partition.num_clients, partition.classes_per_client, partition.seed) == (1000, 2, 0)
    assert repr(MNIST(tmp_path, num_clients=7, seed=3).partition) == repr(PowerLaw(7, seed=3))
    own = Iid(num_clients=3)
    assert MNIST(tmp_path, partition=own).partition is own


def test_mnist_trains_flat_and_augmented(tmp_path):
    write_mnist(tmp_path)
    data = MNIST(tmp_path, partition=Iid(3), flatten=True, augment=RandomCrop(2), val_fraction=0.25)
    trainer = FederatedTrainer(
        max_rounds=1, clients_per_round=2, local_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False
    )
    trainer.fit(MLPClassifier(in_features=784), data)
    batch, size = next(data.client_batches(0).epoch(torch.Generator()))
    assert batch[0].shape == (size, 784)
    assert len(trainer.predict(MLPClassifier(in_features=784), data)[0]) == 20


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("packed", [False, True])
def test_emnist_is_upright_and_its_labels_start_at_0(tmp_path, split, packed):
    (images, labels), (test_images, _) = write_emnist(tmp_path, split, packed)
    data = EMNIST(tmp_path, split=split, num_clients=2)
    assert data.num_classes == len(data.classes) == SPLITS[split]
    assert sum(data.known_sizes) == 130
    assert data.train.tensors[0].equal(images.mT[:, None])
    assert data.train.tensors[1].equal(labels)
    [(x, _)] = data.test_dataloader()
    assert x.equal(test_images.mT[:, None] / 255)
    if not packed:
        theirs = datasets.EMNIST(tmp_path, split=split, train=True, download=False)
        assert theirs.data.mT.equal(data.train.tensors[0][:, 0])
        names = [theirs.classes[label] for label in theirs.targets]
        assert names == [data.classes[label] for label in data.train.tensors[1]]


def test_many_images_are_transposed_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_fed.data.datasets.images._IMAGES_AT_ONCE", 16)
    (images, _), _ = write_emnist(tmp_path, "digits")
    data = EMNIST(tmp_path, split="digits", black_on_white=True)
    data.setup("fit")
    assert data.train.tensors[0].equal(255 - images.mT[:, None])


def test_emnist_defaults_to_one_client_per_writer(tmp_path):
    assert EMNIST(tmp_path).partition.num_clients == EMNIST(tmp_path, split="bymerge").partition.num_clients == 3400
    assert EMNIST(tmp_path, split="balanced").partition.num_clients == 100
    partition = EMNIST(tmp_path, num_clients=5, alpha=0.7, seed=2).partition
    assert (partition.num_clients, partition.alpha, partition.seed) == (5, 0.7, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EMNIST(split="byklass"), r"EMNIST\(split='byklass'\).*'byclass' or"),
        (lambda: EMNIST(num_clients=0), "num_clients=0"),
        (lambda: EMNIST(alpha=-1), "alpha=-1"),
        (lambda: MNIST(num_clients=-1), "num_clients=-1"),
        (lambda: MNIST(batch_size=0), r"MNIST\(batch_size=0\)"),
        (lambda: MNIST(val_fraction=1.5), r"MNIST\(val_fraction=1.5\)"),
        (lambda: MNIST(partition=Iid), "partition=Iid is a class"),
        (lambda: MNIST(transform=3), r"MNIST\(transform=3\)"),
        (lambda: MNIST(seed=-1), "seed=-1"),
        (lambda: MNIST(root=3), r"MNIST\(root=3\)"),
    ],
)
def test_invalid_arguments_are_rejected_before_reading(make, message):
    with pytest.raises(FederatedError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "path", "files"),
    [
        (MNIST, "MNIST/raw/train-images-idx3-ubyte", r"train-\*-ubyte and t10k-\*-ubyte"),
        (EMNIST, "EMNIST/raw/emnist-byclass-train-images-idx3-ubyte", r"emnist-byclass-train-\*-ubyte and"),
    ],
)
def test_missing_file_raises_with_both_ways_to_get_it(tmp_path, make, path, files, monkeypatch):
    monkeypatch.setattr(datasets, make.__name__, None)  # nothing may be downloaded
    message = rf"{make.__name__}: there is no {tmp_path / path} .*Set download=True, or put {files}"
    for ask in (lambda data: data.setup("fit"), lambda data: data.num_clients, lambda data: data.known_sizes):
        with pytest.raises(FederatedError, match=message):
            ask(make(tmp_path))
    make(tmp_path).prepare_data()


@pytest.mark.parametrize("where", ["prepare_data", "num_clients"])
def test_requested_download_uses_torchvision_once(tmp_path, monkeypatch, where):
    calls = []

    def fetch(root, **options):
        calls.append((root, options))
        write_emnist(tmp_path, "letters", packed=True)

    monkeypatch.setattr(datasets, "EMNIST", fetch)
    data = EMNIST(tmp_path, split="letters", download=True, num_clients=2)
    assert not calls
    if where == "prepare_data":
        data.prepare_data()
        assert data.train is None
    assert data.num_clients == 2
    data.prepare_data()
    EMNIST(tmp_path, split="letters", download=True).prepare_data()  # the compressed files suffice
    assert calls == [(tmp_path, {"split": "letters", "download": True})]


WHOLE = idx(np.zeros((60, 28, 28)))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        WHOLE[:9],
        b"<html>" + WHOLE,
        idx(np.zeros(3)),
        WHOLE[:2] + b"\x0b" + WHOLE[3:],
        WHOLE[:-1],
        WHOLE + b"0",
        WHOLE[:4] + b"\xff" * 12 + WHOLE[16:],
    ],
    ids=["empty", "short header", "a page", "other dimensions", "other numbers", "short", "long", "huge"],
)
def test_corrupt_file_is_rejected(tmp_path, content, packed):
    write_mnist(tmp_path, packed)
    path = tmp_path / "MNIST" / "raw" / f"t10k-images-idx3-ubyte{'.gz' * packed}"
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(FederatedError, match=f"{path.name} is damaged or no IDX file .*Download it again"):
        MNIST(tmp_path).setup("fit")


@pytest.mark.parametrize(
    "spoil", [lambda c: c[:-12], lambda c: c[:20] + bytes([c[20] ^ 1]) + c[21:], lambda c: c[:-5] + b"0" * 5]
)
def test_corrupt_archive_is_rejected(tmp_path, spoil):
    write_mnist(tmp_path, packed=True)
    path = tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte.gz"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(FederatedError, match="train-labels-idx1-ubyte.gz is damaged"):
        MNIST(tmp_path).setup("fit")


def test_unpacked_file_takes_precedence(tmp_path):
    (images, _), _ = write_mnist(tmp_path)
    (tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte.gz").touch()  # torchvision keeps both
    data = MNIST(tmp_path)
    data.setup("fit")
    assert data.train.tensors[0].equal(images[:, None])


@pytest.fixture(scope="module")
def published():
    folder = os.environ.get("LIGHTNING_FED_DATA")
    if folder is None:
        pytest.skip("LIGHTNING_FED_DATA names no folder of data sets")
    return Path(folder)


def test_published_mnist_has_the_known_statistics(published):
    data = MNIST(published)
    images, labels = data.train.tensors if data.num_clients == 1000 else None
    assert torch.bincount(labels).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert (images / 255).mean().item() == pytest.approx(0.1307, abs=1e-4)
    assert len(data.test) == 10_000
    assert (sum(data.known_sizes), min(data.known_sizes)) == (60_000, 10)
    assert all(len(labels[data.client_dataset(i).indices].unique()) == 2 for i in range(0, 1000, 50))


def test_published_emnist_letters_have_the_known_statistics(published):
    data = EMNIST(published, split="letters")
    data.setup("fit")
    assert torch.bincount(data.train.tensors[1]).tolist() == [4800] * 26
    assert torch.bincount(data.test.tensors[1]).tolist() == [800] * 26
    images, labels = data.train.tensors
    ink = images[labels == data.classes.index("l"), 0].float().mean(0)  # a vertical stroke, if upright
    assert ink.mean(0).max() > 1.5 * ink.mean(1).max()


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
    """Write 20 images a file and let torchvision expect their checksums; return the class, folder and arrays."""
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


def test_cifar_matches_its_files(tiny):
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
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("fired"),)


def test_file_with_a_wrong_checksum_is_not_unpickled(tiny, tmp_path):
    make, root, _ = tiny
    write_pickle(root / make._folder / BATCHES[make.__name__][0], Fires())
    data = make(root)
    with pytest.raises(FederatedError, match=rf"{make.__name__}: a file in .*{make._folder}.*MD5.*Remove the folder"):
        data.setup("fit")
    assert not Path("fired").exists()


def test_cifar_partition_and_augmentation_default_to_fedcm():
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
def test_missing_folder_raises_with_both_ways_to_get_it(tmp_path, make):
    make(tmp_path).prepare_data()
    with pytest.raises(FederatedError, match=rf"there is no {tmp_path / make._folder}.*download=True, or unpack"):
        make(tmp_path).setup("fit")


def test_cifar_download_uses_torchvision(tmp_path, monkeypatch):
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
def test_invalid_cifar_arguments_are_rejected(options, message):
    with pytest.raises(FederatedError, match=message):
        CIFAR10(**options)
