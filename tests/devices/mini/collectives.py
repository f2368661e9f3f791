"""Collectives on the test device: gloo on copies, with NCCL's restrictions."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import lightning_fed.strategies.ddp

__all__ = ["LOG", "stage_collectives"]

LOG: list[tuple[str, torch.dtype, torch.Size]] = []
"""The name of each collective on device tensors, with dtype and shape of its first tensor."""


def stage_collectives() -> None:
    """Let the collectives of torch.distributed accept tensors of the test device."""
    for name in ("all_reduce", "all_gather", "all_to_all_single", "broadcast", "reduce"):
        staged = _staged(name, getattr(dist, name))
        setattr(dist, name, staged)
        setattr(dist.distributed_c10d, name, staged)
    lightning_fed.strategies.ddp._sync_module_states = _broadcast_module


def _staged(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [t for arg in args[:2] for t in (arg if isinstance(arg, list | tuple) else [arg])]
        tensors = [t for t in tensors if isinstance(t, Tensor)]
        if not any(t.device.type == "mini" for t in tensors):
            return collective(*args, **kwargs)
        own = torch.get_device_module("mini").current_device()
        for t in tensors:
            if t.device.type != "mini":
                raise RuntimeError(f"No backend type associated with device type {t.device.type} (in {name})")
            if t.device.index != own:
                raise RuntimeError(f"{name}: a tensor is on {t.device}, the process drives mini:{own}")
            if not t.is_contiguous():
                raise ValueError(f"Tensors must be contiguous (in {name})")
        LOG.append((name, tensors[0].dtype, tensors[0].shape))
        copies = {id(t): t.cpu() for t in tensors}

        def on_host(arg: Any) -> Any:
            if isinstance(arg, list | tuple):
                return [on_host(part) for part in arg]
            return copies.get(id(arg), arg)

        found = collective(*map(on_host, args), **kwargs)
        for t in tensors:
            t.copy_(copies[id(t)])
        return found

    return call


def _broadcast_module(module: torch.nn.Module) -> None:
    for t in [*module.parameters(), *module.buffers()]:
        dist.broadcast(t.data, 0)
