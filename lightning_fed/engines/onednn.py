"""Products of large linear layers through oneDNN, on the processors on which it is faster than what PyTorch asks."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from lightning_fed.engines.simplify import erase_unused

__all__ = ["add_product", "use_onednn"]

_aten = torch.ops.aten
_WEIGHTS = 2**15  # of a layer from which oneDNN is asked at all
_ZEN_5 = 26  # the family of the first AMD processors that compute on 512 bits at once


@dataclass(frozen=True, slots=True)
class _Examples:
    """From how many examples on oneDNN is faster; None if it is not.

    Attributes:
        forward: In forward passes.
        gradient: In gradients of weights, for which inputs have to be brought into its order.
    """

    forward: int | None
    gradient: int | None


def use_onednn(graph: fx.Graph) -> None:
    """Let oneDNN take products of large linear layers on a CPU, in float32, where PyTorch is built with it.

    Which ones is a matter of the processor and of sizes, and not of a trial, so that every run has the same bits.
    """
    least = _least()
    for node in graph.find_nodes(op="call_function", target=_aten.addmm.default) if least.forward else ():
        bias, rows, columns = node.args
        if node.kwargs or not isinstance(value := columns.meta.get("val"), Tensor) or not _is_plain(value.t()):
            continue
        values = [part.meta.get("val") for part in (bias, rows)]
        if value.numel() >= _WEIGHTS and all(map(_is_plain, values)):
            after = next(iter(node.users))
            is_relu = len(node.users) == 1 and after.target is _aten.relu.default
            if is_relu:
                after.replace_all_uses_with(node)
            with graph.inserting_before(node):
                is_turned = columns.target is _aten.t.default
                weight = columns.args[0] if is_turned else graph.call_function(_aten.t.default, (columns,))
            node.target, node.args = _linear, (rows, weight, bias, is_relu)
    for node in graph.find_nodes(op="call_function", target=_aten.addmm_.default) if least.gradient else ():
        value = node.args[0].meta.get("val")
        if _is_plain(value) and value.numel() >= _WEIGHTS:
            node.target = _add_product
    erase_unused(graph, keep=(_add_product,))


def add_product(total: Tensor, left: Tensor, right: Tensor, alpha: float) -> None:
    """Add a multiple of the product of two matrices to a third, by what is fastest."""
    is_large = _least().gradient is not None and total.numel() >= _WEIGHTS and _is_plain(total)
    (_add_product if is_large else Tensor.addmm_)(total, left, right, alpha=alpha)


def _linear(rows: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
    """Return the outputs of a linear layer, and of a ReLU behind it."""
    if len(rows) < (_least().forward or 0):
        out = torch.addmm(bias, rows, weight.t())
        return out.relu_() if relu else out
    result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "relu" if relu else "none", [], "")
    return result


def _add_product(total: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Add the product of two matrices to a third, through oneDNN where they have many examples in common."""
    if len(right) < (_least().gradient or 0):
        return total.addmm_(left, right, beta=beta, alpha=alpha)
    turned = right.t().contiguous()
    product = torch.ops.mkldnn._linear_pointwise(left.contiguous(), turned, None, "none", [], "")
    return (total if beta == 1 else total.mul_(beta)).add_(product, alpha=alpha)


@cache
def _least() -> _Examples:
    """Return from how many examples on oneDNN is faster on this processor, as far as processors have been measured.

    On Zen 4 it is up to a quarter faster in forward passes over many examples, and slower in all else. On an AMD
    processor twice as fast, which by its speed was of the next family, MKL leaves half of the arithmetic unused, and
    oneDNN takes four fifths to two fifths of the time, the more examples the less.
    """
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return _Examples(None, None)
    vendor, family = _processor()
    if vendor != "AuthenticAMD" or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return _Examples(None, None)
    return _Examples(1, 48) if family >= _ZEN_5 else _Examples(48, None)


def _processor() -> tuple[str, int]:
    """Return the vendor and the family of this machine's processors, as far as they can be had."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "", 0
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    family = found.get("cpu family", "")
    return found.get("vendor_id", ""), int(family) if family.isdigit() else 0


def _is_plain(value: Any) -> bool:
    known = isinstance(value, Tensor) and value.device.type == "cpu"
    return known and value.dtype is torch.float32 and value.is_contiguous()
