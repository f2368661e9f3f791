"""Odd but legal runs work, and runs that cannot work are refused before any client trains."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from lightning_fed import FederatedDataModule, FederatedError
from lightning_fed.algorithms import FedAvg, FedDyn, FedNova, Mime, Scaffold, SGDm
from lightning_fed.data import Dirichlet, Iid
from lightning_fed.models import MLPClassifier
from lightning_fed.server import RoundRobinSampler
from tests.helpers.ids import spelled
from tests.helpers.selection import covering
from tests.helpers.training import FEATURES, Net, classification, clients, data, parameters, trainer

METHODS = [FedAvg(), Scaffold(), FedDyn(0.1), FedNova(), Mime(SGDm())]
ENGINES = ["sequential", "vectorized"]


class Slope(pl.LightningModule):
    """A model with one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return (self.w * x - y).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def works(datamodule: FederatedDataModule, model: Any = None, **options: Any) -> Any:
    """Fit, and check that all rounds are counted and that the parameters changed and are finite."""
    model = Net(dropout=0.0) if model is None else model
    before = parameters(model).clone()
    (run := trainer(**{"clients_per_round": 1.0, **options})).fit(model, datamodule)
    assert run.fit_loop.round == 3
    assert bool(parameters(model).isfinite().all())
    assert not torch.equal(parameters(model), before)
    return run


# ------------------------------------------------------------------ odd but legal


def pairs() -> FederatedDataModule:
    clients = [TensorDataset(torch.ones(4), torch.full((4,), float(k + 1))) for k in range(3)]
    return FederatedDataModule(clients=clients, batch_size=2)


SMALL: dict[str, tuple[Callable[[], FederatedDataModule], type[pl.LightningModule]]] = {
    "one client": (partial(data, (7,)), Net),
    "one sample each": (partial(data, (1, 1, 1)), Net),
    "one client with one sample": (partial(data, (1,)), Net),
    "one parameter": (pairs, Slope),
}


@pytest.mark.parametrize(
    ("what", "algorithm"), covering([(name, e) for name in SMALL for e in ENGINES], METHODS), ids=spelled
)
def test_smallest_runs_work(what: tuple[str, str], algorithm: Any) -> None:
    (datamodule, module), engine = SMALL[what[0]], what[1]
    model = module(dropout=0.0) if module is Net else module()
    works(datamodule(), model, algorithm=algorithm, engine=engine)


@pytest.mark.parametrize(("everyone", "engine"), covering([6, 1.0, None], ENGINES), ids=str)
def test_full_cohort(everyone: Any, engine: str) -> None:
    run = works(data(), engine=engine, clients_per_round=everyone)
    assert run.fit_loop.state.seen == 6


@pytest.mark.thorough
def test_class_missing_from_validation_or_training() -> None:
    x, y = classification(40, 5).tensors
    for absent in range(3):
        rest = TensorDataset(x[y != absent], y[y != absent])
        model = MLPClassifier(in_features=FEATURES, num_classes=3, hidden=[])
        works(data(val=rest), model)
        works(FederatedDataModule(train=rest, partition=Iid(3), val=TensorDataset(x, y)), model)


def test_single_example_validation_set() -> None:
    run = works(data(val=classification(1, 5)))
    assert math.isfinite(run.callback_metrics["val_loss"])


def test_empty_clients_beside_a_nonempty_one() -> None:
    run = works(data(sizes=(0, 5, 0)))
    assert run.fit_loop.state.seen == 1


def test_batch_size_and_local_steps_exceeding_the_data() -> None:
    works(data(sizes=(3, 2), batch_size=10**9))
    works(data(sizes=(3, 2), batch_size=2), local_steps=7)


def test_zero_rounds_leave_the_model_unchanged() -> None:
    before = parameters(model := Net()).clone()
    trainer(max_rounds=0).fit(model, data())
    assert torch.equal(parameters(model), before)


def test_unusual_client_ids_and_large_seed() -> None:
    ids = ["", " ", "ä/ö", "../x", "0", 7, -1]
    works(FederatedDataModule(clients=dict(zip(ids, clients((3,) * 7), strict=True))), seed=2**100)


# ------------------------------------------------------------------ refused before any client trains


class Trained(Net):
    """A module that fails the test if it is trained."""

    test_step = Net.validation_step

    def training_step(self, *_: Any) -> Tensor:
        pytest.fail("a client was trained")


class Frozen(Trained):
    """A module without anything to train."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Endless(Dataset[Any]):
    """A data set without a length."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(1)


TENSORS = classification(20, 0)
FLOATS = TensorDataset(torch.randn(20, FEATURES), torch.randn(20))
REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "no data": ("FederatedDataModule, found no datamodule", lambda: trainer().fit(Trained())),
    "a loader": ("found a DataLoader", lambda: trainer().fit(Trained(), torch.utils.data.DataLoader(TENSORS))),
    "no clients": ("client", lambda: trainer().fit(Trained(), FederatedDataModule(clients=[]))),
    "empty clients": ("client", lambda: trainer().fit(Trained(), data(sizes=(0, 0)))),
    "too many wanted": ("clients_per_round=9", lambda: trainer(clients_per_round=9).fit(Trained(), data())),
    "too many in turn": ("clients_per_round=9", lambda: trainer(sampler=RoundRobinSampler(9)).fit(Trained(), data())),
    "a stranger": ("'bob'", lambda: trainer(sampler=lambda seed, round: ["bob"]).fit(Trained(), data())),
    "no list": ("sampler must return a list", lambda: trainer(sampler=lambda s, r: 3).fit(Trained(), data())),
    "a stranger's validation": ("'bob'", lambda: data(client_val={"bob": TENSORS})),
    "clients and a partition": ("either clients", lambda: FederatedDataModule(clients=[TENSORS], partition=Iid(2))),
    "no partition": ("found train alone", lambda: FederatedDataModule(train=TENSORS)),
    "no length": ("Endless", lambda: FederatedDataModule(clients=[Endless()])),
    "no classes": ("integer", lambda: FederatedDataModule(train=FLOATS, partition=Dirichlet(3, 0.5)).clients),
    "more clients than examples": (
        "needs at least 99 examples",
        lambda: FederatedDataModule(train=TENSORS, partition=Iid(99)).clients,
    ),
    "indices beyond": (
        "gave indices from 99 to 99 for 20 examples",
        lambda: FederatedDataModule(train=TENSORS, partition=lambda y: [torch.tensor([99])]).clients,
    ),
    "nothing to train": ("no trainable parameter", lambda: trainer().fit(Frozen(), data())),
    "two names": ("max_rounds=3 and max_epochs=4 differ", lambda: trainer(max_rounds=3, max_epochs=4)),
    "two works": ("not both", lambda: trainer(local_steps=3, local_epochs=3)),
    "validation within": ("val_check_interval", lambda: trainer(val_check_interval=0.5).fit(Trained(), data())),
    "no test set": ("no test set", lambda: trainer().test(Trained(), data())),
    "no checkpoint": (r"gone\.ckpt", lambda: trainer().fit(Trained(), data(), ckpt_path="gone.ckpt")),
    "an empty checkpoint": (r"empty\.ckpt", lambda: trainer().fit(Trained(), data(), ckpt_path="empty.ckpt")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_impossible_runs_are_rejected_before_training(name: str) -> None:
    Path("empty.ckpt").touch()
    message, attempt = REFUSED[name]
    with pytest.raises(FederatedError, match=message):
        attempt()
