"""Feature shift: a rotation or noise that differs between clients changes their inputs, but not their labels."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from lightning_fed.core.arguments import check_number, check_one_of, check_seed, kind_of
from lightning_fed.core.errors import FederatedError
from lightning_fed.data.batches.batches import TensorBatches
from lightning_fed.data.batches.settings import BatchSettings
from lightning_fed.data.partitions import (
    Partition,
    PartitionFunction,
    Parts,
    check_partition,
    random_state,
    seed_words,
)


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Return images [..., H, W], float or uint8, rotated counter-clockwise about their center; the corners are zero.

    Multiples of 90 degrees (of 180, if H and W differ) only move pixels. Other angles interpolate linearly, in float32
    or float64, and round back for uint8.
    """
    height, width = images.shape[-2:]
    if degrees % 90 == 0 and (height == width or degrees % 180 == 0):
        return torch.rot90(images, int(degrees // 90) % 4, (-2, -1)).contiguous() if degrees % 360 else images
    return _interpolated(images, degrees)


def _interpolated(images: Tensor, degrees: float) -> Tensor:
    height, width = images.shape[-2:]
    dtype = images.dtype if images.dtype in (torch.float32, torch.float64) else torch.float32
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    # map each pixel to its source, in coordinates with height and width 2 and y pointing down
    theta = torch.tensor([[[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]]], dtype=dtype)
    flat = images.reshape(1, -1, height, width).to(dtype)
    grid = F.affine_grid(theta.to(images.device), [1, 1, height, width], align_corners=False)
    turned = F.grid_sample(flat, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    turned = turned.reshape(images.shape)
    return turned.round().clamp(0, 255).to(torch.uint8) if images.dtype == torch.uint8 else turned.to(images.dtype)


_CACHE_BYTES = 2**28
_COLOURS = (1, 3, 4)
_SHIFT = 0xFFFFFFFF  # keeps the streams apart from a partition with the same seed


class FeatureShift(Partition):
    """Any partition, with a rotation angle and a noise level per client.

    The indices come from ``partition``; the labels do not change. The images of client i of N are rotated
    counter-clockwise about their center, by angles such as the 0, 90, 180 and 270 degrees of Rotated MNIST in IFCA
    (Ghosh et al., 2020, arXiv:2006.04088, section 6). Then noise with the standard deviation ``noise * (i + 1) / N`` is
    added: the noise-based feature imbalance of Li et al., 2022 (arXiv:2102.02079), who count clients from 1. They call
    that number a variance, but their code uses it as the standard deviation, like this class. The noise is a function
    of (seed, client, example), so an example is the same in every round, process and machine, whichever other clients
    train.

    A client's inputs are the first element of its examples: float tensors or uint8 images. Multiples of 90 degrees move
    the pixels of square images without changing them; other angles interpolate linearly, with zeros outside of the
    image. Noise converts uint8 to float32 in [0, 1] first, like :class:`ToFloat`, since bytes would clip it. The shift
    applies before any batch transform, when a client participates. A ``TensorDataset`` becomes another
    ``TensorDataset``.

    Only training data are shifted. For a client's validation set, use :meth:`shifted`.

    Args:
        partition: The split: a :class:`Partition`, or any callable from labels to each client's indices.
        rotation: Degrees. A number r spaces the angles evenly: client i of N gets r i / N. A list assigns its angles to
            the clients in turn.
        noise: The standard deviation of the last client's noise, in units of the inputs; uint8 counts as [0, 1].
        angles: "spaced" as above, or "drawn": at random for each client, uniformly from [0, r) or from the list.
        seed: The seed of the noise and of drawn angles.

    Raises:
        FederatedError: If an argument is not allowed.

    Example:
        >>> from lightning_fed.data import FederatedDataset, Iid
        >>> images = TensorDataset(
        ...     torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]).repeat(2, 1, 1),
        ...     torch.tensor([0, 1]),
        ... )
        >>> data = FederatedDataset.from_partition(
        ...     images, FeatureShift(Iid(num_clients=2), rotation=[0, 90])
        ... )
        >>> [data.dataset(client)[0][0].tolist() for client in data.ids]
        [[[1.0, 2.0], [3.0, 4.0]], [[2.0, 4.0], [1.0, 3.0]]]
    """

    def __init__(
        self,
        partition: Partition | PartitionFunction,
        rotation: float | Sequence[float] = 0.0,
        noise: float = 0.0,
        angles: Literal["spaced", "drawn"] = "spaced",
        seed: int = 0,
    ) -> None:
        check_partition(partition)
        if isinstance(partition, FeatureShift):
            raise FederatedError(
                "FeatureShift(partition=FeatureShift(...)): give rotation and noise to one of them; it rotates first."
            )
        self.partition = partition
        self.rotation = _check_rotation(rotation)
        self.noise = check_number("FeatureShift", "noise", noise, "[0, inf)")
        self.angles = check_one_of("FeatureShift", "angles", angles, ("spaced", "drawn"))
        self.seed = check_seed("FeatureShift", seed)

    @property
    def needs_labels(self) -> bool:  # type: ignore[override]  # as for the partition
        """True if the partition depends on the values of the labels."""
        return bool(getattr(self.partition, "needs_labels", True))

    def __call__(self, labels: Tensor) -> Parts:
        """Return each client's indices from the partition."""
        return self.partition(labels)

    def angle(self, client: int, num_clients: int) -> float:
        """Return the rotation of a client in degrees.

        Args:
            client: The client's stored index i, from 0.
            num_clients: The number of clients N, empty ones included.
        """
        choices = self.rotation
        if self.angles == "spaced":
            return choices * client / num_clients if isinstance(choices, float) else choices[client % len(choices)]
        drawn = float(random_state(self.seed, _SHIFT, client).random_sample())
        return choices * drawn if isinstance(choices, float) else choices[int(drawn * len(choices))]

    def deviation(self, client: int, num_clients: int) -> float:
        """Return the standard deviation of a client's noise; arguments as for :meth:`angle`."""
        return self.noise * (client + 1) / num_clients

    def shifted(
        self, dataset: Dataset[Any], client: int, num_clients: int, indices: Tensor | None = None
    ) -> Dataset[Any]:
        """Return a data set with the shift of one client.

        Args:
            dataset: A map-style data set whose examples begin with the input.
            client: The client's stored index i, from 0.
            num_clients: The number of clients N, empty ones included.
            indices: The examples to use [n_i]; by default all. An example's noise depends on its index in ``dataset``.

        Returns:
            A ``TensorDataset`` if ``dataset`` is one or a subset of one; otherwise, examples are shifted lazily, when
            they are read.

        Raises:
            FederatedError: If the inputs cannot be rotated or get noise.
        """
        rows = torch.arange(len(cast("Any", dataset))) if indices is None else indices
        found = _tensors(dataset, rows)
        if found is None:
            return Subset(_ShiftedDataset(dataset, self, client, num_clients), rows.tolist())
        return TensorDataset(self._shift(found[0], client, num_clients, rows.tolist()), *found[1:])

    def check(self, dataset: Dataset[Any]) -> None:
        """Check the first example of a data set."""
        if len(cast("Any", dataset)):
            found = _tensors(dataset, torch.zeros(1, dtype=torch.int64))
            self._check_input(_split(cast("Any", dataset)[0])[0] if found is None else found[0][0])

    def _shift(self, inputs: Tensor, client: int, num_clients: int, examples: Sequence[int]) -> Tensor:
        """Return the inputs [n_i, ...] of some examples with a client's shift; unchanged inputs are not copied."""
        if len(inputs):
            self._check_input(inputs[0])
        deviation = self.deviation(client, num_clients)
        inputs = rotate(inputs, self.angle(client, num_clients)) if self.rotation else inputs
        if not deviation:
            return inputs
        noise, random = np.empty(inputs.shape), np.random.RandomState(0)
        for row, example in zip(noise, examples, strict=True):
            random.seed(seed_words(self.seed, _SHIFT, client, example))  # ten times faster than a new RandomState
            row[...] = random.standard_normal(row.shape)
        floats = inputs if inputs.is_floating_point() else inputs.to(torch.float32).div_(255)
        return floats + torch.from_numpy(deviation * noise).to(floats)

    def _check_input(self, example: Any) -> None:
        name = "FeatureShift"
        if not isinstance(example, Tensor):
            raise FederatedError(
                f"{name}: an example's input, its first element, is {kind_of(example)} and must be a tensor."
                " Turn it into one in the data set, as torchvision's ToTensor does."
            )
        shape = list(example.shape)
        if not example.is_floating_point() and example.dtype != torch.uint8:
            raise FederatedError(
                f"{name} needs float inputs or uint8 images, and an example is {example.dtype} of shape {shape}. Turn"
                " the inputs into floats in the data set."
            )
        if not self.rotation:
            return
        if example.ndim < 2:
            raise FederatedError(
                f"{name}(rotation={self.rotation!r}) needs images [height, width] or [channels, height, width], and an"
                f" example has shape {shape}. Do not flatten the images, or give noise alone."
            )
        if example.ndim == 3 and shape[-1] in _COLOURS and shape[0] not in _COLOURS:
            raise FederatedError(
                f"{name}(rotation={self.rotation!r}): images of shape {shape} have their channels last. Give"
                " [channels, height, width]."
            )


class ShiftedClients:
    """The clients' shifted data sets, built lazily; the most recently used ones stay cached, up to 256 MiB."""

    def __init__(self, dataset: Dataset[Any], shift: FeatureShift, num_clients: int) -> None:
        shift.check(dataset)
        self._source, self._shift, self._num_clients = dataset, shift, num_clients
        self._recent: OrderedDict[int, TensorDataset] = OrderedDict()
        self._bytes = 0

    def dataset(self, client: int, indices: Tensor) -> Dataset[Any]:
        """Return the data set of a client with the examples ``indices`` [n_i]."""
        if client in self._recent:
            self._recent.move_to_end(client)
            return self._recent[client]
        made = self._shift.shifted(self._source, client, self._num_clients, indices)
        if isinstance(made, TensorDataset):
            self._recent[client] = made
            self._bytes += _bytes(made)
            while self._bytes > _CACHE_BYTES and len(self._recent) > 1:
                self._bytes -= _bytes(self._recent.popitem(last=False)[1])
        return made


class _ShiftedDataset(Dataset[Any]):
    """A data set with one client's shift; other attributes, such as ``targets``, are unchanged."""

    def __init__(self, dataset: Dataset[Any], shift: FeatureShift, client: int, num_clients: int) -> None:
        self._dataset, self._shift, self._client, self._num_clients = dataset, shift, client, num_clients

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # copying looks up attributes before they are set
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(cast("Any", self._dataset))

    def __getitem__(self, index: int) -> Any:
        example = cast("Any", self._dataset)[index]
        x, rest = _split(example)
        self._shift._check_input(x)
        shifted = self._shift._shift(x[None], self._client, self._num_clients, [index])[0]
        if rest is None:
            return shifted
        make = getattr(type(example), "_make", type(example))  # keeps a list, tuple or named tuple
        return make([shifted, *rest])


def _tensors(dataset: Dataset[Any], indices: Tensor) -> tuple[Tensor, ...] | None:
    """Return the selected rows of a ``TensorDataset`` or its subsets, or None for other data sets."""
    found = TensorBatches.of(dataset, BatchSettings())
    return None if found is None else tuple(found.pick(indices))


def _split(example: Any) -> tuple[Any, Sequence[Any] | None]:
    """Return an example's input and the parts after it; None if the example is only its input."""
    return (example[0], example[1:]) if isinstance(example, (tuple, list)) and example else (example, None)


def _bytes(dataset: TensorDataset) -> int:
    return sum(tensor.nbytes for tensor in dataset.tensors)


def _check_rotation(rotation: Any) -> float | list[float]:
    if isinstance(rotation, (list, tuple)):
        if not rotation:
            raise FederatedError("FeatureShift(rotation=[]): give at least one angle, such as [0, 90, 180, 270].")
        return [check_number("FeatureShift", "rotation", angle) for angle in rotation]
    return check_number("FeatureShift", "rotation", rotation)
