"""ServerOnly: no local work; the server optimizer runs on the cohort's gradient."""

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.rounds import Run, Update
from lightning_fed.core.types import Vector


class ServerOnly(Algorithm):
    r"""A centralized optimizer with one step per round, on the clients' mean full-batch gradient.

    The baseline "server-only" of Karimireddy et al., *Mime: Mimicking Centralized Stochastic Algorithms in Federated
    Learning*, 2020 (https://arxiv.org/abs/2008.03606), Section 6. With SGD it is FedSGD of McMahan et al., AISTATS 2017
    (https://arxiv.org/abs/1602.05629).

    .. math::
        g = \sum_i p_i \nabla F_i(x), \qquad x \leftarrow x - \eta\, U(g, s), \qquad s \leftarrow V(g, s)

    Clients take no local steps, so ``local_epochs`` and ``local_steps`` stay unset. The optimizer of
    ``configure_optimizers`` is not used: :math:`\eta` and U are the server optimizer's.

    Example:
        >>> ServerOnly()
        ServerOnly()
    """

    local_work = False
    full_grad_at = ("x",)
    full_grad_for = "client"

    def finish(self, y: Vector, run: Run) -> Update:
        """Send minus the full-batch gradient at x."""
        return Update(send={"delta": -run.full_grad["x"]})
