"""Images turned about their centre."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["rotate"]


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Return images rotated counter-clockwise about their centre.

    Args:
        images: Images [..., H, W], float or uint8. Multiples of 90 degrees (of 180, if H and W differ) move pixels;
            other angles interpolate linearly between them, in float32 at least and rounded back for uint8.
        degrees: The angle. The corners that turn into the image are zero.

    Example:
        >>> rotate(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8), 90)
        tensor([[2, 4],
                [1, 3]], dtype=torch.uint8)
    """
    height, width = images.shape[-2:]
    if degrees % 90 == 0 and (height == width or degrees % 180 == 0):
        return torch.rot90(images, int(degrees // 90) % 4, (-2, -1)).contiguous() if degrees % 360 else images
    return _interpolated(images, degrees)


def _interpolated(images: Tensor, degrees: float) -> Tensor:
    height, width = images.shape[-2:]
    dtype = images.dtype if images.dtype in (torch.float32, torch.float64) else torch.float32
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    # where each pixel comes from, in coordinates in which height and width are both 2, and y points down
    theta = torch.tensor([[[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]]], dtype=dtype)
    flat = images.reshape(1, -1, height, width).to(dtype)
    grid = F.affine_grid(theta.to(images.device), [1, 1, height, width], align_corners=False)
    turned = F.grid_sample(flat, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    turned = turned.reshape(images.shape)
    return turned.round().clamp(0, 255).to(torch.uint8) if images.dtype == torch.uint8 else turned.to(images.dtype)
