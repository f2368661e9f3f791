"""One folder per client, read when the client participates, for data that do not fit in memory."""

import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from lightning_fed.core.arguments import check_count, check_paths
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.data.batches.settings import BatchAugmentation, BatchTransform
from lightning_fed.data.datamodule import AnyDataset, FederatedDataModule
from lightning_fed.data.files.stored import find, inside

_ARRAYS = ("x", "y")
_DEEP = ("I", "F")  # PIL's 16- and 32-bit modes: convert("RGB") would clip their values at 255
_IMAGES = {".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


class _Folders(FederatedDataModule):
    """Clients as the folders in ``root``, by name; folders are opened lazily."""

    root: str
    _names: list[str] | None = None

    @property
    def client_ids(self) -> Sequence[ClientId]:
        """The sorted names of the folders; the first access lists ``root``."""
        if self._names is None:
            owner = type(self).__name__
            root = find(owner, Path(self.root), "Make it: a folder for each client.", "Or correct root.")
            if not root.is_dir():
                raise FederatedError(f"{owner}: {root} is not a folder.")
            with os.scandir(root) as entries:
                self._names = sorted(e.name for e in entries if not e.name.startswith(".") and e.is_dir())
            if not self._names:
                raise FederatedError(f"{owner}: {root} has no folders, and so there are no clients.")
        return self._names

    @client_ids.setter
    def client_ids(self, value: Sequence[ClientId]) -> None:
        raise FederatedError(f"The clients of {type(self).__name__} are the folders in {self.root!r}.")

    def _folder(self, client_id: ClientId) -> Path:
        """Return a client's folder; only listed folders are ever opened."""
        names = self.client_ids
        position = bisect_left(names, str(client_id))  # type: ignore[type-var]
        if names[position : position + 1] != [client_id]:
            raise FederatedError(f"{type(self).__name__}: {self.root} has no client folder {client_id!r}.")
        return inside(type(self).__name__, Path(self.root), Path(self.root) / str(client_id))


class ClientFolder(_Folders):
    """One folder per client with its examples in one file: ``root/<client>/train.npz``.

    The file holds the arrays ``x`` [n, ...] and ``y`` [n, ...], as written by ``numpy.savez(path, x=x, y=y)``; or it is
    a ``train.pt`` with a dictionary of the tensors ``x`` and ``y``. Floating point numbers become float32, integers in
    ``y`` int64, and integers in ``x`` keep their type. A client may also have a ``val.npz``, and ``root`` a ``val.npz``
    and a ``test.npz`` for the server model. Files are read when needed; counting the examples in an ``.npz`` file only
    reads ``y``. Files with pickled objects raise an error, so no code in them runs.

    Args:
        root: The folder of client folders.
        batch_size: Examples in a client's training batch.
        cache_size: The number of clients whose data stay in memory; the least recently used are evicted first.
        transform: As for :class:`FederatedDataModule`, on batches [x, y], for example to convert bytes to floats.
        augment: As for :class:`FederatedDataModule`, on batches [x, y].

    Raises:
        FederatedError: If an argument is not allowed; later, if a folder or file is missing or damaged.
    """

    def __init__(
        self,
        root: str,
        batch_size: int = 32,
        cache_size: int = 64,
        transform: Sequence[BatchTransform] | BatchTransform | None = None,
        augment: Sequence[BatchAugmentation] | BatchAugmentation | None = None,
    ) -> None:
        super().__init__(batch_size=batch_size, transform=transform, augment=augment)
        check_paths("ClientFolder", root=root)
        self.root = root
        self.cache_size = check_count("ClientFolder", "cache_size", cache_size, least=0)
        self._cache: dict[Path, TensorDataset] = {}

    def setup(self, stage: str | None = None) -> None:
        """List the clients, and read the server model's validation and test sets, if any."""
        _ = self.client_ids
        if self.val is None:
            self.val = self._optional(Path(self.root), "val")
            self.test = self._optional(Path(self.root), "test") or self.val

    def client_dataset(self, client_id: ClientId) -> TensorDataset:
        """Return a client's training set, from its file or the cache."""
        path = self._path(client_id)
        self._cache[path] = dataset = self._cache.pop(path, None) or read_examples(path)  # most recent last
        if len(self._cache) > self.cache_size:
            del self._cache[next(iter(self._cache))]
        return dataset

    def client_size(self, client_id: ClientId) -> int:
        """Return a client's number of training examples; for an ``.npz`` file, this only reads ``y``."""
        path = self._path(client_id)
        if path.suffix == ".pt":
            return len(self.client_dataset(client_id))
        try:
            with np.load(path, allow_pickle=False) as file:
                return len(file["y"])
        except Exception as error:  # the error depends on where the file is damaged
            raise FederatedError(f"{path} must be an .npz file with the arrays x and y: {error}.") from error

    def client_val_dataset(self, client_id: ClientId) -> TensorDataset | None:
        """Return a client's validation set, or None if its folder has none."""
        return self._optional(self._folder(client_id), "val")

    def _path(self, client_id: ClientId) -> Path:
        folder = self._folder(client_id)
        path = self._choose(folder, "train")
        if path is None:
            raise FederatedError(
                f"ClientFolder: there is no train.npz (or train.pt) in {folder}. Write it, or remove the folder."
            )
        return path

    def _optional(self, folder: Path, part: str) -> TensorDataset | None:
        path = self._choose(folder, part)
        return None if path is None else read_examples(path)

    def _choose(self, folder: Path, part: str) -> Path | None:
        """Return a file of examples, or None; raise if two files have one name."""
        found = [path for path in (folder / f"{part}.npz", folder / f"{part}.pt") if path.is_file()]
        if len(found) > 1:
            raise FederatedError(f"{folder} has both {part}.npz and {part}.pt: remove one.")
        return inside("ClientFolder", Path(self.root), found[0]) if found else None


class ClientImages(_Folders):
    """One folder per client with one folder per class: ``root/<client>/<class>/<image>``.

    Images are opened when a batch needs them. They become float32 [3, height, width] in [0, 1], or the result of
    ``image_transform``, which must have one size for all images. Labels are int64.

    Args:
        root: The folder of client folders.
        classes: The names of all classes, in the order of their numbers. A client need not have all of them. A folder
            with any other name raises.
        val_root: A folder of class folders to validate and test the server model on; not in ``root``.
        image_transform: A function from a PIL image to a tensor. The image is RGB, or as stored if it has more than 8
            bits per channel; without a function, such images raise.
        batch_size: Examples in a client's training batch.
        num_workers: The processes that open a client's images.

    Raises:
        FederatedError: If an argument is not allowed; later, if a folder is missing, has an unknown class, or has files
            but no images, or if an image cannot be opened.
    """

    def __init__(
        self,
        root: str,
        classes: Sequence[str],
        val_root: str | None = None,
        image_transform: Callable[[Any], Any] | None = None,
        batch_size: int = 32,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size=batch_size, num_workers=num_workers)
        check_paths("ClientImages", root=root, **({} if val_root is None else {"val_root": val_root}))
        names = list(classes) if isinstance(classes, list | tuple) else []
        if not names or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
            raise FederatedError(f"ClientImages(classes={classes!r}): give a list of different names.")
        if image_transform is not None and not callable(image_transform):
            raise FederatedError(f"ClientImages(image_transform={image_transform!r}) must be a function of an image.")
        self.root = root
        self.classes = names
        self.val_root = val_root
        self.image_transform = image_transform

    def setup(self, stage: str | None = None) -> None:
        """List the clients and the validation images."""
        _ = self.client_ids
        if self.val is None and self.val_root is not None:
            root, get = Path(self.val_root), "Make it: a folder for each class."
            find("ClientImages", root, get, "Or correct val_root.")
            self.val = self.test = _Images(root, self.classes, self.image_transform)

    def client_dataset(self, client_id: ClientId) -> AnyDataset:
        """Return a client's images; they are opened lazily."""
        return _Images(self._folder(client_id), self.classes, self.image_transform)


class _Images(Dataset[tuple[Tensor, int]]):
    """The images in a folder's class folders; a class has the same number for all clients."""

    def __init__(self, folder: Path, classes: list[str], transform: Callable[[Any], Any] | None) -> None:
        self.transform = transform
        entries = [entry for entry in sorted(folder.iterdir()) if not entry.name.startswith(".")]
        for entry in entries:
            if entry.is_dir() and entry.name not in classes:
                raise FederatedError(f"{entry}: {entry.name!r} is not among the classes {classes}.")
        files = [file for entry in entries for file in (sorted(entry.iterdir()) if entry.is_dir() else [entry])]
        files = [file for file in files if not file.name.startswith(".")]
        images = [file for file in files if file.suffix.lower() in _IMAGES and file.parent != folder]
        numbers = {name: number for number, name in enumerate(classes)}
        self.paths = [inside("ClientImages", folder, image) for image in images]
        self.targets = [numbers[image.parent.name] for image in images]
        if files and not images:
            raise FederatedError(
                f"ClientImages: {folder} holds files, such as {files[0].relative_to(folder)}, and no image in the"
                f" folder of a class; images end in {', '.join(sorted(_IMAGES))}. Convert or move them, or remove the"
                " folder."
            )

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image
        from torchvision.transforms.functional import to_tensor

        try:
            with Image.open(self.paths[index]) as file:
                deep = file.mode.startswith(_DEEP)
                image = file.copy() if deep else file.convert("RGB")
        except Exception as error:  # the error depends on the format and on where the file is damaged
            raise FederatedError(f"{self.paths[index]} cannot be opened as an image: {error}") from error
        if deep and self.transform is None:
            raise FederatedError(
                f"{self.paths[index]} has more than 8 bits a pixel (mode {image.mode!r}), and RGB would cut off what is"
                " above 255. Pass image_transform, a function that scales it and returns a tensor, or save 8 bits."
            )
        return (self.transform or to_tensor)(image), self.targets[index]


def read_examples(path: Path) -> TensorDataset:
    """Return the arrays ``x`` and ``y`` of an ``.npz`` file, or the tensors of a ``.pt`` file."""
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                found = {name: torch.from_numpy(file[name]) for name in _ARRAYS if name in file.files}
        else:
            content = torch.load(path, weights_only=True, map_location="cpu")
            held = content if isinstance(content, dict) else {}
            found = {name: held[name] for name in _ARRAYS if isinstance(held.get(name), Tensor)}
    except Exception as error:  # the error depends on where the file is damaged
        remedy = "numpy.savez(path, x=x, y=y)" if path.suffix == ".npz" else "torch.save({'x': x, 'y': y}, path)"
        raise FederatedError(
            f"{path} is damaged, or holds more than arrays of numbers ({type(error).__name__}). Write it again with"
            f" {remedy}."
        ) from error
    if len(found) < len(_ARRAYS) or any(tensor.is_complex() for tensor in found.values()):
        raise FederatedError(f"{path} must hold x and y, real numbers both; found {sorted(found)} of these.")
    x, y = found["x"], found["y"]
    if not x.ndim or not y.ndim or len(x) != len(y):
        raise FederatedError(f"{path}: x {list(x.shape)} and y {list(y.shape)} must have the same number of examples.")
    if y.dtype == torch.uint64 and bool((y.long() < 0).any()):
        raise FederatedError(f"{path}: y holds a number too large for int64.")
    x, y = x.float() if x.is_floating_point() else x, y.float() if y.is_floating_point() else y.long()
    for name, tensor in (("x", x), ("y", y)):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise FederatedError(f"{path}: {name} holds NaN, an infinity, or a number too large for float32.")
    return TensorDataset(x, y)
