"""Clients that are trained in another process than the one that keeps their state: it travels there and back."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_fed.core.types import State
from lightning_fed.engines.ranks import Ranks

__all__ = ["Kinds", "kinds_of", "send_states"]

Kinds: TypeAlias = Mapping[int, Mapping[str, tuple[tuple[int, ...], torch.dtype]]]
"""Shapes and types of clients' states, by stored index and name."""

_ALIGNED = 16  # bytes that every tensor starts at a multiple of


def kinds_of(states: Mapping[int, State]) -> Kinds:
    """Return what other processes need to know of states before these arrive."""
    return {
        index: {name: (tuple(value.shape), value.dtype) for name, value in state.items()}
        for index, state in states.items()
    }


def send_states(
    ranks: Ranks, states: Mapping[int, State], to: Mapping[int, int], kinds: Sequence[Kinds]
) -> dict[int, State]:
    """Send clients' states to other processes, and return those that arrive here, by stored index; all must call it.

    Args:
        ranks: The processes.
        states: This process's states that leave.
        to: The rank to which each goes, for the clients of all processes.
        kinds: Everybody's :func:`kinds_of`.
    """
    if not any(kinds):
        return {}
    outgoing = [[states[index] for index in sorted(states) if to[index] == rank] for rank in range(ranks.size)]
    incoming = [[(index, of[index]) for index in sorted(of) if to[index] == ranks.rank] for of in kinds]
    received = ranks.exchange_bytes(
        [[_bytes(value) for state in leaving for value in state.values()] for leaving in outgoing],
        [sum(_padded(*kind) for _, kind_of in arriving for kind in kind_of.values()) for arriving in incoming],
    )
    start = 0
    arrived: dict[int, State] = {}
    for index, kind_of in (client for arriving in incoming for client in arriving):
        arrived[index] = {}
        for name, (shape, dtype) in kind_of.items():
            part = received[start : start + prod(shape) * dtype.itemsize]
            arrived[index][name] = part.view(dtype).view(shape).clone()
            start += _padded(shape, dtype)
    return arrived


def _padded(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED


def _bytes(value: Tensor) -> Tensor:
    """Return a tensor's bytes, filled up to where the next one starts."""
    own = value.detach().contiguous().view(-1).view(torch.uint8)
    return torch.nn.functional.pad(own, (0, _padded(tuple(value.shape), value.dtype) - len(own)))
