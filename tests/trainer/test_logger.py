"""The default logger names a run's folder by its number and its method."""

from pathlib import Path

import pytest
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger

from lightning_fed.algorithms import FedAvg, Scaffold
from lightning_fed.core.errors import FederatedError
from lightning_fed.trainer.logger import MethodLogger
from tests.helpers.training import data, seeded, trainer


@pytest.mark.parametrize("default", [True, None])
def test_runs_are_numbered_when_they_start_and_name_their_method(default: bool | None, tmp_path: Path) -> None:
    (tmp_path / "lightning_logs" / "version_6").mkdir(parents=True)  # an ordinary run of Lightning
    runs = [trainer(algorithm=own, logger=default, default_root_dir=tmp_path) for own in (FedAvg(), Scaffold())]
    for run, name in ((runs[1], "version_7_Scaffold"), (runs[0], "version_8_FedAvg")):
        assert Path(run.log_dir).name == run.logger.version == name
        Path(run.log_dir).mkdir()


def test_a_given_logger_keeps_its_name(tmp_path: Path) -> None:
    given = trainer(logger=TensorBoardLogger(tmp_path))
    assert Path(given.log_dir).name == "version_0"
    assert not isinstance(given.logger, MethodLogger)


def test_a_quick_try_has_no_folder(tmp_path: Path) -> None:
    assert not isinstance(trainer(logger=True, fast_dev_run=True, default_root_dir=tmp_path).logger, MethodLogger)


@pytest.mark.parametrize("logger", [None, CSVLogger])
def test_logs_that_cannot_be_written_are_refused_with_their_folder(logger: type | None, tmp_path: Path) -> None:
    place = tmp_path / "lightning_logs"
    place.write_text("a file, in which no folder can be made")
    made = trainer(logger=True if logger is None else logger(tmp_path), default_root_dir=tmp_path)
    with pytest.raises(FederatedError, match=f"cannot be written to {place}.*: .*Choose another .*default_root_dir"):
        made.fit(seeded(), data())
    assert place.is_file()


def test_another_file_that_fails_keeps_its_error(tmp_path: Path) -> None:
    module = seeded()
    module.on_fit_start = lambda: (tmp_path / "mine.txt").read_text()  # type: ignore[method-assign]
    with pytest.raises(FileNotFoundError, match="mine"):
        trainer(logger=True, default_root_dir=tmp_path).fit(module, data())
