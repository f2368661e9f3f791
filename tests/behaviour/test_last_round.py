"""``last`` is the latest round with a checkpoint due, regardless of the monitored metric."""

import pickle
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_fed import FederatedCallback
from lightning_fed.algorithms import Scaffold
from lightning_fed.callbacks import RunSummary
from lightning_fed.checkpoints.files import AtomicCheckpointIO
from lightning_fed.server.client_states.disk_store import Index
from tests.helpers.processes import in_processes
from tests.helpers.selection import few
from tests.helpers.training import Net, data, parameters, rounds_in, seeded, trainer

SCORES = (0.5, 0.9, 0.3, 0.2, 0.1, 0.95, 0.4)  # by round: the best is the second, then the sixth
ROUNDS = len(SCORES)


class Scored(Net):
    """Logs :data:`SCORES` as its metric."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.log("score", SCORES[self.current_epoch])


class Watch(FederatedCallback):
    """Records the round in each ModelCheckpoint's ``last`` whenever a round begins, or 0 before there is one."""

    def __init__(self) -> None:
        self.seen: dict[str, list[int]] = {}

    def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
        for saver in trainer.checkpoint_callbacks:
            path = saver.last_model_path
            self.seen.setdefault(Path(saver.dirpath).name, []).append(rounds_in(path) if path else 0)


def saver(folder: Path, kind: type[ModelCheckpoint] = ModelCheckpoint, **options: Any) -> ModelCheckpoint:
    given = {"monitor": "score", "mode": "max", "save_last": True, "filename": "{epoch}", **options}
    return kind(folder, **given)


def run(folder: Path, *callbacks: Any, **options: Any) -> Any:
    """Run Scaffold with a scripted metric, or resume such a run."""
    ckpt_path, given = options.pop("ckpt_path", None), {"max_rounds": ROUNDS, "algorithm": Scaffold(), **options}
    made = trainer(callbacks=list(callbacks), enable_checkpointing=True, default_root_dir=folder, **given)
    made.fit(seeded(Scored), data(), ckpt_path=ckpt_path)
    return made


def held(folder: Path, keep: ModelCheckpoint, **options: Any) -> list[int]:
    """Return the round that ``last`` held after each round of a run."""
    watch = Watch()
    run(folder, watch, keep, **options)
    return [*watch.seen[Path(str(keep.dirpath)).name][1:], rounds_in(keep.last_model_path)]


class Named(ModelCheckpoint):
    """Puts the round into the name of its last checkpoint, and overrides a hook that saves."""

    CHECKPOINT_NAME_LAST = "{epoch}-last"

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_epoch_end(trainer, pl_module)


EVERY, SECOND = [*range(1, ROUNDS + 1)], [0, 2, 2, 4, 4, 6, 6]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[int]]] = {
    "file": ({}, {}, EVERY),
    "link": ({"save_last": "link"}, {}, EVERY),
    "best two": ({"save_last": "link", "save_top_k": 2}, {}, EVERY),
    "no best": ({"save_top_k": 0}, {}, EVERY),
    "no best, link": ({"save_top_k": 0, "save_last": "link"}, {}, EVERY),
    "no metric": ({"monitor": None, "save_last": "link"}, {}, EVERY),
    "every second": ({"every_n_epochs": 2}, {}, SECOND),
    "every second, link": ({"every_n_epochs": 2, "save_last": "link"}, {}, SECOND),
    "after validation": ({"save_on_train_epoch_end": False}, {}, EVERY),
    "where validated": ({}, {"check_val_every_n_epoch": 2}, SECOND),
    "where validated, link": ({"save_last": "link"}, {"check_val_every_n_epoch": 2}, SECOND),
    "between validations": ({"save_on_train_epoch_end": True}, {"check_val_every_n_epoch": 2}, EVERY),
    "by the clock": ({"train_time_interval": timedelta(0), "save_last": "link"}, {}, [0, *EVERY[:-1]]),  # mid-round
    "subclass": ({"kind": Named}, {}, EVERY),
    "subclass, link, every second": ({"kind": Named, "save_last": "link", "every_n_epochs": 2}, {}, SECOND),
    "at once": ({}, {"engine": "vectorized"}, EVERY),
    "states on disk": ({"save_last": "link"}, {"client_states": "disk"}, EVERY),
}
FEW = [
    "by the clock",
    "no best",
    "every second, link",
    "where validated",
    "subclass, link, every second",
]


@pytest.mark.parametrize("name", few(CASES, FEW))
def test_last_holds_the_latest_round_with_a_checkpoint_due(name: str, tmp_path: Path) -> None:
    given, options, expected = CASES[name]
    keep = saver(tmp_path, **given)
    assert held(tmp_path, keep, **options) == expected
    assert len(list(tmp_path.glob("*last*.ckpt"))) == 1


