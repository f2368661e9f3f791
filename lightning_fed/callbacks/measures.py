"""What measures of a run share: every how many rounds, on which clients, and where their tables go."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from lightning_fed.callbacks.base import FederatedCallback
from lightning_fed.compat.package import pl
from lightning_fed.compat.private import rank_zero_warn
from lightning_fed.core.arguments import check_count, check_one_of
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.seeds import Purpose, derive_seed, generator
from lightning_fed.core.types import ClientId

__all__ = ["ClientMeasure", "Measure", "WeightedMeasure", "Weighting", "write_table"]

Weighting: TypeAlias = Literal["uniform", "examples"]


def write_table(trainer: pl.Trainer, name: str, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table of this round to ``<log directory>/<name>/round_<completed rounds>.csv``; nothing without a logger.

    Args:
        trainer: The trainer.
        name: The folder.
        header: The names of the columns.
        rows: The rows.
    """
    folder = trainer.log_dir if trainer.loggers and not trainer.fast_dev_run else None
    if folder is None or not trainer.is_global_zero:
        return
    path = Path(folder) / name / f"round_{trainer.fit_loop.round:06d}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


class Measure(FederatedCallback):
    """A callback that measures every n rounds and changes nothing: the run goes on as if it were not there.

    Args:
        every_n_rounds: Measure after every so many rounds.

    Raises:
        FederatedError: If the number is not positive.
    """

    def __init__(self, every_n_rounds: int = 1) -> None:
        self.every_n_rounds = check_count(type(self).__name__, "every_n_rounds", every_n_rounds, least=1)

    def is_due(self, completed: int) -> bool:
        """Whether to measure after so many completed rounds."""
        return completed % self.every_n_rounds == 0


class ClientMeasure(Measure):
    """A measure taken at the new server model on all clients, or on a fixed sample of them.

    Args:
        every_n_rounds: Measure after every so many rounds.
        clients: How many clients to measure: a sample that the run's seed decides, the same in every round and for
            every measure. All of them by default. Clients without examples are left out.

    Raises:
        FederatedError: If a number is not positive, more clients are wanted than there are, or nobody has examples.
    """

    def __init__(self, every_n_rounds: int = 1, clients: int | None = None) -> None:
        super().__init__(every_n_rounds)
        self.clients = None if clients is None else check_count(type(self).__name__, "clients", clients, least=1)
        self.measured: list[ClientId] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Settle which clients are measured."""
        population = trainer.fit_loop.population
        wanted = len(population) if self.clients is None else self.clients
        if wanted > len(population):
            raise FederatedError(
                f"{type(self).__name__}(clients={wanted}) asks for more clients than the {len(population)} non-empty"
                " ones there are. Pass at most that many, or leave clients unset for all."
            )
        seed = derive_seed(trainer.fit_loop.state.seed, Purpose.MEASUREMENT)
        order = torch.randperm(len(population), generator=generator(seed, Purpose.COHORT))
        chosen: list[int] = []
        for position in order.tolist() if self.clients is not None else range(len(population)):
            if len(chosen) == wanted:
                break
            if self.can_measure(trainer, population[position]):
                chosen.append(position)
        self.measured = [population[position] for position in sorted(chosen)]
        if not self.measured:
            raise self.refusal()
        if len(self.measured) < wanted:
            rank_zero_warn(
                f"{type(self).__name__}: {len(self.measured)} of {wanted} clients have {self.needs}; they are measured."
            )

    @property
    def needs(self) -> str:
        """What a client must have to be measured, in words."""
        return "training examples"

    def refusal(self) -> FederatedError:
        """Return the error that nobody can be measured."""
        return FederatedError(f"{type(self).__name__} has nobody to measure: no client has {self.needs}.")

    def can_measure(self, trainer: pl.Trainer, client_id: ClientId) -> bool:
        """Whether a client has what the measure needs; one that is built on demand may turn out to be empty."""
        return bool(trainer.fit_loop.population.size(client_id) > 0)


class WeightedMeasure(ClientMeasure):
    """A measure that is a mean over clients.

    Args:
        every_n_rounds: Measure after every so many rounds.
        clients: How many clients to measure; all by default.
        weighting: "uniform", every client alike, or "examples", by their number.

    Raises:
        FederatedError: If an argument is not allowed, or more clients are wanted than there are.
    """

    def __init__(self, every_n_rounds: int, clients: int | None, weighting: Weighting) -> None:
        super().__init__(every_n_rounds, clients)
        check_one_of(type(self).__name__, "weighting", weighting, ("uniform", "examples"))
        self.weighting = weighting

    def weight(self, trainer: pl.Trainer, client_id: ClientId) -> float:
        """Return a client's weight in the mean."""
        return 1.0 if self.weighting == "uniform" else float(trainer.fit_loop.population.size(client_id))
