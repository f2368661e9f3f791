"""The loop of one client's local epochs: its batches, and the losses of its steps."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import Callback, GradientAccumulationScheduler, LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.plugins.precision import MixedPrecision
from torch import Tensor

from lightning_fed import FederatedCallback
from lightning_fed.algorithms import Algorithm, FedSAM, Mime, Scaffold
from lightning_fed.core.errors import FederatedError
from lightning_fed.engines.sequential.local_loop import ClientFetcher
from lightning_fed.engines.sequential.readings import ClientNumbers
from tests.helpers.engines import Ordinary, Record, assert_close, run, state_of
from tests.helpers.training import Net, data, fit, seeded, trainer


def test_fetcher_yields_batches_of_each_local_epoch_in_order() -> None:
    fetcher = ClientFetcher()
    for batches in ([("a", 4), ("b", 4), ("c", 1)], [("d", 2)]):
        fetcher.bind(iter(batches), len(batches))
        found = []
        for batch, index, loader in iter(fetcher):
            found.append((batch, fetcher.examples))
            assert (index, loader) == (len(found) - 1, 0)
            assert fetcher.done == (len(found) == len(batches))
        assert found == batches
    fetcher.bind(iter(()), 0)
    assert fetcher.done
    with pytest.raises(StopIteration):
        next(fetcher)


class Losses(FederatedCallback):
    """Keeps the losses of each client's steps, and its report."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[float], Any]] = []

    def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
        loop, accumulated = trainer.fit_loop.epoch_loop, trainer.accumulate_grad_batches
        self.seen.append(
            (ClientNumbers(loop._losses, loop._loss_weights, {}, accumulated).step_losses(), client_report)
        )


