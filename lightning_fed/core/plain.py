"""Options as plain values, which checkpoints can hold, and which are the same in every process."""

import functools
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def as_plain(value: Any) -> Any:
    """Return an option as numbers, text and collections only; anything else becomes text.

    Functions and classes become their names, and tensors their checksums. Reading the result runs no code. Equal
    options give equal results, without memory addresses, which differ between processes. A value that cannot be read,
    such as one that contains itself, becomes the name of its type.

    Example:
        >>> as_plain({"rate": 0.5, "of": (math.sqrt, None)})
        {'rate': 0.5, 'of': ('math.sqrt', None)}
        >>> as_plain(torch.zeros(2))
        'tensor [2] of torch.float32 with the checksum 1696784233'
    """
    try:
        return _plain(value)
    except (RuntimeError, TypeError, ValueError):  # a RecursionError is a RuntimeError
        return _name(type(value))


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options, each as a plain value."""
    return {name: as_plain(value) for name, value in options.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, torch.dtype)):
        return value
    if isinstance(value, (int, float, str)):  # enum members have their own classes
        kind = next(kind for kind in (int, float, str) if isinstance(value, kind))
        return "nan" if isinstance(value, float) and math.isnan(value) else kind(value)
    if isinstance(value, dict):
        return {_plain(name): _plain(own) for name, own in value.items()}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)([_plain(own) for own in value])
    if isinstance(value, (set, frozenset)):
        return sorted(map(_plain, value), key=repr)
    if isinstance(value, functools.partial):
        return {"partial": _plain(value.func), "args": _plain(value.args), "keywords": _plain(value.keywords)}
    if isinstance(value, torch.Generator):
        return f"generator with the state {_plain(value.get_state())}"
    if hasattr(value, "__qualname__"):  # a function or a class
        return _name(value)
    if isinstance(value, Tensor) or hasattr(value, "__array__"):
        try:
            return _checksum(value)
        except (RuntimeError, TypeError, ValueError):  # a sparse tensor, or an array of texts
            pass
    text = repr(value)
    return _name(type(value)) if " at 0x" in text else text


def _checksum(value: Any) -> str:
    tensor = torch.as_tensor(value).detach().cpu()
    checksum = zlib.crc32(bytes_of(tensor).numpy().tobytes())
    return f"tensor {list(tensor.shape)} of {tensor.dtype} with the checksum {checksum}"


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of all numbers of a tensor, in one dimension; conjugate and negative views are resolved."""
    flat = tensor.resolve_conj().resolve_neg().contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)  # contiguous() ignores the stride of a size of 1


def place_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return a tensor's place in memory: of two that exist, those with one place are one tensor under two names."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _name(owner: Any) -> str:
    return f"{getattr(owner, '__module__', None)}.{owner.__qualname__}"
