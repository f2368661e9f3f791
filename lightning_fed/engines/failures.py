"""What a user is told of an error that several clients at once ran into: what and where; its full text is logged."""

import logging
import traceback
from pathlib import Path

from lightning_fed._lightning import pl
from lightning_fed.core.arguments import kind_of

__all__ = ["in_short"]

_log = logging.getLogger(pl.__name__)  # in every process: the error may be that of any

_FRAMEWORKS = ("torch", "pytorch_lightning", "lightning_fabric", "lightning", "lightning_fed", "torchmetrics")
_VALUE_READ = "a tensor's value is read, by .item() or by data-dependent control flow"
_SHARED_WRITTEN = "a tensor that all clients share is changed by an in-place operation"
_KINDS = {  # parts of PyTorch's commonest refusals, and what the module does
    "calling .item() on a Tensor": _VALUE_READ,
    "data-dependent control flow": _VALUE_READ,
    "dynamic shape": "a result's shape depends on values, as that of nonzero() or of a boolean mask does",
    "is not possible because there exists a Tensor": _SHARED_WRITTEN,
    "would mutate a captured Tensor": _SHARED_WRITTEN,
}


def in_short(error: BaseException) -> str:
    """Return what an error is and where the user's code ran into it; its full text goes to the log, at level DEBUG.

    Args:
        error: An error that was raised and caught.
    """
    _log.debug("%s: %s", type(error).__name__, error)
    what = next((kind for words, kind in _KINDS.items() if words in str(error)), kind_of(error))
    return f"{what}{_place(error)}; the full text of the error is in the log, at level DEBUG"


def _place(error: BaseException) -> str:
    """Return the last line that is not a framework's, nothing if there is none."""
    frames = list(traceback.walk_tb(error.__traceback__))
    for frame, line in reversed(frames):
        if frame.f_globals.get("__name__", "").split(".")[0] not in _FRAMEWORKS:
            return f", in {Path(frame.f_code.co_filename).name}, line {line}"
    return ""
