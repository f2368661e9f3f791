"""Images from torchvision's files: stored as bytes, converted to floats per batch, and split by a partition."""

import tempfile
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from lightning_fed.core.arguments import check_flags, check_number, check_one_of, check_paths
from lightning_fed.core.errors import FederatedError
from lightning_fed.data.batches.settings import BatchAugmentation, BatchTransform
from lightning_fed.data.batches.transforms import Flatten, Normalize, RandomCrop, RandomFlip, ToFloat
from lightning_fed.data.files.stored import StoredDataModule
from lightning_fed.data.partitions import BalancedDirichlet, Partition, PartitionFunction, PowerLaw


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
        """Return the fix for missing files; subclasses without a download override it."""
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


_CLASSES = {  # in the order of the labels
    "byclass": digits + ascii_uppercase + ascii_lowercase,
    "bymerge": digits + ascii_uppercase + "abdefghnqrt",
    "balanced": digits + ascii_uppercase + "abdefghnqrt",
    "letters": ascii_lowercase,
    "digits": digits,
    "mnist": digits,
}
_CONTENTS = ("images-idx3", "labels-idx1")
_IMAGES_AT_ONCE = 10_000


class _IdxImages(ImageDataModule):
    """Images and labels in IDX files, gzipped or not."""

    _shape = (1, 28, 28)
    _prefixes: tuple[str, str]  # prefixes of the training and test files
    _first_label = 0  # in the file

    def _file(self, train: bool, content: str) -> Path:
        """Return the path of the file of ``content``, images-idx3 or labels-idx1; gzipped if only that exists."""
        path = self.root / self._torchvision_class / "raw" / f"{self._prefixes[not train]}-{content}-ubyte"
        packed = path.with_name(f"{path.name}.gz")
        return packed if packed.is_file() and not path.is_file() else path

    def _paths(self) -> list[Path]:
        return [self._file(train, content) for train in (True, False) for content in _CONTENTS]

    def _by_hand(self) -> str:
        train, test = (self._file(train, "*") for train in (True, False))
        return f"put {train.name} and {test.name}, packed as .gz or not, into {train.parent}"

    def _read(self, train: bool) -> tuple[Tensor, Tensor]:
        from torchvision.datasets import mnist

        images_path, labels_path = (self._file(train, content) for content in _CONTENTS)
        images = _read_with(mnist.read_image_file, images_path)[:, None]
        labels = _read_with(mnist.read_label_file, labels_path) - self._first_label
        self._check(images, labels, f"{images_path}, {labels_path.name}")
        return images, labels


def _read_with(read: Callable[[str], Tensor], path: Path) -> Tensor:
    """Read an IDX file with one of torchvision's functions, which need unpacked files."""
    from torchvision.datasets.utils import extract_archive

    try:
        with tempfile.TemporaryDirectory() as folder:
            return read(extract_archive(str(path), folder) if path.suffix == ".gz" else str(path))
    except Exception as error:  # the error depends on where the file is damaged
        raise FederatedError(
            f"{path} is damaged or no IDX file ({type(error).__name__}: {error}). Download it again."
        ) from error


class MNIST(_IdxImages):
    """The 70,000 handwritten digits of LeCun, Cortes and Burges; by default split as in FedProx.

    The split has 1,000 clients with two digits each and power-law sizes (Li et al., 2020, arXiv:1812.06127, appendix
    C.1); see :class:`PowerLaw` for the recipe and its differences. Here the clients share the 60,000 training images,
    and the 10,000 test images evaluate the server model. The paper splits all 70,000 among the clients, and each
    client's share into training and test.

    Images are [1, 28, 28] with paper 0 and ink 1. ``val`` is the test part, unless ``val_fraction`` is positive.

    Args:
        root: The folder of data sets; the files are in ``root/MNIST/raw``, as for torchvision, gzipped or not.
        download: Whether to download missing files.
        num_clients: The number of clients.
        partition: A partition to use instead of ``PowerLaw(num_clients, seed=seed)``.
        batch_size: Examples in a client's training batch.
        val_fraction: The share of the training images to use as ``val``. If 0, the test images validate.
        seed: The seed of the partition.
        flatten: Whether an image has shape [784] instead of [1, 28, 28].
        transform: Converts bytes [B, 1, 28, 28] to floats; by default :class:`ToFloat`.
        augment: Random transforms of training batches of bytes, such as :class:`RandomCrop`.

    Raises:
        FederatedError: If an argument is not allowed; in ``setup``, if a file is missing or damaged.

    Example:
        >>> data = MNIST(root="data", num_clients=100)  # reads nothing yet
        >>> data.partition
        PowerLaw(num_clients=100, seed=0, classes_per_client=2, sigma=2.0, min_per_class=5)
    """

    num_classes = 10
    _torchvision_class = "MNIST"
    _prefixes = ("train", "t10k")

    def __init__(
        self,
        root: str | Path = "data",
        download: bool = False,
        num_clients: int = 1000,
        partition: Partition | PartitionFunction | None = None,
        batch_size: int = 10,
        val_fraction: float = 0.0,
        seed: int = 0,
        flatten: bool = False,
        transform: Sequence[BatchTransform] | BatchTransform | None = None,
        augment: Sequence[BatchAugmentation] | BatchAugmentation | None = None,
    ) -> None:
        transform = ToFloat() if transform is None else transform
        partition = PowerLaw(num_clients, seed=seed) if partition is None else partition
        super().__init__(root, download, partition, batch_size, val_fraction, flatten, transform, augment)


