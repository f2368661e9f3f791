"""FedExP: the server extrapolates along the clients' mean, further if they disagree more."""

from collections.abc import Mapping
from typing import Literal

import torch

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.arguments import check_number, check_one_of
from lightning_fed.core.rounds import Cohort, Run, Update
from lightning_fed.core.types import State, Vector


class FedExP(Algorithm):
    r"""Federated averaging with an adaptive server step.

    Jhunjhunwala, Wang and Joshi, *FedExP: Speeding Up Federated Averaging via Extrapolation*, ICLR 2023
    (https://arxiv.org/abs/2301.09604), Algorithm 1.

    .. math::
        \Delta_i = x - y_i, \qquad \bar\Delta = \sum_i p_i \Delta_i, \qquad
        \eta_g = \max\left(1, \frac{\sum_i p_i \lVert \Delta_i \rVert^2}
        {2 (\lVert \bar\Delta \rVert^2 + \epsilon)}\right), \qquad x \leftarrow x - \eta_g \bar\Delta

    Note:
        Norms are over all parameters. Since the iterates oscillate, the mean of the last two is validated and saved, as
        in the paper's experiments; training continues from x. The formulas assume the server optimizer SGD(lr=1). All
        clients have equal weight by default.

    Args:
        eps: :math:`\epsilon`, positive.
        eps_scaling: "paper" is :math:`\epsilon`, "cohort" is :math:`\lvert S \rvert \epsilon`, as in the authors' code.
        eps_decay: The factor of :math:`\epsilon` after every round, in (0, 1]; in the authors' code, the square of the
            rates' decay.

    Raises:
        FederatedError: If a hyper-parameter is out of range or unknown.

    Example:
        >>> FedExP(eps=0.001)
        FedExP(eps=0.001, eps_scaling='paper', eps_decay=1.0)
    """

    reduces: Mapping[str, str] = {"delta": "weighting", "square": "weighting"}
    scales_with_means = False  # it divides one mean by the square of the other
    uncompressed = ("square",)
    default_weighting = "uniform"
    uses_path_gradient = False

    def __init__(
        self, eps: float = 0.001, eps_scaling: Literal["paper", "cohort"] = "paper", eps_decay: float = 1.0
    ) -> None:
        self.eps = check_number(self, "eps", eps, "(0, inf)")
        self.eps_scaling = check_one_of(self, "eps_scaling", eps_scaling, ("paper", "cohort"))
        self.eps_decay = check_number(self, "eps_decay", eps_decay, "(0, 1]")

    def init_server(self, x: Vector) -> State:
        """Return x^0 as the other iterate of the average, the weight of x (1 at first), and eta_g = 1."""
        return {"previous": x.clone(), "shown": x.new_ones(1), "eta_g": x.new_ones(1)}

    def finish(self, y: Vector, run: Run) -> Update:
        """Send the model's change, and its squared norm."""
        return Update({"delta": run.delta, "square": run.delta.square().sum(-1, keepdim=True)})

    def update_server(self, x: Vector, server: State, mean: State, cohort: Cohort) -> tuple[Vector, State]:
        """Step by eta_g along the mean change; the first iterate is evaluated alone."""
        eps = self.eps * self.eps_decay**cohort.round * (cohort.size if self.eps_scaling == "cohort" else 1)
        eta_g = (mean["square"] / (2 * (mean["delta"].square().sum() + eps))).clamp(min=1.0)
        # skip scaling if eta_g = 1: x then becomes the clients' mean without rounding
        direction = mean["delta"] if float(eta_g) == 1 else eta_g * mean["delta"]
        share = torch.ones_like(eta_g) if cohort.round == 0 else torch.full_like(eta_g, 0.5)
        return direction, {"previous": x, "shown": share, "eta_g": eta_g}

    def evaluate_at(self, x: Vector, server: State) -> Vector:
        """Return the mean of the last two iterates."""
        return server["shown"] * x + (1 - server["shown"]) * server["previous"]
