"""Let torchvision import beside a PyTorch build that its native library was not made for.

A torchvision built against CUDA cannot load its native library with a CPU build of PyTorch; ``import torchvision`` and
with it torchmetrics and Lightning then stop at the missing operator ``torchvision::nms``. Declaring the two operators'
schemas is enough for data sets, transforms and models. Nothing happens where the native library loads.
"""

import importlib.util
import sys
from pathlib import Path

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_library: torch.library.Library | None = None  # the declarations live as long as this object


def declare_missing_operators() -> None:
    """Declare torchvision's operators if it is installed, not imported yet, and cannot load its native library.

    It may be about to be imported: its own import begins with that of PyTorch.
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
