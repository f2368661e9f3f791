"""Random draws behind clients and partitions, vectorised over clients, classes and examples."""

import hashlib
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "Floats",
    "Ints",
    "cut_by",
    "deal_classes",
    "draw_classes",
    "equal_shares",
    "log_gamma",
    "random_state",
    "seed_words",
]

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]


def seed_words(seed: int, *key: int | str) -> list[int]:
    """Return what ``RandomState`` is seeded with: 64 bits of a seed, then integers, and 128 bits of a name's hash."""
    words = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for part in key:
        words += [part] if isinstance(part, int) else _hash(part)
    return words


def random_state(seed: int, *key: int | str) -> np.random.RandomState:
    """Return a stream of random numbers that a seed and a key decide.

    The streams of ``RandomState`` are frozen: they are the same on every machine and with every version of NumPy.
    """
    return np.random.RandomState(seed_words(seed, *key))


def _hash(name: str) -> list[int]:
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    words: list[int] = np.frombuffer(digest, dtype="<u4").tolist()
    return words


def equal_shares(size: int, parts: int) -> Ints:
    """Return the sizes of equal parts; the first ones get one more where it does not come out even."""
    return size // parts + (np.arange(parts) < size % parts).astype(np.int64)


def cut_by(log_weights: Floats, size: int, least: int) -> Ints:
    """Return shares that sum to ``size``: ``least`` for everybody, and the rest in proportion to the weights."""
    cumulative = np.cumsum(np.exp(log_weights - log_weights.max()))
    cuts = np.rint(cumulative / cumulative[-1] * (size - least * len(log_weights))).astype(np.int64)
    shares: Ints = least + np.diff(cuts, prepend=0)
    return shares


def log_gamma(alpha: Floats, shape: tuple[int, ...], random: np.random.RandomState) -> Floats:
    """Return logarithms of Gamma(alpha) variables: normalised over the last axis, they are a Dirichlet draw.

    Gamma(alpha) is Gamma(alpha + 1) U^(1 / alpha). In logarithms it neither vanishes nor ties when alpha is tiny.
    """
    limits = np.finfo(np.float64)
    drawn = np.log(random.standard_gamma(alpha + 1, shape))
    with np.errstate(over="ignore"):
        drawn += np.log1p(-random.random_sample(shape)) / np.maximum(alpha, limits.tiny)
    clamped: Floats = np.maximum(drawn, limits.min)
    return clamped


def draw_classes(
    log_mixtures: Floats, is_open: npt.NDArray[np.bool_], clients: Ints, random: np.random.RandomState
) -> Ints:
    """Draw a class for each of ``clients`` from its row of ``log_mixtures`` [N, C], among the open classes only."""
    classes = np.flatnonzero(is_open)
    waiting = np.bincount(clients, minlength=len(log_mixtures)) > 0
    rows = (np.cumsum(waiting) - 1)[clients]
    weights = log_mixtures[np.ix_(np.flatnonzero(waiting), classes)]
    weights = np.exp(weights - weights.max(axis=1, keepdims=True))
    cumulative = np.cumsum(weights, axis=1)
    cumulative /= cumulative[:, -1:]
    cumulative += np.arange(len(cumulative))[:, None]  # row r ascends from r to r + 1: one search serves all rows
    points = np.minimum(rows + random.random_sample(len(rows)), np.nextafter(rows + 1.0, 0))
    found = np.searchsorted(cumulative.ravel(), points, side="right")
    drawn: Ints = classes[found - rows * len(classes)]
    return drawn


def deal_classes(num_clients: int, num_classes: int, each: int, random: np.random.RandomState) -> Ints:
    """Deal every client ``each`` different classes [N, each] from one shuffled deck of all classes after another."""
    hands = np.empty((num_clients, each), dtype=np.int64)
    deck = np.empty(0, dtype=np.int64)
    for hand in hands:
        if len(deck) < each:
            fresh = random.permutation(num_classes)
            held = np.isin(fresh, deck)
            deck = np.concatenate([deck, fresh[~held], fresh[held]])  # what the client holds already goes to the end
        hand[:] = deck[:each]
        deck = deck[each:]
    return hands
