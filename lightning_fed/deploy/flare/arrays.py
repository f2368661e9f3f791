"""Messages as FLARE carries them: each is one array of bytes, by the number of its client. No PyTorch, no NVFlare."""

from collections.abc import Mapping
from typing import Any

import numpy as np

_REFUSED = "refused "


def packed(messages: Mapping[str, bytes], refused: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the bytes of messages, and why others are missing, as arrays; a reply has the keys of its tasks."""
    why = {f"{_REFUSED}{key}": text.encode() for key, text in (refused or {}).items()}
    return {key: np.frombuffer(content, np.uint8) for key, content in {**messages, **why}.items()}


def unpacked(arrays: Mapping[str, Any]) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the messages, and why others are missing, dropping anything but arrays of bytes."""
    found = {
        str(key): value.tobytes()
        for key, value in arrays.items()
        if isinstance(value, np.ndarray) and value.dtype == np.uint8
    }
    why = {key: found.pop(key) for key in list(found) if key.startswith(_REFUSED)}
    return found, {key.removeprefix(_REFUSED): text.decode(errors="replace") for key, text in why.items()}
