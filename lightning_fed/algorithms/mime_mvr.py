"""MimeMVR: Mime with momentum-based variance reduction."""

from typing import Literal

import torch
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.arguments import check_number, check_one_of
from lightning_fed.core.rounds import Cohort, Step
from lightning_fed.core.types import State, Vector

_POINTS = {"eq15": ("x", "x_prev"), "lemma9": ("x_prev", "x_prev"), "current": ("x", "x")}
"""The points of the batch gradient A and the cohort gradient C of a local step."""


class MimeMVR(Algorithm):
    r"""Mime with momentum-based variance reduction.

    Karimireddy et al., *Mime: Mimicking Centralized Stochastic Algorithms in Federated Learning*, 2020
    (https://arxiv.org/abs/2008.03606), equations 14 to 17.

    .. math::
        y_i &\leftarrow y_i - \eta \left( g_i(y_i) - g_i(A) + a\, \bar g(C) + (1 - a)\, m \right) \\
        m &\leftarrow a\, \bar g(x) + (1 - a)\, m + (1 - a) \left( \bar g(x) - \bar g(x^-) \right), \qquad
        x \leftarrow \sum_i p_i y_i

    :math:`\bar g(z) = \sum_i p_i \nabla F_i(z)` over this round's cohort with full batches. :math:`x^-` is the server
    model one round ago, and x in the first round.

    Note:
        Equations 14 and 15 mix x and :math:`x^-`, but the paper's Lemma 9 needs :math:`x^-` in both places. The first m
        is undefined. ``anchor`` and ``m0`` choose the points and the first m.

        The paper's theorem IV takes :math:`\eta \le \min(\frac{1}{15 K} (F S / (T \delta^2 G^2))^{1/3}, \frac1L,
        \frac{1}{40 \delta K})` and :math:`a = 1536\, \eta^2 \delta^2 K^2`, with :math:`F = f(x^0) - f^*`, S clients
        taking K local steps in each of T rounds, L the smoothness of f, and G and :math:`\delta` the dissimilarities of
        the clients' gradients and Hessians. ``lightning-fed diagnose`` measures them and computes both.

    Args:
        a: The weight of the new gradient, :math:`a` in [0, 1].
        anchor: The points A and C. "eq15": A = x and C = :math:`x^-`. "lemma9": both are :math:`x^-`. "current": both
            are x, which for ``a=1`` is Mime over SGD.
        m0: The first m: "grad" for the first cohort's gradient at :math:`x^0`, or "zeros".

    Raises:
        FederatedError: If a hyper-parameter is out of range or unknown.

    Example:
        >>> MimeMVR(a=0.1, anchor="lemma9").anchor_at
        'x_prev'
    """

    full_grad_at = ("x", "x_prev")
    full_grad_for = "cohort"

    def __init__(
        self,
        a: float,
        anchor: Literal["eq15", "lemma9", "current"] = "eq15",
        m0: Literal["grad", "zeros"] = "grad",
    ) -> None:
        self.a = check_number(self, "a", a, "[0, 1]")
        self.anchor = check_one_of(self, "anchor", anchor, ("eq15", "lemma9", "current"))
        self.m0 = check_one_of(self, "m0", m0, ("grad", "zeros"))
        self.anchor_at, self._center_at = _POINTS[self.anchor]

    def init_server(self, x: Vector) -> State:
        """Return m = 0, a flag for whether it is the first m or a placeholder, and x^- = x^0."""
        has_m = torch.full((), float(self.m0 == "zeros"), dtype=x.dtype, device=x.device)
        return {"m": torch.zeros_like(x), "has_m": has_m, "x_prev": x.clone()}

    def begin_round(self, x: Vector, server: State, cohort: Cohort) -> State:
        """Set the first m to the first cohort's gradient if requested."""
        return {**server, "m": torch.where(server["has_m"] > 0, server["m"], cohort.grad["x"])}

    def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
        """Return g - g(A) + a g(C) + (1 - a) m."""
        v: Tensor = g - step.anchor_grad + self.a * step.cohort_grad[self._center_at] + (1 - self.a) * step.server["m"]
        return v

    def update_server(self, x: Vector, server: State, mean: State, cohort: Cohort) -> tuple[Vector, State]:
        """Update m with gradients at x and at x^-, and save x."""
        g, g_prev = cohort.grad["x"], cohort.grad["x_prev"]
        m = self.a * g + (1 - self.a) * server["m"] + (1 - self.a) * (g - g_prev)
        return mean["delta"], {"m": m, "has_m": torch.ones_like(server["has_m"]), "x_prev": x.clone()}
