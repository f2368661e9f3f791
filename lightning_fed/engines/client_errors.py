"""Errors in clients' work: the client, the step, and messages for several failing clients."""

import logging
import math
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_fed.compat.package import pl
from lightning_fed.compat.private import MisconfigurationException, SIGTERMException, call
from lightning_fed.core.arguments import kind_of
from lightning_fed.core.devices import is_out_of_memory
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.rounds import ClientReport
from lightning_fed.core.types import ClientId
from lightning_fed.strategies.split import PeerError

_log = logging.getLogger(pl.__name__)  # logs in every process, since the error may come from any

ONE_VALUE = "Expected more than 1 value per channel when training"
"""PyTorch's error for BatchNorm in training mode on a batch of one example."""

_ONE_VALUE_REMEDY = (
    ". BatchNorm normalises by the statistics of a batch, and a batch of one example has none. Set drop_last=True or"
    " another batch_size (for full-batch gradients, another full_batch_size), use GroupNorm, or set"
    " on_client_error='drop' to leave such clients out of their rounds"
)
_NOTHING_TO_CLIP = "nested_tensorlist[0].empty()"  # part of PyTorch's error for clipping by value without gradients
_NOTHING_TO_CLIP_REMEDY = (
    ". The step has no gradient, since training_step returned None, and PyTorch cannot clip none by value. Use"
    " gradient_clip_algorithm='norm' or gradient_clip_on='corrected', which leave such a step out"
)
_VIEWED_AS = re.compile(r"(storage_offset\S*|stride) .*divisible by")  # in PyTorch's errors for views of another type
_VIEWED_REMEDY = (
    ". Parameters are parts of one vector here, which begin anywhere in it. Copy a parameter before you view it as"
    " another type, as in torch.view_as_complex(weight.clone())"
)
_MEMORY_REMEDY = (
    ". The device does not hold the work of one client at a time. Use a smaller batch_size or full_batch_size, or a"
    " lower precision such as 'bf16-mixed'"
)
FULL_GRADIENT = "its full-batch gradient"
"""The name of a pass over a client's data before its local work."""

_OF_SHAPES = (RuntimeError, ValueError, AssertionError)
_FULL_GRADIENT_REMEDY = (
    ". Full-batch gradients take batches of up to full_batch_size examples: if the module needs batches of batch_size,"
    " set the data module's full_batch_size to it"
)
_FRAMEWORKS = ("torch", "pytorch_lightning", "lightning_fabric", "lightning", "lightning_fed", "torchmetrics")
_VALUE_READ = "a tensor's value is read, by .item(), by one_hot() or by data-dependent control flow"
_OWN_FUNCTION = (
    "an autograd.Function takes one client at a time, as in torch.distributions.Beta and Dirichlet and for backward"
    " hooks of layers; yours needs setup_context() and generate_vmap_rule = True"
)
_SHARED_WRITTEN = "a tensor that all clients share is changed by an in-place operation"
_GIVEN_WRITTEN = (
    "a tensor that the step did not make, such as one of its batch or a buffer, is changed by an in-place operation;"
    " change a clone() of it"
)
SHARED_STATE = "doesn't match the broadcast shape"
"""Part of PyTorch's error for adding several clients' values in place to one client's tensor."""

_KINDS = {  # parts of PyTorch's most common errors, and their cause in the module
    "calling .item() on a Tensor": _VALUE_READ,
    "data-dependent control flow": _VALUE_READ,
    "Cannot access data pointer of Tensor": "a tensor's memory is read, as .numpy() and functions outside PyTorch do",
    "dynamic shape": "a result's shape depends on values, as that of nonzero() or of a boolean mask does",
    "is not possible because there exists a Tensor": _SHARED_WRITTEN,
    "would mutate a captured Tensor": _GIVEN_WRITTEN,
    "inplace randomness on an unbatched tensor": (
        "random numbers are drawn into a tensor that all clients share, as torch.distributions does in rsample(); draw"
        " them with torch.randn_like(x) of a tensor x made from the input"
    ),
    "must override the setup_context": _OWN_FUNCTION,
    "does not have vmap support": _OWN_FUNCTION,
    "support saved tensor hooks": "gradient checkpointing and other hooks of saved tensors take one client at a time",
    "Tensor.requires_grad_()": "it calls requires_grad_() of a tensor, or torch.autograd.functional",
    SHARED_STATE: (
        "a tensor that all clients share is changed in place by the values of each, such as the first state of a"
        " recurrent cell: make it from the input, by x.new_zeros()"
    ),
}

