"""ckpt_path="last" continues from the newest checkpoint of a run."""

import re
import time
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.utils.data import DataLoader

from lightning_fed import ClientError, FederatedCallback
from lightning_fed.algorithms import Scaffold
from lightning_fed.core.errors import FederatedError
from tests.helpers.checkpoints import run_keeping as run
from tests.helpers.selection import few
from tests.helpers.training import Net, classification, fit, parameters, rounds_in, seeded, trainer


def test_last_is_the_newest_checkpoint_regardless_of_its_name(tmp_path: Path) -> None:
    run(tmp_path, 2, keep=ModelCheckpoint(tmp_path, save_last=True))
    time.sleep(0.02)
    run(tmp_path, 3, ckpt_path="last", keep=ModelCheckpoint(tmp_path))
    again = run(tmp_path, 4, ckpt_path="last", keep=ModelCheckpoint(tmp_path))
    assert again.ckpt_path.endswith("epoch=2-step=3.ckpt")


def test_last_skips_weights_only_checkpoints(tmp_path: Path) -> None:
    weights = ModelCheckpoint(tmp_path, filename="weights", save_weights_only=True, monitor="val_loss")
    run(tmp_path, 2, callbacks=[weights])
    assert run(tmp_path, 3, ckpt_path="last").ckpt_path.endswith("step=2.ckpt")


def test_last_resumes_from_the_previous_logger_version(tmp_path: Path) -> None:
    options = {"logger": True, "default_root_dir": tmp_path}
    straight = run(tmp_path / "straight", 4)
    for rounds in (2, 3, 4):
        last = run(tmp_path, rounds, ckpt_path="last", keep=ModelCheckpoint(), **options)
    assert Path(last.log_dir).name == "version_2_Scaffold"
    assert "version_1_Scaffold" in str(last.ckpt_path)
    assert torch.equal(last.fit_loop.state.x, straight.fit_loop.state.x)


class Fails(pl.Callback):
    """Raises in a round."""

    def __init__(self, round: int) -> None:
        self.round = round

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch == self.round:
            raise RuntimeError("my own")


def test_last_can_be_a_checkpoint_saved_on_an_exception(tmp_path: Path) -> None:
    def keeping() -> dict[str, Any]:
        keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_epochs=2, save_top_k=-1)
        return {"keep": keep, "callbacks": [OnExceptionCheckpoint(tmp_path / "rescued")]}

    options = keeping()
    options["callbacks"].append(Fails(3))
    with pytest.raises(ClientError, match="my own"):
        run(tmp_path, 5, **options)
    time.sleep(0.02)
    resumed = run(tmp_path, 5, ckpt_path="last", **keeping())
    assert resumed.ckpt_path.endswith("on_exception.ckpt")
    assert torch.equal(resumed.fit_loop.state.x, fit(seeded(), algorithm=Scaffold(), max_rounds=5))


