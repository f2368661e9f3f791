"""Randomness as a function of (seed, purpose, round, client), so that no generator state is saved."""

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from lightning_fed.core.devices import get_device_random_state, seed_device, set_device_random_state

_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio; its multiples differ in all bits


class Purpose(IntEnum):
    """The purpose of a random stream; streams of different purposes are independent."""

    COHORT = 1
    GRADIENT_COHORT = 2
    BATCHES = 3
    TRAINING = 4
    FULL_GRADIENT = 5
    VALIDATION = 6
    STRAGGLERS = 8  # 7 is unused: streams depend on these numbers
    DROPOUT = 9
    SPEED = 10
    AVAILABILITY = 11
    MEASUREMENT = 12
    COMPRESSION = 13
    INNER_SOLVE = 14
    ATTACKERS = 15
    ATTACK = 16
    ATTACK_ON_GRADIENTS = 17
    CLIENT_NOISE = 18
    POISSON = 19
    SENDERS = 20
    HOOKS_BEFORE_ROUND = 21
    HOOKS_AFTER_ROUND = 22
    SERVER = 23
    HOOKS_BEFORE_CLIENT = 24
    HOOKS_AFTER_CLIENT = 25


def derive_seed(seed: int, purpose: Purpose, round: int = 0, client: int = 0) -> int:
    """Return the seed of one random stream.

    It has 63 bits. PyTorch's CPU generator uses the lower 32, so two of very many streams may coincide, which is
    harmless.

    Args:
        seed: The run's seed.
        purpose: The purpose of the stream.
        round: The round, from 0.
        client: The client's stored index, from 0.

    Example:
        >>> derive_seed(0, Purpose.COHORT, 3) == derive_seed(0, Purpose.COHORT, 3)
        True
        >>> derive_seed(0, Purpose.COHORT, 3) == derive_seed(0, Purpose.BATCHES, 3)
        False
    """
    key = f"{seed}/{int(purpose)}/{round}/{client}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def generator(
    seed: int, purpose: Purpose, round: int = 0, client: int = 0, reuse: torch.Generator | None = None
) -> torch.Generator:
    """Return a CPU generator for one random stream, ``reuse`` or a new one; see :func:`derive_seed`."""
    return (reuse or torch.Generator()).manual_seed(derive_seed(seed, purpose, round, client))


class KeyedStream:
    """Random bytes that cannot be predicted without the run's seed: SHAKE-256 of its key and a counter.

    PyTorch's generators are not made for secrets, and have 32-bit seeds, which can be tried one after another.

    Args:
        key: The numbers that the stream depends on, such as the run's seed, the purpose, the round and the client.
    """

    def __init__(self, *key: int) -> None:
        self._key, self._drawn = "/".join(str(int(part)) for part in key), 0

    def __call__(self, count: int) -> bytes:
        """Return the next bytes."""
        self._drawn += 1
        return hashlib.shake_256(f"{self._key}/{self._drawn}".encode()).digest(count)

    def uniform(self, count: int) -> torch.Tensor:
        """Return the next independent numbers in [0, 1), float64 [count]."""
        bits = torch.frombuffer(bytearray(self(8 * count)), dtype=torch.int64) if count else torch.zeros(0)
        return ((bits.to(torch.int64) >> 11) & (2**53 - 1)).to(torch.float64) * 2.0**-53


def seed_global(seed: int, device: torch.device | None = None) -> None:
    """Seed the global generators that user code uses: torch (CPU and ``device``), Python's and NumPy's.

    NumPy has the same generator as PyTorch, so one seed would give both the same numbers. Both would flip the same
    images, for example.

    ``torch.manual_seed`` also visits every lazily initialized backend. That takes about a millisecond, which is too
    slow for once per client.
    """
    torch.default_generator.manual_seed(seed)
    seed_device(device, seed)
    random.seed(seed)
    np.random.seed(seed * _GOLDEN >> 32 & 0xFFFFFFFF)


def capture_random_state(device: torch.device | None = None) -> Callable[[], None]:
    """Return a function that restores the current state of the global generators."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    on_device = get_device_random_state(device)

    def restore() -> None:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        set_device_random_state(device, on_device)

    return restore


def random_state(device: torch.device | None = None) -> tuple[Any, ...]:
    """Return the state of PyTorch's global generators (CPU and ``device``), to detect draws from them."""
    state, on_device = torch.default_generator.get_state(), get_device_random_state(device)
    return state.numpy().tobytes(), None if on_device is None else on_device.numpy().tobytes()


def foreign_state() -> tuple[Any, ...]:
    """Return the states of the other global generators: Python's and NumPy's."""
    numpy: Any = np.random.get_state()
    return random.getstate(), numpy[1].tobytes(), numpy[2:]


@contextmanager
def preserved_random_state(device: torch.device | None = None) -> Iterator[None]:
    """Restore the state of the global generators on exit.

    A second gradient on a batch then has the dropout masks and in-step augmentation of the first one.
    """
    restore = capture_random_state(device)
    try:
        yield
    finally:
        restore()
