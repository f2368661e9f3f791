"""Ditto: every client also trains a personal model, regularized towards the averaged model."""

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.arguments import check_count, check_number, check_one_of
from lightning_fed.core.rounds import Run, Step, Update
from lightning_fed.core.types import State, Vector


class Ditto(Algorithm):
    r"""Federated averaging, and a regularized personal model per client.

    Li, Hu, Beirami and Smith, *Ditto: Fair and Robust Federated Learning Through Personalization*, ICML 2021
    (https://arxiv.org/abs/2012.04221), Algorithm 1.

    .. math::
        v_i \leftarrow v_i - \eta_v \left( g_i(v_i) + \lambda (v_i - x) \right), \qquad
        y_i \leftarrow y_i - \eta_l\, g_i(y_i), \quad y_i = x \text{ at first}, \qquad
        x \leftarrow \sum_i p_i y_i

    :math:`v_i` is the client's personal model. It begins at :math:`x^0`, continues from the client's last round, and is
    never sent.

    Args:
        lam: :math:`\lambda`, not negative: 0 trains each :math:`v_i` alone, large values pull it to x.
        personal_rate: :math:`\eta_v / \eta_l`, positive: the factor of the directions of :math:`v_i`. Values other
            than 1 need ``torch.optim.SGD`` as the local optimizer, and no clipping of corrected gradients.
        personal_epochs: The passes over a client's data that train :math:`v_i`; by default, :math:`v_i` takes as many
            steps as :math:`y_i`.
        batches: The batches of :math:`v_i`: the "same" as for :math:`y_i`, as in the authors' code, or its "own".

    Raises:
        FederatedError: If an argument is out of range.

    Example:
        >>> Ditto(lam=0.5)
        Ditto(lam=0.5, personal_rate=1.0, personal_epochs=None, batches='same')
    """

    init_client_at_start = True

    def __init__(
        self,
        lam: float,
        personal_rate: float = 1.0,
        personal_epochs: int | None = None,
        batches: Literal["same", "own"] = "same",
    ) -> None:
        self.lam = check_number(self, "lam", lam, "[0, inf)")
        self.personal_rate = check_number(self, "personal_rate", personal_rate, "(0, inf)")
        self.personal_epochs = personal_epochs
        if personal_epochs is not None:
            check_count(self, "personal_epochs", personal_epochs)
        self.batches = check_one_of(self, "batches", batches, ("same", "own"))
        self.own_solve = _OwnModel(self)

    def init_client(self, x: Vector) -> State:
        """Return the initial v_i = x^0."""
        return {"v": x.clone()}

    def evaluate_client_at(self, x: Vector, server: State, client: State) -> Vector:
        """Return v_i."""
        return client["v"]


class _OwnModel(Algorithm):
    """The inner solve that trains v_i."""

    reduces: Mapping[str, str] = {}
    uses_path_gradient = False

    def __init__(self, ditto: Ditto) -> None:
        self.ditto = ditto  # a reference, since hooks may change its options
        self.own_epochs, self.own_batches = ditto.personal_epochs, ditto.batches == "own"

    def start(self, x: Vector, step: Step) -> Vector:
        """Return v_i."""
        return step.client["v"]

    def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
        """Return the gradient of F_i plus the pull to x, both at v_i."""
        return self.ditto.personal_rate * (g + self.ditto.lam * (y - step.x))

    def finish(self, y: Vector, run: Run) -> Update:
        """Save v_i, and send nothing."""
        return Update({}, {"v": y.clone()})
