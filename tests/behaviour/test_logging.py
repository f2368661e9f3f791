"""The values that loggers and callbacks receive: counted in rounds, under the user's own names."""

import csv
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LearningRateMonitor
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from lightning_fed import FederatedCallback
from lightning_fed.algorithms import FedAvg, Mime, Scaffold, SGDm
from lightning_fed.core.rounds import ClientReport, RoundReport
from tests.helpers.training import Net, data, fit, seeded, trainer


def rows(logger: CSVLogger) -> list[dict[str, str]]:
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def column(logger: CSVLogger, name: str) -> dict[int, float]:
    return {int(row["step"]): float(row[name]) for row in rows(logger) if row.get(name)}


class Noisy(Net):
    """Logs a different number for each batch, and records the logged values."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.seen: list[list[tuple[float, int]]] = []

    def on_train_epoch_start(self) -> None:
        self.seen.append([])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("mine", batch[0].sum())
        self.log("largest", batch[0].max(), reduce_fx="max")
        if torch.is_grad_enabled():
            self.seen[-1].append((float(batch[0].sum()), len(batch[0])))
        return loss


def test_training_metrics_are_example_weighted_means_per_round(tmp_path: Path) -> None:
    logger, model = CSVLogger(tmp_path), seeded(Noisy)
    fit(model, logger=logger, max_rounds=3)
    logged = column(logger, "mine")
    assert sorted(logged) == [1, 2, 3]
    for step, seen in enumerate(model.seen, start=1):
        assert logged[step] == pytest.approx(sum(v * n for v, n in seen) / sum(n for _, n in seen), rel=1e-5)
    assert sorted(column(logger, "largest")) == [1, 2, 3]


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_positional_batch_size_equals_keyword_batch_size(engine: str) -> None:
    class Weighted(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            value, size = batch[0].square().mean(), 1 + batch_idx
            self.log("by_name", value, batch_size=size)
            self.log("by_position", value, False, True, False, True, "mean", False, False, None, True, size)
            return super().training_step(batch, batch_idx)

    run = trainer(engine=engine, max_rounds=1)
    run.fit(seeded(Weighted, dropout=0.0), data())
    logged = run.callback_metrics
    assert logged["by_position"] == logged["by_name"]


@pytest.mark.parametrize("method", [Mime(base=SGDm()), Scaffold(option="i")], ids=repr)
def test_extra_gradients_log_nothing(method: Any, tmp_path: Path) -> None:
    class Writes(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.logger.experiment.log_metrics({"raw": 1.0}, step=batch_idx)
            return super().training_step(batch, batch_idx)

    logger, count = CSVLogger(tmp_path), Steps()
    fit(seeded(Writes), logger=logger, max_rounds=2, algorithm=method, callbacks=count)
    assert sum(1 for row in rows(logger) if row["raw"]) == count.steps


class Steps(FederatedCallback):
    """Count local steps and local batches."""

    def __init__(self) -> None:
        self.steps = self.batches = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: RoundReport) -> None:
        self.steps += sum(round_report.steps.values())


@pytest.mark.parametrize("method", [FedAvg(), Mime(base=SGDm()), Scaffold(option="i")], ids=repr)
def test_batch_hooks_run_once_per_local_batch(method: Any) -> None:
    count = Steps()
    fit(algorithm=method, callbacks=count)
    assert count.batches == count.steps > 0


class Reports(FederatedCallback):
    """Keep every report, and the start of every round and client."""

    def __init__(self) -> None:
        self.rounds: list[RoundReport] = []
        self.clients: list[ClientReport] = []
        self.started: list[Any] = []

    def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
        self.started.append(round)
        pl_module.log("at_start", float(round))

    def on_client_start(self, trainer: Any, pl_module: Any, round: int, client_id: Any) -> None:
        self.started.append((round, client_id))

    def on_client_end(self, trainer: Any, pl_module: Any, client_report: ClientReport) -> None:
        self.clients.append(client_report)

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: RoundReport) -> None:
        self.rounds.append(round_report)
        pl_module.log("at_end", float(len(round_report.cohort)))


def test_round_reports_match_the_run(tmp_path: Path) -> None:
    reports, logger = Reports(), CSVLogger(tmp_path)
    fit(callbacks=reports, max_rounds=2, logger=logger)
    assert [r.round for r in reports.rounds] == [0, 1]
    assert reports.started == [x for r in reports.rounds for x in (r.round, *((r.round, i) for i in r.cohort))]
    sizes = (13, 8, 21, 5, 16, 9)
    for r in reports.rounds:
        assert dict(r.sizes) == {i: sizes[i] for i in r.cohort}
        assert dict(r.steps) == {i: -(-sizes[i] // 4) for i in r.cohort}
        assert sum(r.weights.values()) == pytest.approx(1)
        assert r.weights[r.cohort[0]] == pytest.approx(sizes[r.cohort[0]] / sum(sizes[i] for i in r.cohort))
        assert r.loss == pytest.approx(r.metrics["train_loss"])
        means = [r.clients[i].metrics["train_loss"] * sizes[i] for i in r.cohort]
        assert r.loss == pytest.approx(sum(means) / sum(r.sizes.values()))
        assert 0 < r.drift < sum(c.update_norm for c in r.clients.values())
        assert isinstance(r.sizes, MappingProxyType)
        with pytest.raises(AttributeError):
            r.loss = 0.0  # type: ignore[misc]
    assert column(logger, "at_end") == {1: 3.0, 2: 3.0}
    assert column(logger, "at_start") == {1: 0.0, 2: 1.0}


def test_drift_is_the_spread_of_the_client_models() -> None:
    class Models(FederatedCallback):
        def __init__(self) -> None:
            self.models: list[torch.Tensor] = []

        def on_client_end(self, trainer: Any, pl_module: Any, client_report: ClientReport) -> None:
            self.models.append(torch.cat([p.detach().flatten().clone() for p in pl_module.parameters()]))

        def on_round_end(self, trainer: Any, pl_module: Any, round_report: RoundReport) -> None:
            w = torch.tensor([round_report.weights[i] for i in round_report.cohort])[:, None]
            y = torch.stack(self.models)
            expected = (w * (y - (w * y).sum(0)) ** 2).sum().sqrt()
            assert round_report.drift == pytest.approx(float(expected), rel=1e-4)

    fit(callbacks=Models(), max_rounds=1)


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)]


def test_learning_rate_monitor_counts_rounds(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit(seeded(Scheduled), logger=logger, callbacks=LearningRateMonitor(), max_rounds=3)
    assert column(logger, "lr-SGD") == {0: 0.1, 1: 0.05, 2: 0.025}
    logger = CSVLogger(tmp_path, "plain")
    fit(seeded(dropout=0.0), logger=logger, callbacks=LearningRateMonitor("step"), max_rounds=2, log_every_n_steps=1)
    assert [int(r["step"]) for r in rows(logger) if r["lr-SGD/pg1"]] == [0, 1]


@pytest.mark.parametrize("module", [Scheduled, Net], ids=lambda module: module.__name__)
def test_both_engines_log_the_same_rates(module: type[Net], tmp_path: Path) -> None:
    logged = []
    for engine in ("sequential", "vectorized"):
        monitor, logger = LearningRateMonitor("epoch", log_momentum=True), CSVLogger(tmp_path, engine)
        fit(seeded(module, momentum=0.5), logger=logger, callbacks=monitor, engine=engine)
        logged.append([{key: row[key] for key in row if key.startswith(("lr-", "step"))} for row in rows(logger)])
    assert logged[0] == logged[1]
    name = "lr-SGD" if module is Scheduled else "lr-SGD/pg1"
    assert [float(row[name]) for row in logged[0] if row[name]] == (
        [0.1, 0.05, 0.025] if module is Scheduled else [0.1] * 3
    )


def test_validation_metrics_belong_to_the_server_model(tmp_path: Path) -> None:
    model = seeded()
    run = trainer(max_rounds=2)
    run.fit(model, data())
    last = float(run.callback_metrics["val_loss"])
    (metrics,) = run.validate(model, data(), verbose=False)
    assert metrics["val_loss"] == pytest.approx(last)


@pytest.mark.parametrize("profiler", ["simple", None])
def test_profiler_times_steps_and_rounds(profiler: str | None, tmp_path: Path) -> None:
    reference = fit(max_rounds=1)
    run, model = trainer(profiler=profiler, max_rounds=1, default_root_dir=tmp_path), seeded()
    run.fit(model, data())
    assert torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), reference)
    if profiler:
        recorded: Mapping[str, Any] = run.profiler.recorded_durations
        assert len(recorded["run_federated_round"]) == 1
        assert len(recorded["run_training_batch"]) > 1
        assert len(recorded["[LightningModule]Net.optimizer_step"]) == len(recorded["run_training_batch"])


@pytest.mark.parametrize(
    "hook", ["on_before_zero_grad", "on_after_backward", "on_before_optimizer_step", "on_before_backward"]
)
def test_hooks_between_batch_and_step_do_not_change_the_result(hook: str) -> None:
    calls = []

    class Listens(pl.Callback):
        pass

    setattr(Listens, hook, lambda self, *args: calls.append(hook))
    count = Steps()
    assert torch.equal(fit(callbacks=[Listens(), count], max_rounds=1), fit(max_rounds=1))
    assert len(calls) == count.steps


def test_barebones_trainer_runs() -> None:
    run = trainer(barebones=True, max_rounds=2)
    model = seeded()
    run.fit(model, data())
    assert run.fit_loop.round == 2


class LogsTwice(pl.Callback):
    """Logs one name in two ways, and continues when Lightning refuses."""

    refused = False

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.log("twice", torch.tensor(1.0))
        try:
            pl_module.log("twice", torch.tensor(1.0), prog_bar=True)
        except MisconfigurationException:
            self.refused = True


def test_caught_log_error_does_not_affect_other_metrics() -> None:
    plain, caught = trainer(max_rounds=1), trainer(max_rounds=1, callbacks=LogsTwice())
    for run in (plain, caught):
        run.fit(seeded(), data())
    assert caught.callbacks[0].refused
    assert caught.callback_metrics["train_loss"] == plain.callback_metrics["train_loss"]
    assert caught.callback_metrics["twice"] == 1


@pytest.mark.parametrize("step", ["training_step", "validation_step"])
def test_logging_a_reserved_name_warns_once(step: str) -> None:
    def logs(self: Net, batch: Any, batch_idx: int) -> Any:
        self.log("client/loss", 5.0)
        return getattr(Net, step)(self, batch, batch_idx)

    clashing = type("Clashing", (Net,), {step: logs})
    with pytest.warns(UserWarning, match="the run itself logs") as caught:
        trainer(max_rounds=2, num_sanity_val_steps=1).fit(seeded(clashing), data())
    told = [str(warning.message) for warning in caught if "the run itself logs" in str(warning.message)]
    assert len(told) == 1
    assert told[0].startswith("self.log('client/loss', ...) uses the name")