_SPARSE = (
    " If that is about gradients: they must be dense here, so leave out sparse=True in torch.nn.functional.embedding"
    " and the like. Layers such as nn.Embedding may have it."
)
_NOT_A_CLIENTS = (MisconfigurationException, MemoryError, torch.AcceleratorError)


def fault_of(report: ClientReport, losses: Callable[[], Sequence[float]] | None, round: int) -> ClientError | None:
    """Return the error of a client with a non-finite loss or update, else None.

    ``losses`` returns the loss of each local step, or no loss if a module with manual optimization returns none. It is
    None if losses are not shown.
    """
    is_moved = math.isfinite(report.update_norm)
    if is_moved and (report.steps == 0 or math.isfinite(report.loss)):
        return None
    steps = [] if losses is None else losses()
    if is_moved and not steps:
        return None
    what = "a loss that is not finite" if is_moved else "parameters that are not finite"
    first, found = next(((k, loss) for k, loss in enumerate(steps) if not math.isfinite(loss)), (None, 0.0))
    where = "" if first is None else f"; its loss was first {found:g} at local step {first + 1}"
    return ClientError(
        f"Client {report.client_id!r} returned {what} in round {round}, after {report.steps} local"
        f" steps{where}. Lower the learning rate, clip gradients, or look at its data.",
        report.client_id,
    )


@dataclass(frozen=True, slots=True)
class NamesClient:
    """Context manager that adds the client, the round and the local step to any error inside."""

    client_id: ClientId
    round: int
    what: str  # the name of the work inside, for the message
    steps: Callable[[], int | None]  # called after an error; returns the local steps, None before the first
    less_memory: str = ""  # a further remedy that saves memory, to continue a sentence
    planned: int = 0  # the planned number of local steps; 0 if none

    def __enter__(self) -> None:
        """Enter the context."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Raise an error with these names in front of the original message."""
        if not isinstance(error, Exception) or isinstance(error, (SIGTERMException, PeerError)):
            return
        steps = self.steps()
        at = "" if steps is None else f", local step {steps + 1}"
        if steps and steps == self.planned:
            at = f", after its {steps} local steps"
        text = str(error) if isinstance(error, ClientError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, ClientError):
            if isinstance(error, RuntimeError) and "sparse" in text.lower():
                text += _SPARSE
            if ONE_VALUE in text:
                text += _ONE_VALUE_REMEDY
            if _NOTHING_TO_CLIP in text:
                text += _NOTHING_TO_CLIP_REMEDY
            if _VIEWED_AS.search(text):
                text += _VIEWED_REMEDY
            if is_out_of_memory(error):
                text += _MEMORY_REMEDY + self.less_memory
            elif self.what == FULL_GRADIENT and isinstance(error, _OF_SHAPES) and ONE_VALUE not in text:
                text += _FULL_GRADIENT_REMEDY
        raise ClientError(
            f"Client {self.client_id!r} failed in {self.what} in round {self.round}{at}: {text}",
            self.client_id if _is_clients_own(error) else None,
        ) from error


def _is_clients_own(error: Exception) -> bool:
    """Return whether the cause may be the client's data or the module's work on it.

    Unsupported settings, memory, a failed GPU and callbacks are not a client's fault.
    """
    if isinstance(error, FederatedError):
        return isinstance(error, ClientError)
    if isinstance(error, _NOT_A_CLIENTS) or is_out_of_memory(error):
        return False
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return all(frame.f_code is not call._call_callback_hooks.__code__ for frame in frames)


def summary_of(error: BaseException) -> str:
    """Return an error and its place in the user's code; the full text is logged at level DEBUG."""
    _log.debug("%s: %s", type(error).__name__, error)
    what = next((kind for words, kind in _KINDS.items() if words in str(error)), kind_of(error))
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").split(".")[0] not in _FRAMEWORKS:
            where = f", in {Path(frame.f_code.co_filename).name}, line {line}"
    return f"{what}{where}; the full text of the error is in the log, at level DEBUG"
