"""An evaluation with ckpt_path="last" or "best" finds the checkpoint of the newest run, or names where it looked."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_fed.core.errors import FederatedError
from tests.helpers.checkpoints import run_keeping as run
from tests.helpers.selection import few
from tests.helpers.training import Net, classification, parameters, trainer


class Evaluated(Net):
    """Can be tested and asked for predictions, too."""

    test_step = Net.validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])


def evaluate(stage: str, made: Any) -> torch.Tensor:
    """Return the parameters with which the last checkpoint is evaluated by a trainer."""
    model = Evaluated()
    getattr(made, stage)(model, DataLoader(classification(8, 0), batch_size=4), ckpt_path="last")
    return parameters(model)


STAGES = ("validate", "test", "predict")


@pytest.mark.parametrize("weights_alone", few([False, True], [False]))
def test_last_is_evaluated_by_a_new_trainer_in_every_stage(weights_alone: bool, tmp_path: Path) -> None:
    options = {"logger": True, "default_root_dir": tmp_path}
    fitted = run(tmp_path, 2, keep=ModelCheckpoint(save_weights_only=weights_alone), **options)
    for made in (trainer(**options, enable_checkpointing=True), fitted):
        for stage in STAGES:
            assert torch.equal(evaluate(stage, made), parameters(fitted.lightning_module)), stage


@pytest.mark.parametrize("stage", STAGES)
def test_last_without_any_is_refused_where_nothing_is_trained(stage: str, tmp_path: Path) -> None:
    found = re.escape(f"{stage}(ckpt_path='last') found no checkpoint: none lies in ")
    with pytest.raises(FederatedError, match=f"{found}{tmp_path}. Give the trainer"):
        evaluate(stage, trainer(default_root_dir=tmp_path))
    with pytest.raises(FederatedError, match=f"{found}{tmp_path / 'checkpoints'} or under {tmp_path}. Give"):
        evaluate(stage, trainer(default_root_dir=tmp_path, enable_checkpointing=True))


def test_the_best_checkpoint_of_the_newest_run_is_evaluated_wherever_its_folder_went(tmp_path: Path) -> None:
    keep = ModelCheckpoint(monitor="val_loss", mode="max", filename="{step}")  # not the last one
    options = {"default_root_dir": tmp_path / "runs", "enable_checkpointing": True}
    fitted = run(tmp_path / "runs", 3, keep=keep, default_root_dir=tmp_path / "runs")
    best = Path(fitted.checkpoint_callback.best_model_path)
    wanted = torch.load(best, weights_only=True)["state_dict"]
    (tmp_path / "runs").rename(tmp_path / "moved")
    made, model = trainer(**{**options, "default_root_dir": tmp_path / "moved"}), Evaluated()
    made.validate(model, DataLoader(classification(8, 0), batch_size=4), ckpt_path="best")
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    (tmp_path / "moved" / best.relative_to(tmp_path / "runs")).rename(tmp_path / "moved" / "checkpoints" / "other.ckpt")
    with pytest.raises(FederatedError, match=r"the best one, .* is gone. Pass a path, or ckpt_path='last'"):
        made.validate(model, DataLoader(classification(8, 0), batch_size=4), ckpt_path="best")


def test_a_path_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    run(tmp_path / "a", 2)
    with pytest.raises(
        FederatedError, match=r"There is no checkpoint .*b\.ckpt\. .*a holds step=2\.ckpt, step=1\.ckpt"
    ):
        run(tmp_path / "a", 3, ckpt_path=tmp_path / "a" / "b.ckpt")
