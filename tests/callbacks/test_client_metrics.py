"""Metrics of single clients: by hand, with torchmetrics, and separate from the trainer's validation."""

import csv
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_fed import FederatedDataModule, FederatedError
from lightning_fed.algorithms import FedDyn
from lightning_fed.callbacks import (
    ClientAccuracy,
    GradientDissimilarity,
    HessianDissimilarity,
    PersonalizedAccuracy,
    TrainingLoss,
)
from lightning_fed.data import Quadratics
from lightning_fed.models import Quadratic
from tests.helpers.training import CLASSES, Net, classification, data, fit, seeded, trainer

SIZES = (11, 3, 7, 5, 20, 9)
VAL = {i: classification(n, seed=100 + i) for i, n in enumerate(SIZES)}


def run(callback: Any, model: Any = None, datamodule: Any = None, **kwargs: Any) -> dict[str, float]:
    """Return the values logged at the end of one round."""
    fitted = trainer(callbacks=callback, **{"max_rounds": 1, **kwargs})
    datamodule = data(client_val=VAL, eval_batch_size=4) if datamodule is None else datamodule
    fitted.fit(seeded() if model is None else model, datamodule)
    return {name: float(value) for name, value in fitted.callback_metrics.items()}


@torch.no_grad()
def accuracies(model: nn.Module, datasets: dict[Any, TensorDataset] | None = None) -> dict[int, float]:
    model.eval()
    return {
        i: float((model(d.tensors[0]).argmax(1) == d.tensors[1]).float().mean()) for i, d in (datasets or VAL).items()
    }


