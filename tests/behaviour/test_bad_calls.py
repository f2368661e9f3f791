"""Every public method that users call refuses junk by name before any training, as constructors do."""

import logging
import math
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed import FederatedDataModule, FederatedDataset, FederatedError, FederatedTrainer
from lightning_fed import data as parts
from lightning_fed.algorithms import Scaffold
from lightning_fed.server import BernoulliSampler, DifferentialPrivacy
from tests.helpers.training import Net, classification, data, seeded, trainer


class Odd:
    """A value that is invalid for any argument."""


class Staged(Net):
    """A module for every stage, which fails the test if it is trained or evaluated."""

    def training_step(self, *_: Any) -> None:
        pytest.fail("a client was trained")

    validation_step = test_step = predict_step = training_step


HUGE = 10**400
SOON = 20.0  # seconds of CPU time: enough on any machine, while counting to 10**15 takes days
JUNK = (
    *(None, True, "x", "", b"x", -1, 0, 1.5, math.nan, math.inf, 1j, HUGE, 10**15),
    *(Odd(), Odd, [], {}, [None], ["x"], {"a": None}, (1, "x"), torch.zeros(3), torch.zeros(())),
)
NOTHING = (None,)
PATHS = ("x",)
LOADERS = (
    [],
    {},
    [None],
    ["x"],
    {"a": None},
    (1, "x"),
)  # an empty loader is legal, and only the steps can judge its contents
CLIENTS = (0, True)  # ids of existing clients: in Python, True equals 1
PARTITIONS: dict[str, Any] = {
    "Dirichlet": parts.Dirichlet(3, 0.5),
    "BalancedDirichlet": parts.BalancedDirichlet(3, 1.0),
    "ByKey": parts.ByKey([0] * 10),
    "ClassesPerClient": parts.ClassesPerClient(3, 2),
    "Iid": parts.Iid(3),
    "LogNormalSizes": parts.LogNormalSizes(3, 1.0),
    "PowerLaw": parts.PowerLaw(3),
    "QuantitySkew": parts.QuantitySkew(3, 1.0),
    "Shards": parts.Shards(3),
    "Similarity": parts.Similarity(3, 0.5),
}


@pytest.fixture(scope="module", autouse=True)
def fitted(tmp_path_factory: pytest.TempPathFactory) -> FederatedTrainer:
    run = FITTED.setdefault("run", trainer(max_rounds=1, algorithm=Scaffold()))
    if run.fit_loop.round == 0:
        run.fit(seeded(), data())
    return run


FITTED: dict[str, FederatedTrainer] = {}


def loop() -> Any:
    return FITTED["run"].fit_loop


def module() -> FederatedDataModule:
    return data()


def dataset() -> FederatedDataset:
    return FederatedDataset([classification(4, 0), classification(5, 1)])


@cache
def private() -> Any:
    run = trainer(sampler=BernoulliSampler(0.5), clients_per_round=None, aggregator=DifferentialPrivacy(1.0, 1.0, 1e-5))
    return run.fit_loop.settings.aggregator


