"""APFL: every client mixes the averaged model with its personal model."""

from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.arguments import check_number
from lightning_fed.core.rounds import Run, Step, Update
from lightning_fed.core.types import State, Vector


class APFL(Algorithm):
    r"""Adaptive personalized federated learning, with a fixed mixing weight.

    Deng, Kamani and Mahdavi, *Adaptive Personalized Federated Learning*, 2020 (https://arxiv.org/abs/2003.13461),
    Algorithm 1.

    .. math::
        v_i \leftarrow v_i - \eta_l \alpha\, g_i(\alpha v_i + (1 - \alpha) y_i), \qquad
        y_i \leftarrow y_i - \eta_l\, g_i(y_i), \quad y_i = x \text{ at first}, \qquad
        x \leftarrow \sum_i p_i y_i

    Both gradients use the same batch, before either model moves. :math:`v_i` begins at :math:`x^0`, is never sent, and
    takes plain gradient steps at the local rate, with any local optimizer. A client's personal model is
    :math:`\alpha v_i + (1 - \alpha) x`. All clients have equal weight by default.

    Args:
        alpha: :math:`\alpha` in [0, 1], the same for all clients and rounds; 0 is FedAvg. The paper's rule that adapts
            it per client is not implemented.

    Raises:
        FederatedError: If ``alpha`` is out of range.

    Example:
        >>> APFL(alpha=0.75)
        APFL(alpha=0.75)
    """

    default_weighting = "uniform"
    init_client_at_start = True
    uses_path_gradient = False

    def __init__(self, alpha: float) -> None:
        self.alpha = check_number(self, "alpha", alpha, "[0, 1]")

    def init_client(self, x: Vector) -> State:
        """Return the initial v_i = x^0."""
        return {"v": x.clone()}

    def init_local(self, x: Vector, server: State, client: State) -> State:
        """Return v_i, which is trained along with y_i."""
        return {"v": client["v"]}

    def second_gradient_at(self, g: Vector, y: Vector, step: Step) -> Vector:
        """Return the mixed model."""
        return self._mixed(step.local["v"], y)

    def advance(self, g: Tensor, y: Tensor, step: Step) -> State:
        """Return v_i after its step."""
        return {"v": step.local["v"] - step.lr * self.alpha * step.anchor_grad}

    def finish(self, y: Vector, run: Run) -> Update:
        """Send the change of y_i, and save v_i."""
        return Update({"delta": run.delta}, {"v": run.local["v"].clone()})

    def evaluate_client_at(self, x: Vector, server: State, client: State) -> Vector:
        """Return the mixed model."""
        return self._mixed(client["v"], x)

    def _mixed(self, v: Tensor, y: Tensor) -> Tensor:
        return self.alpha * v + (1 - self.alpha) * y
