"""CIFAR-10 and CIFAR-100: small photographs, 32x32, in 10 or 100 classes."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_fed.core.errors import FederatedError
from lightning_fed.data.batches.settings import BatchAugmentation, BatchTransform
from lightning_fed.data.batches.transforms import Normalize, RandomCrop, RandomFlip
from lightning_fed.data.datasets.images import ImageDataModule
from lightning_fed.data.partitions.partition import Partition, PartitionFunction
from lightning_fed.data.partitions.skew import BalancedDirichlet


class _Cifar(ImageDataModule):
    """Photographs in the files that torchvision uses."""

    _shape = (3, 32, 32)
    _folder: ClassVar[str]
    _mean: ClassVar[list[float]]
    _std: ClassVar[list[float]]

    def __init__(
        self,
        root: str | Path = "data",
        download: bool = False,
        num_clients: int = 100,
        alpha: float = 0.6,
        partition: Partition | PartitionFunction | None = None,
        batch_size: int = 50,
        val_fraction: float = 0.0,
        seed: int = 0,
        transform: Sequence[BatchTransform] | BatchTransform | None = None,
        augment: bool | Sequence[BatchAugmentation] | BatchAugmentation = True,
    ) -> None:
        if augment is None:
            raise FederatedError(f"{type(self).__name__}(augment=None): augment must be False for none at all.")
        if isinstance(augment, bool):
            augment = [RandomCrop(padding=4), RandomFlip()] if augment else []
        if transform is None:
            transform = Normalize(self._mean, self._std)
        partition = BalancedDirichlet(num_clients, alpha, seed=seed) if partition is None else partition
        super().__init__(
            root, download, partition, batch_size, val_fraction, flatten=False, transform=transform, augment=augment
        )

    def _paths(self) -> list[Path]:
        return [self.root / self._folder]

    def _by_hand(self) -> str:
        return f"unpack {type(self).__name__}'s archive for Python so that its folder is {self.root / self._folder}"

    def _read(self, train: bool) -> tuple[Tensor, Tensor]:
        # The files are pickles, which could run any code. torchvision checks their MD5 sums against the published ones,
        # and raises RuntimeError if they differ.
        try:
            source = self._torchvision(train=train)
        except RuntimeError as error:
            raise FederatedError(
                f"{type(self).__name__}: a file in {self.root / self._folder} is missing or is not the published one"
                f" (MD5), and was not read: {error}. Remove the folder, then set download=True, or {self._by_hand()}."
            ) from error
        images = torch.from_numpy(np.ascontiguousarray(source.data.transpose(0, 3, 1, 2)))
        return images, torch.tensor(source.targets, dtype=torch.int64)


class CIFAR10(_Cifar):
    """The 60,000 photographs of Krizhevsky, 2009, in 10 classes; by default split as in FedCM and FedDyn.

    The split has 100 clients with 500 training images each, and a mixture of classes from Dir(0.6, ..., 0.6) per client
    (Xu et al., 2021, arXiv:2106.10874; Acar et al., 2021, arXiv:2111.04263): see :class:`BalancedDirichlet`.

    Images are [3, 32, 32], each channel normalized by the mean and standard deviation of the training images, and
    randomly cropped (padding 4) and mirrored in training. ``val`` is the test part of 10,000 images, unless
    ``val_fraction`` is positive.

    Args:
        root: The folder of data sets; the files are in ``root/cifar-10-batches-py``, as for torchvision.
        download: Whether to download missing files.
        num_clients: The number of clients.
        alpha: The concentration of the :class:`BalancedDirichlet` partition. Small values give clients few classes.
        partition: A partition to use instead of ``BalancedDirichlet(num_clients, alpha, seed=seed)``.
        batch_size: Examples in a client's training batch.
        val_fraction: The share of the training images to use as ``val``. If 0, the test images validate.
        seed: The seed of the partition.
        transform: Converts bytes [B, 3, 32, 32] to floats; by default :class:`Normalize`.
        augment: True for :class:`RandomCrop` and :class:`RandomFlip`, False for nothing, or your random transforms.

    Attributes:
        classes: The names of the classes, in the order of the labels.

    Raises:
        FederatedError: If an argument is not allowed; in ``setup``, if a file is missing or damaged.

    Example:
        >>> data = CIFAR10(num_clients=10)  # reads nothing yet
        >>> data.batch_augment
        [RandomCrop(padding=4), RandomFlip()]
    """

    num_classes = 10
    _torchvision_class = "CIFAR10"
    classes = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    _folder = "cifar-10-batches-py"
    _mean = [0.4914, 0.4822, 0.4465]
    _std = [0.2470, 0.2435, 0.2616]


class CIFAR100(_Cifar):
    """The 60,000 photographs of Krizhevsky, 2009, in 100 classes; by default split as in FedCM and FedDyn.

    Everything else is as in :class:`CIFAR10`.

    Args:
        root: The folder of data sets; the files are in ``root/cifar-100-python``, as for torchvision.
        download: Whether to download missing files.
        num_clients: The number of clients.
        alpha: The concentration of the :class:`BalancedDirichlet` partition. Small values give clients few classes.
        partition: A partition to use instead of ``BalancedDirichlet(num_clients, alpha, seed=seed)``.
        batch_size: Examples in a client's training batch.
        val_fraction: The share of the training images to use as ``val``. If 0, the test images validate.
        seed: The seed of the partition.
        transform: Converts bytes [B, 3, 32, 32] to floats; by default :class:`Normalize`.
        augment: True for :class:`RandomCrop` and :class:`RandomFlip`, False for nothing, or your random transforms.

    Raises:
        FederatedError: If an argument is not allowed; in ``setup``, if a file is missing or damaged.

    Example:
        >>> CIFAR100(augment=False).num_classes
        100
    """

    num_classes = 100
    _torchvision_class = "CIFAR100"
    _folder = "cifar-100-python"
    _mean = [0.5071, 0.4865, 0.4409]
    _std = [0.2673, 0.2564, 0.2762]
