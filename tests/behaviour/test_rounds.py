"""The guarantees of a run: identities between methods, equality with plain Lightning, exact resume."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_fed import FederatedCallback, FederatedDataModule, FederatedError
from lightning_fed.algorithms import (
    SGD,
    Algorithm,
    FedAvg,
    FedCM,
    FedDane,
    FedProx,
    Mime,
    MimeLite,
    Scaffold,
    SGDm,
)
from tests.helpers.selection import covering, few
from tests.helpers.training import QUIET, Net, classification, clients, data, fit, parameters, seeded, trainer


class RoundsOf(FederatedCallback):
    """Keep every round's server parameters and cohort."""

    def __init__(self) -> None:
        self.models: list[torch.Tensor] = []
        self.cohorts: list[tuple[Any, ...]] = []

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        self.models.append(parameters(pl_module).clone())
        self.cohorts.append(round_report.cohort)


@cache
def fedavg(decay: float) -> torch.Tensor:
    return fit(seeded(weight_decay=decay), algorithm=FedAvg(), weighting="uniform")


@pytest.mark.parametrize("decay", few([0.0, 0.01], [0.01]))
@pytest.mark.parametrize(
    "method",
    [FedProx(mu=0.0), FedCM(alpha=1.0), MimeLite(base=SGD()), MimeLite()],
    ids=["FedProx(0)", "FedCM(1)", "MimeLite(SGD)", "MimeLite"],
)
def test_neutral_settings_and_fedavg_have_identical_bits(method: Algorithm, decay: float) -> None:
    assert torch.equal(fit(seeded(weight_decay=decay), algorithm=method, weighting="uniform"), fedavg(decay))


@pytest.mark.parametrize(
    ("momentum", "extra", "precision"),
    covering(
        [0.9, 0.0],
        [{}, {"gradient_clip_val": 0.5}, {"accumulate_grad_batches": 2}],
        ["32-true", "64-true", "bf16-mixed"],
    ),
    ids=str,
)
def test_one_client_and_lightning_have_identical_bits(momentum: float, extra: dict[str, Any], precision: str) -> None:
    examples = classification(18, seed=3)
    ours, plain = (seeded(dropout=0.0, momentum=momentum, weight_decay=0.01) for _ in range(2))
    fit(
        ours, data(sizes=(18,), shuffle=False, val=examples), algorithm=FedAvg(), max_rounds=1, local_epochs=2,
        clients_per_round=1, precision=precision, **extra,
    )  # fmt: skip
    client = data(sizes=(18,)).client_dataset(0)
    pl.Trainer(**QUIET, max_epochs=2, precision=precision, **extra).fit(plain, DataLoader(client, batch_size=4))
    assert torch.equal(parameters(ours), parameters(plain))


class SaveInside(pl.Callback):
    """Write a checkpoint in the middle of a client's work."""

    def __init__(self, path: Path, round: int) -> None:
        self.path, self.round, self.seen = path, round, 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seen += trainer.current_epoch == self.round
        if self.seen == 5:
            trainer.save_checkpoint(self.path)


@pytest.mark.thorough
@pytest.mark.parametrize("method", [Scaffold(), Mime(base=SGDm())], ids=repr)
def test_mid_client_checkpoint_holds_the_last_completed_round(method: Algorithm, tmp_path: Path) -> None:
    rounds, path = RoundsOf(), tmp_path / "inside.ckpt"
    straight = fit(algorithm=method, max_rounds=4, callbacks=[rounds, SaveInside(path, round=2)])
    loaded = Net.load_from_checkpoint(path)
    assert torch.equal(parameters(loaded), rounds.models[1])
    assert torch.equal(fit(seeded(lr=0.1), algorithm=method, max_rounds=4, ckpt_path=path), straight)


