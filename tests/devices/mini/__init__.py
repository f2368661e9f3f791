"""Two devices, ``torch.device("mini")``, for tests on machines without an accelerator.

Importing this package builds ``mini.cpp`` (once for each PyTorch; PyTorch caches it by content) and registers it.
Operators run the CPU's kernels on copies, so results equal the CPU's bit for bit if tensors have the same layout.
The device shows faults of real accelerators that the CPU hides. The CPU cannot access its memory, and tensors of
different devices do not mix. It has its own random stream, and can run out of memory. It also counts kernels, copies
and host reads.

It differs from CUDA: ``module.to()`` replaces parameters, it has no streams, cuDNN, Philox or fused optimizers, and it
is slow.
"""

import hashlib
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import cpp_extension

__all__ = ["counted", "set_limit"]

_source = Path(__file__).with_name("mini.cpp").read_text()
core: Any = cpp_extension.load_inline(
    f"mini_{hashlib.sha256(_source.encode()).hexdigest()[:12]}",  # checkouts with the same source share one build
    _source,
    extra_cflags=["-O1", "-g0", "-w", "-std=c++20"],
    no_implicit_headers=True,
)


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return core.current_device() if index is None else index


class _Device:
    """``with torch.mini.device(1):``."""

    def __init__(self, device: Any = None) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = core.current_device()
        core.set_device(self.index)

    def __exit__(self, *_: object) -> None:
        core.set_device(self.before)


class _Generators:
    def __getitem__(self, index: int) -> torch.Generator:
        return core.default_generator(index)

    def __len__(self) -> int:
        return core.device_count()


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    memory = core.memory(_index(device))
    return memory["limit"] - memory["used"], memory["limit"]


def _seed_all(seed: int) -> None:
    for i in range(core.device_count()):
        core.default_generator(i).manual_seed(seed)


def _register() -> None:
    """Create ``torch.mini``, with the functions of ``torch.cuda`` that PyTorch, Lightning and lightning_fed call."""
    module: Any = types.ModuleType("torch.mini")
    module.is_available = module.is_initialized = lambda: True
    module.init = module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.device = _Device
    module.device_count = core.device_count
    module.current_device = core.current_device
    module.set_device = lambda device: core.set_device(_index(device))
    module.synchronize = lambda device=None: core.synchronize()
    module.get_device_name = lambda device=None: "mini"
    module.get_device_capability = lambda device=None: (8, 0)

    module.default_generators = _Generators()
    module.manual_seed = lambda seed: core.default_generator(core.current_device()).manual_seed(seed)
    module.manual_seed_all = _seed_all
    module.get_rng_state = lambda device="mini": core.default_generator(_index(device)).get_state()
    module.set_rng_state = lambda state, device="mini": core.default_generator(_index(device)).set_state(state)

    module.is_bf16_supported = lambda *_: True
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.get_autocast_dtype = lambda: torch.float16

    module.empty_cache = lambda: None
    module.mem_get_info = _mem_get_info
    module.memory_allocated = module.memory_reserved = lambda device=None: core.memory(_index(device))["used"]
    module.max_memory_allocated = lambda device=None: core.memory(_index(device))["peak"]
    module.reset_peak_memory_stats = lambda device=None: core.reset_peak(_index(device))

    torch.utils.rename_privateuse1_backend("mini")
    torch._register_device_module("mini", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def _lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    # PyTorch calls the fused cell on every device but the CPU, and the CPU has no kernel for it
    gates = input_gates + hidden_gates
    if input_bias is not None:
        gates = gates + input_bias + hidden_bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    i, f, g, o = workspace.chunk(4, 1)
    tanh = cy.tanh()
    grad_hy = torch.zeros_like(cx) if grad_hy is None else grad_hy
    grad_cy = torch.zeros_like(cx) if grad_cy is None else grad_cy
    total = grad_cy + grad_hy * o * (1 - tanh * tanh)
    gates = torch.cat(
        [total * g * i * (1 - i), total * cx * f * (1 - f), total * i * (1 - g * g), grad_hy * tanh * o * (1 - o)], 1
    )
    return gates, total * f, gates.sum(0) if has_bias else torch.empty(0, device=gates.device)


def _native_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    # It updates the running statistics in place without declaring it in its schema, so the fallback would lose them.
    args = [None if t is None else t.cpu() for t in (x, weight, bias, mean, var)]
    found = torch.native_batch_norm(*args, training, momentum, eps)
    for own, moved in ((mean, args[3]), (var, args[4])):
        if own is not None and training:
            own.copy_(moved)
    return tuple(t.to(x.device) for t in found)


_register()
_library = torch.library.Library("aten", "IMPL")
_library.impl("_thnn_fused_lstm_cell", _lstm_cell, "PrivateUse1")
_library.impl("_thnn_fused_lstm_cell_backward_impl", _lstm_cell_backward, "PrivateUse1")
_library.impl("native_batch_norm", _native_batch_norm, "PrivateUse1")
_autocast = torch.library.Library("_", "IMPL")
_autocast.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")


class counted:  # noqa: N801  # a context manager like torch.no_grad
    """``with counted() as found: ...`` counts the kernels, copies and host reads of the block in ``found``.

    Its keys are "kernels" and "kernel NAME", "to device", "to host", "bytes to device", "bytes to host", "copy",
    "copy between devices", "scalar to host" and "synchronize". Counts of zero are absent.
    """

    def __enter__(self) -> dict[str, int]:
        self.found: dict[str, int] = {}
        core.start_counting()
        return self.found

    def __exit__(self, *_: object) -> None:
        self.found.update(core.stop_counting())


def set_limit(index: int, num_bytes: int) -> None:
    """Limit a device's memory; 0 removes the limit."""
    core.set_limit(index, num_bytes)
