"""Transforms of image batches [B, C, H, W]: bytes to floats, fewer pixels, random crops and flips."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fed.core.arguments import ArgumentsRepr, check_count, check_numbers
from lightning_fed.core.errors import FederatedError


class _OfImages(ArgumentsRepr, ABC):
    """Base of image transforms; the images are the whole batch, or the first part of a list or tuple."""

    _random = False

    def __call__(self, batch: Any, *generator: torch.Generator) -> Any:
        """Return a batch with changed images; the given batch stays unchanged.

        Args:
            batch: Images [B, C, H, W], uint8 or floating point, or a list or tuple that begins with them.
            generator: For a random function, the CPU generator to draw from.

        Raises:
            FederatedError: If the batch has no such images.
        """
        name = type(self).__name__
        if len(generator) != self._random:
            where = "augment" if self._random else "transform"
            raise FederatedError(f"{name} belongs in {where}=...: it is {'' if self._random else 'not '}random.")
        images = batch[0] if isinstance(batch, (list, tuple)) and batch else batch
        if not isinstance(images, Tensor) or images.ndim != 4:
            found = f"shape {list(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
            raise FederatedError(
                f"{name} found {found} where a batch should have its images [B, C, H, W]: the batch itself, or the"
                " first part of a list or tuple. Write a function of the whole batch for any other."
            )
        if images.dtype != torch.uint8 and not images.is_floating_point():
            raise FederatedError(f"{name} takes images of uint8 in 0, ..., 255 or of floats; found {images.dtype}.")
        changed = self._change(images, *generator)
        if images is batch:
            return changed
        make = getattr(type(batch), "_make", type(batch))  # keep the type of a named tuple
        return make([changed, *batch[1:]])

    @abstractmethod
    def _change(self, images: Tensor, *generator: torch.Generator) -> Tensor:
        """Return the changed images."""


class ToFloat(_OfImages):
    """Convert uint8 images to float32 in [0, 1]; floats stay unchanged.

    Example:
        >>> ToFloat()(
        ...     [
        ...         torch.full((1, 1, 1, 2), 255, dtype=torch.uint8),
        ...         torch.tensor([3]),
        ...     ]
        ... )
        [tensor([[[[1., 1.]]]]), tensor([3])]
    """

    def _change(self, images: Tensor, *generator: torch.Generator) -> Tensor:
        return _to_float(images)


class Normalize(_OfImages):
    """Standardize each channel with a mean and a standard deviation; uint8 becomes float32 in [0, 1] first.

    The result equals torchvision's ``ToTensor`` and ``Normalize`` bit for bit.

    Args:
        mean: The mean of each channel, in pixels of [0, 1].
        std: The standard deviation of each channel, positive.

    Raises:
        FederatedError: If lengths or channels do not match, a value is not finite, or a deviation is not positive.

    Example:
        >>> Normalize(mean=[0.5], std=[0.25])(
        ...     torch.full((1, 1, 1, 2), 255, dtype=torch.uint8)
        ... )
        tensor([[[[2., 2.]]]])
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean = check_numbers("Normalize", "mean", mean)
        self.std = check_numbers("Normalize", "std", std)
        if not len(self.mean) == len(self.std) > 0:
            raise FederatedError(f"Normalize(mean={mean!r}, std={std!r}): give one finite number per channel in each.")
        if min(self.std) <= 0:
            raise FederatedError(f"Normalize(std={std!r}): standard deviations must be positive.")

    def _change(self, images: Tensor, *generator: torch.Generator) -> Tensor:
        channels = images.shape[1]
        if len(self.mean) not in (1, channels):
            raise FederatedError(f"{self!r} is for {len(self.mean)} channels, and the images have {channels}.")
        floats = _to_float(images)
        mean, std = (floats.new_tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return (floats - mean).div_(std)


class Shrink(_OfImages):
    """Replace every square of pixels with its mean, as floats; uint8 becomes float32 in [0, 1] first.

    Args:
        factor: The height and width of a square; it must divide those of the images.

    Raises:
        FederatedError: If it is not a positive integer; in a call, if it does not divide the sizes.

    Example:
        >>> Shrink(2)(
        ...     torch.tensor([[[[1.0, 3.0, 5.0, 5.0], [2.0, 2.0, 5.0, 9.0]]]])
        ... )
        tensor([[[[2., 6.]]]])
    """

    def __init__(self, factor: int) -> None:
        self.factor = check_count(self, "factor", factor, least=1)

    def _change(self, images: Tensor, *generator: torch.Generator) -> Tensor:
        height, width = images.shape[2:]
        if height % self.factor or width % self.factor:
            raise FederatedError(f"{self!r} cannot cut images of {height} x {width} pixels into whole squares.")
        return F.avg_pool2d(_to_float(images), self.factor)


class Flatten(_OfImages):
    """Flatten each image to a vector [C H W].

    Example:
        >>> Flatten()(torch.zeros(5, 3, 2, 2)).shape
        torch.Size([5, 12])
    """

    def _change(self, images: Tensor, *generator: torch.Generator) -> Tensor:
        return images.flatten(1)


class RandomCrop(_OfImages):
    """Shift each image at random: pad it with zeros on all sides, then crop it to its size.

    Both offsets are uniform on 0, ..., 2 padding, drawn per image: the usual augmentation of CIFAR (He et al., 2016,
    arXiv:1512.03385, section 4.2).

    Args:
        padding: The pixels added on each side.

    Example:
        >>> RandomCrop(padding=1)(
        ...     torch.ones(8, 3, 4, 4), torch.Generator().manual_seed(0)
        ... ).shape
        torch.Size([8, 3, 4, 4])
    """

    _random = True

    def __init__(self, padding: int = 4) -> None:
        self.padding = check_count(self, "padding", padding, least=0)

    def _change(self, images: Tensor, *generator: torch.Generator) -> Tensor:
        num_images, _, height, width = images.shape
        offsets = torch.randint(2 * self.padding + 1, (2, num_images), generator=generator[0]).to(images.device)
        windows = F.pad(images, [self.padding] * 4).unfold(2, height, 1).unfold(3, width, 1)  # [B, C, dy, dx, H, W]
        return windows[torch.arange(num_images, device=images.device), :, offsets[0], offsets[1]]


class RandomFlip(_OfImages):
    """Mirror each image from left to right with probability 1/2.

    Example:
        >>> RandomFlip()(
        ...     torch.ones(8, 3, 4, 4), torch.Generator().manual_seed(0)
        ... ).shape
        torch.Size([8, 3, 4, 4])
    """

    _random = True

    def _change(self, images: Tensor, *generator: torch.Generator) -> Tensor:
        flipped = torch.randint(2, (len(images), 1, 1, 1), generator=generator[0]).bool().to(images.device)
        return torch.where(flipped, images.flip(-1), images)


def _to_float(images: Tensor) -> Tensor:
    return images if images.is_floating_point() else images.to(torch.float32).div_(255)
