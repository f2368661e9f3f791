"""Batch hooks of modules and callbacks: their detection, and their rejection by the vectorized engine."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import (
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    Timer,
)
from pytorch_lightning.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch import Tensor

from lightning_fed import FederatedDataModule
from lightning_fed.algorithms import Algorithm, FedAvg, FedSAM, Mime, ServerOnly
from lightning_fed.engines.batch_hooks import (
    CALLBACK_STEP_HOOKS,
    STEP_HOOKS,
    has_transfer_hooks,
    overridden_hooks,
    plugin_step_hooks,
    time_by_rounds,
    uses_batch_hook,
)
from tests.helpers.engines import Ordinary, refused
from tests.helpers.training import clients, data, fit, seeded, trainer

MODULE_HOOKS: dict[str, Callable[..., Any]] = {
    "on_train_batch_start": lambda self, batch, batch_idx: None,
    "on_train_batch_end": lambda self, outputs, batch, batch_idx: None,
    "on_before_backward": lambda self, loss: None,
    "backward": lambda self, loss: loss.backward(),
    "on_after_backward": lambda self: None,
    "on_before_zero_grad": lambda self, optimizer: None,
    "optimizer_zero_grad": lambda self, epoch, batch_idx, optimizer: optimizer.zero_grad(),
    "on_before_optimizer_step": lambda self, optimizer: None,
    "optimizer_step": lambda self, epoch, batch_idx, optimizer, closure: optimizer.step(closure),
    "configure_gradient_clipping": lambda self, optimizer, gradient_clip_val, gradient_clip_algorithm: None,
}
CALLBACK_HOOKS = [
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_backward",
    "on_after_backward",
    "on_before_zero_grad",
    "on_before_optimizer_step",
]


def using(module: pl.LightningModule, *callbacks: pl.Callback, datamodule: Any = None) -> Any:
    """Return a stand-in for a trainer."""
    strategy = SingleDeviceStrategy("cpu")
    return SimpleNamespace(lightning_module=module, callbacks=list(callbacks), datamodule=datamodule, strategy=strategy)


def test_batch_hooks_of_modules_and_callbacks_are_detected() -> None:
    for hook, own in MODULE_HOOKS.items():
        hooked = type("Hooked", (Ordinary,), {hook: own})
        assert overridden_hooks(using(hooked())) == [f"Hooked.{hook}"]
    for hook in CALLBACK_HOOKS:
        callback = LambdaCallback(**{hook: lambda *_: None})
        assert overridden_hooks(using(Ordinary(), callback)) == [f"LambdaCallback.{hook}"]
    assert overridden_hooks(using(Ordinary(), pl.Callback(), ModelCheckpoint(), Timer(interval="epoch"))) == []
    assert {*STEP_HOOKS, "on_train_batch_start", "on_train_batch_end"} == {*MODULE_HOOKS}
    assert {*CALLBACK_STEP_HOOKS, "on_train_batch_start", "on_train_batch_end"} == {*CALLBACK_HOOKS}


def test_vectorized_engine_rejects_batch_hooks() -> None:
    hooked = type("Hooked", (Ordinary,), {"on_after_backward": lambda self: None})
    refused(hooked, r"Hooked\.on_after_backward is called for every batch")
    callback = LambdaCallback(on_train_batch_end=lambda *_: None)
    refused(Ordinary, r"LambdaCallback\.on_train_batch_end is called for every batch", callbacks=[callback])


def test_transfer_hooks_of_modules_and_data_modules_are_detected() -> None:
    class Moves(Ordinary):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch

    class MovesData(FederatedDataModule):
        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            return batch

    assert not has_transfer_hooks(using(Ordinary(), datamodule=data()))
    assert has_transfer_hooks(using(Moves()))
    assert has_transfer_hooks(using(Ordinary(), datamodule=MovesData(clients(), batch_size=4)))


def test_timers_check_the_clock_once_per_round() -> None:
    timer = Timer(interval="step")
    assert uses_batch_hook(timer, "on_train_batch_end")
    time_by_rounds(using(Ordinary(), pl.Callback(), timer))
    assert not uses_batch_hook(timer, "on_train_batch_end")
    assert uses_batch_hook(ModelCheckpoint(train_time_interval=timedelta(seconds=1)), "on_train_batch_end")


class PerBatch(ModelCheckpoint):
    """Acts on every batch."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.heard = True


