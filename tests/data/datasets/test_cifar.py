"""CIFAR: on tiny files in the true format, and on the published JPEG copy where it is at hand.

Set ``LIGHTNING_FED_DATA`` to a folder with ``cifar10_jpeg/cifar10_jpeg.npz`` for the last part.
"""

import hashlib
import io
import os
import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
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
        ({"source": "png"}, r"CIFAR10\(source='png'\).*'original' or 'jpeg'"),
        ({"source": "jpeg", "download": True}, "only the originals can be downloaded"),
        ({"alpha": 0}, "alpha=0"),
        ({"num_clients": 2.5}, "num_clients=2.5"),
        ({"augment": [RandomCrop]}, "augment=RandomCrop\\) is a class"),
        ({"val_fraction": -0.1}, r"CIFAR10\(val_fraction=-0.1\)"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_read(options, message):
    with pytest.raises(FederatedError, match=message):
        CIFAR10(**options)


# JPEG


def jpeg(image):
    with io.BytesIO() as file:
        Image.fromarray(image).save(file, "JPEG", quality=75)
        return file.getvalue()


def arrays_of(part, n, side=32):
    images = np.random.RandomState(n).randint(256, size=(n, side, side, 3)).astype(np.uint8)
    files = [jpeg(image) for image in images]
    return {
        f"{part}_jpeg": np.frombuffer(b"".join(files), np.uint8),
        f"{part}_offset": np.cumsum([0, *map(len, files)]),
        f"{part}_label": np.arange(n) % 10,
    }


def write_jpeg(path, **changes):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **{**arrays_of("train", 30), **arrays_of("test", 11), **changes})


@pytest.mark.parametrize("folder", [".", "cifar10_jpeg"])
def test_the_jpeg_copy_is_read_where_it_is_asked_for(tmp_path, folder):
    write_jpeg(tmp_path / folder / "cifar10_jpeg.npz")
    data = CIFAR10(tmp_path, source="jpeg", partition=Iid(3))
    assert data.known_sizes == [10] * 3
    files = arrays_of("train", 30)
    ends, content = files["train_offset"], files["train_jpeg"].tobytes()
    expected = [np.asarray(Image.open(io.BytesIO(content[a:b]))) for a, b in pairwise(ends)]
    assert data.train.tensors[0].equal(torch.from_numpy(np.stack(expected)).permute(0, 3, 1, 2))
    assert data.train.tensors[1].tolist() == [i % 10 for i in range(30)]
    assert len(data.test) == 11
    with pytest.raises(FederatedError, match="there is no .*cifar-10-batches-py"):
        CIFAR10(tmp_path).setup("fit")  # never in place of the originals


def test_a_missing_jpeg_copy_is_named(tmp_path):
    with pytest.raises(
        FederatedError, match=r"there is no .*cifar10_jpeg.npz .*Put it there, or use source='original'"
    ):
        CIFAR10(tmp_path, source="jpeg").setup("fit")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_offset": np.arange(31)}, "train_offset must ascend from 0"),
        ({"train_offset": np.zeros(0, int)}, "train_offset must ascend from 0"),
        ({"train_offset": arrays_of("train", 30)["train_offset"][::-1]}, "train_offset must ascend"),
        ({"test_label": np.arange(5)}, "test_offset must ascend.*5 labels"),
        ({"train_label": np.arange(30.0)}, "found uint8.*float64"),
        ({"train_label": np.arange(30)}, "labels run from 0 to 29"),
        ({"train_label": np.array([Fires()] * 30)}, "damaged or no such archive.*allow_pickle"),
        ({"test_jpeg": np.zeros_like(arrays_of("test", 11)["test_jpeg"])}, "image 0 of test: cannot identify"),
        (arrays_of("train", 3, side=16), r"image 0 of train should be RGB, 32x32; found RGB, 16x16"),
    ],
)
def test_a_damaged_jpeg_copy_is_named(tmp_path, changes, message):
    path = tmp_path / "cifar10_jpeg.npz"
    write_jpeg(path, **changes)
    with pytest.raises(FederatedError, match=rf"{path}.*{message}"):
        CIFAR10(tmp_path, source="jpeg").setup("fit")
    assert not Path("fired").exists()


def test_what_is_no_archive_is_named(tmp_path):
    path = tmp_path / "cifar10_jpeg.npz"
    for content in (b"", b"text", pickle.dumps(Fires())):
        path.write_bytes(content)
        with pytest.raises(FederatedError, match=rf"{path} is damaged or no such archive"):
            CIFAR10(tmp_path, source="jpeg").setup("fit")
    write_jpeg(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(FederatedError, match=rf"{path} is damaged or no such archive"):
        CIFAR10(tmp_path, source="jpeg").setup("fit")
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(FederatedError, match=rf"{path} is damaged or no such archive"):
        CIFAR10(tmp_path, source="jpeg").setup("fit")
    np.savez(path, train_jpeg=np.zeros(3, np.uint8))
    with pytest.raises(FederatedError, match=rf"{path} is damaged.*train_offset"):
        CIFAR10(tmp_path, source="jpeg").setup("fit")
    assert not Path("fired").exists()


@pytest.mark.thorough
def test_the_published_jpeg_copy():
    folder = os.environ.get("LIGHTNING_FED_DATA")
    if folder is None:
        pytest.skip("LIGHTNING_FED_DATA names no folder of data sets")
    data = CIFAR10(folder, source="jpeg")
    data.setup("fit")
    images, labels = data.train.tensors
    assert torch.bincount(labels).tolist() == [5000] * 10
    assert torch.bincount(data.test.tensors[1]).tolist() == [1000] * 10
    means = [images[:, c].float().mean().item() / 255 for c in range(3)]
    assert means == pytest.approx(CIFAR10._mean, abs=1e-3)
