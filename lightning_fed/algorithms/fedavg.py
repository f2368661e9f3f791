"""FedAvg: local steps, then the average."""

from typing import Literal

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.arguments import check_one_of
from lightning_fed.core.rounds import Run, Update
from lightning_fed.core.types import Vector


class FedAvg(Algorithm):
    r"""Federated averaging.

    McMahan et al., *Communication-Efficient Learning of Deep Networks from Decentralized Data*, AISTATS 2017
    (https://arxiv.org/abs/1602.05629), Algorithm 1. With any server optimizer other than SGD(lr=1), it is FedOpt: Reddi
    et al., *Adaptive Federated Optimization*, ICLR 2021 (https://arxiv.org/abs/2003.00295), Algorithm 1.

    .. math::
        y_i \leftarrow y_i - \eta_l\, g_i(y_i), \qquad
        x \leftarrow x - \eta_g\, U(\Delta), \qquad
        \Delta = \sum_i p_i (x - y_i)

    By default, :math:`p_i` is proportional to the client's number of examples :math:`n_i` (see ``weighting``).

    Args:
        pseudo_grad: The client's part of :math:`\Delta`, the server optimizer's gradient. "raw" is :math:`x - y_i`.
            "normalized" is :math:`(x - y_i) / (\eta_l K_i)`, the mean gradient along the client's path, whose scale
            does not depend on the local rate and the number of local steps (so SGD(lr=1) is rarely a good server
            optimizer for it).

    Raises:
        FederatedError: If ``pseudo_grad`` is unknown.

    Example:
        >>> FedAvg()
        FedAvg(pseudo_grad='raw')
    """

    def __init__(self, pseudo_grad: Literal["raw", "normalized"] = "raw") -> None:
        self.pseudo_grad = check_one_of(self, "pseudo_grad", pseudo_grad, ("raw", "normalized"))
        self.uses_path_gradient = pseudo_grad == "normalized"

    def finish(self, y: Vector, run: Run) -> Update:
        """Send the model's change, or minus the mean gradient along its path."""
        return Update(send={"delta": run.delta if self.pseudo_grad == "raw" else -run.path_gradient})
