"""A client's losses, means and norm; on an accelerator, those of all clients are read at once."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any

from torch import Tensor

from lightning_fed.core.devices import numbers_of
from lightning_fed.core.errors import ClientError
from lightning_fed.core.rounds import ClientReport
from lightning_fed.engines.client_errors import fault_of


@dataclass(slots=True)
class ClientNumbers:
    """The numbers of a client's batches."""

    losses: Sequence[float] | Tensor  # the loss of each batch: numbers, or a tensor on an accelerator
    weights: Sequence[int]  # the examples in each batch
    metrics: Mapping[str, Any]  # the means of logged values by name: numbers, or tensors on an accelerator
    accumulated: int  # the batches per local step
    # the sums of losses times examples, and of examples, over the processes that split batches
    totals: tuple[float, float] | None = None

    def waiting(self) -> list[Tensor]:
        """Return the tensors that are not yet read."""
        return [value for value in (self.losses, *self.metrics.values()) if isinstance(value, Tensor)]

    def read_with(self, norm: Tensor) -> float:
        """Read all waiting tensors and a norm, and return the norm."""
        numbers = iter(numbers_of([norm, *self.waiting()]))
        found = next(numbers)
        self.fill(numbers)
        return found

    def fill(self, numbers: Iterator[float]) -> None:
        """Fill in the numbers of :meth:`waiting`."""
        if isinstance(self.losses, Tensor):
            self.losses = [next(numbers) for _ in self.losses]
        self.metrics = {k: next(numbers) if isinstance(v, Tensor) else v for k, v in self.metrics.items()}

    @property
    def loss(self) -> float:
        """The mean loss; nan without examples."""
        total, examples = self.totals or (self.sum_of_losses(), sum(self.weights))
        return total / examples if examples else math.nan

    def sum_of_losses(self) -> float:
        """Return the sum of losses times examples."""
        total: float = sum(map(mul, self.losses, self.weights))  # type: ignore[arg-type]  # they are numbers by now
        return total * self.accumulated

    def step_losses(self) -> list[float]:
        """Return the mean loss of each local step."""
        size = self.accumulated
        losses = [float(loss) * size for loss in self.losses]
        return [sum(part) / len(part) for part in (losses[i : i + size] for i in range(0, len(losses), size))]


@dataclass(slots=True)
class Reading:
    """A report whose numbers are not yet read."""

    report: ClientReport
    norm: Tensor  # the norm of the client's change
    numbers: ClientNumbers
    round: int

    def fill(self, numbers: Iterator[float]) -> ClientError | None:
        """Complete the report; return the client's error if its loss or change is not finite."""
        norm = next(numbers)
        self.numbers.fill(numbers)
        found: dict[str, Any] = {"loss": self.numbers.loss, "metrics": self.numbers.metrics, "update_norm": norm}
        for name, value in found.items():
            object.__setattr__(self.report, name, value)  # it is read-only for others
        return fault_of(self.report, self.numbers.step_losses, self.round)


def read(readings: Sequence[Reading]) -> list[ClientError]:
    """Complete reports in one read, since each read waits for an accelerator; return the clients' errors."""
    tensors = [tensor for reading in readings for tensor in (reading.norm, *reading.numbers.waiting())]
    numbers = iter(numbers_of(tensors))
    return [error for reading in readings if (error := reading.fill(numbers)) is not None]
