"""What every round writes to the loggers."""

import csv
from pathlib import Path

from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from lightning_fed.algorithms import FedDyn, FedProx, Mime, Scaffold, SGDm
from tests.helpers.training import fit, seeded


def column(logger: CSVLogger, name: str) -> dict[int, float]:
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row.get(name)}


def test_tensorboard_shows_rounds(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    fit(logger=logger, max_rounds=4, check_val_every_n_epoch=2, algorithm=Scaffold())
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    for tag in (
        "train_loss", "client/loss", "client/update_norm", "client/drift", "server/update_norm", "comm/bytes_up",
        "comm/bytes_down", "round/clients", "round/local_steps", "round/seconds",
    ):  # fmt: skip
        assert [e.step for e in events.Scalars(tag)] == [1, 2, 3, 4], tag
    for tag in ("val_loss", "val_acc"):
        assert [e.step for e in events.Scalars(tag)] == [2, 4], tag


def test_bytes_are_those_of_the_messages(tmp_path: Path) -> None:
    model, logger = seeded(), CSVLogger(tmp_path)
    vector = 4 * sum(p.numel() for p in model.parameters())
    fit(model, logger=logger, max_rounds=1, algorithm=Scaffold())
    assert column(logger, "comm/bytes_up") == {1: 3 * 2 * vector}
    assert column(logger, "comm/bytes_down") == {1: 3 * 2 * vector}
    logger = CSVLogger(tmp_path, "mime")
    fit(seeded(), logger=logger, max_rounds=1, algorithm=Mime(base=SGDm()))
    assert column(logger, "comm/bytes_up") == {1: 3 * 2 * vector}  # the full gradient, the change of the model
    assert column(logger, "comm/bytes_down") == {1: 3 * 3 * vector}  # x, m and c
    logger = CSVLogger(tmp_path, "feddyn")
    fit(seeded(), logger=logger, max_rounds=1, algorithm=FedDyn(alpha=0.1))
    assert column(logger, "comm/bytes_up") == {1: 3 * vector}  # two messages, one tensor
    assert column(logger, "comm/bytes_down") == {1: 3 * vector}  # d stays on the server


def test_tensorboard_tells_methods_apart_and_shows_losses_and_summary(tmp_path: Path) -> None:
    for number, mu in enumerate((0.1, 0.5)):
        logger = TensorBoardLogger(tmp_path, name="", version=number)
        fit(algorithm=FedProx(mu=mu), logger=logger, max_rounds=40, clients_per_round=3)
        events = EventAccumulator(logger.log_dir, size_guidance={"tensors": 0, "histograms": 0})
        events.Reload()
        assert [event.step for event in events.Histograms("client/losses")] == list(range(2, 41, 2))
        assert events.Histograms("client/losses")[0].histogram_value.num == 3
        (card,) = events.Tensors("summary/text_summary")
        assert f"FedProx(mu={mu}" in card.tensor_proto.string_val[0].decode()
        plugin = events.SummaryMetadata("_hparams_/session_start_info").plugin_data
        started = HParamsPluginData.FromString(plugin.content).session_start_info.hparams
        assert started["method"].string_value.startswith(f"FedProx(mu={mu}")
        assert {"lr", "dropout", "clients_per_round", "local_epochs", "partition"} <= set(started)
