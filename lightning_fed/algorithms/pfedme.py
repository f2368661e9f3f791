"""pFedMe: clients approximate a personal model on every batch, and send the point that it pulls."""

import torch
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.arguments import check_count, check_number
from lightning_fed.core.rounds import Run, Step, Update
from lightning_fed.core.types import State, Vector


class PFedMe(Algorithm):
    r"""Personalized federated learning with Moreau envelopes.

    Dinh, Tran and Nguyen, *Personalized Federated Learning with Moreau Envelopes*, NeurIPS 2020
    (https://arxiv.org/abs/2006.08848), Algorithm 1. On every batch B, several times and then once:

    .. math::
        \theta_i \leftarrow \theta_i - \eta_\theta \left( g_i(\theta_i; B) + \lambda (\theta_i - w_i) \right), \qquad
        w_i \leftarrow w_i - \eta_l \lambda (w_i - \theta_i), \qquad
        x \leftarrow \sum_i p_i w_i

    Both begin at x. The local optimizer trains :math:`\theta_i`, which continues from batch to batch. It is the
    client's personal model after its last round, and :math:`x^0` before its first. The paper's
    :math:`(1 - \beta) x + \beta \sum_i p_i w_i` is the server optimizer SGD(lr=beta). Default weights are equal.

    Args:
        lam: :math:`\lambda`, positive; :math:`\eta_l \lambda` must stay below 1. The paper uses 15, and rates near
            0.01.
        inner_steps: The steps of :math:`\theta_i` on every batch; ``local_steps`` counts each of them.
        personal_rate: :math:`\eta_\theta / \eta_l`, positive: the factor of the directions of :math:`\theta_i`.
            Values other than 1 need ``torch.optim.SGD`` as the local optimizer, and no clipping of corrected gradients.

    Raises:
        FederatedError: If an argument is out of range.

    Example:
        >>> PFedMe(lam=15.0)
        PFedMe(lam=15.0, inner_steps=5, personal_rate=1.0)
    """

    default_weighting = "uniform"
    init_client_at_start = True
    uses_path_gradient = False

    def __init__(self, lam: float, inner_steps: int = 5, personal_rate: float = 1.0) -> None:
        self.lam = check_number(self, "lam", lam, "(0, inf)")
        self.inner_steps = check_count(self, "inner_steps", inner_steps, least=1)
        self.personal_rate = check_number(self, "personal_rate", personal_rate, "(0, inf)")
        self.steps_per_batch = self.inner_steps

    def init_client(self, x: Vector) -> State:
        """Return theta_i = x^0, the personal model before the client's first round."""
        return {"theta": x.clone()}

    def init_local(self, x: Vector, server: State, client: State) -> State:
        """Return the initial w_i = x, a step count of zero, and a previous rate of zero."""
        return {"w": x, "k": torch.zeros((), dtype=x.dtype, device=x.device), "lr": torch.zeros_like(x)}

    def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
        """Return the gradient of F_i plus the pull to w_i, both at theta_i."""
        return self.personal_rate * (g + self.lam * (y - self._w(y, step)))

    def advance(self, g: Tensor, y: Tensor, step: Step) -> State:
        """Update w_i, count the step, and keep its rate: a schedule by local step may change it before the next."""
        return {"w": self._w(y, step), "k": step.local["k"] + 1, "lr": torch.zeros_like(y) + step.lr}

    def finish(self, y: Vector, run: Run) -> Update:
        """Send the change of w_i, and save theta_i."""
        return Update({"delta": self._pulled(run.local["w"], y, run.local["lr"]) - run.x}, {"theta": y.clone()})

    def evaluate_client_at(self, x: Vector, server: State, client: State) -> Vector:
        """Return theta_i."""
        return client["theta"]

    def _w(self, theta: Tensor, step: Step) -> Tensor:
        """Return w_i, which moves towards the last batch's theta_i when a new batch begins."""
        k, w = step.local["k"], step.local["w"]
        begins = (k > 0) & (k % self.inner_steps == 0)
        return torch.where(begins, self._pulled(w, theta, step.local["lr"]), w)

    def _pulled(self, w: Tensor, theta: Tensor, lr: Tensor) -> Tensor:
        return w - lr * self.lam * (w - theta)
