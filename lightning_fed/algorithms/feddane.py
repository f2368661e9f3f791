"""FedDANE: a gradient phase, then proximal local steps corrected by it."""

from typing import Literal

from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.arguments import check_number, check_one_of
from lightning_fed.core.rounds import Step


class FedDane(Algorithm):
    r"""FedDANE, a federated Newton-type method.

    Li et al., *FedDANE: A Federated Newton-Type Method*, Asilomar 2019 (https://arxiv.org/abs/2001.01920); also
    compared in Appendix B of FedProx (https://arxiv.org/abs/1812.06127).

    .. math::
        g = \sum_{k \in S'} p_k \nabla F_k(x), \qquad
        y_i \leftarrow y_i - \eta_l \left( g_i(y_i) + g - \nabla F_i(x) + \mu (y_i - x) \right), \qquad
        x \leftarrow \sum_{i \in S} p_i y_i

    Note:
        The first phase uses full-batch gradients of all trainable parameters. A training client outside the gradient
        cohort also computes its :math:`\nabla F_i(x)`.

    Args:
        mu: The proximal coefficient :math:`\mu \ge 0`.
        grad_cohort: "own" draws a second cohort S' for the gradient phase, as in the paper; "same" uses the training
            cohort, which saves a communication.

    Raises:
        FederatedError: If a hyper-parameter is out of range or unknown.

    Example:
        >>> FedDane(mu=0.1).grad_cohort
        'own'
    """

    full_grad_at = ("x",)

    def __init__(self, mu: float, grad_cohort: Literal["own", "same"] = "own") -> None:
        self.mu = check_number(self, "mu", mu, "[0, inf)")
        self.grad_cohort = check_one_of(self, "grad_cohort", grad_cohort, ("own", "same"))

    def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
        """Return g with the client's gradient at x replaced by the cohort's, plus the proximal term."""
        return g + step.cohort_grad["x"] - step.full_grad["x"] + self.mu * (y - step.x)
