"""The values that every round writes to the loggers."""

import csv
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from lightning_fed.algorithms import FedAvg, FedDyn, FedProx, Mime, Scaffold, SGDm
from lightning_fed.callbacks import SplitPicture
from lightning_fed.data import Dirichlet, FederatedDataModule, Iid, Partition
from lightning_fed.server import BernoulliSampler, DifferentialPrivacy, FedAdam, FedBuff, TrimmedMean
from tests.helpers.optional import needs_matplotlib
from tests.helpers.training import Net, classification, clients, fit, seeded, trainer


def column(logger: CSVLogger, name: str) -> dict[int, float]:
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row.get(name)}


def test_tensorboard_logs_metrics_by_round(tmp_path: Path) -> None:
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


def test_logged_bytes_match_the_messages(tmp_path: Path) -> None:
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


@pytest.mark.thorough
def test_tensorboard_logs_the_method_losses_and_summary(tmp_path: Path) -> None:
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
        assert started["algorithm"].string_value.startswith(f"FedProx(mu={mu}")
        assert {"lr", "dropout", "clients_per_round", "local_epochs", "partition"} <= set(started)


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, {}),
        ({"server_optimizer": FedAdam}, {"server_optimizer": "FedAdam"}),
        ({"server_optimizer": partial(FedAdam, lr=0.5)}, {"server_optimizer": "FedAdam(lr=0.5)"}),
        (  # the form of the command line
            {"server_optimizer": partial(lambda kind, params, **options: kind(params, **options), FedAdam, lr=0.5)},
            {"server_optimizer": "FedAdam(lr=0.5)"},
        ),
        ({"aggregator": TrimmedMean(0.1)}, {"aggregator": "TrimmedMean(beta=0.1)"}),
        (
            {"asynchronous": FedBuff(size=2, concurrency=2), "clients_per_round": None},
            {"asynchronous": repr(FedBuff(size=2, concurrency=2))},
        ),
    ],
    ids=lambda value: ", ".join(value),
)
def test_settings_show_only_non_default_parts(options: dict[str, Any], shown: dict[str, str], tmp_path: Path) -> None:
    parts = {
        "server_optimizer",
        "heterogeneity",
        "aggregator",
        "attack",
        "compression",
        "client_privacy",
        "asynchronous",
    }
    logger = TensorBoardLogger(tmp_path, name="", version="")
    fit(algorithm=FedAvg(), logger=logger, max_rounds=1, **options)
    assert {name: value for name, value in logger.hparams.items() if name in parts} == shown


class WithSeed(Net):
    """A module with a hyper-parameter named like a setting of the run."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_other_loggers_get_settings_and_keep_module_hyperparameters(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit(WithSeed(), logger=logger, max_rounds=1, algorithm=FedProx(mu=0.1))
    found = yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text())
    assert found["algorithm"].startswith("FedProx(mu=0.1")
    assert found["seed"] == 7
    assert {"clients_per_round", "local_epochs", "engine", "partition"} <= set(found)


def events_of(logger: TensorBoardLogger) -> EventAccumulator:
    events = EventAccumulator(logger.log_dir, size_guidance={"images": 0, "tensors": 0, "scalars": 0, "histograms": 0})
    events.Reload()
    return events


def split(partition: Partition) -> FederatedDataModule:
    return FederatedDataModule(train=classification(40, 1), partition=partition, val=classification(8, 2), batch_size=4)


@needs_matplotlib
def test_hyperparameters_are_not_logged_if_disabled(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    fit(logger=logger, max_rounds=1, enable_autolog_hparams=False)
    assert logger.hparams == {}
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert "hp_metric" not in events.Tags()["scalars"]
    assert "_hparams_/session_start_info" not in events.summary_metadata


def test_resumed_run_does_not_log_its_method_and_split_again(tmp_path: Path) -> None:
    def run(rounds: int, **options: Any) -> EventAccumulator:
        logger = TensorBoardLogger(tmp_path, name="", version="run")
        once = trainer(logger=logger, max_rounds=rounds, algorithm=FedProx(mu=0.1), clients_per_round=2)
        once.fit(seeded(), split(Dirichlet(num_clients=4, alpha=0.3)), **options)
        once.save_checkpoint(tmp_path / "last.ckpt")
        return events_of(logger)

    for events in (run(2), run(3, ckpt_path=tmp_path / "last.ckpt")):
        (method,) = events.Tensors("method/text_summary")
        assert method.tensor_proto.string_val[0].decode().startswith("FedProx(mu=0.1")
        assert [image.step for image in events.Images("split")] == [0]
        assert [card.step for card in events.Tensors("split/text_summary")] == [0]


class OnDemand(FederatedDataModule):
    """Clients built on demand: only those that a run needs may be built."""

    def client_dataset(self, client_id: Any) -> Any:
        return super().client_dataset(client_id)


@needs_matplotlib
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: split(Iid(num_clients=4)), {}),
        (lambda: FederatedDataModule(clients=clients(), val=classification(8, 2)), {}),
        (lambda: OnDemand(train=classification(40, 1), partition=Dirichlet(4, alpha=0.3)), {}),
        (
            lambda: split(Dirichlet(4, alpha=0.3)),
            {"aggregator": DifferentialPrivacy(1.0, 1.0, 1e-5), "sampler": BernoulliSampler(0.5)},
        ),
    ],
    ids=["labels not used", "clients given", "on demand", "private"],
)
def test_split_is_not_drawn_by_default_if_costly_or_private(make: Any, options: dict[str, Any], tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    fit(datamodule=make(), logger=logger, max_rounds=1, **({} if options else {"clients_per_round": 2}), **options)
    assert events_of(logger).Tags()["images"] == []


@needs_matplotlib
def test_requested_picture_is_drawn_once(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    data = split(Dirichlet(num_clients=4, alpha=0.3))
    fit(datamodule=data, logger=logger, max_rounds=1, clients_per_round=2, callbacks=SplitPicture(), algorithm=FedAvg())
    assert len(events_of(logger).Images("split")) == 1
