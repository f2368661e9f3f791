"""Run a configuration of ``lightning-fed fit`` for a few rounds at several step sizes, without keeping any files."""

import json
import math
import tempfile
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_fed import callbacks
from lightning_fed.callbacks.measures import WeightedMeasure, Weighting
from lightning_fed.checkpoints.folders import best_of_newest_run, check_exists, last_of_newest_run
from lightning_fed.cli.configuration import CellParts
from lightning_fed.compat.package import pl
from lightning_fed.core.errors import FederatedError, refusal_in
from lightning_fed.core.rounds import RoundReport
from lightning_fed.core.types import ClientId
from lightning_fed.data.files.stored import StoredDataModule
from lightning_fed.lab.configurations import UNUSED, Configurations
from lightning_fed.lab.diagnosis.measurement import Measured, mean_gradient, measure, stepping
from lightning_fed.lab.overlays import Config, overlay
from lightning_fed.lab.workers import quietly
from lightning_fed.lab.yaml_files import read_yaml, unknown
from lightning_fed.settings.lightning_arguments import arguments_of_environment
from lightning_fed.settings.settings import Settings
from lightning_fed.trainer.trainer import FederatedTrainer

FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0)

PARTS = ("seed_everything", "trainer", "model", "data", "optimizer", "lr_scheduler")
"""The parts of a configuration."""

_WATCHERS = ("Checkpoint", "EarlyStopping", "ProgressBar", "Summary", "Monitor", "Timer", *callbacks.__all__)
_PLAIN: Config = {  # one process, no validation, and no limit but the rounds
    "strategy": "auto", "devices": 1, "num_nodes": 1, "limit_val_batches": 0, "fast_dev_run": False,
    "max_steps": -1, "max_time": None, "min_epochs": None, "min_steps": None, "profiler": None,
    "client_states_dir": None,
}  # fmt: skip
_ENDS = ("not finite", "max_update_ratio")  # phrases in the errors after a step that is too large
_DIVERGED = 1e3  # as a multiple of the loss at the start


