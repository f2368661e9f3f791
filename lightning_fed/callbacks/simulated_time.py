"""The simulated time of a run, for comparing by it what clients of different speeds reach."""

from typing import Any

from lightning_fed.callbacks.base import FederatedCallback
from lightning_fed.compat.package import pl
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import RoundReport
from lightning_fed.server.asynchronous.client_clock import ClientClock

__all__ = ["SimulatedTime"]


class SimulatedTime(FederatedCallback):
    """Log ``time/simulated``, the simulated seconds since the start of the run, after every round.

    A synchronous round takes as long as the slowest of its clients. An asynchronous one ends when the last of the
    answers arrives of which its step is made.

    Args:
        clock: How long clients take; by default that of ``asynchronous``, or one second each.

    Attributes:
        seconds: The time so far.

    Raises:
        FederatedError: If it is no clock; when the fit starts, if the run has a clock of its own.

    Example:
        >>> SimulatedTime().seconds
        0.0
    """

    def __init__(self, clock: ClientClock | None = None) -> None:
        if clock is not None and not isinstance(clock, ClientClock):
            raise FederatedError(f"SimulatedTime(clock={clock!r}): clock must be a ClientClock, or None.")
        self.clock = clock
        self.seconds = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the time so far."""
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the time of a checkpoint's run."""
        self.seconds = float(state_dict["seconds"])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse a second clock."""
        if self.clock is not None and trainer.fit_loop.is_asynchronous:
            raise FederatedError(
                "SimulatedTime(clock=...) does not go with asynchronous=..., whose clock it goes by. Leave it unset."
            )

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round_report: RoundReport) -> None:
        """Add the round."""
        loop = trainer.fit_loop
        if loop.is_asynchronous:
            self.seconds = loop.arrived
        else:
            clock, population = self.clock or ClientClock(), loop.population
            places = map(population.place_of, round_report.cohort)
            seconds = (clock.seconds_of(loop.state.seed, population, place, round_report.round) for place in places)
            self.seconds += max(seconds, default=0.0)
        loop.log_round({"time/simulated": self.seconds})
