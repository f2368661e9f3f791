"""FedACG: clients start from the server's look-ahead point and are pulled to it."""

import torch
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.arguments import check_number
from lightning_fed.core.rounds import Cohort, Step
from lightning_fed.core.types import State, Vector


class FedACG(Algorithm):
    r"""Federated averaging with an accelerated client gradient.

    Kim, Kim and Han, *Communication-Efficient Federated Learning with Accelerated Client Gradient*, CVPR 2024
    (https://arxiv.org/abs/2201.03172), Algorithm 1, in terms of the point :math:`z = x + \lambda m` sent to clients.

    .. math::
        y_i &\leftarrow y_i - \eta_l \left( g_i(y_i) + \beta (y_i - z) \right), \quad y_i = z \text{ at first} \\
        m &\leftarrow \lambda m + \sum_i p_i (y_i - z), \qquad x \leftarrow x + m

    Note:
        The run's x is the paper's z, the clients' starting point. Validation and checkpoints use the paper's x, which
        is :math:`z - \lambda m`. The formulas assume the server optimizer SGD(lr=1). All clients have equal weight by
        default.

    Args:
        lam: The momentum :math:`\lambda`, in [0, 1); 0 is FedProx with :math:`\mu = \beta`.
        beta: The coefficient :math:`\beta` of the pull to z, not negative.

    Raises:
        FederatedError: If a hyper-parameter is out of range.

    Example:
        >>> FedACG(lam=0.85)
        FedACG(lam=0.85, beta=0.01)
    """

    default_weighting = "uniform"

    def __init__(self, lam: float = 0.85, beta: float = 0.01) -> None:
        self.lam = check_number(self, "lam", lam, "[0, 1)")
        self.beta = check_number(self, "beta", beta, "[0, inf)")

    def init_server(self, x: Vector) -> State:
        """Return the initial m = 0."""
        return {"m": torch.zeros_like(x)}

    def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
        """Return g + beta (y - z)."""
        return g + self.beta * (y - step.x)

    def update_server(self, x: Vector, server: State, mean: State, cohort: Cohort) -> tuple[Vector, State]:
        """Update m, and step from z to the next z."""
        if self.lam == 0:
            return mean["delta"], {"m": mean["delta"].clone()}
        m = self.lam * server["m"] + mean["delta"]
        return m - self.lam * server["m"] + self.lam * m, {"m": m}

    def evaluate_at(self, x: Vector, server: State) -> Vector:
        """Return the paper's x."""
        return x - self.lam * server["m"] if self.lam else x
