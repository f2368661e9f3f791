"""Losses, means and norms of clients; on an accelerator, one read gets the numbers of all clients."""

import math
import time
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

    @property
    def loss(self) -> float:
        """The mean loss; nan without examples."""
        total, examples = self.totals or (self.sum_of_losses(), sum(self.weights))
        return total / examples if examples else math.nan

    def sum_of_losses(self) -> float:
        """Return the sum of losses times examples."""
        total: float = sum(map(mul, self.losses, self.weights))  # type: ignore[arg-type]  # already read as numbers
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
    norm: float | Tensor  # the norm of the client's change, a tensor on an accelerator
    numbers: ClientNumbers | None  # None if the report must not show them
    round: int
    started: float | None = None  # start of the client's work, which lasts until the reading; None if it has ended

    def fill(self, read: Iterator[float]) -> ClientError | None:
        """Complete the report; return the client's error if its loss or change is not finite."""
        numbers, norm = self.numbers, self.norm
        found: dict[str, Any] = {"update_norm": next(read) if isinstance(norm, Tensor) else norm}
        if numbers is not None:
            if isinstance(numbers.losses, Tensor):
                numbers.losses = [next(read) for _ in numbers.losses]
            found["loss"], found["metrics"] = numbers.loss, dict(numbers.metrics)
            for name, value in numbers.metrics.items():
                found["metrics"][name] = next(read) if isinstance(value, Tensor) else value
        if self.started is not None:
            found["seconds"] = time.perf_counter() - self.started
        for name, value in found.items():
            object.__setattr__(self.report, name, value)  # the report is read-only for others
        return fault_of(self.report, None if numbers is None else numbers.step_losses, self.round)


def read(readings: Sequence[Reading]) -> list[ClientError]:
    """Complete reports in one read, since each read waits for an accelerator; return the clients' errors."""
    waiting, faults = list[Tensor](), list[ClientError]()
    for reading in readings:
        shown = () if reading.numbers is None else (reading.numbers.losses, *reading.numbers.metrics.values())
        for value in (reading.norm, *shown):
            if isinstance(value, Tensor):
                waiting.append(value)
    numbers = iter(numbers_of(waiting) if waiting else ())
    for reading in readings:
        if (fault := reading.fill(numbers)) is not None:
            faults.append(fault)
    return faults
