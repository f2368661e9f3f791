"""FedBuff with the events of a case, instead of events drawn from a clock."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from lightning_fed.server import FedBuff
from lightning_fed.server.asynchronous import Arrival, Between

from .cases import Case

STALENESS_EXPONENT = 0.5
"""The format's default."""


class ReplayedFedBuff(FedBuff):
    """FedBuff that replays a case's arrivals. For the trainer, each arrival is a client.

    A client may occur twice among the arrivals, from one server model or from several. So the trainer gets one client
    for every arrival: :class:`tests.oracle.problem.ArrivalData`.

    Args:
        case: The case.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        size = len(case.arrivals(0))
        super().__init__(size, concurrency=1, staleness_exponent=case.hp.get("staleness_exponent", STALENESS_EXPONENT))

    def events(self, seed: int, population: Sequence[Any]) -> Any:
        """Return the case's events."""
        began = [began for r in range(self.case.n_rounds) for _, began in self.case.arrivals(r)]

        def in_round(round: int) -> Between:
            arrive = range(round * self.size, (round + 1) * self.size)
            left = [k for k in range(arrive.stop, len(began)) if began[k] <= round]
            return Between(
                [k for k in range(len(began)) if began[k] == round],
                [Arrival(began[k], k) for k in arrive],
                [Arrival(began[k], k) for k in left],
                float(round),
            )

        return SimpleNamespace(seed=seed, population=population, in_round=in_round)
