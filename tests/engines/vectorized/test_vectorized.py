"""Clients run at once end where clients run one after another do."""

from functools import partial
from typing import Any

import pytest
import torch

from lightning_fed.algorithms import FedAvg, FedNova, Scaffold
from tests.behaviour.test_contract import METHODS
from tests.helpers.engines import Ordinary, assert_agree, run
from tests.helpers.selection import covering, few

FEW = (  # other kinds are in test_turns.py and test_traces.py
    "ServerOnly", "FedProx adaptive", "FedDane same", "FedNova", "FedDyn inverse mean", "MimeMVR current", "CMime Yogi",
)  # fmt: skip
ROUNDS = {"Mime RMSProp": 2}  # where rounding errors grow a hundredfold a round, in any order of summation


@pytest.mark.parametrize("name", few(METHODS, FEW))
def test_every_method_agrees_with_the_sequential_engine(name: str) -> None:
    method = METHODS[name]
    local = {"local_epochs": 2} if method.algorithm.local_work else {"local_epochs": None}
    local["max_rounds"] = ROUNDS.get(name, 3)
    runs = [
        run(engine, partial(Ordinary, method.optimizer), algorithm=method.algorithm, **local)
        for engine in ("sequential", "vectorized")
    ]
    assert_agree(*runs)


OPTIMIZERS = {
    "SGD momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD dampened": partial(torch.optim.SGD, lr=0.05, momentum=0.5, dampening=0.5),
    "Adam": partial(torch.optim.Adam, lr=0.01, weight_decay=0.01),
    "Adam amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "Adamax": partial(torch.optim.Adamax, lr=0.01),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "RAdam": partial(torch.optim.RAdam, lr=0.01),
}


@pytest.mark.parametrize(("optimizer", "algorithm"), covering(list(OPTIMIZERS), [FedAvg(), Scaffold(), FedNova()]))
def test_every_local_optimizer_agrees(optimizer: str, algorithm: Any) -> None:
    runs = [
        run(engine, partial(Ordinary, OPTIMIZERS[optimizer]), algorithm=algorithm, local_epochs=2)
        for engine in ("sequential", "vectorized")
    ]
    assert_agree(*runs)


@pytest.mark.thorough  # the default run has chunks of several sizes in test_turns.py
@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4])
def test_the_chunk_changes_nothing_but_rounding(chunk_size: int) -> None:
    runs = [run("vectorized", algorithm=Scaffold(), chunk_size=n) for n in (chunk_size, 64)]
    assert_agree(*runs)


@pytest.mark.parametrize(
    ("on", "clip"),
    covering(
        ["gradient", "corrected"],
        [{"gradient_clip_val": 0.05}, {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}],
    ),
)
def test_clipping_agrees(on: str, clip: dict[str, Any]) -> None:
    runs = [run(engine, algorithm=Scaffold(), gradient_clip_on=on, **clip) for engine in ("sequential", "vectorized")]
    assert_agree(*runs)


def test_float32_agrees_up_to_rounding() -> None:
    runs = [run(engine, algorithm=Scaffold(), precision="32-true") for engine in ("sequential", "vectorized")]
    assert_agree(*runs, rtol=1e-5)


def test_groups_with_rates_of_their_own_agree() -> None:
    def groups(params: Any) -> torch.optim.Optimizer:
        params = list(params)
        return torch.optim.SGD([{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.0}], weight_decay=0.1)

    assert_agree(
        *(run(engine, partial(Ordinary, groups), algorithm=Scaffold()) for engine in ("sequential", "vectorized"))
    )
