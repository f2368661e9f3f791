r"""The papers' theory, applied to the clients' constants.

- Karimireddy et al., *Mime* (https://arxiv.org/abs/2008.03606), theorems I and IV.
- Karimireddy et al., *SCAFFOLD* (https://arxiv.org/abs/1910.06378): local steps, and the lower bound for FedAvg.
"""

import math
from dataclasses import dataclass

from lightning_fed.lab.diagnosis.measurement import Measured


@dataclass(frozen=True)
class Theory:
    r"""The theory's values for a configuration; nan if an input is unknown.

    Attributes:
        K: The mean number of local steps of a client.
        S: The mean number of clients per round.
        T: The remaining rounds, or all rounds of a finished run.
        useful_steps: :math:`L / \delta`: the local steps that help a method with drift correction.
        useful_steps_mean: The same with the mean of the clients' distances for :math:`\delta`.
        ceiling: :math:`1 / L`.
        client_ceiling: :math:`1 / (L + \delta)`: no client's curvature is above :math:`L + \delta`.
        drift_bound: :math:`\eta \frac{K - 1}{2} \delta G`, the largest drift to first order in :math:`\eta`.
            Local step k starts about :math:`\eta k g_i` away from x. There, the client's gradient differs by
            :math:`-\eta k H_i g_i`.
        batches: The standard deviation of a round's mean gradient due to batches.
        drawing: The standard deviation of it due to drawing S of N clients without replacement.
        lower_bound: :math:`G^2 / (\mu T^2)`, FedAvg's error after T rounds on the worst functions with this G. L
            replaces :math:`\mu`, which gives the smallest value.
        mvr_rate: MimeMVR's step size, see :func:`mime_mvr`.
        mvr_a: MimeMVR's ``a``.
    """

    K: float
    S: float
    T: float
    useful_steps: float
    useful_steps_mean: float
    ceiling: float
    client_ceiling: float
    drift_bound: float
    batches: float
    drawing: float
    lower_bound: float
    mvr_rate: float
    mvr_a: float


def mime_mvr(
    *, F: float, G: float, delta: float, L: float, K: float, S: float, T: float  # noqa: N803
) -> tuple[float, float]:  # fmt: skip
    r"""Return the largest step size that Mime's theorem IV allows MimeMVR, and its ``a``.

    .. math::
        \eta = \min\left( \frac{1}{15 K} \left( \frac{F S}{T \delta^2 G^2} \right)^{1/3}, \frac1L,
        \frac{1}{40 \delta K} \right), \qquad a = 1536\, \eta^2 \delta^2 K^2

    Args:
        F: :math:`f(x^0) - f^*`, at least 0.
        G: The dissimilarity of the gradients.
        delta: The dissimilarity of the Hessians.
        L: The smoothness, positive.
        K: The number of local steps.
        S: The number of clients per round.
        T: The number of rounds.

    Example:
        >>> rate, a = mime_mvr(F=1.0, G=1.0, delta=0.1, L=1.0, K=10, S=10, T=100)
        >>> round(rate, 6), round(a, 6)
        (0.014363, 0.316866)
    """
    rate = min(
        _ratio(_ratio(F * S, T * (delta * G) ** 2) ** (1 / 3), 15 * K),
        1 / L,
        _ratio(1, 40 * delta * K),
    )
    return rate, 1536 * (rate * delta * K) ** 2


def suggest(m: Measured, K: float, S: float, T: int | None, best_loss: float) -> Theory:  # noqa: N803
    """Return the theory's values for the measured constants.

    Args:
        m: The clients' constants.
        K: The number of local steps of a client.
        S: The number of clients per round.
        T: The number of remaining rounds; None if unknown.
        best_loss: The least possible loss, f*.
    """
    G, delta, L, N = m.G[0], m.delta[0], abs(m.curvature[0]), m.population  # noqa: N806
    rounds, F = float(T or math.nan), m.loss - best_loss  # noqa: N806
    can_mvr = L > 0 and rounds > 0 and F >= 0
    rate, a = mime_mvr(F=F, G=G, delta=delta, L=L, K=K, S=S, T=rounds) if can_mvr else (math.nan, math.nan)
    return Theory(
        K=K,
        S=S,
        T=rounds,
        useful_steps=_ratio(L, delta),
        useful_steps_mean=_ratio(L, m.delta_mean),
        ceiling=_ratio(1, L),
        client_ceiling=_ratio(1, L + delta),
        drift_bound=m.rate * max(0.0, K - 1) / 2 * delta * G,
        batches=m.noise[0] / math.sqrt(K * S),
        drawing=G * math.sqrt(max(0.0, N - S) / ((N - 1) * S)) if N > 1 else 0.0,
        lower_bound=_ratio(G**2, L * rounds**2),
        mvr_rate=rate,
        mvr_a=a,
    )


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.inf