@pytest.mark.parametrize("accumulated", [1, 2])
def test_local_step_loss_covers_its_accumulated_batches(accumulated: int) -> None:
    losses = Losses()
    run("sequential", max_rounds=1, callbacks=losses, accumulate_grad_batches=accumulated)
    for steps, report in losses.seen:
        batches = -(-report.size // 4)
        assert len(steps) == report.steps == -(-batches // accumulated)
    whole = [report for _, report in losses.seen if report.size % (4 * accumulated) == 0]
    assert whole, "a client whose batches are all full"
    for steps, report in losses.seen:
        if report in whole:
            assert report.loss == pytest.approx(sum(steps) / len(steps), rel=1e-12)


class Skips(Ordinary):
    """Ends each local epoch before its third batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


def test_hook_can_skip_the_rest_of_a_local_epoch() -> None:
    losses = Losses()
    run("sequential", Skips, max_rounds=1, local_epochs=2, callbacks=losses)
    for steps, report in losses.seen:
        assert len(steps) == report.steps == 2 * min(2, -(-report.size // 4))


class Sometimes(Ordinary):
    """Returns no loss for the first batch of a local epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return super().training_step(batch, batch_idx) if batch_idx else None


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_batch_without_a_loss_is_not_a_local_step() -> None:
    losses = Losses()
    run("sequential", Sometimes, max_rounds=1, callbacks=losses)
    for steps, report in losses.seen:
        assert len(steps) == report.steps == -(-report.size // 4) - 1 > 0


RHO, LR = 0.2, 0.1


class Scaled(MixedPrecision):
    """Half precision with a gradient scaler, which Lightning provides only on a GPU."""

    def __init__(self, scale: float) -> None:
        super().__init__("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000))


@pytest.mark.thorough
def test_half_precision_works_with_a_gradient_scaler() -> None:
    class Count(FederatedCallback):
        steps: int = 0

        def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
            self.steps += sum(round_report.steps.values())

    plain, small, large = Count(), Count(), Count()
    reference = fit(seeded(dropout=0.0), algorithm=FedSAM(RHO), callbacks=plain)
    close = fit(seeded(dropout=0.0), algorithm=FedSAM(RHO), plugins=Scaled(2.0**8), callbacks=small)
    torch.testing.assert_close(close, reference, rtol=2e-2, atol=2e-3)
    assert small.steps == plain.steps
    skipping = fit(seeded(dropout=0.0), algorithm=FedSAM(RHO), plugins=Scaled(2.0**24), callbacks=large)
    assert torch.isfinite(skipping).all()
    assert 0 < large.steps < plain.steps


class Accumulates(FederatedCallback):
    def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
        trainer.accumulate_grad_batches = 2


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "accumulation": (
        lambda: {"accumulate_grad_batches": 2},
        "accumulate_grad_batches=2 cannot be combined with FedSAM",
    ),
    "scheduled": (
        lambda: {"callbacks": GradientAccumulationScheduler({1: 2})},
        "GradientAccumulationScheduler cannot be combined with FedSAM",
    ),
    "from a callback": (lambda: {"callbacks": Accumulates()}, "A callback has set accumulate_grad_batches=2"),
    "clipping": (lambda: {"gradient_clip_val": 1.0}, "gradient_clip_val=1.0 would clip the first gradient of FedSAM"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_make_the_first_gradient_ambiguous_are_rejected(name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(FederatedError, match=message):
        trainer(algorithm=FedSAM(RHO), engine="sequential", **options()).fit(Net(), data())


def test_second_gradient_point_of_another_shape_is_rejected() -> None:
    class Short(FedSAM):
        def second_gradient_at(self, g: Tensor, y: Tensor, step: Any) -> Tensor:
            return y[:2]

    with pytest.raises(FederatedError, match=r"Short.second_gradient_at\(\) must return a point.*found shape \(2,\)"):
        trainer(algorithm=Short(RHO)).fit(Net(), data())


def ends_of(algorithm: Algorithm, accumulated: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return the final state and the clients' mean losses, with four examples per step."""
    record = Record()
    t = run(
        "sequential",
        datamodule=lambda: data((12, 8, 16, 4), batch_size=4 // accumulated),
        algorithm=algorithm,
        accumulate_grad_batches=accumulated,
        callbacks=[record],
    )
    return state_of(t), [report.loss for report in record.reports]


@pytest.mark.thorough
def test_second_gradients_and_losses_cover_the_whole_batch() -> None:
    for algorithm in (Mime(), Scaffold()):
        (whole, losses), (parts, of_parts) = (ends_of(algorithm, accumulated) for accumulated in (1, 2))
        assert_close(parts, whole)
        torch.testing.assert_close(torch.tensor(of_parts), torch.tensor(losses), rtol=1e-6, atol=1e-9)


class Anneals(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + self.global_step)


class WarmsUp(Ordinary):
    def optimizer_step(self, *args: Any) -> None:
        for group in self.optimizers().param_groups:
            group["lr"] = 0.01 * (1 + self.trainer.global_step)
        super().optimizer_step(*args)


class DecaysMore(Ordinary):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.01 * (1 + self.global_step)


class SlowsDown(Ordinary):
    momentum = 0.9

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.momentum = 1 - 0.1 / (1 + self.trainer.global_step)


class HasOwnHook(Ordinary):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


class ReadsInCallback(Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        assert trainer.global_step == trainer.current_epoch


class ReadsElsewhere(Ordinary):
    def on_train_epoch_start(self) -> None:
        assert self.global_step == self.current_epoch

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("rounds", float(self.global_step))


@pytest.mark.parametrize(
    ("module", "engine"),
    [
        (Anneals, "sequential"),
        (WarmsUp, "sequential"),
        (DecaysMore, "sequential"),
        (SlowsDown, "sequential"),
        pytest.param(Anneals, "vectorized", marks=pytest.mark.thorough),
    ],
)
def test_step_that_reads_global_step_warns_once(module: Any, engine: str) -> None:
    with pytest.warns(UserWarning, match=rf"{module.__name__}\.\w+ reads global_step") as told:
        run(engine, module, max_rounds=2)
    assert len([one for one in told if "global_step" in str(one.message)]) == 1


STARTS: list[int] = []


class StartsOnce(Ordinary):
    """Fails if its first step is repeated, as the trial steps that look for reads of old attributes do."""

    def __init__(self) -> None:
        super().__init__()
        self.kind: str | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.kind is None:
            assert not STARTS
            STARTS.append(batch_idx)
            self.kind = "started"
        return super().training_step(batch, batch_idx)


def test_callbacks_can_read_global_step_after_a_failed_trial_step(tmp_path: Path) -> None:
    STARTS.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*reads global_step")
        run("sequential", StartsOnce, callbacks=[ModelCheckpoint(dirpath=tmp_path)], enable_checkpointing=True)


def test_round_hooks_and_callbacks_can_read_global_step(tmp_path: Path) -> None:
    callbacks = [ModelCheckpoint(dirpath=tmp_path), LearningRateMonitor()]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*reads global_step")
        logger = CSVLogger(tmp_path)
        run("sequential", ReadsElsewhere, callbacks=callbacks, logger=logger, enable_checkpointing=True)
        run("sequential", HasOwnHook, callbacks=ReadsInCallback())
