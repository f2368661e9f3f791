"""One progress bar over rounds."""

import sys
from typing import Any

from lightning_fed.callbacks.base import FederatedCallback
from lightning_fed.compat.package import pl
from lightning_fed.compat.private import Tqdm, TrainerFn
from lightning_fed.core.arguments import check_count, check_flags
from lightning_fed.core.rounds import ClientReport, RoundReport

__all__ = ["RoundProgressBar"]


class RoundProgressBar(FederatedCallback, pl.callbacks.TQDMProgressBar):
    """Show one bar whose unit is the round, with the metrics logged with ``prog_bar=True``.

    ``validate``, ``test`` and ``predict`` show Lightning's own bars.

    Args:
        refresh_rate: Redraw the metrics every so many rounds; 0 hides the bar.
        process_position: The bar's line on the screen, counted from its own.
        leave: Whether Lightning's own bars stay on the screen when they are done.

    Raises:
        FederatedError: If an argument is not allowed.
    """

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        check_count("RoundProgressBar", "refresh_rate", refresh_rate, least=0)
        check_count("RoundProgressBar", "process_position", process_position, least=0)
        check_flags("RoundProgressBar", leave=leave)
        super().__init__(refresh_rate, process_position, leave)

    # nothing to do per batch, and Lightning skips what is not there
    on_train_batch_start = pl.Callback.on_train_batch_start
    on_train_batch_end = pl.Callback.on_train_batch_end

    def init_train_tqdm(self) -> Tqdm:
        """Return the bar over rounds."""
        limit = self.trainer.fit_loop.max_epochs
        return Tqdm(
            desc="Rounds",
            total=None if limit is None or limit < 0 else limit,
            initial=self.trainer.fit_loop.round,
            disable=self.is_disabled,
            leave=True,
            dynamic_ncols=True,
            file=sys.stdout,
            unit="round",
        )

    def init_sanity_tqdm(self) -> Tqdm:
        """Return a hidden bar: the sanity check of validation is not a round."""
        return Tqdm(disable=True)

    def init_validation_tqdm(self) -> Tqdm:
        """Return Lightning's bar for ``validate``, a hidden one within a fit."""
        return Tqdm(disable=True) if self.trainer.state.fn == TrainerFn.FITTING else super().init_validation_tqdm()

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Leave the bar as it is: it counts rounds, not batches."""
        self._clients_done = 0

    def on_round_restart(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round: int) -> None:
        """Count the round's clients from the first one again."""
        self._clients_done = 0

    def on_client_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, client_report: ClientReport) -> None:
        """Show the progress within the round, for long rounds."""
        self._clients_done += 1
        self.train_progress_bar.set_description(f"Rounds (client {self._clients_done} done)", refresh=False)
        self.train_progress_bar.update(0)

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round_report: RoundReport) -> None:
        """Go back to counting rounds."""
        self.train_progress_bar.set_description("Rounds", refresh=False)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Advance by one round."""
        bar = self.train_progress_bar
        if not bar.disable and trainer.fit_loop.round % max(1, self.refresh_rate) == 0:
            bar.set_postfix(self.get_metrics(trainer, pl_module), refresh=False)
        bar.update(1)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Return the metrics to show; the logger's version number is no news."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics
