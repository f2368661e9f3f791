"""Messages in FLARE: one array of bytes per message, by its client's number. It imports no PyTorch and no NVFlare."""

from collections.abc import Mapping
from typing import Any

import numpy as np


def packed(messages: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the bytes of messages as arrays."""
    return {key: np.frombuffer(content, np.uint8) for key, content in messages.items()}


def unpacked(arrays: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the bytes of messages, dropping anything but arrays of bytes."""
    found = ((key, value) for key, value in arrays.items() if isinstance(value, np.ndarray))
    return {str(key): value.tobytes() for key, value in found if value.dtype == np.uint8}
