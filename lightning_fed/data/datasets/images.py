"""What the image data sets have in common: bytes in memory, floats a batch at a time, clients from a partition."""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from lightning_fed.core.arguments import check_flags, check_fraction, check_paths
from lightning_fed.core.errors import FederatedError
from lightning_fed.data.batches.examples import BareInputs
from lightning_fed.data.batches.settings import BatchAugmentation, BatchTransform, chain
from lightning_fed.data.batches.transforms import Flatten
from lightning_fed.data.dataset import check_partition
from lightning_fed.data.files.stored import StoredDataModule
from lightning_fed.data.partitions.partition import Partition, PartitionFunction

__all__ = ["ImageDataModule"]


class ImageDataModule(StoredDataModule):
    """Published images with a training and a test part, which stay in memory as bytes [n, C, H, W].

    The training part is dealt out to clients. ``val`` is the test part, as usual in the literature, unless
    ``val_fraction`` sets training examples aside for it. ``trainer.predict`` sees the test images without labels.

    Files are downloaded by ``prepare_data`` if ``download`` says so, and read in ``setup`` or when the clients are
    first asked for. A subclass says where they are and how they are read.

    Args:
        root: The folder of data sets.
        download: Whether to download what is missing.
        partition: How the training part is dealt out to clients.
        batch_size: Examples in a client's training batch.
        val_fraction: The share of the training part that no client gets and the server model is validated on, in
            [0, 1); 0 validates on the test part. It is drawn once and for all, whatever the seeds.
        flatten: Whether an image has shape [C H W] instead of [C, H, W], after ``transform``.
        transform: As of :class:`FederatedDataModule`, on batches (images, labels) or images, uint8 [B, C, H, W].
        augment: As of :class:`FederatedDataModule`, likewise.

    Raises:
        FederatedError: If an argument is not allowed; in ``setup``, if a file is missing or damaged.
    """

    num_classes: int
    _shape: ClassVar[tuple[int, int, int]]  # of one image, [C, H, W]

    def __init__(
        self,
        root: str | Path,
        download: bool,
        partition: Partition | PartitionFunction,
        batch_size: int,
        val_fraction: float,
        flatten: bool,
        transform: Sequence[BatchTransform] | BatchTransform | None,
        augment: Sequence[BatchAugmentation] | BatchAugmentation | None,
    ) -> None:
        owner = type(self).__name__
        whole = chain(owner, "transform", transform)
        super().__init__(
            batch_size=batch_size,
            transform=[*([] if whole is None else [whole]), *([Flatten()] if flatten else [])],
            augment=augment,
        )
        check_partition(partition)
        check_paths(owner, root=root)
        check_flags(owner, download=download, flatten=flatten)
        self.partition = partition
        self.root = Path(root)
        self.download = download
        self.val_fraction = check_fraction(owner, "val_fraction", val_fraction)
        self.flatten = flatten
        self._prepared = False

    def prepare_data(self) -> None:
        """Download what is missing, if ``download`` says so.

        Raises:
            FederatedError: If that fails.
        """
        if self.download and not self._prepared and self._missing_file() is not None:
            try:
                self._fetch()
            except (OSError, RuntimeError) as error:
                raise FederatedError(
                    f"{type(self).__name__}: the download to {self.root.absolute()} failed: {error}. Get the files"
                    f" elsewhere and {self._by_hand()}."
                ) from error
        self._prepared = True

    def _load(self) -> None:
        self.prepare_data()  # already done by Lightning, and not where the clients are asked for without a trainer
        missing = self._missing_file()
        if missing is not None:
            raise FederatedError(
                f"{type(self).__name__}: there is no {missing} (looked in {missing.parent.absolute()})."
                f" {self._remedy()}."
            )
        train, test = (self._read(is_train) for is_train in (True, False))
        self.test = self.val = TensorDataset(*test)
        self.predict = BareInputs(test[0])
        self.train: Dataset[Any] | None = TensorDataset(*train)
        if self.val_fraction:
            order = np.random.RandomState(0).permutation(len(train[1]))
            num_val = round(self.val_fraction * len(order))
            self.val = Subset(self.train, sorted(order[:num_val].tolist()))
            self.train = Subset(self.train, sorted(order[num_val:].tolist()))

    def _check(self, images: Tensor, labels: Tensor, place: str) -> None:
        """Refuse images of another size, and labels that do not belong to them or are no classes."""
        if images.shape[1:] != self._shape:
            found, expected = ("x".join(map(str, shape)) for shape in (images.shape[2:], self._shape[1:]))
            raise FederatedError(f"{place}: the images have {found} pixels, and should have {expected}.")
        if len(labels) != len(images):
            raise FederatedError(f"{place}: there are {len(images):,} images and {len(labels):,} labels.")
        low, high = (int(labels.min()), int(labels.max())) if len(labels) else (0, 0)
        if not 0 <= low <= high < self.num_classes:
            raise FederatedError(
                f"{place}: the labels run from {low} to {high}, and there are {self.num_classes} classes."
            )

    def _remedy(self) -> str:
        """Return what to do if files are missing; overridden where there is nothing to download."""
        return f"Set download=True, or {self._by_hand()}"

    @abstractmethod
    def _missing_file(self) -> Path | None:
        """Return a file that is not there, or None if all are."""

    @abstractmethod
    def _by_hand(self) -> str:
        """Say which files belong where, beginning with what to do."""

    @abstractmethod
    def _fetch(self) -> None:
        """Download the files."""

    @abstractmethod
    def _read(self, train: bool) -> tuple[Tensor, Tensor]:
        """Return the images [n, C, H, W], uint8, and the labels [n], int64, of the training or the test part."""
