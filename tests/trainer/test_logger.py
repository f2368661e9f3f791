"""The default logger names a run's folder by its number and its method."""

from pathlib import Path

import pytest
from pytorch_lightning.loggers import TensorBoardLogger

from lightning_fed.algorithms import FedAvg, Scaffold
from lightning_fed.trainer.logger import MethodLogger
from tests.helpers.training import trainer


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
