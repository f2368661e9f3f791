"""The paths of clients within a round: their drift step by step, and the agreement of their directions."""

import math
from typing import Any

import torch

from lightning_fed.callbacks.measures import Measure, write_table
from lightning_fed.compat.package import pl
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import ClientReport
from lightning_fed.core.types import ClientId
from lightning_fed.metrics import PairwiseCosine

_MOST_PARAMETERS = 64  # the most to write at every local step


class _StepPaths(Measure):
    """Record the cohort's models, or a quantity of them, after every local step, by client."""

    def __init__(self, every_n_rounds: int = 1) -> None:
        super().__init__(every_n_rounds)
        self.paths: dict[ClientId, list[Any]] = {}
        self._first: list[torch.Tensor] = []
        self._path: list[torch.Tensor] = []

    def _start_of(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the first points of every path of a round."""
        return []

    def _path_point(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the point to record for a client's model."""
        raise NotImplementedError

    def on_round_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round: int) -> None:
        if self.is_due(round + 1):
            self.paths = {}
            self._first = self._start_of(trainer.fit_loop.state.x)

    def on_round_restart(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round: int) -> None:
        """Restart the round through ``on_round_start``, which a subclass may override."""
        self.on_round_start(trainer, pl_module, round)

    def on_client_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, round: int, client_id: ClientId
    ) -> None:
        self._path = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loop = trainer.fit_loop
        if self.is_due(loop.round + 1) and loop.local_steps > len(self._path):
            self._path.append(self._path_point(loop.client_model[0], loop.state.x))

    def on_client_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, client_report: ClientReport) -> None:
        if self.is_due(trainer.fit_loop.round + 1) and (path := [*self._first, *self._path]):
            self.paths[client_report.client_id] = torch.stack(path).tolist()

    def _gather(self, trainer: pl.Trainer) -> None:
        """Collect the paths of all processes."""
        self.paths = {i: path for part in trainer.fit_loop.gather(self.paths) for i, path in part.items()}


class LocalDrift(_StepPaths):
    r"""Measure how far the cohort's models have drifted from the server's after each local step.

    It logs ``drift/mean``, the mean of :math:`\|y_{i,k} - x\|^2` over clients and their steps k. SCAFFOLD's analysis
    calls this the client drift (Karimireddy et al., 2020, https://arxiv.org/abs/1910.06378, appendix). It also logs
    ``drift/last``, the mean after the clients' last steps. The whole curve would need a tag per step, so it goes to
    ``drift/round_<completed rounds>.csv`` in the log directory and to :attr:`curve`.

    It needs no gradient, only a distance per local step, and the engine "sequential", which runs single steps.

    Args:
        every_n_rounds: Measure in every n-th round.

    Attributes:
        paths: The distances :math:`\|y_{i,k} - x\|^2` by client id, for k = 1, 2, ..., of the last measurement.

    Raises:
        FederatedError: If the number is not positive.
    """

    tag = "drift"

    @property
    def curve(self) -> list[float]:
        """Return the mean distance after each step k, over the clients that took at least k steps."""
        return [sum(step) / len(step) for step in self._by_step()]

    def _path_point(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        moved = y - x
        return moved.dot(moved)

    def measure(self, trainer: pl.Trainer) -> None:
        """Log the means and write the curve."""
        self._gather(trainer)
        paths = list(self.paths.values())
        if not paths:
            return
        mean = sum(sum(path) / len(path) for path in paths) / len(paths)
        trainer.fit_loop.log_round({"drift/mean": mean, "drift/last": sum(path[-1] for path in paths) / len(paths)})
        rows = [(k, len(step), sum(step) / len(step), max(step)) for k, step in enumerate(self._by_step(), start=1)]
        write_table(trainer, "drift", ("step", "clients", "mean", "max"), rows)

    def _by_step(self) -> list[list[float]]:
        longest = max(map(len, self.paths.values()), default=0)
        return [[path[k] for path in self.paths.values() if k < len(path)] for k in range(longest)]


class LocalIterates(_StepPaths):
    r"""Write the cohort's models after every local step to a table, for models with few parameters.

    ``iterates/round_<completed rounds>.csv`` in the log directory has a row for every iterate :math:`y_{i,k}`: client,
    step, and the parameters x0, x1, ... in flat order. The server's model has the name "server", with step 0 before the
    round and 1 after it. Several processes list their clients one after another. It needs the engine "sequential",
    which runs single steps.

    Args:
        every_n_rounds: Write in every n-th round.

    Attributes:
        paths: The iterates by client id, the starting point first, of the last round that was written.

    Raises:
        FederatedError: If the number is not positive; when training starts, if the model has too many parameters.
    """

    tag = "iterates"

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse models that are too large to write."""
        size = trainer.fit_loop.state.x.numel()
        if size > _MOST_PARAMETERS:
            raise FederatedError(
                f"LocalIterates writes every parameter at every local step: at most {_MOST_PARAMETERS} of them, and the"
                f" model has {size:,}. LocalDrift measures distances instead."
            )

    def _start_of(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x.clone()]

    def _path_point(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return y.clone()

    def measure(self, trainer: pl.Trainer) -> None:
        """Write the paths."""
        loop = trainer.fit_loop
        self._gather(trainer)
        server = [self._first[0].tolist(), loop.state.x.tolist()]
        rows = [(i, k, *y) for i, path in (*self.paths.items(), ("server", server)) for k, y in enumerate(path)]
        names = [f"x{place}" for place in range(len(server[0]))]
        write_table(trainer, "iterates", ("client", "step", *names), rows)


class UpdateCosine(Measure):
    r"""Measure whether the cohort's updates point the same way.

    It logs ``update/cosine``, the mean cosine between :math:`y_i - x` and :math:`y_j - x` over all pairs of the cohort.
    It is 1 if all clients pull the same way, 0 if their directions are unrelated, less if they undo each other's work.
    Clients that did not move are left out; with fewer than two others nothing is logged. It costs one sum per client.

    Args:
        every_n_rounds: Measure in every n-th round.

    Raises:
        FederatedError: If the number is not positive.
    """

    tag = "update"

    def __init__(self, every_n_rounds: int = 1) -> None:
        super().__init__(every_n_rounds)
        self._cosine = PairwiseCosine()

    def on_round_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round: int) -> None:
        """Reset the mean."""
        self._cosine = PairwiseCosine()

    def on_round_restart(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round: int) -> None:
        """Restart the round through ``on_round_start``, which a subclass may override."""
        self.on_round_start(trainer, pl_module, round)

    def on_client_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, client_report: ClientReport) -> None:
        """Add one client's update."""
        loop = trainer.fit_loop
        if self.is_due(loop.round + 1):
            self._cosine.add(loop.client_model[0] - loop.state.x)

    def measure(self, trainer: pl.Trainer) -> None:
        """Log the mean cosine."""
        cosine = PairwiseCosine()
        for part in trainer.fit_loop.gather(self._cosine):
            cosine.merge(part)
        if not math.isnan(cosine.value()):
            trainer.fit_loop.log_round({"update/cosine": cosine.value()})
