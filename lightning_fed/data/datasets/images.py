"""The base of image data sets: bytes in memory, floats a batch at a time, clients from a partition."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from lightning_fed.core.arguments import check_flags, check_number, check_paths
from lightning_fed.core.errors import FederatedError
from lightning_fed.data.batches.settings import BatchAugmentation, BatchTransform
from lightning_fed.data.batches.transforms import Flatten
from lightning_fed.data.files.stored import StoredDataModule
from lightning_fed.data.partitions.partition import Partition, PartitionFunction


class ImageDataModule(StoredDataModule):
    """Published images with a training and a test part, which stay in memory as bytes [n, C, H, W].

    The training part is split into clients. ``val`` is the test part, as usual in the literature, unless
    ``val_fraction`` reserves training examples for it. ``trainer.predict`` gets the test images without labels.

    With ``download``, torchvision downloads the files in ``prepare_data``. They are read in ``setup`` or when the
    clients are first accessed. A subclass defines the files' paths and how to read them, and takes the same arguments.
    """

    num_classes: int
    _torchvision_class: ClassVar[str]
    _options: Mapping[str, str] = {}  # for the download
    _shape: ClassVar[tuple[int, int, int]]  # shape of an image, [C, H, W]

    def __init__(
        self,
        root: str | Path,
        download: bool,
        partition: Partition | PartitionFunction,
        batch_size: int,
        val_fraction: float,
        flatten: bool,
        transform: Sequence[BatchTransform] | BatchTransform,
        augment: Sequence[BatchAugmentation] | BatchAugmentation | None,
    ) -> None:
        check_flags(self, download=download, flatten=flatten)
        functions: list[Any] = [*transform] if isinstance(transform, list | tuple) else [transform]
        if flatten:
            functions.append(Flatten())
        super().__init__(partition=partition, batch_size=batch_size, transform=functions, augment=augment)
        check_paths(self, root=root)
        self.root = Path(root)
        self.download = download
        self.val_fraction = check_number(self, "val_fraction", val_fraction, "[0, 1)")
        self.flatten = flatten

    def prepare_data(self) -> None:
        """Download missing files, if ``download`` is set."""
        if self.download and self._missing_path() is not None:
            try:
                self._fetch()
            except (OSError, RuntimeError) as error:
                raise FederatedError(
                    f"{type(self).__name__}: the download to {self.root.absolute()} failed: {error}. Get the files"
                    f" elsewhere and {self._by_hand()}."
                ) from error

    def _fetch(self) -> None:
        self._torchvision(download=True, **self._options)

    def _remedy(self) -> str:
        """Return the fix for missing files; overridden if there is no download."""
        return f"Set download=True, or {self._by_hand()}"

    def _load(self) -> None:
        self.prepare_data()  # Lightning also calls it, but not if the clients are accessed without a trainer
        missing = self._missing_path()
        if missing is not None:
            raise FederatedError(
                f"{type(self).__name__}: there is no {missing} (looked in {missing.parent.absolute()})."
                f" {self._remedy()}."
            )
        train, test = (TensorDataset(*self._read(is_train)) for is_train in (True, False))
        self.test = self.val = test
        self.predict = cast("Dataset[Any]", test.tensors[0])
        self.train: Dataset[Any] | None = train
        if self.val_fraction:
            order = np.random.RandomState(0).permutation(len(train))
            num_val = round(self.val_fraction * len(order))
            self.val = Subset(train, sorted(order[:num_val].tolist()))
            self.train = Subset(train, sorted(order[num_val:].tolist()))

    def _check(self, images: Tensor, labels: Tensor, where: str) -> None:
        """Raise unless the images have the right size and each has a valid class."""
        if images.shape[1:] != self._shape:
            found, expected = ("x".join(map(str, shape)) for shape in (images.shape[2:], self._shape[1:]))
            raise FederatedError(f"{where}: the images have {found} pixels, and should have {expected}.")
        if len(labels) != len(images):
            raise FederatedError(f"{where}: there are {len(images):,} images and {len(labels):,} labels.")
        low, high = (int(labels.min()), int(labels.max())) if len(labels) else (0, 0)
        if not 0 <= low <= high < self.num_classes:
            raise FederatedError(
                f"{where}: the labels run from {low} to {high}, and there are {self.num_classes} classes."
            )

    def _torchvision(self, **options: Any) -> Any:
        """Return torchvision's data set; its options select the files to read or download."""
        from torchvision import datasets

        return getattr(datasets, self._torchvision_class)(self.root, **options)

    def _missing_path(self) -> Path | None:
        return next((path for path in self._paths() if not path.exists()), None)

    @abstractmethod
    def _paths(self) -> list[Path]:
        """Return the required files or folder."""

    @abstractmethod
    def _by_hand(self) -> str:
        """Return instructions for placing the files by hand."""

    @abstractmethod
    def _read(self, train: bool) -> tuple[Tensor, Tensor]:
        """Return the images [n, C, H, W], uint8, and the labels [n], int64, of the training or the test part."""
