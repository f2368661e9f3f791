"""Trainer arguments mean what a Lightning user expects, counted in rounds."""

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import GradientAccumulationScheduler, ModelCheckpoint

from lightning_fed import FederatedCallback, FederatedTrainer
from lightning_fed.algorithms import FedAvg, Scaffold
from tests.helpers.training import QUIET, Net, data, fit, parameters, seeded, trainer


@pytest.fixture(scope="module")
def plain() -> torch.Tensor:
    return fit()


@pytest.mark.parametrize(
    "argument",
    [
        {"deterministic": True},
        {"detect_anomaly": True},
        {"inference_mode": False},
        {"reload_dataloaders_every_n_epochs": 1},
        {"sync_batchnorm": True},
        {"limit_val_batches": 1},
        {"num_sanity_val_steps": 0},
        {"num_sanity_val_steps": -1},
        {"log_every_n_steps": 1},
        {"use_distributed_sampler": False},
        {"enable_autolog_hparams": False},
        {"min_epochs": 2},
        {"max_time": "00:01:00:00"},
    ],
    ids=str,
)
def test_arguments_that_change_no_parameter(argument: dict[str, Any], plain: torch.Tensor) -> None:
    assert torch.equal(fit(**argument), plain)


class Seen(FederatedCallback):
    """Keep what local steps were trained on, and how many there were."""

    def __init__(self) -> None:
        self.batches: list[torch.Tensor] = []
        self.steps: list[dict[Any, int]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch[0])

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        self.steps.append(dict(round_report.steps))


def test_overfit_batches_trains_on_the_same_first_batches() -> None:
    seen, datamodule = Seen(), data(sizes=(13,))
    fit(datamodule=datamodule, callbacks=seen, clients_per_round=1, overfit_batches=2, max_rounds=2)
    x = datamodule.client_dataset(0).tensors[0]
    assert len(seen.batches) == 4
    assert all(torch.equal(b, x[4 * (i % 2) : 4 * (i % 2) + 4]) for i, b in enumerate(seen.batches))


def test_accumulation_may_follow_a_schedule_of_rounds() -> None:
    seen = Seen()
    schedule = GradientAccumulationScheduler({0: 1, 1: 4})
    fit(datamodule=data(sizes=(16,)), callbacks=[seen, schedule], clients_per_round=1, max_rounds=2)
    assert seen.steps == [{0: 4}, {0: 1}]


@pytest.mark.parametrize("every", [1, 2, 3])
def test_validation_and_checkpoints_come_every_n_rounds(every: int, tmp_path: Any) -> None:
    class Validations(pl.Callback):
        rounds: list[int]

        def on_train_start(self, *_: Any) -> None:
            self.rounds = []

        def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if not trainer.sanity_checking:
                self.rounds.append(trainer.global_step)

    validations = Validations()
    keep = ModelCheckpoint(tmp_path, "{epoch}-{step}", every_n_epochs=every, save_top_k=-1)
    fit(max_rounds=6, check_val_every_n_epoch=every, callbacks=[validations, keep], enable_checkpointing=True)
    assert validations.rounds == list(range(every, 7, every))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"epoch={r - 1}-step={r}.ckpt" for r in range(every, 7, every)}


def test_during_a_round_epoch_and_step_are_the_completed_rounds() -> None:
    class Look(FederatedCallback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            assert trainer.current_epoch == trainer.global_step == trainer.fit_loop.round

        def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
            assert (trainer.current_epoch, trainer.global_step) == (round_report.round, round_report.round + 1)

    run = trainer(callbacks=Look(), max_rounds=3)
    run.fit(seeded(), data())
    assert (run.current_epoch, run.global_step, run.max_rounds) == (3, 3, 3)


def test_zero_rounds_and_zero_batches_change_nothing() -> None:
    for argument in ({"max_rounds": 0}, {"limit_train_batches": 0}):
        model = seeded()
        before = parameters(model).clone()
        run = trainer(**argument)
        run.fit(model, data())
        assert torch.equal(parameters(model), before)
        assert run.fit_loop.round == 0


def test_max_epochs_is_another_name_for_max_rounds() -> None:
    run = FederatedTrainer(**QUIET, local_epochs=1, max_epochs=2)
    run.fit(seeded(), data())
    assert run.fit_loop.round == 2


def test_min_epochs_holds_off_a_request_to_stop() -> None:
    class Stop(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.should_stop = True

    run = trainer(callbacks=Stop(), min_epochs=3, max_rounds=9)
    run.fit(seeded(), data())
    assert run.fit_loop.round == 3


def test_test_and_predict_use_the_server_model() -> None:
    class Staged(Net):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.validation_step(batch, batch_idx)

    model, datamodule = seeded(Staged), data()
    datamodule.test = datamodule.val
    run = trainer(algorithm=Scaffold(), max_rounds=2)
    run.fit(model, datamodule)
    (tested,) = run.test(model, datamodule, verbose=False)
    assert tested["val_loss"] == pytest.approx(float(run.callback_metrics["val_loss"]))


def test_the_model_and_the_data_module_by_keyword() -> None:
    run, model = trainer(algorithm=FedAvg()), seeded()
    run.fit(model=model, datamodule=data())
    assert torch.equal(parameters(model), fit(algorithm=FedAvg()))


def test_the_parameters_are_the_models_own_again_after_a_fit() -> None:
    model = seeded()
    fit(model)
    assert all(p.untyped_storage().size() == p.numel() * p.element_size() for p in model.parameters())
    again = pl.Trainer(**QUIET, max_epochs=1)
    again.fit(model, torch.utils.data.DataLoader(data().client_dataset(0), batch_size=4))


def test_clipping_that_a_callback_turns_on_is_not_passed_over() -> None:
    class TurnOn(pl.Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.gradient_clip_val = 0.05

    assert torch.equal(fit(callbacks=TurnOn()), fit(gradient_clip_val=0.05))
    assert not torch.equal(fit(callbacks=TurnOn()), fit())
