"""Example-weighted means of losses and logged values, client by client and over all of them."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_fed._lightning import pl
from lightning_fed.tracing.traces import Values

__all__ = ["ChunkMeans", "log_means"]

_Entry: TypeAlias = tuple[Sequence[int], Tensor, int]  # clients, a value of each, and its weight
_Sums: TypeAlias = tuple[list[float], list[int]]  # by client: of values times weights, and of weights


class ChunkMeans:
    """Collect the values of a chunk's steps; they are looked at once, at the end.

    Args:
        count: The number of clients.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._losses: list[_Entry] = []
        self._logged: dict[str, list[_Entry]] = {}
        self._sums: dict[str, _Sums] = {}

    def add(self, clients: Sequence[int], examples: int, loss: Tensor, values: Values) -> None:
        """Add a step of some clients on batches of one size.

        Args:
            clients: Whose step it is.
            examples: The examples in each batch.
            loss: The loss of each.
            values: What each logged.
        """
        self._losses.append((clients, loss, examples))
        for name, (value, batch_size) in values.items():
            self._logged.setdefault(name, []).append((clients, value, batch_size or examples))

    def of_clients(self) -> tuple[list[float], list[dict[str, float]]]:
        """Return each client's mean loss, and its means of what it logged."""
        read: dict[tuple[int, ...], list[float]] = {}  # a loss that is logged too is the same tensor
        totals, weights = self._sum(self._losses, read)
        loss = [total / weight if weight else float("nan") for total, weight in zip(totals, weights, strict=True)]
        logged: list[dict[str, float]] = [{} for _ in loss]
        for name, entries in self._logged.items():
            self._sums[name] = self._sum(entries, read)
            for own, total, weight in zip(logged, *self._sums[name], strict=True):
                if weight:
                    own[name] = total / weight
        return loss, logged

    def _sum(self, entries: Sequence[_Entry], read: dict[tuple[int, ...], list[float]]) -> _Sums:
        totals, weights = [0.0] * self._count, [0] * self._count
        tensors = [value.reshape(-1) for _, value, _ in entries]
        key = tuple([id(value) for _, value, _ in entries])
        if key not in read:
            read[key] = torch.cat(tensors).tolist() if tensors else []
        values = iter(read[key])
        for clients, _, weight in entries:
            for client in clients:
                totals[client] += weight * next(values)
                weights[client] += weight
        return totals, weights

    def losses_of(self, row: int) -> list[float]:
        """Return the loss of each local step of one client."""
        steps = (zip(at, loss.reshape(-1).tolist(), strict=True) for at, loss, _ in self._losses if row in at)
        return [loss for step in steps for client, loss in step if client == row]

    def add_to(self, means: dict[str, tuple[float, int]], without: Collection[int] = ()) -> None:
        """Add what the chunk's clients logged to the sums of the round, of values times examples and of examples.

        Args:
            means: The sums of the round, by name.
            without: The rows of clients that are left out.
        """
        for name, (totals, weights) in self._sums.items():
            for row in without:
                totals[row], weights[row] = 0.0, 0
            if any(weights):
                total, weight = means.get(name, (0.0, 0))
                means[name] = (total + sum(totals), weight + sum(weights))


def log_means(
    trainer: pl.Trainer, means: Mapping[str, tuple[float, int]], options: Mapping[str, dict[str, Any]]
) -> None:
    """Hand a round's means to Lightning, each as one value with the weight of its examples.

    Args:
        trainer: The trainer.
        means: The sums of values times examples and of examples, by name.
        options: What ``self.log`` was given beside name and value, by name.
    """
    module, results = trainer.lightning_module, trainer.fit_loop.epoch_loop._results
    previous, module._current_fx_name = module._current_fx_name, "training_step"
    with results.of_client(module):
        for name, (total, weight) in means.items():
            value = torch.tensor(total / weight, dtype=torch.float64)
            module.log(name, value, **{**options[name], "batch_size": weight})
    results.close_client()
    module._current_fx_name = previous
