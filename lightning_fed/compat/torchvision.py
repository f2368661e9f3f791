"""Make torchvision importable with a PyTorch build that its native library does not match.

A torchvision built for CUDA cannot load its native library with a CPU build of PyTorch. ``import torchvision``, and so
torchmetrics and Lightning, then fail at the missing operator ``torchvision::nms``. Declaring the schemas of two
operators is enough for data sets, transforms and models. If the native library loads, nothing changes.
"""

import importlib.util
import sys
from pathlib import Path

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_library: torch.library.Library | None = None  # keeps the declarations alive


def declare_missing_operators() -> None:
    """Declare torchvision's operators if it is installed, not imported, and cannot load its native library.

    Its import may be in progress, since it begins with PyTorch's.
    """
    global _library
    if "torchvision.extension" in sys.modules or _library is not None:
        return
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    for path in Path(spec.origin).parent.glob("_C*"):
        try:
            torch.ops.load_library(str(path))
        except OSError:
            continue
        return
    _library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        _library.define(schema)
