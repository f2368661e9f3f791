"""FedNova: normalized averaging for clients with unequal numbers of steps."""

from collections.abc import Mapping

from lightning_fed.algorithms.base import Algorithm, lr_sum
from lightning_fed.core.rounds import Cohort, Run, Update
from lightning_fed.core.types import State, Vector


class FedNova(Algorithm):
    r"""Federated normalized averaging.

    Wang et al., *Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization*, NeurIPS 2020
    (https://arxiv.org/abs/2007.07481), for plain SGD clients. Their accumulation vector :math:`a_i` holds the rates
    of their :math:`K_i` steps.

    .. math::
        d_i = \frac{x - y_i}{\sum_k \eta_{i,k}}, \qquad
        x \leftarrow x - \tau_{\text{eff}} \sum_i p_i d_i, \qquad
        \tau_{\text{eff}} = \sum_i p_i \sum_k \eta_{i,k}

    At a constant rate :math:`\eta` this is the paper's :math:`x - \bar\tau\, \eta \sum_i p_i d_i` with
    :math:`\bar\tau = \sum_i p_i K_i`. A client with more steps no longer pulls the model towards its optimum. If all
    clients take the same number of steps, this is FedAvg.

    Note:
        With any local optimizer other than SGD, :math:`d_i` is the mean gradient along the client's path, weighted by
        the rates: its momentum and preconditioning act locally but are not sent.

    Example:
        >>> FedNova()
        FedNova()
    """

    reduces: Mapping[str, str] = {"gradient": "weighting", "lr_sum": "weighting"}
    scales_with_means = False  # it multiplies two means
    uncompressed = ("lr_sum",)  # [P] if parameter groups differ: an omitted entry would be a zero step

    def finish(self, y: Vector, run: Run) -> Update:
        """Send d_i and the sum of the rates."""
        return Update(send={"gradient": run.path_gradient, "lr_sum": lr_sum(run)})

    def update_server(self, x: Vector, server: State, mean: State, cohort: Cohort) -> tuple[Vector, State]:
        """Step by the mean sum of rates along the mean normalized gradient."""
        return -mean["lr_sum"] * mean["gradient"], server