def test_every_client_is_measured_on_all_its_examples(tmp_path: Path) -> None:
    model, callback, logger = seeded(), ClientAccuracy(), CSVLogger(tmp_path)
    found = run(callback, model, logger=logger)
    expected = accuracies(model)
    assert {i: row["val_acc"] for i, row in callback.table.items()} == pytest.approx(expected)
    values = torch.tensor(list(expected.values()))
    assert found["clients/val_acc/mean"] == pytest.approx(float(values.mean()))
    assert found["clients/val_acc/std"] == pytest.approx(float(values.std(correction=0)))
    assert found["clients/val_acc/worst_10"] == pytest.approx(float(values.min()))
    assert found["clients/val_acc/p90"] == pytest.approx(float(values.quantile(0.9)))
    with (Path(logger.log_dir) / "clients" / "round_000001.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {int(row["client"]): float(row["val_acc"]) for row in rows} == pytest.approx(expected)
    assert set(rows[0]) == {"client", "val_acc", "val_loss"}


@pytest.mark.thorough
def test_tensorboard_shows_a_histogram_over_clients(tmp_path: Path) -> None:
    logger, callback = TensorBoardLogger(tmp_path), ClientAccuracy(every_n_rounds=2, on="train")
    fit(callbacks=callback, logger=logger, max_rounds=5)
    events = EventAccumulator(logger.log_dir, size_guidance={"histograms": 0})
    events.Reload()
    shown = events.Histograms("clients_train/val_acc")
    assert [event.step for event in shown] == [2, 4]
    values = [row["val_acc"] for row in callback.table.values()]
    assert shown[-1].histogram_value.num == len(values) == 6
    assert shown[-1].histogram_value.sum == pytest.approx(sum(values))


def test_training_sets_are_measured_on_request() -> None:
    model, callback = seeded(), ClientAccuracy(on="train")
    found, datamodule = run(callback, model, data()), data()
    expected = accuracies(model, {i: datamodule.client_dataset(i) for i in range(6)})  # type: ignore[misc]
    assert {i: row["val_acc"] for i, row in callback.table.items()} == pytest.approx(expected)
    assert found["clients_train/val_acc/mean"] == pytest.approx(sum(expected.values()) / 6)


def test_worst_loss_is_the_largest_with_mode_min() -> None:
    callback = ClientAccuracy("val_loss", mode="min")
    assert run(callback)["clients/val_loss/worst_10"] == max(row["val_loss"] for row in callback.table.values())


class Measured(Net):
    """Logs torchmetrics objects, a collection of them, a sum, and a value at the end of validation."""

    def __init__(self) -> None:
        super().__init__()
        self.acc = MulticlassAccuracy(CLASSES, average="micro")
        self.scores = MetricCollection({"f1": MulticlassF1Score(CLASSES, average="macro")})
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.acc(self(batch[0]), batch[1])
        self.log("train_acc", self.acc, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_start(self) -> None:
        self.seen = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        out = self(batch[0])
        self.acc(out, batch[1])
        self.scores(out, batch[1])
        self.log("val_acc", self.acc)
        self.log_dict(self.scores)
        self.log("examples", float(len(batch[0])), reduce_fx="sum")
        self.seen.append(len(batch[0]))

    def on_validation_epoch_end(self) -> None:
        self.log("largest_batch", float(max(self.seen)))
        assert "val_acc" in self.trainer.callback_metrics


def test_metric_objects_are_reset_for_every_client() -> None:
    model, callback = seeded(Measured), ClientAccuracy()
    run(callback, model)
    for i, dataset in VAL.items():
        x, y = dataset.tensors
        with torch.no_grad():
            out = model.eval()(x)
        row = callback.table[i]
        assert row["val_acc"] == pytest.approx(float((out.argmax(1) == y).float().mean()))
        assert row["f1"] == pytest.approx(float(MulticlassF1Score(CLASSES, average="macro")(out, y)))
        assert row["examples"] == len(y)
        assert row["largest_batch"] == min(4, len(y))


@pytest.mark.thorough
def test_measuring_clients_does_not_change_trainer_metrics(tmp_path: Path) -> None:
    logged = []
    for callbacks in ([], [ClientAccuracy(), PersonalizedAccuracy(local_steps=2)]):
        logger = CSVLogger(tmp_path, version=len(logged))
        run(callbacks, seeded(Measured), logger=logger, max_rounds=2)
        with (Path(logger.log_dir) / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        own = ("train_acc", "train_loss", "val_acc", "f1", "examples", "largest_batch", "client/loss")
        logged.append([{name: row[name] for name in own if row[name]} for row in rows if any(row[n] for n in own)])
    assert logged[0]
    assert logged[0] == logged[1]


def test_sample_contains_only_clients_with_a_validation_set() -> None:
    some = {1: VAL[1], 4: VAL[4], 5: TensorDataset(torch.zeros(0, 6), torch.zeros(0, dtype=torch.int64))}
    callback = ClientAccuracy(clients=2)
    run(callback, datamodule=data(client_val=some))
    assert list(callback.table) == [1, 4]
    everyone = ClientAccuracy()
    with pytest.warns(UserWarning, match="2 of 6 clients have a validation set"):
        run(everyone, datamodule=data(client_val=some))
    assert list(everyone.table) == [1, 4]


def test_validation_step_may_use_any_argument_names() -> None:
    class Indexed(Net):
        def validation_step(self, batch: Any, number: int) -> None:
            self.log("number", float(number), reduce_fx="max")

    class Bare(Net):
        def validation_step(self, batch: Any) -> None:
            self.log("number", -1.0)

    for module, expected in ((Indexed, 4.0), (Bare, -1.0)):
        callback = ClientAccuracy("number")
        run(callback, seeded(module))
        assert callback.table[4]["number"] == expected


def test_measured_model_is_the_evaluated_one() -> None:
    model, callback = seeded(), ClientAccuracy()
    run(callback, model, algorithm=FedDyn(alpha=0.1, evaluate="mean"))
    assert {i: row["val_acc"] for i, row in callback.table.items()} == pytest.approx(accuracies(model))


def by_hand(make: Any, steps: int) -> list[float]:
    """Return the losses of both clients of a quadratic problem, each after its own steps from 2."""
    losses = []
    for a, b in ((3.0, 10.0), (1.0, -10.0)):
        x = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        optimizer = make([x])
        for _ in range(steps):
            optimizer.zero_grad()
            (a / 2 * x**2 + b * x).backward()
            optimizer.step()
        losses.append(float((a / 2 * x**2 + b * x).detach()))
    return losses


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, lr=0.1),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
        partial(torch.optim.Adam, lr=0.5),
    ],
    ids=["sgd", "momentum", "adam"],
)
@pytest.mark.parametrize("steps", [1, 5])
def test_personalized_models_take_plain_user_optimizer_steps(make: Any, steps: int) -> None:
    class Mine(Quadratic):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make(self.parameters())

    # the server stays at 2, so every client starts there
    callback = PersonalizedAccuracy("val_loss", mode="min", on="train", local_steps=steps)
    found = run(
        callback, Mine(x0=2.0), Quadratics(a=(3.0, 1.0), G=10.0), clients_per_round=1.0,
        server_optimizer=partial(torch.optim.SGD, lr=0.0), max_rounds=2,
    )  # fmt: skip
    losses = by_hand(make, steps)
    assert [row["val_loss"] for row in callback.table.values()] == pytest.approx(losses)
    assert found["personalized_train/val_loss/mean"] == pytest.approx(sum(losses) / 2)


@pytest.mark.parametrize("corrected", [False, True])
def test_personalization_clips_gradients_like_the_run(corrected: bool) -> None:
    callback = PersonalizedAccuracy("val_loss", mode="min", on="train", local_steps=3)
    run(
        callback, Quadratic(x0=2.0, lr=0.1), Quadratics(a=(3.0, 1.0), G=10.0), gradient_clip_val=1.0,
        gradient_clip_on="corrected" if corrected else "gradient", clients_per_round=1.0,
        server_optimizer=partial(torch.optim.SGD, lr=0.0),
    )  # fmt: skip
    for row, (a, b, x) in zip(callback.table.values(), ((3.0, 10.0, 1.7), (1.0, -10.0, 2.3)), strict=True):
        assert row["val_loss"] == pytest.approx(a / 2 * x**2 + b * x, rel=1e-5)