def test_last_without_a_checkpoint_starts_a_new_run(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no last checkpoint available"):
        begun = run(tmp_path, 2, ckpt_path="last")
    assert torch.equal(parameters(begun.lightning_module), fit(seeded(), algorithm=Scaffold(), max_rounds=2))


@pytest.mark.thorough
def test_run_resumed_in_a_new_folder_knows_the_overall_best(tmp_path: Path) -> None:
    def keeping(place: str, rounds: int, **options: Any) -> ModelCheckpoint:
        # the first round has the largest drift
        keep = ModelCheckpoint(tmp_path / place, monitor="client/drift", mode="max", save_last=True, save_top_k=2)
        run(tmp_path, rounds, keep=keep, **options)
        return keep

    straight = keeping("straight", 6)
    first = keeping("first", 3)
    second = keeping("second", 6, ckpt_path=first.last_model_path)
    assert Path(second.best_model_path) == Path(first.best_model_path)
    assert second.best_model_score == straight.best_model_score
    assert [*map(torch.Tensor.item, second.best_k_models.values())] == [
        *map(torch.Tensor.item, straight.best_k_models.values())
    ]
    assert Path(first.best_model_path).is_file()  # another run's files are not removed
    assert Path(second.last_model_path) == tmp_path / "second" / "last.ckpt"


def test_resumed_run_keeps_its_own_best_if_the_earlier_is_missing(tmp_path: Path) -> None:
    first = ModelCheckpoint(tmp_path / "first", monitor="client/drift", mode="max", save_last=True)
    run(tmp_path, 3, keep=first)
    Path(first.best_model_path).unlink()
    second = ModelCheckpoint(tmp_path / "second", monitor="client/drift", mode="max")
    run(tmp_path, 5, keep=second, ckpt_path=first.last_model_path)
    assert Path(second.best_model_path).parent == tmp_path / "second"
    assert Path(second.best_model_path).is_file()


def test_resumed_run_that_keeps_fewer_checkpoints_keeps_the_best(tmp_path: Path) -> None:
    first, second = (
        ModelCheckpoint(tmp_path / name, monitor="client/drift", mode="max", save_last=True, save_top_k=k)
        for name, k in (("first", 3), ("second", 1))
    )
    run(tmp_path, 3, keep=first)
    run(tmp_path, 4, keep=second, ckpt_path=first.last_model_path)
    assert second.best_k_models == {first.best_model_path: first.best_model_score}


@pytest.mark.thorough
def test_resumed_run_finds_its_files_after_the_folder_is_moved(tmp_path: Path) -> None:
    def keeping(place: str, rounds: int, ckpt_path: Any = None) -> list[ModelCheckpoint]:
        # the first round has the largest drift
        best = ModelCheckpoint(tmp_path / place / "best", monitor="client/drift", mode="max", save_top_k=2)
        last = ModelCheckpoint(tmp_path / place / "last", save_last=True)
        run(tmp_path, rounds, keep=best, callbacks=[last], ckpt_path=ckpt_path)
        return [best, last]

    straight = keeping("straight", 5)
    keeping("first", 3)
    (tmp_path / "first").rename(tmp_path / "moved")
    moved = keeping("moved", 5, ckpt_path="last")
    for one, other in zip(straight, moved, strict=True):
        for name in ("best_model_path", "kth_best_model_path", "last_model_path", "best_k_models", "best_model_score"):
            expected = repr(getattr(one, name)).replace(str(tmp_path / "straight"), str(tmp_path / "moved"))
            assert repr(getattr(other, name)) == expected, name
    names = [sorted(p.relative_to(tmp_path / place) for p in (tmp_path / place).rglob("*.ckpt")) for place in PLACES]
    assert names[0] == names[1]


PLACES = ("straight", "moved")


@pytest.mark.thorough
def test_files_of_another_run_are_not_mistaken_for_moved_ones(tmp_path: Path) -> None:
    first, other = (
        ModelCheckpoint(tmp_path / name, monitor="client/drift", mode="max", filename="best") for name in ("first", "b")
    )
    run(tmp_path, 3, keep=first)
    run(tmp_path, 3, keep=other)
    resumed = Path(first.best_model_path).rename(tmp_path / "best.ckpt")
    first.dirpath, content = None, Path(other.best_model_path).read_bytes()
    (tmp_path / "first").rmdir()
    run(tmp_path, 5, keep=ModelCheckpoint(tmp_path / "b", monitor="client/drift", mode="min"), ckpt_path=resumed)
    assert Path(other.best_model_path).read_bytes() == content


def test_last_stays_one_link_if_a_run_resumes_from_its_first_round(tmp_path: Path) -> None:
    def keep() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, save_last="link", save_top_k=-1)

    run(tmp_path, 1, keep=keep())
    run(tmp_path, 3, keep=keep(), ckpt_path="last")
    assert [path.name for path in tmp_path.glob("last*")] == ["last.ckpt"]
    assert rounds_in(tmp_path / "last.ckpt") == 3


class EndsRounds(FederatedCallback):
    """Changes weights and counts when a round ends."""

    def __init__(self) -> None:
        self.ended = 0

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.ended += 1
        with torch.no_grad():
            for value in pl_module.parameters():
                value.mul_(0.9)

    def state_dict(self) -> dict[str, Any]:
        return {"ended": self.ended}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.ended = state_dict["ended"]


