"""Options as plain values, which checkpoints hold and every process writes alike."""

import functools
import math
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor


def as_plain(value: Any) -> Any:
    """Return an option made of numbers, texts and collections alone; anything else becomes a text.

    Functions and classes become their names, and tensors their checksums. Reading such a value runs no code, equal
    values are equal, and an address never differs between processes.

    Example:
        >>> as_plain({"rate": 0.5, "of": (math.sqrt, None)})
        {'rate': 0.5, 'of': ('math.sqrt', None)}
        >>> as_plain(torch.zeros(2))
        'tensor [2] of torch.float32 with the checksum 1696784233'
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, torch.dtype)):
        return value
    if isinstance(value, (int, float, str)):  # those of an enum have a class of their own
        kind = next(kind for kind in (int, float, str) if isinstance(value, kind))
        return "nan" if isinstance(value, float) and math.isnan(value) else kind(value)
    if isinstance(value, dict):
        return {as_plain(name): as_plain(own) for name, own in value.items()}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)([as_plain(own) for own in value])
    if isinstance(value, (set, frozenset)):
        return sorted(map(as_plain, value), key=repr)
    if isinstance(value, functools.partial):
        return {"partial": as_plain(value.func), "args": as_plain(value.args), "keywords": as_plain(value.keywords)}
    if isinstance(value, torch.Generator):
        return f"generator with the state {as_plain(value.get_state())}"
    if isinstance(value, Tensor) or hasattr(value, "__array__"):
        flat = torch.as_tensor(value).detach().cpu().contiguous()
        checksum = zlib.crc32(flat.reshape(-1).view(torch.uint8).numpy().tobytes())
        return f"tensor {list(flat.shape)} of {flat.dtype} with the checksum {checksum}"
    text = repr(value)
    owner = value if hasattr(value, "__qualname__") else type(value)
    named = f"{owner.__module__}.{owner.__qualname__}"
    return named if owner is value or " at 0x" in text else text
