"""Messages as FLARE carries them: each is one array of bytes, by the number of its client. No PyTorch, no NVFlare."""

from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["Arrays", "packed", "unpacked"]

Arrays = dict[str, Any]
"""What one FLARE task carries, or its result."""

_REFUSED = "refused "


def packed(messages: Mapping[str, bytes], refused: Mapping[str, str] | None = None) -> Arrays:
    """Return the bytes of messages, and why others are missing, as arrays; a reply has the keys of its tasks."""
    why = {f"{_REFUSED}{key}": text.encode() for key, text in (refused or {}).items()}
    return {key: np.frombuffer(content, np.uint8) for key, content in {**messages, **why}.items()}


def unpacked(arrays: Mapping[str, Any]) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the messages, and why others are missing; what is no array of bytes is left out."""
    messages: dict[str, bytes] = {}
    refused: dict[str, str] = {}
    for key, value in arrays.items():
        if not isinstance(value, np.ndarray) or value.dtype != np.uint8:
            continue
        if str(key).startswith(_REFUSED):
            refused[str(key).removeprefix(_REFUSED)] = value.tobytes().decode(errors="replace")
        else:
            messages[str(key)] = value.tobytes()
    return messages, refused
