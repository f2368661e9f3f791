"""FedBN: batch normalization stays on each client."""

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.errors import FederatedError


class FedBN(Algorithm):
    r"""Federated averaging of all layers except batch normalization.

    Li, Jiang, Zhang, Kamp and Dou, *FedBN: Federated Learning on Non-IID Features via Local Batch Normalization*, ICLR
    2021 (https://arxiv.org/abs/2102.07623), Algorithm 1.

    .. math::
        (u_i, b_i) \leftarrow (u_i, b_i) - \eta_l\, g_i(u_i, b_i), \quad u_i = x \text{ at first}, \qquad
        x \leftarrow \sum_i p_i u_i

    :math:`b_i` are the scales, shifts and running statistics of the module's BatchNorm layers, which are neither sent
    nor averaged. The server model keeps those of :math:`x^0`, so evaluate the clients' personal models. :math:`p_i` are
    the shares of examples; the authors average uniformly, as with ``FederatedTrainer(weighting="uniform")``.

    Raises:
        FederatedError: When the fit starts, if the module has no BatchNorm layer.

    Example:
        >>> FedBN()
        FedBN()
    """

    def personal_names(self, module: nn.Module) -> Sequence[str]:
        """Return the names of all parameters and buffers of BatchNorm layers."""
        found = []
        for name, layer in module.named_modules():
            if isinstance(layer, _NormBase):
                trained = (own for own, p in layer.named_parameters(recurse=False) if p.requires_grad)
                buffers = (own for own, _ in layer.named_buffers(recurse=False))
                found += [f"{name}.{own}" for own in (*trained, *buffers)]
        if not found:
            raise FederatedError(
                f"FedBN keeps BatchNorm layers with the clients, and {type(module).__name__} has none. Use FedAvg, or"
                " FedPer for other layers."
            )
        return found
