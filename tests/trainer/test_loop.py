"""The loop of rounds: its epochs and steps, its end, and the changes that a round's hooks may make."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import GradientAccumulationScheduler

from lightning_fed import FederatedCallback, FederatedError, FederatedTrainer
from tests.helpers.processes import in_processes
from tests.helpers.training import QUIET, Net, data, fit, parameters, seeded, trainer


class Seen(FederatedCallback):
    """Keeps the batches of local steps, and the numbers of steps."""

    def __init__(self) -> None:
        self.batches: list[torch.Tensor] = []
        self.steps: list[dict[Any, int]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch[0])

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        self.steps.append(dict(round_report.steps))


def test_gradient_accumulation_follows_a_round_schedule() -> None:
    seen = Seen()
    schedule = GradientAccumulationScheduler({0: 1, 1: 4})
    fit(datamodule=data(sizes=(16,)), callbacks=[seen, schedule], clients_per_round=1, max_rounds=2)
    assert seen.steps == [{0: 4}, {0: 1}]


def test_epoch_and_step_equal_completed_rounds_during_a_round() -> None:
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


def test_max_epochs_is_an_alias_of_max_rounds() -> None:
    run = FederatedTrainer(**QUIET, local_epochs=1, max_epochs=2)
    run.fit(seeded(), data())
    assert run.fit_loop.round == 2


def test_min_epochs_delays_a_stop_request() -> None:
    class Stop(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.should_stop = True

    run = trainer(callbacks=Stop(), min_epochs=3, max_rounds=9)
    run.fit(seeded(), data())
    assert run.fit_loop.round == 3


@pytest.mark.thorough
def test_clipping_enabled_by_a_callback_is_applied() -> None:
    class TurnOn(pl.Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.gradient_clip_val = 0.05

    assert torch.equal(fit(callbacks=TurnOn()), fit(gradient_clip_val=0.05))
    assert not torch.equal(fit(callbacks=TurnOn()), fit())


def test_max_steps_ends_the_run_after_the_current_round(caplog: pytest.LogCaptureFixture) -> None:
    seen = Seen()
    run = trainer(callbacks=seen, max_steps=10, max_rounds=9)
    with caplog.at_level("INFO"):
        run.fit(seeded(), data())
    taken = [sum(steps.values()) for steps in seen.steps]
    assert sum(taken[:-1]) < 10 <= sum(taken) == run.fit_loop.steps_taken
    assert "`Trainer.fit` stopped: `max_steps=10` reached." in caplog.text
    with pytest.warns(
        UserWarning, match=r"nothing to do: \d rounds are done and max_steps=10. Raise max_steps to continue"
    ):
        run.fit(run.lightning_module, data())


def test_round_hooks_run_inside_lightning_epoch_hooks() -> None:
    names = ["on_train_epoch_start", "on_round_start", "on_client_start", "on_client_end", "on_round_end"]
    names += ["on_validation_end", "on_train_epoch_end"]

    class Order(FederatedCallback):
        def __init__(self) -> None:
            self.called: list[str] = []
            for name in names:
                setattr(self, name, lambda *_, name=name: self.called.append(name))

    order = Order()
    fit(callbacks=order, max_rounds=2, num_sanity_val_steps=0)
    of_a_round = [*names[:2], *names[2:4] * 3, *names[4:]]
    assert order.called == of_a_round * 2


def test_reading_the_run_state_before_fit_raises() -> None:
    run = trainer()
    for ask in (lambda: run.fit_loop.state, lambda: run.fit_loop.server, lambda: run.fit_loop.round_state):
        with pytest.raises(FederatedError, match=r"There is no server state before trainer.fit\(\)"):
            ask()
    with pytest.raises(FederatedError, match="fit_loop.arrived is of asynchronous runs"):
        run.fit_loop.arrived  # noqa: B018
    assert run.fit_loop.round == 0
    assert (run.fit_loop.population, run.fit_loop.clients, run.fit_loop.epsilon) == (None, None, None)


def test_client_progress_is_visible_only_during_its_hooks() -> None:
    class Look(FederatedCallback):
        steps: list[int]

        def on_client_start(self, trainer: Any, pl_module: Any, round: int, client_id: Any) -> None:
            self.steps = []

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.steps.append(trainer.fit_loop.local_steps)
            assert torch.equal(trainer.fit_loop.client_model[0], parameters(trainer.lightning_module))

        def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
            assert self.steps == list(range(1, client_report.steps + 1))

    run = trainer(callbacks=Look(), max_rounds=1)
    run.fit(seeded(), data())
    assert run.fit_loop.client_model is None
    assert run.fit_loop.local_steps == 0


class Collects(Net):
    """Collects numbers during training, as modules ported from Lightning 1 do."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.examples = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.examples += len(batch[0])
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("own", self.examples)
        self.log("everyones", self.examples, sync_dist=True, reduce_fx="sum")
        self.log("round", float(self.trainer.fit_loop.round))
        self.log("not_a_number", torch.nan)
        self.examples = 0.0


def collected(**options: Any) -> tuple[dict[str, float], list[str]]:
    run = trainer(clients_per_round=6, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(seeded(Collects), data())
    told = [str(warning.message) for warning in caught if "A hook of the round logs" in str(warning.message)]
    return {name: float(run.callback_metrics[name]) for name in ("own", "everyones")}, told


@pytest.mark.thorough
def test_values_collected_per_process_are_reduced_or_warn(tmp_path: Path) -> None:
    examples = float(sum((13, 8, 21, 5, 16, 9)))
    assert collected() == ({"own": examples, "everyones": examples}, [])
    outcomes = in_processes(lambda: collected(devices=2, strategy="clients"), tmp_path)
    assert not any(outcome.error for outcome in outcomes)
    (first, told), (second, _) = (outcome.value for outcome in outcomes)
    assert first["everyones"] == second["everyones"] == first["own"] + second["own"] == examples
    assert len(told) == 1  # once in three rounds
    assert told[0].startswith("A hook of the round logs 'own' with another value in each process")
