"""FedNova: normalized averaging when clients take unequal numbers of steps."""

from collections.abc import Mapping

import torch

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.rounds import Cohort, Run, Update
from lightning_fed.core.types import State, Vector

__all__ = ["FedNova"]


class FedNova(Algorithm):
    r"""Federated normalized averaging.

    Wang et al., *Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization*, NeurIPS 2020
    (https://arxiv.org/abs/2007.07481), for a plain SGD client, whose accumulation vector :math:`a_i` is the rates of
    its :math:`K_i` steps.

    .. math::
        d_i = \frac{x - y_i}{\sum_k \eta_{i,k}}, \qquad
        x \leftarrow x - \tau_{\text{eff}} \sum_i p_i d_i, \qquad
        \tau_{\text{eff}} = \sum_i p_i \sum_k \eta_{i,k}

    At a constant rate :math:`\eta` this is the paper's :math:`x - \bar\tau\, \eta \sum_i p_i d_i` with
    :math:`\bar\tau = \sum_i p_i K_i`. A client that steps more often no longer pulls the model towards its own optimum;
    where all take as many steps, it is FedAvg.

    Note:
        With another local solver than SGD, :math:`d_i` is the mean gradient along the client's path, weighted by the
        rates: solver momentum and preconditioning act locally but are not sent.

    Example:
        >>> FedNova()
        FedNova()
    """

    reduces: Mapping[str, str] = {"gradient": "weighting", "lr_sum": "weighting"}
    uncompressed = ("lr_sum",)  # [P] where parameter groups differ: an entry left out would be a step of zero

    def finish(self, y: Vector, run: Run) -> Update:
        """Send d_i and the sum of the rates."""
        lr_sum = torch.as_tensor(run.lr_sum, dtype=y.dtype, device=y.device)
        return Update(send={"gradient": run.path_gradient, "lr_sum": lr_sum})

    def update_server(self, x: Vector, server: State, mean: State, cohort: Cohort) -> tuple[Vector, State]:
        """Step by the mean sum of rates along the mean of the normalized gradients."""
        return -mean["lr_sum"] * mean["gradient"], server
