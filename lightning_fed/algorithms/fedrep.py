"""FedRep: every client first trains its head on the shared representation, then the representation."""

from collections.abc import Sequence

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.algorithms.fedper import FedPer
from lightning_fed.core.arguments import check_count
from lightning_fed.core.rounds import Run, Update
from lightning_fed.core.types import Vector


class FedRep(FedPer):
    r"""Federated averaging of a representation, after clients train their heads.

    Collins, Hassani, Mokhtari and Shakkottai, *Exploiting Shared Representations for Personalized Federated Learning*,
    ICML 2021 (https://arxiv.org/abs/2102.07078), Algorithm 1.

    .. math::
        h_i \leftarrow h_i - \eta_l\, \nabla_h F_i(x, h_i; B) \quad\text{(head steps)}, \qquad
        u_i \leftarrow u_i - \eta_l\, \nabla_u F_i(u_i, h_i; B), \quad u_i = x \text{ at first}, \qquad
        x \leftarrow \sum_i p_i u_i

    ``local_epochs`` or ``local_steps`` count the steps of the representation. The local optimizer is reset between the
    head and the representation. All clients have equal weight by default.

    Args:
        personal: Names, or patterns of names, of the parameters and buffers of the head: ``["head.*"]``.
        head_epochs: The passes over a client's data that train the head; 10 in the paper's experiments.

    Raises:
        FederatedError: Like :class:`FedPer`, or if the number of epochs is not positive.

    Example:
        >>> FedRep(["head.*"], head_epochs=2)
        FedRep(personal=['head.*'], head_epochs=2)
    """

    default_weighting = "uniform"
    trains = "shared"

    def __init__(self, personal: Sequence[str], head_epochs: int = 10) -> None:
        super().__init__(personal)
        self.head_epochs = check_count(self, "head_epochs", head_epochs, least=1)
        self.own_solve = _Head(self.head_epochs)


class _Head(Algorithm):
    """The inner solve that trains the head. It sends nothing, since personal parameters are always saved."""

    trains = "personal"
    own_batches = True

    def __init__(self, epochs: int) -> None:
        self.own_epochs = epochs

    def finish(self, y: Vector, run: Run) -> Update:
        """Send nothing."""
        return Update({})
