"""The default logger names a run's folder by its number and its method."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger

from lightning_fed import FederatedDataModule
from lightning_fed.algorithms import FedAvg, Scaffold
from lightning_fed.core.errors import FederatedError
from lightning_fed.trainer.logger import MethodLogger
from tests.helpers.training import clients, data, seeded, trainer


@pytest.mark.parametrize("default", [True, None])
def test_runs_are_numbered_at_start_and_named_after_the_method(default: bool | None, tmp_path: Path) -> None:
    (tmp_path / "lightning_logs" / "version_6").mkdir(parents=True)  # an ordinary run of Lightning
    runs = [trainer(algorithm=own, logger=default, default_root_dir=tmp_path) for own in (FedAvg(), Scaffold())]
    for run, name in ((runs[1], "version_7_Scaffold"), (runs[0], "version_8_FedAvg")):
        assert Path(run.log_dir).name == run.logger.version == name
        Path(run.log_dir).mkdir()


def test_given_logger_keeps_its_name(tmp_path: Path) -> None:
    given = trainer(logger=TensorBoardLogger(tmp_path))
    assert Path(given.log_dir).name == "version_0"
    assert not isinstance(given.logger, MethodLogger)


def test_fast_dev_run_uses_no_method_logger(tmp_path: Path) -> None:
    assert not isinstance(trainer(logger=True, fast_dev_run=True, default_root_dir=tmp_path).logger, MethodLogger)


@pytest.mark.parametrize("logger", [None, CSVLogger, TensorBoardLogger])
def test_version_taken_by_another_process_is_skipped(
    logger: type | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [
        trainer(logger=True if logger is None else logger(tmp_path), default_root_dir=tmp_path, max_rounds=1)
        for _ in range(2)
    ]
    for run in made:  # both look for a free number before either has made a folder
        monkeypatch.setattr(type(run.logger), "_get_next_version", lambda self: 4)
    made[0].fit(seeded(), data())
    theirs = {file: file.read_bytes() for file in Path(made[0].log_dir).rglob("*") if file.is_file()}
    made[1].fit(seeded(), data())
    assert [Path(run.log_dir).name.split("_")[:2] for run in made] == [["version", "4"], ["version", "5"]]
    assert {file: file.read_bytes() for file in Path(made[0].log_dir).rglob("*") if file.is_file()} == theirs
    assert len([file for file in Path(made[1].log_dir).rglob("*") if file.is_file()]) >= len(theirs)


def test_run_that_fails_before_its_logger_starts_leaves_no_folder(tmp_path: Path) -> None:
    class NoData(FederatedDataModule):
        def prepare_data(self) -> None:
            raise ConnectionError("no network")

    with pytest.raises(ConnectionError):
        trainer(logger=True, default_root_dir=tmp_path).fit(seeded(), NoData(clients=clients()))
    assert not [*tmp_path.rglob("version_*")]


@pytest.mark.parametrize("logger", [None, CSVLogger])
def test_unwritable_log_folder_raises_an_error_naming_it(logger: type | None, tmp_path: Path) -> None:
    place = tmp_path / "lightning_logs"
    place.write_text("a file, in which no folder can be made")
    made = trainer(logger=True if logger is None else logger(tmp_path), default_root_dir=tmp_path)
    with pytest.raises(FederatedError, match=f"cannot be written to {place}.*: .*Choose another .*default_root_dir"):
        made.fit(seeded(), data())
    assert place.is_file()


@pytest.mark.parametrize("logger", [TensorBoardLogger, CSVLogger])
def test_full_disk_error_names_the_log_folder(logger: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # a failed write does not name the file

    made = trainer(logger=logger(tmp_path, name="runs", version="a"))
    monkeypatch.setattr(type(made.logger.experiment), "add_scalar", full, raising=False)
    monkeypatch.setattr(CSVLogger, "save", full)
    found = rf"cannot be written to {tmp_path}/runs/a: No space left .*Make room, .*ckpt_path='last'"
    with pytest.raises(FederatedError, match=found):
        made.fit(seeded(), data())


def test_error_of_an_unrelated_file_is_raised_unchanged(tmp_path: Path) -> None:
    module = seeded()
    module.on_fit_start = lambda: (tmp_path / "mine.txt").read_text()  # type: ignore[method-assign]
    with pytest.raises(FileNotFoundError, match="mine"):
        trainer(logger=True, default_root_dir=tmp_path).fit(module, data())


def test_hook_error_caused_by_a_disk_error_keeps_its_type(tmp_path: Path) -> None:
    def fail() -> None:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise ValueError("mine") from error

    module = seeded()
    module.on_fit_start = fail  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="^mine$"):
        trainer(logger=True, default_root_dir=tmp_path).fit(module, data())
