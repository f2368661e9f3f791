"""SCAFFOLD-M: control variates and the server's momentum in every local step."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm, path_gradient, update_with_path
from lightning_fed.core.arguments import check_number, check_one_of
from lightning_fed.core.rounds import Cohort, Run, Step, Update
from lightning_fed.core.types import State, Vector


class ScaffoldM(Algorithm):
    r"""Stochastic controlled averaging with client-level momentum.

    Cheng, Huang, Wu and Yuan, *Momentum Benefits Non-IID Federated Learning Simply and Provably*, ICLR 2024
    (https://arxiv.org/abs/2306.16504), Algorithm 2. Their FedAvg-M is :class:`lightning_fed.algorithms.FedCM` with
    :math:`\alpha = \beta`.

    .. math::
        y_i &\leftarrow y_i - \eta_l \left( \beta (g_i(y_i) - c_i + c) + (1 - \beta) g \right) \\
        c_i^+ &= \tfrac{1}{K_i} \sum_k g_i(y_{i,k}), \qquad
        g \leftarrow \tfrac{1}{|S|} \sum_{i \in S} \frac{x - y_i}{\eta_l K_i} \\
        x &\leftarrow x - \gamma g \;\text{(paper)} \quad\text{or}\quad
        x + \tfrac{\gamma}{|S|} \sum_{i \in S} (y_i - x) \;\text{(relative)}, \qquad
        c \leftarrow c + \tfrac{1}{N} \sum_{i \in S} (c_i^+ - c_i)

    Note:
        c, :math:`c_i` and g begin at zero. :math:`c_i^+` is the mean of the client's gradients, without correction.
        There is no weighted form: all clients have equal weight.

    Args:
        beta: The weight :math:`\beta` of the corrected gradient, in (0, 1]; 1 is SCAFFOLD with these :math:`c_i`.
        gamma: The server's step :math:`\gamma`, positive.
        gamma_mode: With "paper", :math:`\gamma` multiplies g. With "relative", it multiplies the mean change of the
            clients, so that 1 moves x to their mean.

    Raises:
        FederatedError: If a hyper-parameter is out of range or unknown.

    Example:
        >>> ScaffoldM(beta=0.2)
        ScaffoldM(beta=0.2, gamma=1.0, gamma_mode='relative')
    """

    reduces: Mapping[str, str] = {"delta": "uniform", "gradient": "uniform", "delta_c": "population"}
    aside = ("lr_sum",)

    def __init__(self, beta: float, gamma: float = 1.0, gamma_mode: Literal["relative", "paper"] = "relative") -> None:
        self.beta = check_number(self, "beta", beta, "(0, 1]")
        self.gamma = check_number(self, "gamma", gamma, "(0, inf)")
        self.gamma_mode = check_one_of(self, "gamma_mode", gamma_mode, ("relative", "paper"))

    def init_server(self, x: Vector) -> State:
        """Return the initial c = 0 and g = 0."""
        return {"c": torch.zeros_like(x), "g": torch.zeros_like(x)}

    def init_client(self, x: Vector) -> State:
        """Return the initial c_i = 0."""
        return {"c_i": torch.zeros_like(x)}

    def init_local(self, x: Vector, server: State, client: State) -> State:
        """Return the initial sum of gradients, zero."""
        return {"sum": torch.zeros_like(x)}

    def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
        """Return beta (g - c_i + c) + (1 - beta) times the momentum."""
        corrected = g - step.client["c_i"] + step.server["c"]
        return self.beta * corrected + (1 - self.beta) * step.server["g"]

    def advance(self, g: Tensor, y: Tensor, step: Step) -> State:
        """Add the client's gradient."""
        return {"sum": step.local["sum"] + g}

    def finish(self, y: Vector, run: Run) -> Update:
        """Send the model's change, its mean direction and the change of c_i, and save the new c_i."""
        new = run.local["sum"] / run.num_steps
        send = {"delta": run.delta, "gradient": run.path_gradient, "delta_c": new - run.client["c_i"]}
        return update_with_path(run, send, {"c_i": new}, of_path="gradient")

    def implied(self, send: State, server: State) -> State:
        """Return the mean direction along the path."""
        return {"gradient": path_gradient(send)}

    def update_server(self, x: Vector, server: State, mean: State, cohort: Cohort) -> tuple[Vector, State]:
        """Step by gamma, update g, and move c by |S|/N times the cohort's mean change of c_i."""
        if self.gamma_mode == "paper":
            direction = -self.gamma * mean["gradient"]
        else:
            direction = mean["delta"] if self.gamma == 1 else self.gamma * mean["delta"]
        return direction, {"c": server["c"] + mean["delta_c"], "g": mean["gradient"]}
