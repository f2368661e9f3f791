"""FedSpeed: a proximal term with a dual correction, and a second gradient at an ascent point."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.algorithms.fedsam import unit
from lightning_fed.core.arguments import check_number, check_one_of
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import Cohort, Run, Step, Update
from lightning_fed.core.types import State, Vector


class FedSpeed(Algorithm):
    r"""Federated learning with a prox-correction and a second gradient at an ascent point.

    Sun, Shen, Huang, Ding and Tao, *FedSpeed: Larger Local Interval, Less Communication Round, and Higher
    Generalization Accuracy*, ICLR 2023 (https://arxiv.org/abs/2302.10429), Algorithm 1, in terms of
    :math:`d_i = -\lambda \hat g_i`.

    .. math::
        \tilde g_i &= (1 - \alpha)\, g_i(y_i) + \alpha\, g_i(y_i + \rho\, g_i(y_i)), \qquad
        y_i \leftarrow y_i - \eta_l \left( \tilde g_i + \tfrac{1}{\lambda} (y_i - x + d_i) \right) \\
        d_i &\leftarrow d_i + (y_i - x), \qquad
        x \leftarrow \tfrac{1}{|S|} \sum_{i \in S} y_i + \tfrac{1}{|S|} \sum_{i \in S} d_i

    Note:
        There is no weighted form: all clients have equal weight. The formulas assume the server optimizer SGD(lr=1).
        :math:`d_i` begins at zero. Without perturbation and with ``dual_average="all"``, this is FedDyn with
        :math:`\alpha = 1 / \lambda`.

    Args:
        lam: The inverse :math:`\lambda` of the pull's coefficient, positive.
        rho: The length :math:`\rho` of the ascent step to the second gradient's point, not negative.
        alpha: The weight :math:`\alpha` of the second gradient, in [0, 1].
        perturb: The ascent direction: "plain" is the gradient, as in the paper. "unit" is the gradient divided by its
            norm over all parameters plus ``eps``, as in the authors' code.
        eps: A constant added to the norm, not negative; with ``perturb="unit"`` only.
        dual_average: The clients whose :math:`d_i` are averaged: the "cohort", as in the paper, or "all" N clients, as
            in the authors' code.

    Raises:
        FederatedError: If a hyper-parameter is out of range or unknown, or has no effect.

    Example:
        >>> FedSpeed(lam=10.0, rho=0.1)
        FedSpeed(lam=10.0, rho=0.1, alpha=1.0, perturb='plain', eps=0.0, dual_average='cohort')
    """

    reduces: Mapping[str, str] = {"delta": "uniform"}
    uses_path_gradient = False

    def __init__(
        self,
        lam: float,
        rho: float,
        alpha: float = 1.0,
        perturb: Literal["plain", "unit"] = "plain",
        eps: float = 0.0,
        dual_average: Literal["cohort", "all"] = "cohort",
    ) -> None:
        self.lam = check_number(self, "lam", lam, "(0, inf)")
        self.rho = check_number(self, "rho", rho, "[0, inf)")
        self.alpha = check_number(self, "alpha", alpha, "[0, 1]")
        self.perturb = check_one_of(self, "perturb", perturb, ("plain", "unit"))
        self.eps = check_number(self, "eps", eps, "[0, inf)")
        self.dual_average = check_one_of(self, "dual_average", dual_average, ("cohort", "all"))
        if self.perturb == "plain" and self.eps:
            raise FederatedError(f"FedSpeed: eps={eps!r} has no effect with perturb='plain'. Set perturb='unit'.")
        if self.dual_average == "all":
            self.reduces = {"delta": "uniform", "drift": "population"}

    def init_server(self, x: Vector) -> State:
        """Return the initial d = 0, the mean over all clients, if it is used."""
        return {"d": torch.zeros_like(x)} if self.dual_average == "all" else {}

    def init_client(self, x: Vector) -> State:
        """Return the initial d_i = 0."""
        return {"d_i": torch.zeros_like(x)}

    def second_gradient_at(self, g: Vector, y: Vector, step: Step) -> Vector:
        """Return the ascent point."""
        return y + self.rho * (g if self.perturb == "plain" else unit(g, self.eps))

    def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
        """Return the mix of both gradients, plus the pull to x - d_i."""
        pull = (y - step.x + step.client["d_i"]) / self.lam
        mixed: Tensor = (1 - self.alpha) * g + self.alpha * step.anchor_grad
        return mixed + pull

    def finish(self, y: Vector, run: Run) -> Update:
        """Send the model's change plus the new d_i, or the change once for each mean."""
        d_i = run.client["d_i"] + run.delta
        if self.dual_average == "cohort":
            return Update({"delta": run.delta + d_i}, {"d_i": d_i})
        return Update({"delta": run.delta, "drift": run.delta}, {"d_i": d_i})

    def update_server(self, x: Vector, server: State, mean: State, cohort: Cohort) -> tuple[Vector, State]:
        """Step to the cohort's mean plus the mean d_i."""
        if self.dual_average == "cohort":
            return mean["delta"], server
        d = server["d"] + mean["drift"]
        return mean["delta"] + d, {"d": d}
