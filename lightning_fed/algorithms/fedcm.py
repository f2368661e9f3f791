"""FedCM: every local step mixes in the server's momentum."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm, path_gradient, update_with_path
from lightning_fed.core.arguments import check_number, check_one_of
from lightning_fed.core.rounds import Cohort, Run, Step, Update
from lightning_fed.core.types import State, Vector


class FedCM(Algorithm):
    r"""Federated averaging with client-level momentum.

    Xu et al., *FedCM: Federated Learning with Client-level Momentum*, 2021 (https://arxiv.org/abs/2106.10874),
    Algorithm 2.

    .. math::
        y_i &\leftarrow y_i - \eta_l \left( \alpha\, g_i(y_i) + (1 - \alpha) \Delta \right) \\
        \Delta &\leftarrow \sum_i p_i \frac{x - y_i}{\eta_l K_i}, \qquad
        x \leftarrow x - \eta_g \Delta \;\text{(paper)} \quad\text{or}\quad
        x + \eta_g \sum_i p_i (y_i - x) \;\text{(relative)}

    Note:
        The initial :math:`\Delta` is zero. A client divides by the sum of the rates of its steps, :math:`\eta_l K_i` at
        a constant rate. With plain SGD the server divides instead, and a client sends one vector and that sum. Weight
        decay is part of g, so :math:`\alpha` scales it. All clients have equal weight by default.

    Args:
        alpha: The weight :math:`\alpha` of the client's own gradient, in (0, 1]; 1 is FedAvg.
        eta_g: The server's step :math:`\eta_g`, positive.
        eta_g_mode: With "paper", :math:`\eta_g` multiplies :math:`\Delta`. With "relative", it multiplies the mean
            change of the clients, so that 1 moves x to their mean (this scales :math:`\eta_g` by :math:`\eta_l K`, as
            in the paper's experiments).

    Raises:
        FederatedError: If a hyper-parameter is out of range or unknown.

    Example:
        >>> FedCM(alpha=0.1)
        FedCM(alpha=0.1, eta_g=1.0, eta_g_mode='relative')
    """

    reduces: Mapping[str, str] = {"delta": "weighting", "gradient": "weighting"}
    aside = ("lr_sum",)
    default_weighting = "uniform"

    def __init__(self, alpha: float, eta_g: float = 1.0, eta_g_mode: Literal["relative", "paper"] = "relative") -> None:
        self.alpha = check_number(self, "alpha", alpha, "(0, 1]")
        self.eta_g = check_number(self, "eta_g", eta_g, "(0, inf)")
        self.eta_g_mode = check_one_of(self, "eta_g_mode", eta_g_mode, ("relative", "paper"))

    def init_server(self, x: Vector) -> State:
        """Return the initial Delta = 0."""
        return {"delta": torch.zeros_like(x)}

    def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
        """Return alpha g + (1 - alpha) Delta."""
        return self.alpha * g + (1 - self.alpha) * step.server["delta"]

    def finish(self, y: Vector, run: Run) -> Update:
        """Send the model's change, and the mean direction along its path or its divisor."""
        return update_with_path(run, {"delta": run.delta, "gradient": run.path_gradient}, {}, of_path="gradient")

    def implied(self, send: State, server: State) -> State:
        """Return the mean direction along the path."""
        return {"gradient": path_gradient(send)}

    def update_server(self, x: Vector, server: State, mean: State, cohort: Cohort) -> tuple[Vector, State]:
        """Step by eta_g, and update Delta."""
        if self.eta_g_mode == "paper":
            direction = -self.eta_g * mean["gradient"]
        else:  # skip scaling if eta_g = 1: x then becomes the clients' mean without rounding
            direction = mean["delta"] if self.eta_g == 1 else self.eta_g * mean["delta"]
        return direction, {"delta": mean["gradient"]}