class Scheduled(Net):
    """A module whose rate is halved by a step schedule and by a plateau schedule."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        halve = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=10.0)
        return [optimizer], [halve, {"scheduler": plateau, "monitor": "val_loss", "strict": False}]


@pytest.mark.thorough
@pytest.mark.parametrize(("every", "at_round_end"), covering([1, 2], [False, True]))
def test_resume_keeps_schedules(tmp_path: Path, every: int, at_round_end: bool) -> None:
    def checkpoints() -> ModelCheckpoint:
        return ModelCheckpoint(
            tmp_path, "{step}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=at_round_end
        )

    common = {"enable_checkpointing": True, "check_val_every_n_epoch": every}
    model = seeded(Scheduled)
    straight = fit(model, max_rounds=6, callbacks=checkpoints(), **common)
    resumed = fit(
        seeded(Scheduled), max_rounds=6, ckpt_path=tmp_path / "step=4.ckpt", **{**common, "enable_checkpointing": False}
    )
    assert torch.equal(resumed, straight)


class SaveIn(FederatedCallback):
    """Write checkpoints in one of the hooks that end a round."""

    def __init__(self, hook: str, folder: Path, weights_only: bool = False) -> None:
        def save(trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(folder / f"{trainer.fit_loop.round}.ckpt", weights_only=weights_only)

        setattr(self, hook, save)


@pytest.mark.parametrize("hook", few(["on_round_end", "on_validation_end"], ["on_validation_end"]))
def test_checkpoint_before_plateau_schedule_steps_is_rejected(hook: str, tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match=r"before ReduceLROnPlateau has stepped.* Save in on_train_epoch_end"):
        fit(seeded(Scheduled), callbacks=SaveIn(hook, tmp_path), num_sanity_val_steps=0)
    assert not list(tmp_path.iterdir())
    fit(seeded(Scheduled), callbacks=SaveIn(hook, tmp_path, weights_only=True), num_sanity_val_steps=0)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("module", "hook"), [(Scheduled, "on_train_epoch_end"), (Scheduled, "on_round_start"), (Net, "on_round_end")]
)
def test_run_resumes_exactly_from_callback_checkpoints(module: Any, hook: str, tmp_path: Path) -> None:
    straight = fit(seeded(module), max_rounds=5, callbacks=SaveIn(hook, tmp_path))
    assert torch.equal(fit(seeded(module), max_rounds=5, ckpt_path=tmp_path / "2.ckpt"), straight)


def test_finished_trainer_continues_when_max_rounds_grows() -> None:
    straight = fit(seeded(Scheduled), algorithm=Scaffold(), max_rounds=6)
    model, run = seeded(Scheduled), trainer(algorithm=Scaffold(), max_rounds=3)
    run.fit(model, data())
    with pytest.warns(UserWarning, match="nothing to do: 3 rounds are done and max_rounds=3"):
        run.fit(model, data())
    run.max_rounds = 6
    run.fit(model, data())
    assert torch.equal(parameters(model), straight)
    run.max_rounds = 7
    with pytest.raises(FederatedError, match="already run 6 rounds on another model"):
        run.fit(seeded(Scheduled), data())


def test_plain_lightning_checkpoint_sets_the_initial_model(tmp_path: Path) -> None:
    plain = seeded(lr=0.3, momentum=0.9)
    ordinary = pl.Trainer(**QUIET, max_epochs=7)
    ordinary.fit(plain, DataLoader(classification(20, 5), batch_size=4))
    rounds = RoundsOf()
    for weights_only in (False, True):
        path = tmp_path / f"plain{weights_only}.ckpt"
        ordinary.save_checkpoint(path, weights_only=weights_only)
        rounds.models.clear()
        model = Net()
        started = fit(model, max_rounds=2, callbacks=rounds, ckpt_path=path)
        reference = seeded()
        reference.load_state_dict(plain.state_dict())
        assert len(rounds.models) == 2
        assert torch.equal(started, fit(reference, max_rounds=2))


@pytest.mark.thorough
def test_best_checkpoint_loads_with_plain_lightning(tmp_path: Path) -> None:
    rounds = RoundsOf()
    keep = ModelCheckpoint(tmp_path, monitor="val_loss", save_last=True)
    run = trainer(max_rounds=4, callbacks=[rounds, keep], enable_checkpointing=True, algorithm=Scaffold())
    run.fit(seeded(), data())
    best = parameters(Net.load_from_checkpoint(keep.best_model_path))
    assert any(torch.equal(best, model) for model in rounds.models)
    assert torch.equal(parameters(Net.load_from_checkpoint(keep.last_model_path)), rounds.models[-1])
    plain = pl.Trainer(**QUIET)
    (metrics,) = plain.validate(Net(), data().val_dataloader(), ckpt_path=keep.best_model_path, verbose=False)
    assert metrics["val_loss"] == pytest.approx(float(keep.best_model_score))


def test_checkpoint_of_another_run_is_rejected(tmp_path: Path) -> None:
    run = trainer(algorithm=Scaffold(), max_rounds=1)
    run.fit(seeded(), data())
    run.save_checkpoint(tmp_path / "a.ckpt")
    changes: dict[str, dict[str, Any]] = {
        "method is 'Scaffold', this run's is 'FedProx'": {"algorithm": FedProx(mu=0.1)},
        "method options": {"algorithm": Scaffold(option="i")},
        "seed is 0, this run's is 5": {"seed": 5},
    }
    for message, change in changes.items():
        with pytest.raises(FederatedError, match=message):
            fit(seeded(), **{"algorithm": Scaffold(), "max_rounds": 6, **change}, ckpt_path=tmp_path / "a.ckpt")
    with pytest.raises(FederatedError, match="client list is 6, this run's is 5"):
        fit(seeded(), data(sizes=(4,) * 5), algorithm=Scaffold(), max_rounds=6, ckpt_path=tmp_path / "a.ckpt")


def test_seed_determines_the_run() -> None:
    torch.manual_seed(1)
    first = fit()
    torch.manual_seed(2)
    assert torch.equal(fit(), first)
    assert not torch.equal(fit(seed=1), first)
    a, b = RoundsOf(), RoundsOf()
    fit(callbacks=a, max_rounds=5)
    fit(callbacks=b, max_rounds=5, seed=1)
    assert a.cohorts != b.cohorts


def test_early_stopping_counts_rounds() -> None:
    stop = EarlyStopping("val_loss", patience=1, min_delta=100.0)
    run = trainer(max_rounds=20, callbacks=stop)
    run.fit(seeded(), data())
    assert run.fit_loop.round == 2
    assert run.current_epoch == 2


def test_fast_dev_run_is_one_round_of_n_batches_per_client() -> None:
    class Count(FederatedCallback):
        steps: dict[Any, int]

        def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
            self.steps = dict(round_report.steps)

    count = Count()
    run = trainer(fast_dev_run=2, callbacks=count, max_rounds=50)
    run.fit(seeded(), data())
    assert run.fit_loop.round == 1
    assert set(count.steps.values()) == {2}


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"local_steps": 7}, {0: 7, 1: 7, 2: 7}),
        ({"local_epochs": 2}, {0: 8, 1: 4, 2: 12}),
        ({"local_epochs": 2, "limit_train_batches": 3}, {0: 6, 1: 4, 2: 6}),
        ({"local_epochs": 2, "accumulate_grad_batches": 3}, {0: 4, 1: 2, 2: 4}),
        ({"local_steps": 3, "accumulate_grad_batches": 3}, {0: 3, 1: 3, 2: 3}),
        ({"local_epochs": 1, "limit_train_batches": 0.5}, {0: 2, 1: 1, 2: 3}),
    ],
    ids=str,
)
def test_local_work_is_measured_in_optimizer_steps(settings: dict[str, Any], steps: dict[int, int]) -> None:
    class Count(FederatedCallback):
        def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
            assert dict(round_report.steps) == steps

    fit(datamodule=data(sizes=(13, 8, 21)), callbacks=Count(), max_rounds=1, **settings)


class Accumulated(RoundsOf):
    """Also keep every round's local steps by client and its number of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[dict[Any, int]] = []
        self.batches: list[int] = []

    def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
        self.batches.append(0)

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches[-1] += 1

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        super().on_round_end(trainer, pl_module, round_report)
        self.steps.append(dict(round_report.steps))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("local", "steps", "batches"),
    [
        ({"local_steps": 4}, [{0: 4, 1: 4}] * 4, [8, 14, 14, 8]),
        ({"local_epochs": 2}, [{0: 8, 1: 6}, {0: 4, 1: 4}, {0: 4, 1: 4}, {0: 8, 1: 6}], [14, 14, 14, 14]),
    ],
    ids=["steps", "epochs"],
)
def test_scheduled_accumulation_applies_per_round_and_resumes(
    local: dict[str, int], steps: list[dict[int, int]], batches: list[int], tmp_path: Path
) -> None:
    def run(rounds: int, **options: Any) -> Accumulated:
        seen, schedule = Accumulated(), GradientAccumulationScheduler({0: 1, 1: 2, 3: 1})
        options = {"callbacks": [schedule, seen], "clients_per_round": 1.0, "max_rounds": rounds, **local, **options}
        ckpt_path = options.pop("ckpt_path", None)
        trained = trainer(**options)
        trained.fit(seeded(), data(sizes=(16, 12)), ckpt_path=ckpt_path)
        trained.save_checkpoint(tmp_path / f"{rounds}.ckpt")
        return seen

    straight = run(4)
    assert straight.steps == steps
    assert straight.batches == batches
    run(2)
    resumed = run(4, ckpt_path=tmp_path / "2.ckpt")
    assert resumed.steps == steps[2:]
    assert torch.equal(torch.stack(resumed.models), torch.stack(straight.models[2:]))