def test_save_after_validation_includes_round_end_changes(tmp_path: Path) -> None:
    def keeping(folder: Path, rounds: int, **options: Any) -> Any:
        keep = ModelCheckpoint(folder, monitor="val_loss", save_top_k=-1, filename="{epoch}-{val_loss:.2f}")
        ends, options = EndsRounds(), {"check_val_every_n_epoch": 2, **options}
        return run(folder, rounds, keep=keep, callbacks=[ends], **options), ends.ended

    straight, ended = keeping(tmp_path / "straight", 4)
    keeping(tmp_path / "first", 2)
    resumed, ended_again = keeping(tmp_path / "first", 4, ckpt_path="last")
    assert len([*(tmp_path / "first").glob("epoch=1-*.ckpt")]) == 1
    assert ended == ended_again == 4
    assert torch.equal(resumed.fit_loop.state.x, straight.fit_loop.state.x)


class Falls(FederatedCallback):
    """Logs a number that is largest in the first round."""

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        trainer.fit_loop.log_round({"falls": -float(round_report.round)})


def test_resumed_run_knows_the_best_weights_of_another_callback(tmp_path: Path) -> None:
    def keeping(folder: Path, rounds: int, ckpt_path: Any = None) -> ModelCheckpoint:
        best = ModelCheckpoint(folder / "best", monitor="falls", mode="max", save_weights_only=True)
        run(folder, rounds, keep=ModelCheckpoint(folder / "whole"), callbacks=[best, Falls()], ckpt_path=ckpt_path)
        return best

    straight = keeping(tmp_path / "straight", 3)
    assert Path(straight.best_model_path).name == "epoch=0-step=1.ckpt"
    keeping(tmp_path / "again", 1)
    again = keeping(tmp_path / "again", 3, "last")
    assert again.best_model_score == straight.best_model_score
    assert [path.name for path in (tmp_path / "again" / "best").iterdir()] == ["epoch=0-step=1.ckpt"]


class Evaluated(Net):
    """Also supports testing and prediction."""

    test_step = Net.validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])


def evaluate(stage: str, made: Any, ckpt_path: Any = "last") -> torch.Tensor:
    """Return the parameters with which a trainer evaluates a checkpoint."""
    model = Evaluated()
    getattr(made, stage)(model, DataLoader(classification(8, 0), batch_size=4), ckpt_path=ckpt_path)
    return parameters(model)


STAGES = ("validate", "test", "predict")


@pytest.mark.parametrize("weights_alone", few([False, True], [False]))
def test_new_trainer_evaluates_last_in_every_stage(weights_alone: bool, tmp_path: Path) -> None:
    options = {"logger": True, "default_root_dir": tmp_path}
    fitted = run(tmp_path, 2, keep=ModelCheckpoint(save_weights_only=weights_alone), **options)
    for made in (trainer(**options, enable_checkpointing=True), fitted):
        for stage in STAGES:
            assert torch.equal(evaluate(stage, made), parameters(fitted.lightning_module)), stage


@pytest.mark.parametrize("stage", STAGES)
def test_last_without_a_checkpoint_is_rejected_in_evaluation(stage: str, tmp_path: Path) -> None:
    found = re.escape(f"{stage}(ckpt_path='last') found no checkpoint: none lies in ")
    with pytest.raises(FederatedError, match=f"{found}{tmp_path}. Give the trainer"):
        evaluate(stage, trainer(default_root_dir=tmp_path))
    with pytest.raises(FederatedError, match=f"{found}{tmp_path / 'checkpoints'} or under {tmp_path}. Give"):
        evaluate(stage, trainer(default_root_dir=tmp_path, enable_checkpointing=True))


def test_best_of_the_newest_run_is_evaluated_after_a_move(tmp_path: Path) -> None:
    keep = ModelCheckpoint(monitor="val_loss", mode="max", filename="{step}")  # the best is not the last one
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


def test_missing_path_raises_and_lists_the_existing_ones(tmp_path: Path) -> None:
    run(tmp_path / "a", 2)
    with pytest.raises(
        FederatedError, match=r"There is no checkpoint .*b\.ckpt\. .*a holds step=2\.ckpt, step=1\.ckpt"
    ):
        run(tmp_path / "a", 3, ckpt_path=tmp_path / "a" / "b.ckpt")


@pytest.mark.parametrize("stage", ["fit", *STAGES])
def test_path_that_cannot_be_opened_is_rejected(stage: str, tmp_path: Path) -> None:
    path = tmp_path / ("a" * 300)
    with pytest.raises(FederatedError, match=r"ckpt_path='.*a{300}' cannot be read: .*too long"):
        run(tmp_path, 1, ckpt_path=path) if stage == "fit" else evaluate(stage, trainer(), path)
