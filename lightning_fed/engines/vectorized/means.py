"""Example-weighted means of losses and logged values, client by client and over all of them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_fed._lightning import pl
from lightning_fed.tracing.traces import Values

__all__ = ["ChunkMeans", "LoggedMean", "log_means"]


@dataclass(slots=True)
class LoggedMean:
    """The mean of one logged value over the clients of a round so far.

    Attributes:
        options: What ``self.log`` was given beside name and value.
        total: The sum of values times examples.
        weight: The examples.
    """

    options: dict[str, Any]
    total: float = 0.0
    weight: int = 0


class ChunkMeans:
    """Collect the values of a chunk's steps; they are looked at once, at the end.

    Args:
        count: The number of clients.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._entries: dict[str, list[tuple[Sequence[int], Tensor, int]]] = {"": []}
        self._sums: dict[str, tuple[list[float], list[int]]] = {}

    def add(self, clients: Sequence[int], examples: int, loss: Tensor, values: Values) -> None:
        """Add a step of some clients on batches of one size.

        Args:
            clients: Whose step it is.
            examples: The examples in each batch.
            loss: The loss of each.
            values: What each logged.
        """
        self._entries[""].append((clients, loss, examples))
        for name, (value, batch_size) in values.items():
            self._entries.setdefault(f".{name}", []).append((clients, value, batch_size or examples))

    def of_clients(self) -> tuple[list[float], list[dict[str, float]]]:
        """Return each client's mean loss, and its means of what it logged."""
        values: dict[tuple[int, ...], list[float]] = {}  # a loss that is logged too is the same tensor
        self._sums = {key: self._sum(entries, values) for key, entries in self._entries.items()}
        means: list[dict[str, float]] = [
            {key: totals[i] / weights[i] for key, (totals, weights) in self._sums.items() if weights[i]}
            for i in range(self._count)
        ]
        loss = [own.pop("", float("nan")) for own in means]
        return loss, [{key[1:]: value for key, value in own.items()} for own in means]

    def _sum(
        self, entries: Sequence[tuple[Sequence[int], Tensor, int]], known: dict[tuple[int, ...], list[float]]
    ) -> tuple[list[float], list[int]]:
        totals, weights = [0.0] * self._count, [0] * self._count
        if not entries:
            return totals, weights
        tensors = tuple(id(value) for _, value, _ in entries)
        if tensors not in known:
            known[tensors] = torch.cat([value.reshape(-1) for _, value, _ in entries]).tolist()
        values = iter(known[tensors])
        for clients, _, weight in entries:
            for client in clients:
                totals[client] += weight * next(values)
                weights[client] += weight
        return totals, weights

    def losses_of(self, row: int) -> list[float]:
        """Return the loss of each local step of one client."""
        steps = (zip(at, loss.reshape(-1).tolist(), strict=True) for at, loss, _ in self._entries[""] if row in at)
        return [loss for step in steps for client, loss in step if client == row]

    def add_to(
        self, means: dict[str, LoggedMean], options: Mapping[str, dict[str, Any]], without: Collection[int] = ()
    ) -> None:
        """Add what the chunk's clients logged to the means of the round.

        Args:
            means: The means of the round.
            options: What ``self.log`` was given beside name and value, by name.
            without: The rows of clients that are left out.
        """
        for key, (totals, weights) in self._sums.items():
            for row in without:
                totals[row], weights[row] = 0.0, 0
            if key and any(weights):
                mean = means.setdefault(key[1:], LoggedMean(options[key[1:]]))
                mean.total += sum(totals)
                mean.weight += sum(weights)


def log_means(trainer: pl.Trainer, means: Mapping[str, LoggedMean]) -> None:
    """Hand a round's means to Lightning, each as one value with the weight of its examples."""
    module, results = trainer.lightning_module, trainer.fit_loop.epoch_loop._results
    previous, module._current_fx_name = module._current_fx_name, "training_step"
    with results.of_client(module):
        for name, mean in means.items():
            value = torch.tensor(mean.total / mean.weight, dtype=torch.float64)
            module.log(name, value, **{**mean.options, "batch_size": mean.weight})
    results.close_client()
    module._current_fx_name = previous
