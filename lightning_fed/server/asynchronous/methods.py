"""Asynchronous servers: FedBuff steps after every M messages, FedAsync after each message."""

from typing import Literal

from lightning_fed.core.arguments import check_number, check_one_of
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import Vector
from lightning_fed.server.asynchronous.base import Asynchronous
from lightning_fed.server.asynchronous.client_clock import ClientClock


class FedBuff(Asynchronous):
    r"""A server that steps along the mean of the next M messages to arrive, however stale they are.

    Nguyen et al., *Federated Learning with Buffered Asynchronous Aggregation*, AISTATS 2022
    (https://arxiv.org/abs/2106.06639), Algorithm 1 and the scaling of its experiments:

    .. math::
        x^{r+1} = x^r + \eta_s \frac1M \sum_{m=1}^M (1 + \tau_m)^{-a} \Delta_m

    with :math:`\Delta_m = y_m - x^{r - \tau_m}` and :math:`\tau_m` the server steps since the client began. The rate
    :math:`\eta_s` is the server optimizer's.

    Args:
        size: M, the number of messages per server step.
        concurrency: The number of clients training at a time.
        staleness_exponent: :math:`a \ge 0`. With 0, all messages have equal weight.
        clock: The clients' training times; all equal by default.

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
        self.staleness_exponent = check_number("FedBuff", "staleness_exponent", staleness_exponent, "[0, inf)")

    def weight(self, staleness: int) -> float:
        """Return (1 + staleness)^-a."""
        return float((1 + staleness) ** -self.staleness_exponent)


class FedAsync(Asynchronous):
    r"""A server that moves towards each client's model as it arrives.

    Xie, Koyejo and Gupta, *Asynchronous Federated Optimization*, 2019 (https://arxiv.org/abs/1903.03934), Algorithm 1
    and section 5.2:

    .. math::
        x^{r+1} = (1 - \alpha_r) x^r + \alpha_r y, \qquad \alpha_r = \alpha \, s(\tau)

    with :math:`\tau` the server steps since the client began, and s(tau) = 1 ("constant"), :math:`(1 + \tau)^{-a}`
    ("polynomial"), or 1 up to b and then :math:`1 / (a (\tau - b) + 1)` ("hinge"). A model that nobody overtook has
    :math:`\tau = 0`, and so the weight :math:`\alpha`; in the paper's Algorithm 1, read literally, its :math:`t - \tau`
    is 1. The paper's clients have a proximal term: use :class:`lightning_fed.algorithms.FedProx`. Leave the server's
    optimizer at SGD with rate 1; another one is applied to :math:`\alpha_r (y - x^r)`.

    Args:
        concurrency: The number of clients training at a time.
        alpha: The weight of a model without staleness, in (0, 1].
        staleness: The name of s.
        a: The parameter of "polynomial" and "hinge", at least 0.
        b: The other parameter of "hinge", at least 0.
        clock: The clients' training times; all equal by default.

    Raises:
        FederatedError: If a value is out of range.

    Example:
        >>> FedAsync(concurrency=10, alpha=0.6, staleness="hinge", a=10.0, b=4.0).weight(4)
        0.6
    """

    def __init__(
        self,
        concurrency: int,
        alpha: float = 0.6,
        staleness: Literal["constant", "polynomial", "hinge"] = "polynomial",
        a: float = 0.5,
        b: float = 0.0,
        clock: ClientClock | None = None,
    ) -> None:
        super().__init__(1, concurrency, clock)
        self.alpha = check_number("FedAsync", "alpha", alpha, "(0, 1]")
        self.staleness = check_one_of("FedAsync", "staleness", staleness, ("constant", "polynomial", "hinge"))
        self.a = check_number("FedAsync", "a", a, "[0, inf)")
        self.b = check_number("FedAsync", "b", b, "[0, inf)")
        if b and staleness != "hinge":
            raise FederatedError(f"FedAsync(b={b!r}) is of no use to staleness={staleness!r}. Leave it unset.")

    def weight(self, staleness: int) -> float:
        """Return alpha s(staleness)."""
        if self.staleness == "polynomial":
            return float(self.alpha * (1 + staleness) ** -self.a)
        if self.staleness == "hinge" and staleness > self.b:
            return self.alpha / (self.a * (staleness - self.b) + 1)
        return self.alpha

    def held(self, change: Vector, x: Vector) -> Vector:
        """Return the client's model."""
        return x + change

    def applied(self, held: Vector, x: Vector) -> Vector:
        """Return the difference between the client's model and the current one."""
        return held - x
