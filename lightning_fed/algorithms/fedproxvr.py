"""FedProxVR: proximal local steps with variance-reduced gradients, SVRG's or SARAH's."""

from typing import Literal

import torch
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.arguments import check_number, check_one_of
from lightning_fed.core.rounds import Step
from lightning_fed.core.types import State, Vector


class FedProxVR(Algorithm):
    r"""Federated learning with proximal, stochastic variance-reduced local steps.

    Dinh, Tran, Nguyen, Bao, Zomaya and Zhou, *Federated Learning with Proximal Stochastic Variance Reduced Gradient
    Algorithms*, ICPP 2020 (https://doi.org/10.1145/3404397.3404457), Algorithm 1.

    .. math::
        v &= \nabla F_i(x), \qquad y_i \leftarrow \operatorname{prox}(x - \eta_l v), \qquad
        \operatorname{prox}(u) = \frac{u + \eta_l \mu x}{1 + \eta_l \mu} \\
        v &\leftarrow g_i(y_i) - g_i(x) + \nabla F_i(x) \;\text{(svrg)} \quad\text{or}\quad
        g_i(y_i) - g_i(y_i^-) + v \;\text{(sarah)}, \qquad y_i \leftarrow \operatorname{prox}(y_i - \eta_l v)

    Note:
        The first step, along the full-batch gradient, comes before the run's local steps and is not counted.
        :math:`y_i^-` is the previous iterate; both gradients use the same batch and dropout masks. The local optimizer
        gets :math:`(v + \mu (y_i - x)) / (1 + \eta_l \mu)`, so that plain SGD takes the exact proximal step.

    Args:
        mu: The coefficient :math:`\mu` of the proximal term, not negative.
        estimator: "svrg" or "sarah".

    Raises:
        FederatedError: If a hyper-parameter is out of range or unknown.

    Example:
        >>> FedProxVR(mu=0.1)
        FedProxVR(mu=0.1, estimator='svrg')
    """

    full_grad_at = ("x",)
    full_grad_for = "client"

    def __init__(self, mu: float, estimator: Literal["svrg", "sarah"] = "svrg") -> None:
        self.mu = check_number(self, "mu", mu, "[0, inf)")
        self.estimator = check_one_of(self, "estimator", estimator, ("svrg", "sarah"))
        self.anchor_at = "x" if self.estimator == "svrg" else None

    def init_local(self, x: Vector, server: State, client: State) -> State:
        """Return SARAH's previous iterate, and its v minus the full-batch gradient."""
        return {} if self.estimator == "svrg" else {"before": x, "v": torch.zeros_like(x)}

    def start(self, x: Vector, step: Step) -> Vector:
        """Return the point after the full-batch step."""
        return x - step.lr * step.full_grad["x"] / (1 + step.lr * self.mu)

    def second_gradient_at(self, g: Vector, y: Vector, step: Step) -> Vector:
        """Return SARAH's previous iterate."""
        before: Vector = step.local["before"]
        return before

    def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
        """Return the direction of the proximal step along v."""
        v = self._estimate(g, step) + step.full_grad["x"]
        return (v + self.mu * (y - step.x)) / (1 + step.lr * self.mu)

    def advance(self, g: Tensor, y: Tensor, step: Step) -> State:
        """Update SARAH's iterate and v."""
        return {} if self.estimator == "svrg" else {"before": y.clone(), "v": self._estimate(g, step)}

    def _estimate(self, g: Tensor, step: Step) -> Tensor:
        """Return v without the full-batch gradient."""
        change: Tensor = g - step.anchor_grad
        return change if self.estimator == "svrg" else change + step.local["v"]
