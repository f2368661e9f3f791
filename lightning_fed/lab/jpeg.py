"""CIFAR-10 from JPEG copies in a NumPy archive. The published results of FedCM use it."""

import io
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fed.core.errors import FederatedError
from lightning_fed.data.datasets.images import CIFAR10


class JpegCIFAR10(CIFAR10):
    """:class:`CIFAR10` from lossy JPEG copies of the photographs.

    They are good for comparing methods with each other. Accuracies are not comparable with published ones.

    The file is ``cifar10_jpeg.npz`` in ``root`` or in ``root/cifar10_jpeg``; :func:`read_jpegs` describes it. The
    arguments are those of :class:`CIFAR10`; the file cannot be downloaded.
    """

    def _file(self) -> Path:
        name = "cifar10_jpeg.npz"
        direct, nested = self.root / name, self.root / "cifar10_jpeg" / name
        return nested if nested.is_file() else direct

    def _paths(self) -> list[Path]:
        return [self._file()]

    def _fetch(self) -> None:
        raise FederatedError(f"JpegCIFAR10(download=True): only the originals can be downloaded. {self._remedy()}.")

    def _remedy(self) -> str:
        return "Put it there, or use lightning_fed.data.CIFAR10 for the originals"

    def _read(self, train: bool) -> tuple[Tensor, Tensor]:
        images, labels = read_jpegs(self._file(), "train" if train else "test", size=32)
        self._check(images, labels, str(self._file()))
        return images, labels


def read_jpegs(path: Path, part: str, size: int) -> tuple[Tensor, Tensor]:
    """Return one part of the images of an ``.npz`` archive, decoded, and their labels.

    Args:
        path: The archive. ``<part>_jpeg`` has the bytes of n files end to end. ``<part>_offset`` [n + 1] has the start
            of each file and the end of the last one. ``<part>_label`` [n] has the classes.
        part: The part, such as "train".
        size: Height and width of every image.

    Returns:
        Images [n, 3, size, size], uint8, and labels [n], int64.

    Raises:
        FederatedError: If the archive is damaged or holds something else.
    """
    data, offsets, labels = _arrays(path, part)
    ends = offsets.astype(np.int64)
    if len(ends) != len(labels) + 1 or ends[0] != 0 or ends[-1] != len(data) or (np.diff(ends) < 0).any():
        raise _damaged(
            path,
            f"{part}_offset must ascend from 0 to the {len(data):,} bytes of {part}_jpeg, with one number more than"
            f" the {len(labels):,} labels",
        )
    content = memoryview(data.tobytes())
    images = torch.empty(len(labels), 3, size, size, dtype=torch.uint8)
    for i, image in enumerate(images):
        image.copy_(_decoded(content[ends[i] : ends[i + 1]], size, f"{path}, image {i:,} of {part}"))
    return images, torch.from_numpy(labels.astype(np.int64))


def _arrays(path: Path, part: str) -> list[Any]:
    try:
        loaded = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise _damaged(path, "it is a single array")
        with loaded as archive:
            arrays = [archive[f"{part}_{name}"] for name in ("jpeg", "offset", "label")]
    except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise _damaged(path, str(error)) from error
    if arrays[0].dtype != np.uint8 or any(a.dtype.kind not in "iu" or a.ndim != 1 for a in arrays):
        found = ", ".join(f"{a.dtype} {list(a.shape)}" for a in arrays)
        raise _damaged(
            path, f"{part}_jpeg, _offset and _label must be bytes and integers in one dimension; found {found}"
        )
    return arrays


def _decoded(content: memoryview, size: int, where: str) -> Tensor:
    from PIL import Image  # torchvision needs it as well

    try:
        with Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
            found = (image.mode, *image.size)
            if found == ("RGB", size, size):
                return torch.from_numpy(np.array(image)).permute(2, 0, 1)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise FederatedError(f"{where}: {error}. Get the file again.") from error
    raise FederatedError(f"{where} should be RGB, {size}x{size}; found {found[0]}, {found[1]}x{found[2]}.")


def _damaged(path: Path, problem: str) -> FederatedError:
    return FederatedError(f"{path} is damaged or no such archive: {problem}. Get the file again.")
