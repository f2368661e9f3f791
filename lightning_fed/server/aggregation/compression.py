"""Compression of client messages: the largest entries with error feedback, and stochastic quantization."""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from lightning_fed.core.arguments import ArgumentsRepr, check_count, check_number, kind_of
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.plain import place_of
from lightning_fed.core.types import State, Vector


class Compressor(ArgumentsRepr, ABC):
    """Compresses a client's messages.

    Each message of more than one number is compressed separately. A tensor sent under two names is compressed once.
    Messages in ``Algorithm.uncompressed`` are sent unchanged.
    """

    error_feedback: bool = False
    """Whether a client keeps the residuals of its messages between rounds, and adds them to later ones."""

    @abstractmethod
    def __call__(self, message: Vector, stream: torch.Generator) -> tuple[Vector, int]:
        """Return the message [P] that the server receives, and the bytes sent.

        Args:
            message: A copy of the message, which you may change.
            stream: The client's random generator for this round, on the CPU.
        """


class TopK(Compressor):
    r"""Send the entries of largest magnitude, with error feedback.

    Stich, Cordonnier and Jaggi, *Sparsified SGD with Memory*, NeurIPS 2018 (https://arxiv.org/abs/1809.07599),
    Algorithm 1, on messages in place of gradients, with the error feedback of Seide et al., Interspeech 2014:

    .. math::
        \hat m_i = \mathrm{top}_k(e_i + m_i), \qquad e_i \leftarrow e_i + m_i - \hat m_i

    The residual :math:`e_i` is client state: one vector per message, initially zero. It adds the omitted entries to the
    client's later messages, so clients that participate once gain nothing.

    Each entry counts as its value and a 4-byte index (8 bytes in messages of more than 2**31 entries).

    Args:
        share: The share of the entries that are sent, in (0, 1]; at least one entry is sent.

    Raises:
        FederatedError: If the share is out of range.

    Example:
        >>> sent, size = TopK(0.5)(torch.tensor([1.0, -3.0, 2.0, 0.5]), torch.Generator())
        >>> sent, size
        (tensor([ 0., -3.,  2.,  0.]), 16)
    """

    error_feedback = True

    def __init__(self, share: float) -> None:
        self.share = check_number(self, "share", share, "(0, 1]")

    def __call__(self, message: Vector, stream: torch.Generator) -> tuple[Vector, int]:
        """Return the message with all but the largest entries set to zero."""
        count = message.numel()
        k = max(1, round(self.share * count))
        chosen = message.abs().topk(k, sorted=False).indices
        sent = torch.zeros_like(message)
        sent[chosen] = message[chosen]
        return sent, k * (message.element_size() + (4 if count <= 2**31 else 8))


class QSGD(Compressor):
    r"""Unbiased stochastic quantization.

    Alistarh et al., *QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding*, NeurIPS 2017
    (https://arxiv.org/abs/1610.02132), Section 3.1, in buckets of consecutive entries. With the bucket's
    Euclidean norm and s levels, an entry becomes

    .. math::
        \hat m_j = \lVert m \rVert\, \mathrm{sign}(m_j)\, \frac{\ell_j}{s}, \qquad
        \ell_j = \left\lfloor s \frac{\lvert m_j \rvert}{\lVert m \rVert} + u_j \right\rfloor, \quad u_j \sim U[0, 1)

    Each entry counts as :math:`\lceil \log_2(2 s + 1) \rceil` bits for level and sign, and each bucket adds its norm.
    The paper's variable-length code would take less. The server receives a message of the same dtype, so bfloat16 adds
    rounding. Errors accumulate in sums that a method carries across rounds (SCAFFOLD's c, FedDyn's d).

    Args:
        levels: The levels s: 127 takes 8 bits per entry, 7 takes 4, 1 takes 2.
        bucket_size: The entries per bucket: smaller buckets mean less noise and more norms.

    Raises:
        FederatedError: If a number is not positive; in a call, if a float16 message has too large a norm.

    Example:
        >>> _, size = QSGD(levels=7, bucket_size=100)(torch.ones(1000), torch.Generator())
        >>> size
        540
    """

    def __init__(self, levels: int = 127, bucket_size: int = 512) -> None:
        self.levels = check_count(self, "levels", levels)
        self.bucket_size = check_count(self, "bucket_size", bucket_size)

    def __call__(self, message: Vector, stream: torch.Generator) -> tuple[Vector, int]:
        """Return the quantized message."""
        count, s = message.numel(), self.levels
        buckets = -(-count // self.bucket_size)
        dtype = torch.promote_types(message.dtype, torch.float32)
        values = message.new_zeros(buckets, self.bucket_size, dtype=dtype)
        values.view(-1)[:count] = message
        norms = torch.linalg.vector_norm(values, dim=1, keepdim=True)
        units = norms.where(norms > 0, 1.0) / s
        coins = torch.rand(values.shape, generator=stream, dtype=dtype).to(message.device)
        level = (values.abs() / units + coins).floor().clamp(max=s)  # rounding may push it above s
        sent = (values.sign() * level * units).view(-1)[:count].to(message.dtype)
        if message.dtype == torch.float16 and bool(sent.isinf().any()):
            raise FederatedError(
                f"QSGD rounds an entry up to at most the norm of its bucket, found a norm of {float(norms.max()):g} in"
                f" a message of float16, whose largest number is {torch.finfo(message.dtype).max:g}. Lower the"
                " learning rate, or train with precision='32-true'."
            )
        bits = math.ceil(math.log2(2 * s + 1))
        return sent, -(-count * bits // 8) + buckets * values.element_size()


def compress(
    compressor: Compressor, send: State, residuals: State, stream: torch.Generator, uncompressed: Collection[str] = ()
) -> tuple[State, State, int]:
    """Return the messages that the server receives, the client's new residuals, and the bytes sent.

    Missing residuals are zero. Messages named in ``uncompressed`` are sent unchanged.
    """
    got: State = {}
    kept: State = {}
    done: dict[tuple[Any, ...], Tensor] = {}
    size = 0
    for name in sorted(send):
        message, key = send[name], place_of(send[name])
        if message.numel() == 1 or name in uncompressed:
            got[name] = message
            size += message.numel() * message.element_size()
        elif key in done:
            got[name] = done[key]
        else:
            whole = (message + residuals[name] if name in residuals else message).reshape(-1)
            # clone: the residual and the client's change are read afterwards
            sent, own = _checked(compressor, compressor(whole.clone(), stream), whole)
            if compressor.error_feedback:
                kept[name] = (whole - sent).view_as(message)
            got[name] = done[key] = sent.view_as(message)
            size += own
    return got, kept, size


def _checked(compressor: Compressor, found: Any, message: Vector) -> tuple[Vector, int]:
    """Return a compressor's result; raise unless it is a message of this shape and a number of bytes."""
    if isinstance(found, tuple) and len(found) == 2:
        sent, size = found
        if isinstance(sent, Tensor) and sent.shape == message.shape and isinstance(size, Integral) and int(size) >= 0:
            return sent, int(size)
        kind = f"shape {list(sent.shape)}" if isinstance(sent, Tensor) else kind_of(sent)
        found_text = f"{kind} and {size!r}"
    else:
        found_text = kind_of(found)
    raise FederatedError(
        f"{type(compressor).__name__} must return the message that the server receives, of shape {list(message.shape)},"
        f" and the bytes sent, an integer, found {found_text}."
    )
