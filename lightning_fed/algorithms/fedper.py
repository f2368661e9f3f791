"""FedPer and LG-FedAvg: a part of the model is averaged, the rest stays on each client."""

from collections.abc import Sequence

from torch import nn

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.arguments import check_patterns


class FedPer(Algorithm):
    r"""Federated averaging of the base layers; the last layers are personal.

    Arivazhagan, Aggarwal, Singh and Choudhary, *Federated Learning with Personalization Layers*, 2019
    (https://arxiv.org/abs/1912.00818), Algorithms 1 and 2.

    .. math::
        (u_i, h_i) \leftarrow (u_i, h_i) - \eta_l\, g_i(u_i, h_i), \quad u_i = x \text{ at first}, \qquad
        x \leftarrow \sum_i p_i u_i

    Both parts are trained together; a client's :math:`h_i` continues from its last round. This is FedAvg with the
    trainer's argument ``personal``, which works with any method.

    Args:
        personal: Names, or patterns of names, of the parameters and buffers that stay on the client: ``["head.*"]``.

    Raises:
        FederatedError: If it is not a list of strings; when the fit starts, if a pattern matches nothing in the module.

    Example:
        >>> FedPer(["head.*"])
        FedPer(personal=['head.*'])
    """

    def __init__(self, personal: Sequence[str]) -> None:
        self.personal = list(check_patterns(self, personal, least=1))

    def personal_names(self, module: nn.Module) -> Sequence[str]:
        """Return the given patterns."""
        return self.personal


class LGFedAvg(FedPer):
    r"""Federated averaging of the last layers; the layers of the representation are personal.

    Liang, Liu, Ziyin, Salakhutdinov and Morency, *Think Locally, Act Globally: Federated Learning with Local and Global
    Representations*, 2020 (https://arxiv.org/abs/2001.01523), Algorithm 1. It is :class:`FedPer` with the
    representation as the ``personal`` part. Implement the paper's extra losses for representations (unsupervised,
    adversarial) in ``training_step``.

    Args:
        personal: Names, or patterns of names, of the parameters and buffers that stay on the client: ``["body.*"]``.

    Raises:
        FederatedError: Like :class:`FedPer`.

    Example:
        >>> LGFedAvg(["body.*"])
        LGFedAvg(personal=['body.*'])
    """
