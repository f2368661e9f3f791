"""A resumed run restores its numbers with their original types."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import Callback
from torch import nn

from tests.helpers.engines import Ordinary, run, state_of
from tests.helpers.training import CLASSES, FEATURES, same

ENGINES = ("sequential", "vectorized")


@pytest.mark.parametrize("precision", ["64-true", "32-true"])
def test_metrics_keep_their_dtypes_after_resume(precision: str, tmp_path: Path) -> None:
    half = run("sequential", precision=precision, max_rounds=2)
    half.save_checkpoint(tmp_path / "half.ckpt")
    seen: dict[str, Any] = {}

    class Look(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.update(trainer.callback_metrics)

    run("sequential", precision=precision, callbacks=[Look()], ckpt_path=tmp_path / "half.ckpt")
    assert seen.keys() == half.callback_metrics.keys()
    assert seen["val_loss"].dtype == {"64-true": torch.float64, "32-true": torch.float32}[precision]
    assert same({k: (v, v.dtype) for k, v in seen.items()}, {k: (v, v.dtype) for k, v in half.callback_metrics.items()})


def test_checkpoint_with_plain_number_metrics_loads(tmp_path: Path) -> None:
    whole, half = run("sequential"), run("sequential", max_rounds=2)
    half.save_checkpoint(tmp_path / "half.ckpt")
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
    state = saved["loops"]["fit_loop"]["state_dict"]
    state["metrics"] = {name: float(value) for name, value in state["metrics"].items()}
    torch.save(saved, tmp_path / "plain.ckpt")
    assert same(state_of(whole), state_of(run("sequential", ckpt_path=tmp_path / "plain.ckpt")))


class Taught(Ordinary):
    """Has a frozen teacher that follows its head."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(FEATURES, CLASSES).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + (self(batch[0]) - self.teacher(batch[0])).square().mean()

    @torch.no_grad()
    def on_train_epoch_end(self) -> None:
        self.teacher.weight.mul_(0.9).add_(0.01 * self.head.weight.mean())


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ENGINES)
def test_changing_frozen_parameters_resume_exactly(engine: str, tmp_path: Path) -> None:
    go = partial(run, engine, Taught)
    whole, half = go(max_rounds=4), go(max_rounds=2)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed = go(max_rounds=4, ckpt_path=tmp_path / "half.ckpt")
    assert same(*(state_of(t) for t in (whole, resumed)))
    assert torch.equal(*(t.lightning_module.teacher.weight for t in (whole, resumed)))
