"""TensorBoard gets a picture of the split when a fit starts. It does not affect the run."""

import random
import sys

import numpy as np
import pytest
import torch
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.callbacks import SplitPicture
from lightning_fed.core.errors import FederatedError
from lightning_fed.data import skew_table, split_figure
from tests.helpers.optional import needs_matplotlib
from tests.helpers.training import CLASSES, FEATURES, data, fit, parameters, seeded, trainer


class Careless(FederatedDataModule):
    """Clients drawn on demand from the global generators."""

    num_clients = 4

    def client_dataset(self, client_id):
        np.random.rand()
        random.random()
        return TensorDataset(torch.rand(9, FEATURES), torch.arange(9) % CLASSES)


def written(logger):
    events = EventAccumulator(logger.log_dir, size_guidance={"images": 0, "tensors": 0})
    events.Reload()
    return events


def text(events):
    (shown,) = events.Tensors("split/text_summary")
    return shown.tensor_proto.string_val[0].decode()


@needs_matplotlib
def test_figure_and_table_go_to_every_tensorboard_logger(tmp_path):
    loggers = [TensorBoardLogger(tmp_path / "a"), CSVLogger(tmp_path / "c"), TensorBoardLogger(tmp_path / "b")]
    fit(logger=loggers, max_rounds=1, callbacks=SplitPicture())
    for logger in (loggers[0], loggers[2]):
        events = written(logger)
        (image,) = events.Images("split")
        assert image.encoded_image_string[:4] == b"\x89PNG"
        assert (image.width, image.height) == (900, 320)
        assert image.step == 0
        assert text(events) == "\n".join(f"    {line}" for line in str(skew_table(data())).splitlines())


@pytest.mark.thorough
@needs_matplotlib
def test_resumed_fit_logs_at_its_round_with_its_max_clients(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "lightning_fed.callbacks.split_picture.split_figure",
        lambda split, max_clients: (asked.append(max_clients), split_figure(split, max_clients))[1],
    )
    first = trainer(logger=TensorBoardLogger(tmp_path), max_rounds=2, callbacks=SplitPicture(max_clients=2))
    first.fit(seeded(), data())
    first.save_checkpoint(tmp_path / "two.ckpt")
    logger = TensorBoardLogger(tmp_path)
    fit(logger=logger, max_rounds=3, callbacks=SplitPicture(), ckpt_path=tmp_path / "two.ckpt")
    assert [image.step for image in written(logger).Images("split")] == [2]
    assert asked == [2, 50]


@pytest.mark.thorough
@needs_matplotlib
@pytest.mark.parametrize(
    "make",
    [data, lambda: Careless(batch_size=3)],
    ids=["given", "on demand"],
)
def test_drawing_the_split_does_not_change_the_run(tmp_path, make):
    ends = []
    for callbacks in ([], [SplitPicture()]):
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        run = trainer(logger=TensorBoardLogger(tmp_path), max_rounds=2, callbacks=callbacks)
        run.fit(model := seeded(), make())
        ends.append((parameters(model).tolist(), torch.rand(2).tolist(), np.random.rand(), random.random()))
    assert ends[0] == ends[1]


def test_missing_tensorboard_logger_is_rejected_before_the_fit():
    with pytest.raises(FederatedError, match="SplitPicture draws for TensorBoard.*loggers are: none"):
        fit(callbacks=SplitPicture())
    with pytest.raises(FederatedError, match="loggers are: CSVLogger. Give FederatedTrainer"):
        fit(logger=CSVLogger("logs"), callbacks=SplitPicture())


def test_fast_dev_run_without_loggers_is_allowed(tmp_path):
    fit(logger=TensorBoardLogger(tmp_path), fast_dev_run=True, callbacks=SplitPicture())
    assert not list(tmp_path.iterdir())


def test_missing_matplotlib_raises_with_an_install_hint(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(FederatedError, match="pip install matplotlib"):
        fit(logger=TensorBoardLogger(tmp_path), callbacks=SplitPicture())


def test_unlabeled_data_is_rejected(tmp_path):
    clients = [TensorDataset(torch.rand(4, FEATURES), torch.rand(4, CLASSES)) for _ in range(3)]
    with pytest.raises(FederatedError, match="not one class.*labels=..."):
        fit(
            datamodule=FederatedDataModule(clients=clients),
            logger=TensorBoardLogger(tmp_path),
            callbacks=SplitPicture(),
        )


def test_only_rank_zero_draws(tmp_path, monkeypatch):
    callback, run = SplitPicture(), trainer(logger=TensorBoardLogger(tmp_path / "logs"))
    monkeypatch.setattr(type(run), "is_global_zero", False)
    callback.on_train_start(run, seeded())
    assert not (tmp_path / "logs").exists()


def test_invalid_max_clients_is_rejected():
    with pytest.raises(FederatedError, match=r"SplitPicture\(max_clients=0\)"):
        SplitPicture(max_clients=0)