@pytest.mark.parametrize(
    ("callback", "hook"),
    [
        (LearningRateMonitor(), "LearningRateMonitor.on_train_batch_start"),
        (LearningRateMonitor("step"), "LearningRateMonitor.on_train_batch_start"),
        (PerBatch(), "PerBatch.on_train_batch_end"),
    ],
    ids=["None", "step", "a subclass"],
)
def test_lightning_callbacks_that_act_per_batch_are_rejected(callback: pl.Callback, hook: str) -> None:
    refused(Ordinary, rf"{hook} is called for every batch", callbacks=[callback], enable_checkpointing=True)


def test_batch_hooks_of_a_checkpoint_callback_are_called(tmp_path: Path) -> None:
    callback = PerBatch(tmp_path)
    trainer(callbacks=callback, enable_checkpointing=True, max_rounds=1).fit(Ordinary(), data())
    assert callback.heard


class Doubled(Precision):
    """Doubles the loss before backward."""

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        return super().pre_backward(2 * tensor, module)


class DoubledAfterwards(Precision):
    """Doubles the gradient in Lightning's clipping, which runs in every step."""

    def clip_gradients(self, optimizer: Any, *_: Any, **__: Any) -> None:
        for parameter in self.main_params(optimizer):
            parameter.grad.mul_(2)


class DoubledIn(SingleDeviceStrategy):
    """Doubles the inputs on their way to the device, on a CPU too."""

    def batch_to_device(self, batch: Any, *_: Any, **__: Any) -> Any:
        return [2 * batch[0], batch[1]]


@pytest.mark.parametrize("plugin", [Doubled, DoubledAfterwards], ids=lambda plugin: plugin.__name__)
def test_custom_precision_plugin_is_called_between_batch_and_step(plugin: type[Precision]) -> None:
    assert torch.equal(fit(plugins=plugin(), max_rounds=1), fit(seeded(lr=0.2), max_rounds=1))
    hook = plugin_step_hooks(SimpleNamespace(precision_plugin=plugin(), strategy=SingleDeviceStrategy("cpu")))
    refused(Ordinary, rf"{hook[0]} is called for every batch", plugins=plugin())


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_custom_strategy_transfers_every_batch(engine: str) -> None:
    doubled = [torch.utils.data.TensorDataset(2 * x.tensors[0], x.tensors[1]) for x in clients()]
    expected = fit(seeded(Ordinary), FederatedDataModule(doubled, batch_size=4), engine=engine, max_rounds=1)
    moved = FederatedDataModule(clients(), batch_size=4)
    found = fit(seeded(Ordinary), moved, engine=engine, max_rounds=1, strategy=DoubledIn("cpu"))
    torch.testing.assert_close(found, expected)


def test_only_hooks_of_custom_strategies_are_detected() -> None:
    seen = []

    class Watches(SingleDeviceStrategy):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.append(batch_idx)

    fit(strategy=Watches("cpu"), max_rounds=1, datamodule=data(sizes=(12,)), clients_per_round=1)
    assert seen == [0, 1, 2]
    refused(Ordinary, r"Watches\.on_train_batch_start is called for every batch", strategy=Watches("cpu"))
    for plugin in (Precision(), DoublePrecision(), HalfPrecision(), MixedPrecision("bf16-mixed", "cpu")):
        assert plugin_step_hooks(SimpleNamespace(precision_plugin=plugin, strategy=SingleDeviceStrategy("cpu"))) == []


class Watching(Ordinary):
    def on_before_backward(self, loss: Tensor) -> None:
        self.watched = True


class Scaling(Ordinary):
    def on_after_backward(self) -> None:
        self.scaled = True


@pytest.mark.parametrize(
    ("algorithm", "others"),
    [(Mime(), "full-batch"), (ServerOnly(), "full-batch"), (FedSAM(0.1), "second")],
    ids=["Mime", "ServerOnly", "FedSAM"],
)
def test_hook_that_is_not_called_for_other_gradients_warns(algorithm: Algorithm, others: str) -> None:
    message = rf"takes {others} gradients, and these hooks are not called for them: Scaling\.on_after_backward\. If"
    local = {"local_epochs": None if isinstance(algorithm, ServerOnly) else 1}
    with pytest.warns(UserWarning, match=message):
        fit(seeded(Scaling), algorithm=algorithm, max_rounds=1, **local)


@pytest.mark.parametrize(
    ("module", "algorithm"),
    [(Scaling, FedAvg()), (Ordinary, Mime()), (Watching, Mime())],
    ids=["FedAvg", "no hook", "a hook before backward"],
)
def test_hook_that_is_called_for_all_gradients_does_not_warn(
    module: type[Ordinary], algorithm: Algorithm, recwarn: pytest.WarningsRecorder
) -> None:
    fit(seeded(module), algorithm=algorithm, max_rounds=1)
    assert not [w for w in recwarn if "for which these hooks" in str(w.message)]