@pytest.mark.thorough
def test_steps_beyond_one_epoch_continue_with_another_epoch() -> None:
    tuned = PersonalizedAccuracy("val_loss", mode="min", on="train", local_steps=60)
    plain = ClientAccuracy("val_loss", mode="min", on="train")
    run([tuned, plain], seeded(dropout=0.0), data((8, 5)), clients_per_round=2)
    assert all(tuned.table[i]["val_loss"] < 0.5 * plain.table[i]["val_loss"] for i in tuned.table)


def test_personalization_updates_per_client_buffers() -> None:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__(dropout=0.0)
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x))

    model, tuned = seeded(Normed), PersonalizedAccuracy(local_steps=10)
    plain = ClientAccuracy()
    run([tuned, plain], model, data(client_val=VAL, drop_last=True))
    assert {i: row["val_acc"] for i, row in plain.table.items()} == pytest.approx(accuracies(model))
    assert int(model.norm.num_batches_tracked) > 0
    assert tuned.table != plain.table


@pytest.mark.parametrize(
    ("callback", "model", "words"),
    [
        (ClientAccuracy(), Net, "client_val"),
        (ClientAccuracy("val_f1", on="train"), Net, r"logs \['val_acc', 'val_loss'\]"),
    ],
)
def test_modules_that_cannot_be_measured_are_rejected(callback: Any, model: Any, words: str) -> None:
    with pytest.raises(FederatedError, match=words):
        run(callback, seeded(model), data())


def test_module_without_validation_step_or_log_is_rejected() -> None:
    class Silent(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            """Log nothing."""

    class Blind(Net):
        validation_step = pl.LightningModule.validation_step

    with pytest.raises(FederatedError, match=r"Silent.validation_step logged nothing"):
        run(ClientAccuracy(), seeded(Silent))
    with pytest.raises(FederatedError, match="which Blind does not have"):
        run(ClientAccuracy(), seeded(Blind), FederatedDataModule(clients=VAL, client_val=VAL))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (partial(ClientAccuracy, mode="best"), "mode"),
        (partial(ClientAccuracy, on="test"), "on="),
        (partial(PersonalizedAccuracy, local_steps=0), "local_steps"),
    ],
)
def test_out_of_range_arguments_are_rejected(make: Any, words: str) -> None:
    with pytest.raises(FederatedError, match=words):
        make()


def test_no_files_are_written_without_a_logger(tmp_path: Path) -> None:
    fit(seeded(), data(client_val=VAL), callbacks=ClientAccuracy())
    assert not list(tmp_path.rglob("*.csv"))


class Built(FederatedDataModule):
    """Three clients with examples and optional empty ones, which are only known to be empty once they are built."""

    def __init__(self, num_empty: int = 0, sizes: tuple[int, ...] = (8, 4, 12)) -> None:
        super().__init__(batch_size=4)
        self.sizes = (*sizes, *(0,) * num_empty)
        self.num_clients = len(self.sizes)

    def client_dataset(self, client_id: Any) -> TensorDataset:
        return classification(self.sizes[client_id], seed=client_id)


@pytest.mark.parametrize(
    "make",
    [
        GradientDissimilarity,
        partial(HessianDissimilarity, max_iterations=3),
        TrainingLoss,
        partial(ClientAccuracy, on="train"),
        partial(PersonalizedAccuracy, on="train"),
    ],
)
def test_clients_found_to_be_empty_are_not_measured(make: Any) -> None:
    tags = ("gradient/", "hessian/", "population/", "clients_train/", "personalized_train/")

    def found(num_empty: int) -> dict[str, float]:
        logged = run(make(), datamodule=Built(num_empty), sampler=lambda seed, round: [0, 1, 2])
        return {tag: value for tag, value in logged.items() if tag.startswith(tags)}

    alone = found(0)
    assert alone
    with pytest.warns(UserWarning, match="3 of 5 clients have training examples"):
        assert found(2) == alone


def test_population_without_examples_is_rejected() -> None:
    with pytest.raises(FederatedError, match="TrainingLoss has no client to measure: none has training examples"):
        run(TrainingLoss(), datamodule=Built(2, sizes=()), clients_per_round=1.0)


def test_client_with_empty_loader_is_measured_without_tuning() -> None:
    class Dropping(Built):
        def client_dataloader(self, client_id: Any, generator: torch.Generator) -> Any:
            return DataLoader(self.client_dataset(client_id), batch_size=6, drop_last=True, generator=generator)

    personal, plain = PersonalizedAccuracy(on="train"), ClientAccuracy(on="train")
    run([personal, plain], datamodule=Dropping())
    assert personal.table[1] == plain.table[1]  # four examples do not fill a batch of six
    assert personal.table[2] != plain.table[2]