class EMNIST(_IdxImages):
    """Handwritten digits and letters of Cohen et al., 2017 (arXiv:1702.05373), from NIST's Special Database 19.

    =========== ======= ================ ============== ==================================================
    split       classes training images  test images    what
    =========== ======= ================ ============== ==================================================
    byclass     62      697,932          116,323        0-9, A-Z and a-z, as often as they were written
    bymerge     47      697,932          116,323        the same, without the small letters that look alike
    balanced    47      112,800          18,800         those of bymerge, equally many of each
    letters     26      124,800          20,800         A-Z, capital and small together
    digits      10      240,000          40,000         0-9
    mnist       10      60,000           10,000         0-9, in MNIST's format
    =========== ======= ================ ============== ==================================================

    Mime and FedJAX train on these characters with 3,400 writers as clients. EMNIST's files do not contain the writers,
    so the clients here are synthetic: their labels are skewed, but they do not differ in handwriting. Results are not
    comparable. LEAF's :class:`FEMNIST` has the writers. SCAFFOLD splits by :class:`Similarity` instead.

    Images are [1, 28, 28] and upright (the files store them transposed). Labels begin at 0 in every split. ``val`` is
    the test part, unless ``val_fraction`` is positive.

    Args:
        root: The folder of data sets. The files are in ``root/EMNIST/raw``, as for torchvision, gzipped or not.
        split: One of the splits above.
        download: Whether to download missing files: one archive of 0.5 GB with all splits.
        num_clients: The number of clients, by default 3,400 for byclass and bymerge, and 100 for the others.
        alpha: The concentration of the :class:`BalancedDirichlet` partition. Small values give clients few classes.
        partition: A partition to use instead of ``BalancedDirichlet(num_clients, alpha, seed=seed)``.
        batch_size: Examples in a client's training batch.
        val_fraction: The share of the training images to use as ``val``. If 0, the test images validate.
        black_on_white: Whether paper is 1 and ink 0, as in LEAF's FEMNIST. Otherwise ink is 1, as in MNIST.
        seed: The seed of the partition.
        flatten: Whether an image has shape [784] instead of [1, 28, 28].
        transform: Converts bytes [B, 1, 28, 28] to floats; by default :class:`ToFloat`.
        augment: Random transforms of training batches of bytes, such as :class:`RandomCrop`.

    Attributes:
        num_classes: The number of classes of the split.
        classes: The characters, in the order of the labels. If a capital and a small letter share a label, the capital
            is listed; ``letters`` lists the small one.

    Raises:
        FederatedError: If an argument is not allowed; in ``setup``, if a file is missing or damaged.

    Example:
        >>> data = EMNIST(split="balanced")  # reads nothing yet
        >>> data.num_classes, data.classes[35:40]
        (47, ['Z', 'a', 'b', 'd', 'e'])
    """

    _torchvision_class = "EMNIST"

    def __init__(
        self,
        root: str | Path = "data",
        split: Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"] = "byclass",
        download: bool = False,
        num_clients: int | None = None,
        alpha: float = 0.3,
        partition: Partition | PartitionFunction | None = None,
        batch_size: int = 20,
        val_fraction: float = 0.0,
        black_on_white: bool = False,
        seed: int = 0,
        flatten: bool = False,
        transform: Sequence[BatchTransform] | BatchTransform | None = None,
        augment: Sequence[BatchAugmentation] | BatchAugmentation | None = None,
    ) -> None:
        self.split = check_one_of("EMNIST", "split", split, list(_CLASSES))
        self.classes = list(_CLASSES[self.split])
        self.num_classes = len(self.classes)
        self._options = {"split": split}
        self._prefixes = (f"emnist-{self.split}-train", f"emnist-{self.split}-test")
        self._first_label = int(self.split == "letters")
        check_flags("EMNIST", black_on_white=black_on_white)
        self.black_on_white = black_on_white
        if num_clients is None:
            num_clients = 3400 if self.split in ("byclass", "bymerge") else 100
        transform = ToFloat() if transform is None else transform
        partition = BalancedDirichlet(num_clients, alpha, seed=seed) if partition is None else partition
        super().__init__(root, download, partition, batch_size, val_fraction, flatten, transform, augment)

    def _read(self, train: bool) -> tuple[Tensor, Tensor]:
        images, labels = super()._read(train)
        for chunk in images.split(_IMAGES_AT_ONCE):  # in place and in chunks: all at once would need twice the memory
            upright = chunk.mT.contiguous()
            chunk.copy_(torch.bitwise_not(upright) if self.black_on_white else upright)  # ~b is 255 - b
        return images, labels


class _Cifar(ImageDataModule):
    """CIFAR photographs from the files that torchvision uses."""

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