def test_state_of_a_finished_checkpoint_is_kept(tmp_path: Path) -> None:
    run = trainer(algorithm=Scaffold(), max_rounds=3)
    run.fit(seeded(), data())
    run.save_checkpoint(tmp_path / "a.ckpt")
    again = trainer(algorithm=Scaffold(), max_rounds=3)
    with pytest.warns(UserWarning, match="nothing to do"):
        again.fit(Net(), data(), ckpt_path=tmp_path / "a.ckpt")
    again.save_checkpoint(tmp_path / "b.ckpt")
    straight = fit(algorithm=Scaffold(), max_rounds=5)
    assert torch.equal(fit(Net(), algorithm=Scaffold(), max_rounds=5, ckpt_path=tmp_path / "b.ckpt"), straight)


@pytest.mark.thorough
def test_run_continues_after_an_exception() -> None:
    class Breaks(pl.Callback):
        broken = False

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.current_epoch == 3 and not self.broken:
                self.broken = True
                raise RuntimeError("a cable")

    straight = fit(seeded(Scheduled), algorithm=Scaffold(), max_rounds=6)
    model, run = seeded(Scheduled), trainer(algorithm=Scaffold(), max_rounds=6, callbacks=Breaks())
    with pytest.raises(FederatedError, match="a cable"):
        run.fit(model, data())
    run.fit(model, data())
    assert torch.equal(parameters(model), straight)


def test_numpy_client_ids_are_saved_as_plain_strings(tmp_path: Path) -> None:
    names = np.array(["ann", "ben", "cas"])
    run = trainer(algorithm=Scaffold())
    run.fit(seeded(), FederatedDataModule(clients=dict(zip(names, clients()[:3], strict=True)), batch_size=4))
    run.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert saved["loops"]["fit_loop"]["state_dict"]["clients"] == ["ann", "ben", "cas"]


def test_round_with_empty_gradient_cohort_is_skipped() -> None:
    def gradients(seed: int, round: int) -> list[int]:
        return [] if round == 1 else [0, 4]

    class Cohorts(RoundsOf):
        def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
            super().on_round_end(trainer, pl_module, round_report)
            assert len(round_report.cohort) + len(round_report.dropped) == 3

    rounds = Cohorts()
    fit(algorithm=FedDane(mu=0.1), gradient_sampler=gradients, callbacks=rounds, max_rounds=3)
    assert [len(cohort) for cohort in rounds.cohorts] == [3, 0, 3]
    assert torch.equal(rounds.models[1], rounds.models[0])
    assert not torch.equal(rounds.models[2], rounds.models[1])
