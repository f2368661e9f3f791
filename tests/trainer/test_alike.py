"""Processes with other settings or data than the first one are rejected by name, in all processes."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from lightning_fed import FederatedCallback, FederatedDataModule, FederatedError
from lightning_fed.algorithms import FedProx, Scaffold
from lightning_fed.trainer.alike import _DEVICE
from tests.helpers.engines import Ordinary
from tests.helpers.processes import in_processes
from tests.helpers.training import CLASSES, FEATURES, classification, clients, data, trainer

FIRST, SECOND = (9, 4, 6, 8, 5, 7), (4, 9, 6, 8, 5, 7)


def fit(
    strategy: str = "clients",
    datamodule: FederatedDataModule | None = None,
    lr: float = 0.1,
    module: Any = None,
    **options: Any,
) -> str:
    """Return the error message of a fit."""
    fitted = trainer(strategy=strategy, devices=2, limit_val_batches=0, **options)
    try:
        module = Ordinary(lambda params: torch.optim.SGD(params, lr)) if module is None else module
        fitted.fit(module, data(FIRST) if datamodule is None else datamodule)
    except FederatedError as error:
        return str(error)
    return ""


def shuffled(seed: int) -> FederatedDataModule:
    """Return clients of the same sizes. The seed shuffles the first one's examples."""
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    first, *others = clients(FIRST)
    return FederatedDataModule([TensorDataset(*(t[order] for t in first.tensors)), *others], batch_size=4)


class Arrays(Dataset[Any]):
    """Examples in NumPy arrays, optionally with new noise in every read."""

    def __init__(self, seed: int, noise: float = 0.0) -> None:
        self.x, self.noise = np.random.default_rng(seed).normal(size=(9, FEATURES)), noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index] + self.noise * np.random.normal(), "y": index % CLASSES}


class Named(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([batch["x"].float(), batch["y"]], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


def named(seed: int, noise: float = 0.0) -> str:
    """Fit with examples that may differ between processes."""
    return fit(module=Named(), datamodule=FederatedDataModule([Arrays(seed, noise)] * 6, batch_size=4))


CASES: dict[str, tuple[Callable[[int], str], str]] = {
    "seed": (lambda rank: fit(seed=rank), "another seed"),
    "seed, ddp": (lambda rank: fit("ddp", seed=rank), "another seed"),
    "sizes": (lambda rank: fit(datamodule=data(SECOND if rank else FIRST)), "other sizes"),
    "examples": (lambda rank: fit(datamodule=shuffled(rank)), "other examples"),
    "arrays": (named, "other examples"),
    "validation": (lambda rank: fit(datamodule=data(FIRST, val=classification(9, rank))), "other validation examples"),
    "rate": (lambda rank: fit(lr=0.1 + rank), "'lr': 1.1"),
    "method": (lambda rank: fit(algorithm=FedProx(1.0 + rank)), "options={'mu': 2.0, 'adaptive': None} (process 0 has"),
    "rounds": (lambda rank: fit(max_rounds=2 + rank), "max_rounds=3 (process 0 has 2)"),
}


class Demanded(FederatedDataModule):
    """Makes clients whose sizes depend on the process."""

    num_clients, rank = 4, 0

    def client_dataset(self, client_id: Any) -> TensorDataset:
        return classification(5 + self.rank, client_id)


class Accumulates(FederatedCallback):
    """Sets a different value in each process in the second round."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.fit_loop.round == 1:
            trainer.accumulate_grad_batches = 1 + trainer.global_rank


def demanded(rank: int) -> FederatedDataModule:
    module = Demanded(batch_size=4)
    module.rank = rank
    return module


def by_rank(strategy: str, rank: int) -> str:
    """Fit with a sampler that draws different clients in each process after the first round."""
    return fit(strategy, sampler=lambda seed, round: [0, 1 + (rank if round else 0)])


def awaits_a_state(rank: int) -> str:
    """Fit with a sampler whose draws leave one process waiting for a state of the other."""
    drawn = [0, 2, 4] if rank else [0]
    options: dict[str, Any] = {"algorithm": Scaffold(), "local_epochs": 7}
    return fit(datamodule=data((16,) * 6), sampler=lambda _, round: drawn if round else range(6), **options)


class AsksByRank:
    """A sampler that requests clients' losses in process 0 alone, after the first round."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def needs_losses_of(self, seed: int, round: int, population: Any) -> list[int]:
        return [] if round and self.rank else [0, 1]

    def __call__(self, seed: int, round: int, population: Any, losses: Any) -> list[int]:
        return [0, 1]


DRAWN: dict[str, tuple[Callable[[int], str], int]] = {
    "sampler": (partial(by_rank, "clients"), 1),
    "sampler, ddp": (partial(by_rank, "ddp"), 1),
    "sampler, states": (awaits_a_state, 1),
    "sampler, losses": (lambda rank: fit(sampler=AsksByRank(rank)), 1),
    "sizes on demand": (lambda rank: fit(datamodule=demanded(rank)), 0),
    "a hook, ddp": (lambda rank: fit("ddp", callbacks=[Accumulates()]), 1),
}


def work() -> dict[str, str]:
    rank = int(os.environ["RANK"])
    fits = {name: run(rank) for name, (run, _) in {**CASES, **DRAWN}.items()}
    return {"alike": fit(), "drawn": named(0, noise=1.0), **fits}


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    outcomes = in_processes(work, tmp_path_factory.mktemp("alike"))
    assert not any(outcome.error for outcome in outcomes), outcomes
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize("name", CASES)
def test_different_settings_or_data_are_rejected_in_all_processes(name: str, errors: list[dict[str, str]]) -> None:
    for of_rank in errors:
        assert of_rank[name].startswith("Process 1 was given other settings or data than process 0: "), name
        assert CASES[name][1] in of_rank[name]


@pytest.mark.parametrize("name", DRAWN)
def test_processes_with_different_clients_or_steps_raise(name: str, errors: list[dict[str, str]]) -> None:
    for of_rank in errors:
        assert of_rank[name].startswith(f"Process 1 has other clients in round {DRAWN[name][1]} than process 0, or"), (
            name
        )


def test_processes_with_equal_settings_and_data_train(errors: list[dict[str, str]]) -> None:
    assert [(of_rank["alike"], of_rank["drawn"]) for of_rank in errors] == [("", "")] * 2


def test_device_of_a_learning_rate_is_ignored() -> None:
    assert _DEVICE.sub("", "[{'lr': tensor(0.1000, device='cuda:1'), 'betas': (0.9, 0.99)}]") == (
        "[{'lr': tensor(0.1000), 'betas': (0.9, 0.99)}]"
    )


@pytest.mark.parametrize("text", ["Blur(device=device(type='cuda', index={}))", "Blur(device=cuda:{})"])
def test_device_of_a_batch_function_is_not_compared(text: str) -> None:
    assert _DEVICE.sub("", text.format(0)) == _DEVICE.sub("", text.format(1))
