"""The climb of a curve in the wrong direction, and the round in which a run has settled."""

from collections.abc import Mapping
from typing import Literal

_CONVERGED = 1e-4  # the loss converges if it changes by less from one round to the next
_DIVERGED = 1.0  # the loss diverges if it grows by more in ten rounds


def climb(curve: Mapping[int, float], rounds: int, mode: Literal["max", "min"]) -> tuple[float, set[int]]:
    """Return the largest worsening of a value over a number of rounds, and its two rounds.

    It is negative if the curve only improves. If no two values are that far apart, it is 0, without rounds.

    Example:
        >>> climb({1: 3.0, 2: 2.0, 3: 2.5, 4: 2.2}, 1, "min")
        (0.5, {2, 3})
    """
    ends = [(_worse(curve[n - rounds], value, mode), n) for n, value in curve.items() if n - rounds in curve]
    if not ends:
        return 0.0, set()
    worst, end = max(ends)
    return worst, {end - rounds, end}


def settled(loss: Mapping[int, float]) -> tuple[int, set[int]]:
    """Return the round after which a run has settled, and the rounds that show it.

    It is the first round in which the loss converges or diverges, or else the last. The loss converges if it changes by
    less than 0.0001 from the round before, and diverges if it grows by more than 1 in ten rounds. This is the rule of
    Li et al., *Federated Optimization in Heterogeneous Networks* (FedProx), MLSys 2020
    (https://arxiv.org/abs/1812.06127), appendix C.3.2.

    Args:
        loss: The training loss by the number of completed rounds. It must not be empty.

    Example:
        >>> settled({1: 3.0, 2: 2.0, 3: 2.00005, 4: 1.0})
        (3, {2, 3})
    """
    for n in sorted(loss):
        if n - 1 in loss and abs(loss[n] - loss[n - 1]) < _CONVERGED:
            return n, {n - 1, n}
        if n - 10 in loss and loss[n] - loss[n - 10] > _DIVERGED:
            return n, {n - 10, n}
    return max(loss), {max(loss)}


def _worse(before: float, after: float, mode: Literal["max", "min"]) -> float:
    if before == after:  # both may be infinite
        return 0.0
    return after - before if mode == "min" else before - after
