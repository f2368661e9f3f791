"""The progress of a run: one bar over rounds on a terminal, lines elsewhere."""

import logging
import sys
import time
from typing import Any

from lightning_fed.callbacks.base import FederatedCallback
from lightning_fed.compat.package import pl
from lightning_fed.compat.private import Tqdm, TrainerFn
from lightning_fed.core.arguments import check_count, check_flags, check_number
from lightning_fed.core.rounds import ClientReport, RoundReport


def shows_information() -> bool:
    """Return whether Lightning's logger shows information: a run prints its lines and its summary only then."""
    return logging.getLogger(pl.__name__).isEnabledFor(logging.INFO)


def overwrites(stream: Any) -> bool:
    """Return whether a carriage return overwrites the line, as on a terminal and in a notebook.

    A process without a console has no stream (None), and a user's stream may lack ``isatty``.
    """
    return bool(getattr(stream, "isatty", bool)()) or hasattr(sys, "ps1")


def printable(text: str) -> str:
    """Return a text with escapes for characters that the output cannot encode: a name must not end a run."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


class RoundProgressBar(FederatedCallback, pl.callbacks.TQDMProgressBar):
    """Show one bar that counts rounds, with the metrics logged with ``prog_bar=True``.

    ``validate``, ``test`` and ``predict`` show Lightning's own bars. Bars are drawn only on a terminal and in
    notebooks, since a file would keep every update. :class:`RoundLines` prints lines elsewhere.

    Args:
        refresh_rate: Redraw the metrics every n rounds; 0 hides the bar.
        process_position: The bar's offset on the screen, in lines.
        leave: Whether Lightning's own bars stay on the screen when they are done.

    Raises:
        FederatedError: If an argument is not allowed.
    """

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        check_count("RoundProgressBar", "refresh_rate", refresh_rate, least=0)
        check_count("RoundProgressBar", "process_position", process_position, least=0)
        check_flags("RoundProgressBar", leave=leave)
        super().__init__(refresh_rate, process_position, leave)

    @property
    def is_enabled(self) -> bool:
        """Return whether bars are drawn: only if a carriage return overwrites the line."""
        return super().is_enabled and overwrites(sys.stdout)

    # no work per batch: the training loop skips hooks that nothing overrides
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
        """Show the count of rounds again."""
        self.train_progress_bar.set_description("Rounds", refresh=False)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Advance by one round."""
        bar = self.train_progress_bar
        if not bar.disable and trainer.fit_loop.round % max(1, self.refresh_rate) == 0:
            bar.set_postfix(self.get_metrics(trainer, pl_module), refresh=False)
        bar.update(1)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Return the metrics to show, without the logger's version number."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics


class RoundLines(FederatedCallback):
    """Print a line such as ``round 10/50  val_acc 0.83  3.2 s/round`` now and then, if no progress bar is drawn.

    Every trainer has one, except with ``barebones=True``. It is for batch jobs: it prints if the output is not a
    terminal, or with ``enable_progress_bar=False``. A line has the metrics logged with ``prog_bar=True``, or else the
    cohort's training loss. It also has the mean time of a round since the last line, including validation. Rank 0
    prints. No lines are printed if Lightning's logger shows no information
    (``logging.getLogger(pl.__name__).setLevel(logging.WARNING)``), as with ``lightning-fed fit -q``.

    Args:
        seconds: Print after a round that ends this many seconds after the last line, or after the start.
        every_n_rounds: Print after every n rounds as well; by default after each tenth of ``max_rounds``.

    Raises:
        FederatedError: If an argument is not allowed.

    Example:
        >>> RoundLines(every_n_rounds=10).seconds
        30.0
    """

    def __init__(self, seconds: float = 30.0, every_n_rounds: int | None = None) -> None:
        self.seconds = check_number("RoundLines", "seconds", seconds, "[0, inf)")
        if every_n_rounds is not None:
            check_count("RoundLines", "every_n_rounds", every_n_rounds, least=1)
        self.every_n_rounds = every_n_rounds
        self._last: tuple[int, float] | None = None  # the round and time of the last line, or of the start

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock."""
        self._last = None

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock with the first round."""
        self._last = self._last or (trainer.fit_loop.round, time.monotonic())

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print a line if one is due."""
        now, done, limit = time.monotonic(), trainer.fit_loop.round, trainer.max_epochs or 0
        assert self._last is not None
        every, (last, then) = self.every_n_rounds or -(-limit // 10), self._last
        is_due = now - then >= self.seconds or (every > 0 and done % every == 0)
        bar = trainer.progress_bar_callback
        has_bar = getattr(bar, "is_enabled", bar is not None)
        if has_bar or not (is_due and trainer.is_global_zero and shows_information()):
            return
        shown: dict[str, Any] = {**trainer.progress_bar_metrics}
        if not shown and "client/loss" in trainer.callback_metrics:
            shown["client/loss"] = trainer.callback_metrics["client/loss"]
        metrics = [f"{name} {float(value):.4g}" for name, value in shown.items()]
        rate = f"{(now - then) / (done - last):.2g} s/round"
        line = "  ".join([f"round {done}/{limit}" if limit > 0 else f"round {done}", *metrics, rate])
        print(printable(line), flush=True)
        self._last = done, now