@pytest.mark.parametrize("save_last", few([True, "link"], ["link"]))
def test_best_checkpoint_is_not_changed_by_last(save_last: Any, tmp_path: Path) -> None:
    keep = saver(tmp_path, save_last=save_last)
    run(tmp_path, keep)
    assert Path(keep.best_model_path).name == "epoch=5.ckpt"
    assert float(keep.best_model_score) == pytest.approx(0.95)
    assert rounds_in(keep.best_model_path) == 6
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {"epoch=5.ckpt", "last.ckpt"}


@pytest.mark.thorough
def test_each_checkpoint_callback_keeps_its_own_last(tmp_path: Path) -> None:
    watch, rare = Watch(), saver(tmp_path / "rare", every_n_epochs=3, save_last="link")
    weights = saver(tmp_path / "weights", save_weights_only=True, mode="min")
    run(tmp_path, watch, saver(tmp_path / "all"), rare, weights)
    assert watch.seen["all"] == watch.seen["weights"] == [0, *EVERY[:-1]]
    assert watch.seen["rare"] == [0, 0, 0, 3, 3, 3, 6]


@pytest.mark.thorough
@pytest.mark.parametrize(("save_last", "writes"), [(True, [2, 2, 1, 1, 1, 2, 1]), ("link", [1] * ROUNDS)])
def test_rounds_are_written_no_more_often_than_needed(
    save_last: Any, writes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[int] = []
    write = AtomicCheckpointIO.save_checkpoint

    def counted(self: Any, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        rounds.append(int(checkpoint["loops"]["fit_loop"]["state_dict"]["round"]))
        write(self, checkpoint, path, storage_options)

    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", counted)
    run(tmp_path, saver(tmp_path, save_last=save_last), client_states="disk")
    assert [rounds.count(n) for n in EVERY] == writes
    (index,) = map(Index, (tmp_path / "client_states").glob("*-0000"))
    assert len({name for name, _ in index.versions()}) == 2  # one for the best checkpoint, one for the last
    index.close()


def resumed(folder: Path, save_last: Any) -> Sequence[float]:
    """Return the final parameters of a run that stops after its fifth round and resumes from ``last``."""
    run(folder, saver(folder, save_last=save_last), max_rounds=5)
    keep = saver(folder, save_last=save_last)
    made = run(folder, keep, ckpt_path="last")
    assert Path(str(made.ckpt_path)).name == "last.ckpt"
    assert rounds_in(folder / "last.ckpt") == ROUNDS
    assert Path(keep.best_model_path).name == "epoch=5.ckpt"
    return parameters(made.lightning_module).tolist()


@pytest.mark.parametrize("save_last", few([True, "link"], ["link"]))
def test_run_resumes_exactly_from_last(save_last: Any, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", saver(tmp_path / "whole"))
    assert resumed(tmp_path / "parts", save_last) == parameters(whole.lightning_module).tolist()


@pytest.mark.thorough
@pytest.mark.parametrize("save_last", [True, "link"])
def test_two_processes_keep_the_same_last(save_last: Any, tmp_path: Path) -> None:
    def work() -> list[int]:
        keep = saver(tmp_path / "kept", save_last=save_last)
        return held(tmp_path, keep, strategy="clients", devices=2)

    for outcome in in_processes(work, tmp_path):
        assert not outcome.error, outcome.trace
        assert outcome.value == EVERY


@pytest.mark.thorough
def test_checkpoint_callback_can_be_copied_after_a_run(tmp_path: Path) -> None:
    keep = saver(tmp_path / "first")
    run(tmp_path, keep, max_rounds=1)
    copied = pickle.loads(pickle.dumps(keep))
    copied.dirpath, copied.last_model_path, copied._last_global_step_saved = str(tmp_path / "second"), "", 0
    assert held(tmp_path, copied) == EVERY
    assert rounds_in(tmp_path / "first" / "last.ckpt") == 1


def test_summary_names_the_saved_round_not_a_stale_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, saver(tmp_path), max_rounds=1)
    run(tmp_path, RunSummary(), saver(tmp_path, save_last=None), ckpt_path="last")
    assert "epoch=5.ckpt (round 6)" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize(("every", "last"), [(1, 7), (3, 6)])
def test_summary_names_the_round_in_last(
    every: int, last: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, RunSummary(), saver(tmp_path, every_n_epochs=every))
    lines = capsys.readouterr().out.splitlines()
    (shown,) = (line for line in lines if "last checkpoint" in line)
    assert shown.endswith(f"last.ckpt (round {last})")
    (resume,) = (line for line in lines if line.startswith(f"  resume (round {last})"))
    assert resume.endswith('last.ckpt")')
