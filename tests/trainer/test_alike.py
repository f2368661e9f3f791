"""Processes that were given other settings or data than the first one are refused by name, in all of them."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule, FederatedError
from lightning_fed.algorithms import FedProx
from tests.helpers.engines import Ordinary
from tests.helpers.processes import in_processes
from tests.helpers.training import clients, data, trainer

FIRST, SECOND = (9, 4, 6, 8, 5, 7), (4, 9, 6, 8, 5, 7)


def fit(
    strategy: str = "clients", datamodule: FederatedDataModule | None = None, lr: float = 0.1, **options: Any
) -> str:
    """Return the error of a fit."""
    fitted = trainer(strategy=strategy, devices=2, limit_val_batches=0, **options)
    try:
        fitted.fit(
            Ordinary(lambda params: torch.optim.SGD(params, lr)), data(FIRST) if datamodule is None else datamodule
        )
    except FederatedError as error:
        return str(error)
    return ""


def shuffled(seed: int) -> FederatedDataModule:
    """Return clients of the same sizes, whose examples are in an order of the seed."""
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    first, *others = clients(FIRST)
    return FederatedDataModule([TensorDataset(*(t[order] for t in first.tensors)), *others], batch_size=4)


CASES: dict[str, tuple[Callable[[int], str], str]] = {
    "seed": (lambda rank: fit(seed=rank), "another seed"),
    "seed, ddp": (lambda rank: fit("ddp", seed=rank), "another seed"),
    "sizes": (lambda rank: fit(datamodule=data(SECOND if rank else FIRST)), "other sizes"),
    "examples": (lambda rank: fit(datamodule=shuffled(rank)), "other examples"),
    "ids": (lambda rank: fit(datamodule=data(FIRST[rank:])), "other clients"),
    "rate": (lambda rank: fit(lr=0.1 + rank), "'lr': 1.1"),
    "method": (lambda rank: fit(algorithm=FedProx(1.0 + rank)), "options={'mu': 2.0, 'adaptive': None} (process 0 has"),
    "rounds": (lambda rank: fit(max_rounds=2 + rank), "max_rounds=3 (process 0 has 2)"),
    "local epochs": (lambda rank: fit("ddp", local_epochs=1 + rank), "local_epochs=2 (process 0 has 1)"),
}


def work() -> dict[str, str]:
    rank = int(os.environ["RANK"])
    return {"alike": fit(), **{name: run(rank) for name, (run, _) in CASES.items()}}


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    outcomes = in_processes(work, tmp_path_factory.mktemp("alike"))
    assert not any(outcome.error for outcome in outcomes), outcomes
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize("name", CASES)
def test_a_process_that_is_given_something_else_is_refused_in_all(name: str, errors: list[dict[str, str]]) -> None:
    for of_rank in errors:
        assert of_rank[name].startswith("Process 1 was given other settings or data than process 0: "), name
        assert CASES[name][1] in of_rank[name]


def test_processes_that_are_given_the_same_train(errors: list[dict[str, str]]) -> None:
    assert [of_rank["alike"] for of_rank in errors] == ["", ""]
