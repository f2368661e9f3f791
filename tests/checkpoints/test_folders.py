"""ckpt_path="last" goes on from the newest checkpoint of a run."""

import time
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_fed import ClientError
from lightning_fed.algorithms import Scaffold
from tests.helpers.checkpoints import run_keeping as run
from tests.helpers.training import fit, parameters, seeded


def test_last_is_the_newest_checkpoint_whatever_its_name(tmp_path: Path) -> None:
    run(tmp_path, 2, keep=ModelCheckpoint(tmp_path, save_last=True))
    time.sleep(0.02)
    run(tmp_path, 3, ckpt_path="last", keep=ModelCheckpoint(tmp_path))
    again = run(tmp_path, 4, ckpt_path="last", keep=ModelCheckpoint(tmp_path))
    assert again.ckpt_path.endswith("epoch=2-step=3.ckpt")


def test_last_passes_over_weights_alone(tmp_path: Path) -> None:
    weights = ModelCheckpoint(tmp_path, filename="weights", save_weights_only=True, monitor="val_loss")
    run(tmp_path, 2, callbacks=[weights])
    assert run(tmp_path, 3, ckpt_path="last").ckpt_path.endswith("step=2.ckpt")


def test_last_goes_on_from_the_former_version_of_a_numbered_logger(tmp_path: Path) -> None:
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


def test_last_may_be_what_was_saved_on_an_exception(tmp_path: Path) -> None:
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


def test_last_without_any_begins(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no last checkpoint available"):
        begun = run(tmp_path, 2, ckpt_path="last")
    assert torch.equal(parameters(begun.lightning_module), fit(seeded(), algorithm=Scaffold(), max_rounds=2))


def test_a_resumed_run_in_a_new_folder_knows_the_best_checkpoint_of_all_rounds(tmp_path: Path) -> None:
    def keeping(place: str, rounds: int, **options: Any) -> ModelCheckpoint:
        # the drift of later rounds is never as large as that of the first
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


def test_a_resumed_run_in_a_new_folder_keeps_its_own_best_one_where_the_earlier_are_gone(tmp_path: Path) -> None:
    first = ModelCheckpoint(tmp_path / "first", monitor="client/drift", mode="max", save_last=True)
    run(tmp_path, 3, keep=first)
    Path(first.best_model_path).unlink()
    second = ModelCheckpoint(tmp_path / "second", monitor="client/drift", mode="max")
    run(tmp_path, 5, keep=second, ckpt_path=first.last_model_path)
    assert Path(second.best_model_path).parent == tmp_path / "second"
    assert Path(second.best_model_path).is_file()


def test_a_resumed_run_that_keeps_fewer_checkpoints_goes_on_from_the_best(tmp_path: Path) -> None:
    first, second = (
        ModelCheckpoint(tmp_path / name, monitor="client/drift", mode="max", save_last=True, save_top_k=k)
        for name, k in (("first", 3), ("second", 1))
    )
    run(tmp_path, 3, keep=first)
    run(tmp_path, 4, keep=second, ckpt_path=first.last_model_path)
    assert second.best_k_models == {first.best_model_path: first.best_model_score}