Call = tuple[Callable[[Any], Any], tuple[Any, ...]]
CALLS: dict[str, Call] = {  # a call with junk, and the values that are legal for it
    "fit.model": (lambda v: trainer().fit(v, data()), ()),
    "fit.train_dataloaders": (lambda v: trainer().fit(Staged(), v), ()),
    "fit.val_dataloaders": (lambda v: trainer(max_rounds=0).fit(Staged(), data(), v), NOTHING),
    "fit.datamodule": (lambda v: trainer().fit(Staged(), datamodule=v), ()),
    "fit.ckpt_path": (lambda v: trainer(max_rounds=0).fit(Staged(), data(), ckpt_path=v), NOTHING),
    "fit.weights_only": (lambda v: trainer(max_rounds=0).fit(Staged(), data(), weights_only=v), (None, True)),
    "validate.model": (lambda v: trainer().validate(v, data()), ()),
    "test.model": (lambda v: trainer().test(v, data()), ()),
    "predict.model": (lambda v: trainer().predict(v, data()), ()),
    "validate.dataloaders": (lambda v: trainer().validate(Staged(), v), (*LOADERS, *JUNK[-2:])),
    "test.dataloaders": (lambda v: trainer().test(Staged(), v), (*LOADERS, *JUNK[-2:])),
    "predict.dataloaders": (lambda v: trainer().predict(Staged(), v), (*LOADERS, *JUNK[-2:])),
    "validate.datamodule": (lambda v: trainer().validate(Staged(), datamodule=v), ()),
    "validate.ckpt_path": (lambda v: trainer().validate(Staged(), data(), ckpt_path=v), NOTHING),
    "save_checkpoint.filepath": (lambda v: FITTED["run"].save_checkpoint(v), PATHS),
    "max_rounds": (lambda v: setattr(trainer(), "max_rounds", v), (None, -1, 0, 10**15)),
    "client_dataset.client_id": (lambda v: module().client_dataset(v), CLIENTS),
    "client_size.client_id": (lambda v: module().client_size(v), CLIENTS),
    "client_batches.client_id": (lambda v: module().client_batches(v), CLIENTS),
    "client_val_dataset.client_id": (lambda v: module().client_val_dataset(v), ("x", "", -1, 0, 10**15, HUGE)),
    "set_clients.clients": (lambda v: module().set_clients(v), ([], {})),  # only a fit refuses them
    "FederatedDataset.size": (lambda v: dataset().size(v), CLIENTS),
    "FederatedDataset.dataset": (lambda v: dataset().dataset(v), CLIENTS),
    "client_state.client_id": (lambda v: loop().client_state(v), CLIENTS),
    "full_gradient.client_id": (lambda v: loop().full_gradient(v, loop().state.x), CLIENTS),
    "full_gradient.point": (lambda v: loop().full_gradient(0, v), ()),
    "hessian_vector.vector": (lambda v: loop().hessian_vector(0, loop().state.x, v), ()),
    "evaluate_client.client_id": (lambda v: loop().evaluate_client(v, on="train"), CLIENTS),
    "evaluate_client.on": (lambda v: loop().evaluate_client(0, on=v), ()),
    "evaluate_client.steps": (lambda v: loop().evaluate_client(0, on="train", steps=v), (0, 10**15)),
    "epsilon.rounds": (lambda v: private().epsilon(v), (0, 10**15)),
    **{
        f"{name}.labels": (
            lambda v, cut=cut: cut(v),
            (torch.zeros(3),) if name in ("Iid", "LogNormalSizes", "QuantitySkew") else (),
        )
        for name, cut in PARTITIONS.items()
    },
}


def legal(name: str, value: Any) -> bool:
    return any(
        value is other or (type(value) is type(other) and repr(value) == repr(other)) for other in CALLS[name][1]
    )


def attempt(name: str, value: Any) -> FederatedError | None:
    """Call with junk and return the refusal, if any. Any other error fails the test."""
    started = time.process_time()
    shown = "10**400" if type(value) is int and value == HUGE else repr(value)
    refusal = None
    try:
        CALLS[name][0](value)
    except FederatedError as error:
        refusal = error
    except Exception as error:
        pytest.fail(f"{name}={shown} ends in {type(error).__name__}: {error}")
    assert time.process_time() - started < SOON, f"{name}={shown} takes too long"
    return refusal


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.ERROR, logger="pytorch_lightning")


@pytest.mark.parametrize("name", CALLS)
def test_junk_arguments_are_rejected(name: str) -> None:
    for value in JUNK:
        if not legal(name, value):
            assert attempt(name, value) is not None, f"{name} takes {value!r}"


LIGHT = [
    name for name in CALLS if not name.startswith(("fit.", "validate.", "test.", "predict.", "save_", "evaluate_"))
]
simple = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text("a1 _é\x00", max_size=5), st.binary(max_size=3)
)
anything = st.one_of(
    simple, st.lists(simple, max_size=3), st.dictionaries(st.text("a1_", max_size=3), simple, max_size=2)
)


@given(name=st.sampled_from(LIGHT), value=anything)
def test_arbitrary_arguments_are_accepted_or_rejected(name: str, value: Any) -> None:
    attempt(name, value)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_stage_without_data_is_rejected(stage: str) -> None:
    with pytest.raises(FederatedError, match=f"FederatedTrainer.{stage} has no data"):
        getattr(trainer(), stage)(Staged())


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_error_for_model_class_suggests_an_instance(stage: str) -> None:
    with pytest.raises(FederatedError, match=r"must be a LightningModule; write Staged\(\)"):
        getattr(trainer(), stage)(Staged, data())


def test_best_checkpoint_is_rejected_when_none_exists() -> None:
    with pytest.raises(FederatedError, match="ckpt_path='best'"):
        trainer().validate(Staged(), data(), ckpt_path="best")


def test_save_checkpoint_raises_before_any_fit() -> None:
    with pytest.raises(FederatedError, match="nothing to save"):
        trainer().save_checkpoint("x.ckpt")


def test_epsilon_raises_for_aggregator_without_a_run() -> None:
    with pytest.raises(FederatedError, match="belongs to no run"):
        DifferentialPrivacy(1.0, 1.0, 1e-5).epsilon(3)
