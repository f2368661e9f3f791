"""Device-specific functions for any kind of device: random streams, free memory, pinned memory, float64.

PyTorch has one module per kind of accelerator: ``torch.cuda``, ``torch.xpu``, ``torch.mps`` and so on. Only this file
handles their differences.
"""

import gc
import traceback
from collections.abc import Iterable, Sequence
from itertools import starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fed.core.errors import FederatedError

_NO_MEMORY = ("DefaultCPUAllocator", "backend out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""Parts of out-of-memory messages: the CPU, MPS and NVIDIA's libraries do not raise a specific error type."""


class Memory(NamedTuple):
    """The memory of a device in bytes."""

    free: int
    total: int


def memory_of(device: torch.device) -> Memory | None:
    """Return the memory of a device, or None for the CPU and if PyTorch does not report it.

    Free memory includes unused memory that PyTorch's allocator has reserved.
    """
    if device.type == "cpu":
        return None
    module: Any = torch.get_device_module(device)
    if hasattr(module, "mem_get_info"):
        free, total = module.mem_get_info(device)
        if hasattr(module, "memory_reserved"):
            free += module.memory_reserved(device) - module.memory_allocated(device)
        return Memory(free, total)
    if hasattr(module, "recommended_max_memory"):  # MPS, which shares the host's memory
        total = module.recommended_max_memory()
        return Memory(max(0, total - module.current_allocated_memory()), total)
    return None


def reset_peak_memory(device: torch.device) -> bool:
    """Start measuring the peak of allocated memory; return whether the device supports it."""
    module: Any = torch.get_device_module(device)
    if not hasattr(module, "reset_peak_memory_stats"):
        return False
    module.reset_peak_memory_stats(device)
    return True


def peak_memory(device: torch.device) -> int:
    """Return the most bytes allocated to tensors since :func:`reset_peak_memory`."""
    return int(torch.get_device_module(device).max_memory_allocated(device))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error means that a device is out of memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _NO_MEMORY)


def release_memory(error: BaseException, device: torch.device) -> None:
    """Free the device memory of failed work: its error keeps the local variables of all functions it left."""
    failed: BaseException | None = error
    while failed is not None:
        traceback.clear_frames(failed.__traceback__)
        failed = failed.__cause__ or failed.__context__
    gc.collect()
    empty_cache = getattr(torch.get_device_module(device), "empty_cache", None)
    if empty_cache is not None:
        empty_cache()


def accelerator_name() -> str | None:
    """Return the name of this machine's accelerator, such as "NVIDIA H100", or None."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return None
    module: Any = torch.get_device_module(found)
    return str(module.get_device_name()) if hasattr(module, "get_device_name") else found.type


def can_pin() -> bool:
    """Return whether pinned host memory makes transfers asynchronous; Apple's GPUs share the host's memory."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found is not None and found.type != "mps"


def are_equal(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[bool]:
    """Return whether the tensors of each pair, all on one device, are equal, with one synchronization."""
    found = list(pairs)
    if not found or found[0][0].is_cpu:
        return list(starmap(torch.equal, found))
    alike = [a.shape == b.shape for a, b in found]
    same = [(a == b).all() for (a, b), is_alike in zip(found, alike, strict=True) if is_alike]
    read = iter(torch.stack(same).tolist() if same else ())
    return [is_alike and next(read) for is_alike in alike]


def numbers_of(tensors: Sequence[Tensor]) -> list[float]:
    """Return the numbers in floating-point tensors on one device, in order, with one synchronization."""
    if not tensors or tensors[0].is_cpu:
        return [number for tensor in tensors for number in tensor.reshape(-1).tolist()]
    numbers: list[float] = torch.cat([tensor.reshape(-1) for tensor in tensors]).tolist()
    return numbers


def accumulation(device: torch.device) -> dict[str, Any]:
    """Return dtype and device for a device's sums: float64, on the CPU if the device does not support it."""
    return {"dtype": torch.float64, "device": device if has_float64(device) else torch.device("cpu")}


def widened(value: Tensor) -> Tensor:
    """Return a tensor converted for sums; see :func:`accumulation`."""
    kind = torch.complex128 if value.is_complex() else torch.float64
    return value.to(accumulation(value.device)["device"]).to(kind)  # in two steps: MPS would convert before it copies


def narrowed(total: Tensor, like: Tensor) -> Tensor:
    """Return a sum, or a result of sums, in the dtype and on the device of a tensor."""
    return total.to(like.dtype).to(like.device)


def has_float64(device: torch.device) -> bool:
    """Return whether the device supports float64; Apple's GPUs and some of Intel's do not."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


def seed_device(device: torch.device | None, seed: int) -> None:
    """Seed the device's random stream; the CPU's does not change."""
    if device is None or device.type == "cpu":
        return
    stream = _generator(device)
    (torch.get_device_module(device) if stream is None else stream).manual_seed(seed)


def get_device_random_state(device: torch.device | None) -> Tensor | None:
    """Return the state of the device's random stream as a CPU tensor, or None for the CPU."""
    if device is None or device.type == "cpu":
        return None
    stream = _generator(device)
    state: Tensor = torch.get_device_module(device).get_rng_state() if stream is None else stream.get_state()
    return state


def set_device_random_state(device: torch.device | None, state: Tensor | None) -> None:
    """Restore a state of :func:`get_device_random_state`."""
    if device is None or state is None:
        return
    stream = _generator(device)
    if stream is None:
        torch.get_device_module(device).set_rng_state(state)
    else:
        stream.set_state(state)


def _generator(device: torch.device) -> torch.Generator | None:
    """Return the default generator of an accelerator, or None if its module only has functions, as for MPS."""
    module: Any = torch.get_device_module(device)
    generators = getattr(module, "default_generators", None)
    if generators is not None:
        if not len(generators):
            module.init()  # CUDA creates them on initialization
        index = module.current_device() if device.index is None else device.index
        found: torch.Generator = module.default_generators[index]
        return found
    if not all(hasattr(module, name) for name in ("manual_seed", "get_rng_state", "set_rng_state")):
        raise FederatedError(
            f"PyTorch offers no random generator for the device {str(device)!r}, so a run there could not be repeated."
            " Use another accelerator, such as accelerator='cpu'."
        )
    return None