class Trial(WeightedMeasure):
    """A few rounds at one step size, as a callback of the fit that runs them.

    Args:
        factor: The factor on the configured step size. With 1, the clients are measured first.
        rounds: The number of rounds to run.
        clients: The largest number of clients to measure.
        hessian_clients: The number of clients whose Hessians are compared.
        weighting: The weights of clients.

    Attributes:
        rate: The step size.
        losses: The mean training loss of the clients measured, before the first round and after each.
        stopped: The reason if it ended early.
        cosine: The cosine of the angle between the change of x and the negative gradient at its start.
        cohorts: The number of clients in each round.
        steps: Their mean number of local steps in each round.
        found: The measurements.

    Raises:
        FederatedError: If a number is not positive.
    """

    def __init__(self, factor: float, rounds: int, clients: int, hessian_clients: int, weighting: Weighting) -> None:
        super().__init__(1, clients, weighting)
        self.factor, self.rounds, self.hessian_clients = factor, rounds, hessian_clients
        self.rate = self.cosine = math.nan
        self.losses: list[float] = []
        self.cohorts: list[int] = []
        self.steps: list[float] = []
        self.stopped = ""
        self.found: Measured | None = None
        self._x0 = self._downhill = torch.zeros(0)

    @property
    def change(self) -> float:
        """The change of the loss as a share of its absolute value at the start; infinite if it diverged."""
        if self.stopped or not abs(self.losses[-1]) < _DIVERGED * max(1.0, abs(self.losses[0])):
            return math.inf
        return (self.losses[-1] - self.losses[0]) / (abs(self.losses[0]) or 1.0)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measure, scale the step size, and set the number of rounds."""
        loop = trainer.fit_loop
        self.clients = min(self.clients or 1, len(loop.population))
        super().on_train_start(trainer, pl_module)
        shares = self._shares(trainer)
        if self.factor == 1:
            self.found = measure(trainer, shares, self.hessian_clients, self.weighting)
        self._x0, self._downhill = loop.state.x.clone(), -mean_gradient(trainer, loop.state.x, shares)
        trainer.max_rounds = loop.round + self.rounds
        for config in trainer.lr_scheduler_configs:
            config.strict = False  # a schedule may follow a validation metric, but trials skip validation
        _scale(stepping(trainer), self.factor)
        for schedule in (loop.state.step.scheduler, *(config.scheduler for config in trainer.lr_scheduler_configs)):
            if getattr(schedule, "optimizer", None) in (stepping(trainer), getattr(stepping(trainer), "base", None)):
                _scale_schedule(schedule, self.factor)
        self.rate = max(float(group["lr"]) for group in stepping(trainer).param_groups)
        self.losses.append(self._loss(trainer))

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round_report: RoundReport) -> None:
        """Record the cosine, the loss, and the work of the cohort."""
        way = trainer.fit_loop.state.x - self._x0
        self.cosine = float(torch.nn.functional.cosine_similarity(way, self._downhill, dim=0))
        self.losses.append(self._loss(trainer))
        if round_report.cohort:
            self.cohorts.append(len(round_report.cohort))
            self.steps.append(sum(round_report.steps.values()) / len(round_report.cohort))

    def _shares(self, trainer: pl.Trainer) -> dict[ClientId, float]:
        weights = {i: self.weight(trainer, i) for i in self.measured}
        total = sum(weights.values())
        return {i: weight / total for i, weight in weights.items()}

    def _loss(self, trainer: pl.Trainer) -> float:
        shares = self._shares(trainer)
        return sum(shares[i] * loss for i, loss in trainer.fit_loop.training_losses(list(shares)).items())


def _scale(optimizer: Optimizer, factor: float) -> None:
    """Multiply the rates of an optimizer, including those that its schedules read."""
    for group in optimizer.param_groups:
        group.update({name: group[name] * factor for name in ("lr", "initial_lr", "max_lr", "min_lr") if name in group})


def _scale_schedule(schedule: Any, factor: float) -> None:
    if hasattr(schedule, "base_lrs"):
        schedule.base_lrs = [rate * factor for rate in schedule.base_lrs]
    for inner in getattr(schedule, "_schedulers", ()):
        _scale_schedule(inner, factor)


def read_config(paths: Sequence[str], overrides: Sequence[str] = ()) -> tuple[Config, list[str]]:
    """Return stacked configurations in the form that trials run, and the names of the removed callbacks.

    Args:
        paths: The files. Each overrides the previous ones.
        overrides: The overrides of the command line, as for ``lightning-fed fit``.

    Raises:
        FederatedError: If a file cannot be read, or the trainer, model or data cannot be instantiated.
    """
    for path in paths:
        for name in read_yaml(Path(path)).keys() - {*PARTS, *UNUSED}:
            raise unknown(path, "key of a configuration", name, PARTS)
    configurations, name = Configurations(of_saved=True), " ".join([*paths, *overrides])
    environment = arguments_of_environment(signature(FederatedTrainer.__init__).parameters)
    words = [f"--trainer.{key}={json.dumps(value, default=str)}" for key, value in environment.items()]
    words += [word for path in paths for word in ("--config", path)]
    config, left_out = _for_trials(configurations.complete(name, {}, [*words, *overrides]))  # as a fit reads them
    configurations.check(name, config)
    return config, left_out


def _for_trials(config: Config) -> tuple[Config, list[str]]:
    """Return a configuration without callbacks that only monitor or stop a run, and their names."""
    given = (config.get("trainer") or {}).get("callbacks") or []
    given = given if isinstance(given, list) else [given]
    names = [str(one.get("class_path") if isinstance(one, dict) else one).rpartition(".")[2] for one in given]
    kept = [one for one, name in zip(given, names, strict=True) if not name.endswith(_WATCHERS)]
    left_out = [name for name in names if name.endswith(_WATCHERS)]
    if not isinstance(config.get("seed_everything"), int) or isinstance(config["seed_everything"], bool):
        config["seed_everything"] = 0  # all trials start from one model
    return overlay(config, {"trainer": {**_PLAIN, "callbacks": kept}}), left_out


class Trials:
    """Run a configuration at several step sizes, always with the same cohorts and batches.

    Args:
        config: The configuration, from :func:`read_config`.
        ckpt_path: The checkpoint to start from: a path, "last" or "best" of the newest run; None for the initial
            model.
        rounds: The number of rounds of a trial.
        clients: The largest number of clients to measure.
        hessian_clients: The number of clients whose Hessians are compared.

    Attributes:
        trials: The trials, in the order of their factors.
        measured: The measurements.
        settings: The settings of the rounds.
        rounds_left: The remaining rounds of the run, or all if it is finished; None if there is no limit.
        data: The data module.

    Raises:
        FederatedError: If the configuration cannot be run, or nothing can be measured.
    """

    settings: Settings
    rounds_left: int | None = None
    data: pl.LightningDataModule | None = None

    def __init__(self, config: Config, ckpt_path: str | None, rounds: int, clients: int, hessian_clients: int) -> None:
        self._sizes = (rounds, clients, hessian_clients)
        with tempfile.TemporaryDirectory() as folder, quietly():
            self._ckpt_path = _newest(config, ckpt_path) if ckpt_path in ("last", "best") else ckpt_path
            config = overlay(config, {"trainer.default_root_dir": folder})
            self.trials = [self._run(config, factor) for factor in FACTORS]
        self.measured = next(trial.found for trial in self.trials if trial.found is not None)

    def _run(self, config: Config, factor: float) -> Trial:
        parts = CellParts(config)
        trainer = parts.trainer
        assert isinstance(trainer, FederatedTrainer)
        self._make_room(trainer)
        self.settings = trainer.fit_loop.settings
        if self.settings.is_private or self.settings.client_privacy is not None:
            name = "aggregator" if self.settings.is_private else "client_privacy"
            raise FederatedError(
                f"A diagnosis measures single clients, which {name}={getattr(self.settings, name)!r} is there to hide."
                " Diagnose the configuration without it, on data that may be looked at."
            )
        if not isinstance(self.data, StoredDataModule):  # reuse stored data: they are the same in every fit
            self.data = parts.datamodule
        trial = Trial(factor, *self._sizes, "examples" if self.settings.weighting == "examples" else "uniform")
        trainer.callbacks.append(trial)
        try:
            trainer.fit(parts.model, self.data, ckpt_path=self._ckpt_path)
        except Exception as error:
            if not trial.losses or not any(words in str(refusal_in(error)) for words in _ENDS):
                raise
            trial.stopped = str(refusal_in(error))
        return trial

    def _make_room(self, trainer: FederatedTrainer) -> None:
        """Raise ``max_rounds`` so that a finished run can continue."""
        reached = 0
        if self._ckpt_path is not None:
            check_exists(trainer, self._ckpt_path)
            saved = trainer.strategy.checkpoint_io.load_checkpoint(self._ckpt_path).get("loops") or {}
            reached = int(saved.get("fit_loop", {}).get("state_dict", {}).get("round", 0))
        planned = trainer.max_rounds
        self.rounds_left = None if planned is None or planned < 0 else max(0, planned - reached) or planned
        if planned is not None and 0 <= planned < reached + self._sizes[0]:
            trainer.max_rounds = reached + self._sizes[0]


def _newest(config: Config, which: str) -> str:
    trainer = CellParts(config).trainer
    found = best_of_newest_run(trainer) if which == "best" else last_of_newest_run(trainer)
    if found is None:
        raise FederatedError(f"--ckpt_path {which} found no checkpoint under {trainer.default_root_dir}.")
    return found
