"""FedSAM and MoFedSAM: local steps along the gradient at a nearby point of high loss."""

from typing import Literal

import torch
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.algorithms.fedcm import FedCM
from lightning_fed.core.arguments import check_number
from lightning_fed.core.rounds import Step
from lightning_fed.core.types import Vector


def unit(g: Vector, eps: float) -> Vector:
    """Return g / (|g| + eps), with the norm of the whole vector [P]; zero if g is zero."""
    norm = torch.linalg.vector_norm(g)
    return torch.where(norm > 0, g / (norm + eps), torch.zeros_like(g))


class FedSAM(Algorithm):
    r"""Federated averaging with sharpness-aware local steps.

    Qu et al., *Generalized Federated Learning via Sharpness Aware Minimization*, ICML 2022
    (https://arxiv.org/abs/2206.02618), Algorithm 1; also Caldarola, Caputo and Ciccone, *Improving Generalization in
    Federated Learning by Seeking Flat Minima*, ECCV 2022 (https://arxiv.org/abs/2203.11834).

    .. math::
        y_i \leftarrow y_i - \eta_l\, g_i\left( y_i + \rho \frac{g_i(y_i)}{\lVert g_i(y_i) \rVert + \epsilon} \right),
        \qquad x \leftarrow \sum_i p_i y_i

    Note:
        Both gradients use the same batch and dropout masks, and the norm is over all parameters. A zero gradient gives
        no perturbation. Coupled weight decay is part of both gradients, each at its point. The paper's server step is
        the rate of the server optimizer. All clients have equal weight by default.

    Args:
        rho: The radius :math:`\rho`, not negative; 0 is FedAvg.
        eps: A constant added to the norm, not negative.

    Raises:
        FederatedError: If a hyper-parameter is out of range.

    Example:
        >>> FedSAM(rho=0.05)
        FedSAM(rho=0.05, eps=0.0)
    """

    default_weighting = "uniform"

    def __init__(self, rho: float, eps: float = 0.0) -> None:
        self.rho = check_number(self, "rho", rho, "[0, inf)")
        self.eps = check_number(self, "eps", eps, "[0, inf)")

    def second_gradient_at(self, g: Vector, y: Vector, step: Step) -> Vector:
        """Return the point of highest loss within rho, to first order."""
        return y + self.rho * unit(g, self.eps)

    def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
        """Return the gradient at that point."""
        second: Tensor = step.anchor_grad
        return second


class MoFedSAM(FedCM):
    r"""FedCM with FedSAM's gradient instead of the client's gradient.

    Qu et al., *Generalized Federated Learning via Sharpness Aware Minimization*, ICML 2022
    (https://arxiv.org/abs/2206.02618), Algorithm 2.

    .. math::
        \tilde g_i &= g_i\left( y_i + \rho \frac{g_i(y_i)}{\lVert g_i(y_i) \rVert + \epsilon} \right), \qquad
        y_i \leftarrow y_i - \eta_l \left( \alpha\, \tilde g_i + (1 - \alpha) \Delta \right) \\
        \Delta &\leftarrow \sum_i p_i \frac{x - y_i}{\eta_l K_i}, \qquad
        x \leftarrow x - \eta_g \Delta \;\text{(paper)} \quad\text{or}\quad
        x + \eta_g \sum_i p_i (y_i - x) \;\text{(relative)}

    Note:
        The perturbation uses the client's gradient, without :math:`\Delta`. The rest is as in :class:`FedCM` and
        :class:`FedSAM`.

    Args:
        rho: The radius :math:`\rho`, not negative. 0 is FedCM.
        alpha: The weight :math:`\alpha` of the client's gradient, in (0, 1]. 1 is FedSAM.
        eta_g: The server's step :math:`\eta_g`, positive.
        eta_g_mode: The scale of :math:`\eta_g`, "relative" or "paper"; see :class:`FedCM`.
        eps: A constant added to the norm, not negative.

    Raises:
        FederatedError: If a hyper-parameter is out of range or unknown.

    Example:
        >>> MoFedSAM(rho=0.05, alpha=0.1)
        MoFedSAM(rho=0.05, alpha=0.1, eta_g=1.0, eta_g_mode='relative', eps=0.0)
    """

    def __init__(
        self,
        rho: float,
        alpha: float,
        eta_g: float = 1.0,
        eta_g_mode: Literal["relative", "paper"] = "relative",
        eps: float = 0.0,
    ) -> None:
        self.rho = check_number(self, "rho", rho, "[0, inf)")
        super().__init__(alpha, eta_g, eta_g_mode)
        self.eps = check_number(self, "eps", eps, "[0, inf)")

    def second_gradient_at(self, g: Vector, y: Vector, step: Step) -> Vector:
        """Return the point of highest loss within rho, to first order."""
        return y + self.rho * unit(g, self.eps)

    def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
        """Return alpha times the gradient at that point, plus (1 - alpha) Delta."""
        return super().correct(step.anchor_grad, y, step)
