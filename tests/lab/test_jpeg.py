"""CIFAR-10 from JPEG copies: on tiny archives, and on the whole one if available.

Set ``LIGHTNING_FED_DATA`` to a folder with ``cifar10_jpeg/cifar10_jpeg.npz`` for the last part.
"""

import io
import os
import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_fed.core.errors import FederatedError
from lightning_fed.data import CIFAR10, Iid
from lightning_fed.lab.jpeg import JpegCIFAR10


class Fires:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("fired"),)


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
def test_jpeg_copy_is_read_when_requested(tmp_path, folder):
    write_jpeg(tmp_path / folder / "cifar10_jpeg.npz")
    data = JpegCIFAR10(tmp_path, partition=Iid(3))
    assert data.known_sizes == [10] * 3
    files = arrays_of("train", 30)
    ends, content = files["train_offset"], files["train_jpeg"].tobytes()
    expected = [np.asarray(Image.open(io.BytesIO(content[a:b]))) for a, b in pairwise(ends)]
    assert data.train.tensors[0].equal(torch.from_numpy(np.stack(expected)).permute(0, 3, 1, 2))
    assert data.train.tensors[1].tolist() == [i % 10 for i in range(30)]
    assert len(data.test) == 11
    with pytest.raises(FederatedError, match="there is no .*cifar-10-batches-py"):
        CIFAR10(tmp_path).setup("fit")  # it never replaces the originals


def test_missing_jpeg_copy_raises(tmp_path):
    with pytest.raises(
        FederatedError, match=r"there is no .*cifar10_jpeg.npz .*Put it there, or use lightning_fed.data.CIFAR10"
    ):
        JpegCIFAR10(tmp_path).setup("fit")
    with pytest.raises(FederatedError, match="only the originals can be downloaded"):
        JpegCIFAR10(tmp_path, download=True).prepare_data()


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
def test_corrupt_jpeg_copy_raises(tmp_path, changes, message):
    path = tmp_path / "cifar10_jpeg.npz"
    write_jpeg(path, **changes)
    with pytest.raises(FederatedError, match=rf"{path}.*{message}"):
        JpegCIFAR10(tmp_path).setup("fit")
    assert not Path("fired").exists()


def test_invalid_archive_raises(tmp_path):
    path = tmp_path / "cifar10_jpeg.npz"
    for content in (b"", b"text", pickle.dumps(Fires())):
        path.write_bytes(content)
        with pytest.raises(FederatedError, match=rf"{path} is damaged or no such archive"):
            JpegCIFAR10(tmp_path).setup("fit")
    write_jpeg(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(FederatedError, match=rf"{path} is damaged or no such archive"):
        JpegCIFAR10(tmp_path).setup("fit")
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(FederatedError, match=rf"{path} is damaged or no such archive"):
        JpegCIFAR10(tmp_path).setup("fit")
    np.savez(path, train_jpeg=np.zeros(3, np.uint8))
    with pytest.raises(FederatedError, match=rf"{path} is damaged.*train_offset"):
        JpegCIFAR10(tmp_path).setup("fit")
    assert not Path("fired").exists()


@pytest.mark.thorough
def test_published_jpeg_copy_matches_cifar10():
    folder = os.environ.get("LIGHTNING_FED_DATA")
    if folder is None:
        pytest.skip("LIGHTNING_FED_DATA names no folder of data sets")
    data = JpegCIFAR10(folder)
    data.setup("fit")
    images, labels = data.train.tensors
    assert torch.bincount(labels).tolist() == [5000] * 10
    assert torch.bincount(data.test.tensors[1]).tolist() == [1000] * 10
    means = [images[:, c].float().mean().item() / 255 for c in range(3)]
    assert means == pytest.approx(CIFAR10._mean, abs=1e-3)
