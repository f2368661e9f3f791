"""FedBuff: a step for every M answers."""

from lightning_fed.core.arguments import check_number
from lightning_fed.core.types import Vector
from lightning_fed.server.asynchronous.base import Asynchronous
from lightning_fed.server.asynchronous.client_clock import ClientClock

__all__ = ["FedBuff"]


class FedBuff(Asynchronous):
    r"""A server that steps along the mean of the M answers that arrive next, however old the models they rest on.

    Nguyen et al., *Federated Learning with Buffered Asynchronous Aggregation*, AISTATS 2022
    (https://arxiv.org/abs/2106.06639), Algorithm 1 and the scaling of its experiments:

    .. math::
        x^{r+1} = x^r + \eta_s \frac1M \sum_{m=1}^M (1 + \tau_m)^{-a} \Delta_m

    with :math:`\Delta_m = y_m - x^{r - \tau_m}` and :math:`\tau_m` the steps that the server has taken since the client
    began. The rate :math:`\eta_s` is the server optimizer's.

    Args:
        size: The answers of which the server makes a step, M.
        concurrency: The clients at work at a time.
        staleness_exponent: :math:`a \ge 0`; with 0 all answers count alike.
        clock: How long clients take; all alike by default.

    Raises:
        FederatedError: If a value is out of range.

    Example:
        >>> FedBuff(size=10, concurrency=100).weight(3)
        0.5
    """

    def __init__(
        self, size: int, concurrency: int, staleness_exponent: float = 0.5, clock: ClientClock | None = None
    ) -> None:
        super().__init__(size, concurrency, clock)
        self.staleness_exponent = check_number("FedBuff", "staleness_exponent", staleness_exponent, least=0.0)

    def weight(self, staleness: int) -> float:
        """Return (1 + staleness)^-a."""
        return float((1 + staleness) ** -self.staleness_exponent)

    def held(self, change: Vector, x: Vector) -> Vector:
        """Return the change itself."""
        return change

    def applied(self, held: Vector, x: Vector) -> Vector:
        """Return the change itself: it is made wherever the server stands."""
        return held
