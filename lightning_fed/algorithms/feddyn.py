"""FedDyn: a dynamic regularizer per client aligns local optima with the joint one."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.arguments import check_number, check_one_of
from lightning_fed.core.rounds import Cohort, Run, Step, Update
from lightning_fed.core.types import State, Vector


class FedDyn(Algorithm):
    r"""Federated learning with dynamic regularization.

    Acar et al., *Federated Learning Based on Dynamic Regularization*, ICLR 2021 (https://arxiv.org/abs/2111.04263),
    Algorithm 1, in terms of :math:`d_i = -\nabla L_i(\theta_i) / \alpha` and :math:`d = -h / \alpha`.

    .. math::
        y_i &\leftarrow y_i - \eta_l \left( g_i(y_i) + \alpha_i (y_i - x + d_i) \right) \\
        d_i &\leftarrow d_i + (y_i - x), \qquad d \leftarrow d + \tfrac{1}{N} \sum_{i \in S} (y_i - x), \qquad
        x \leftarrow \tfrac{1}{|S|} \sum_{i \in S} y_i + d

    Note:
        Local steps replace the paper's exact local minimization. There is no weighted form: all clients have equal
        weight. The paper's :math:`\theta` is x. The formulas assume the server optimizer SGD(lr=1).

    Args:
        alpha: The coefficient :math:`\alpha > 0` of the regularizer.
        alpha_scaling: "none" is one :math:`\alpha` for all clients, as in the paper. "inverse_size" is
            :math:`\alpha_i = \alpha \bar n / n_i` with the mean number of examples :math:`\bar n` (the authors' code).
        evaluate: The model to validate and save: "theta", the server's x; or "mean", the mean of the last cohort's
            :math:`y_i`, that is x without d.

    Raises:
        FederatedError: If a hyper-parameter is out of range or unknown.

    Example:
        >>> FedDyn(alpha=0.01, evaluate="mean")
        FedDyn(alpha=0.01, alpha_scaling='none', evaluate='mean')
    """

    reduces: Mapping[str, str] = {"delta": "uniform", "drift": "population"}
    uses_path_gradient = False

    def __init__(
        self,
        alpha: float,
        alpha_scaling: Literal["none", "inverse_size"] = "none",
        evaluate: Literal["theta", "mean"] = "theta",
    ) -> None:
        self.alpha = check_number(self, "alpha", alpha, "(0, inf)")
        self.alpha_scaling = check_one_of(self, "alpha_scaling", alpha_scaling, ("none", "inverse_size"))
        self.evaluate = check_one_of(self, "evaluate", evaluate, ("theta", "mean"))
        self.uses_mean_examples = self.alpha_scaling == "inverse_size"

    def init_server(self, x: Vector) -> State:
        """Return the initial d = 0, and the mean to evaluate (at first x^0) if requested."""
        return {"d": torch.zeros_like(x), **({"mean": x.clone()} if self.evaluate == "mean" else {})}

    def init_client(self, x: Vector) -> State:
        """Return the initial d_i = 0."""
        return {"d_i": torch.zeros_like(x)}

    def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
        """Return g + alpha_i (y - x + d_i)."""
        scale = step.mean_examples / step.num_examples if self.alpha_scaling == "inverse_size" else 1.0
        pull: Tensor = self.alpha * scale * (y - step.x + step.client["d_i"])
        return g + pull.to(g.dtype)  # sizes [S, 1] may have a wider dtype

    def finish(self, y: Vector, run: Run) -> Update:
        """Send the model's change, for the mean and for d, and save the new d_i."""
        return Update(send={"delta": run.delta, "drift": run.delta}, keep={"d_i": run.client["d_i"] + run.delta})

    def update_server(self, x: Vector, server: State, mean: State, cohort: Cohort) -> tuple[Vector, State]:
        """Update d, and step to the cohort's mean plus d."""
        d = server["d"] + mean["drift"]
        return mean["delta"] + d, {"d": d, **({"mean": x + mean["delta"]} if self.evaluate == "mean" else {})}

    def evaluate_at(self, x: Vector, server: State) -> Vector:
        """Return x, or the mean of the last cohort's models."""
        return server["mean"] if self.evaluate == "mean" else x
