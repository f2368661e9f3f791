"""A summary at the end of a run: metrics, cost, paths, and the commands to continue."""

import json
import math
import shlex
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightning_fed.callbacks.base import FederatedCallback, boards
from lightning_fed.callbacks.progress import printable, shows_information
from lightning_fed.callbacks.target import TargetMetric
from lightning_fed.compat.package import pl
from lightning_fed.core.rounds import RoundReport
from lightning_fed.core.types import ClientId

_SHOWN = 5  # failed clients to list, those with the most failures


class RunSummary(FederatedCallback):
    """Print a short summary when a fit ends.

    Like the lines of :class:`RoundLines`, it is not printed if Lightning's logger does not show information.
    TensorBoard shows it as the text ``summary``. Its ``hp_metric`` is the best value of the metric that the first
    ``ModelCheckpoint`` with a ``monitor`` follows. Without one, it is the last value of the summary's first metric.
    With ``TargetMetric``, it is the rounds to the target.

    Attributes:
        resume_with: The command to resume, with fields ``path``, ``logs`` and ``rounds``. The command line replaces it.
        quote: Quotes the paths in it, for Python or a shell.
    """

    def __init__(self) -> None:
        self.resume_with = "trainer.fit(model, data, ckpt_path={path})"
        self.quote: Callable[[str], str] = partial(json.dumps, ensure_ascii=False)
        self._last: dict[str, float] = {}
        self._best: dict[str, tuple[float, float]] = {}
        self._failed: Counter[ClientId] = Counter()

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round_report: RoundReport) -> None:
        """Count the failed clients, and note the monitored metric."""
        self._failed.update(round_report.failed.keys())
        self._note_monitored(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the metrics of the server model."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        for name in trainer.fit_loop.epoch_loop.val_loop._results.names:
            if (metric := trainer.callback_metrics.get(name)) is not None:
                self._last[name] = float(metric)
                self._note(name, float(metric))

    def _note_monitored(self, trainer: pl.Trainer) -> None:
        """Note the monitored metric, unless validation logs it."""
        checkpoint = _monitoring(trainer)
        name = None if checkpoint is None else checkpoint.monitor
        if name is None or name in self._last:
            return
        if (metric := trainer.callback_metrics.get(name)) is not None:
            self._note(name, float(metric))

    def _note(self, name: str, value: float) -> None:
        """Update the best values; keep NaN, as from a diverged run, only if there is no other value."""
        low, high = self._best.get(name, (value, value))
        if math.isnan(low):
            self._best[name] = (value, value)
        elif not math.isnan(value):
            self._best[name] = (min(low, value), max(high, value))

    def state_dict(self) -> dict[str, Any]:
        """Return the metrics and failures noted so far."""
        failed = [[getattr(i, "item", lambda i=i: i)(), count] for i, count in self._failed.items()]
        return {"last": dict(self._last), "best": {k: list(v) for k, v in self._best.items()}, "failed": failed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the metrics and failures from a checkpoint."""
        self._last = dict(state_dict["last"])
        self._best = {k: (v[0], v[1]) for k, v in state_dict["best"].items()}
        self._failed = Counter(dict(state_dict.get("failed", [])))

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the summary on rank 0."""
        loop = trainer.fit_loop
        log_dir = trainer.log_dir  # all processes must read it
        if not trainer.is_global_zero or loop.round == 0 or not loop.run_state.has_server:
            return
        self._note_monitored(trainer)  # later hooks may have logged it in the last round
        state = loop.state
        rows = [(name, self._metric(trainer, name)) for name in sorted(self._last)]
        if not rows and (loss := trainer.callback_metrics.get("client/loss")) is not None:  # nothing was validated
            rows.append(("client/loss", f"{float(loss):.4f} in the last round, on the clients' training data"))
        rows += [("method", repr(state.algorithm)), ("rounds", str(state.round))]
        if (epsilon := loop.epsilon) is None:
            rows += [
                ("clients seen", f"{state.seen} of {len(state.ids)}"),
                *self._failures(),
                ("bytes up / down", f"{_size(state.bytes_up)} / {_size(state.bytes_down)}"),
                *_record_privacy(loop),
            ]
        else:  # participation is part of the secret
            rows.append(("privacy", f"epsilon {epsilon:.4g} at delta {loop.settings.aggregator.delta:g}"))
        rows += self._paths(trainer, log_dir)
        width = max(len(name) for name, _ in rows)
        lines = [f"  {name:<{width}}  {text}" for name, text in rows]
        if shows_information():
            trainer.print(printable("\n".join(["", "Federated run finished", *lines])))
        for board in boards(trainer) if loop.has_run else ():  # otherwise the run had ended before, and was shown then
            board.experiment.add_text("summary", "\n".join(f"  {line}" for line in lines), loop.round)
            shows_hparams = board._default_hp_metric and trainer.enable_autolog_hparams
            if shows_hparams and (score := self._score(trainer)) is not None:
                board.log_metrics({"hp_metric": score}, loop.round)

    def _score(self, trainer: pl.Trainer) -> float | None:
        """Return the number for TensorBoard to compare runs; None if TargetMetric logs it, or there is none."""
        if any(isinstance(callback, TargetMetric) for callback in trainer.callbacks):
            return None
        checkpoint = _monitoring(trainer)
        if checkpoint is not None and checkpoint.monitor in self._best:
            return self._best[checkpoint.monitor][checkpoint.mode == "max"]
        last = self._last or {k: float(v) for k, v in trainer.callback_metrics.items() if k == "client/loss"}
        return last[min(last)] if last else None  # with differential privacy, there may be none

    def _failures(self) -> list[tuple[str, str]]:
        if not self._failed:
            return []
        worst = [f"{client_id!r} in {count}" for client_id, count in self._failed.most_common(_SHOWN)]
        more = [f"{len(self._failed) - _SHOWN} more"] if len(self._failed) > _SHOWN else []
        rounds = f"{self._failed.total()} times"
        return [("clients failed", f"{len(self._failed)}, {rounds} in all: {', '.join([*worst, *more])}")]

    def _metric(self, trainer: pl.Trainer, name: str) -> str:
        low, high = self._best[name]
        checkpoint = _monitoring(trainer)
        if checkpoint is not None and checkpoint.monitor == name:
            return f"{self._last[name]:.4f} (best {low if checkpoint.mode == 'min' else high:.4f})"
        return f"{self._last[name]:.4f} (lowest {low:.4f}, highest {high:.4f})"  # either may be the best

    def _paths(self, trainer: pl.Trainer, log_dir: str | None) -> list[tuple[str, str]]:
        rows = []
        if log_dir is not None and trainer.loggers:
            rows.append(("logs", _relative(log_dir)))
        checkpoint = trainer.checkpoint_callback
        if isinstance(checkpoint, pl.callbacks.ModelCheckpoint):
            if checkpoint.best_model_path and checkpoint.monitor:  # without a monitor, Lightning's best is the last
                rows.append(("best checkpoint", _relative(checkpoint.best_model_path)))
            saved = checkpoint._last_checkpoint_saved
            if last := (checkpoint.save_last and checkpoint.last_model_path) or saved or checkpoint.last_model_path:
                # its round may precede the run's last round: checkpoints need not be due in every round
                held = f" (round {checkpoint._last_global_step_saved})" if saved else ""
                rows.append(("last checkpoint", f"{_relative(last)}{held}"))
                path, logs = self.quote(_relative(last)), self.quote(_relative(log_dir or trainer.default_root_dir))
                command = self.resume_with.format(path=path, rounds=2 * trainer.fit_loop.round, logs=logs)
                rows.append((f"resume{held}", command))
        return [
            *rows,
            *(("watch", f"tensorboard --logdir {shlex.quote(_relative(one.root_dir))}") for one in boards(trainer)),
        ]


def _monitoring(trainer: pl.Trainer) -> pl.callbacks.ModelCheckpoint | None:
    """Return the first ModelCheckpoint that follows a metric."""
    savers = (c for c in trainer.checkpoint_callbacks if isinstance(c, pl.callbacks.ModelCheckpoint))
    return next((saver for saver in savers if saver.monitor is not None), None)


def _record_privacy(loop: Any) -> list[tuple[str, str]]:
    """Return the row of the record-level privacy that clients have spent, if it is tracked."""
    if not (spent := sorted(loop.client_epsilons.values())):
        return []
    delta, middle = loop.settings.client_privacy.delta, spent[len(spent) // 2]
    return [("record privacy", f"epsilon {spent[-1]:.4g} at most, {middle:.4g} in the median, at delta {delta:g}")]


def _relative(path: str) -> str:
    """Return a path relative to the working directory if it is inside it."""
    try:
        return str(Path(path).resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):  # OSError if the working directory is gone
        return path


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
