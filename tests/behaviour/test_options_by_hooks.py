"""Hooks change a method's options for a round or a client. The results match a hand-written loop."""

from typing import Any

import pytest
import torch

from lightning_fed import FederatedCallback
from lightning_fed.algorithms import Ditto, FedProx
from lightning_fed.data import Quadratics
from lightning_fed.models import Quadratic
from tests.helpers.training import trainer

A, B = (2.0, 0.0), (1.0, -1.0)  # f_i(x) = a_i x^2 / 2 + b_i x
BY_ROUND, MORE = (0.5, 0.25, 1.0), 2.0


class Sets(FederatedCallback):
    """Sets an option by round, and to another value for client 1."""

    def __init__(self, name: str, for_clients: bool) -> None:
        self.name, self.for_clients = name, for_clients

    def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
        setattr(trainer.fit_loop.settings.algorithm, self.name, BY_ROUND[round])

    def on_client_start(self, trainer: Any, pl_module: Any, round: int, client_id: Any) -> None:
        if self.for_clients and client_id == 1:
            setattr(trainer.fit_loop.settings.algorithm, self.name, MORE)


def fitted(method: Any, name: str, engine: Any, for_clients: bool) -> Any:
    sets = Sets(name, for_clients)
    run = trainer(algorithm=method, engine=engine, callbacks=[sets], max_rounds=3, clients_per_round=2, local_epochs=3)
    run.fit(Quadratic(x0=1.0, lr=0.1), Quadratics(a=A, G=1.0))
    return run.fit_loop


def pulls(round: int, for_clients: bool) -> list[float]:
    return [BY_ROUND[round], MORE if for_clients else BY_ROUND[round]]


CASES = [
    ("sequential", True),
    pytest.param("vectorized", False, marks=pytest.mark.thorough),
    pytest.param("auto", True, marks=pytest.mark.thorough),
]


@pytest.mark.filterwarnings("ignore:.*engine='auto' restarts")
@pytest.mark.parametrize(("engine", "for_clients"), CASES)
def test_fedprox_uses_mu_set_by_hooks(engine: Any, for_clients: bool) -> None:
    x = 1.0
    for number in range(3):
        ends = []
        for a, b, mu in zip(A, B, pulls(number, for_clients), strict=True):
            y = x
            for _ in range(3):
                y -= 0.1 * (a * y + b + mu * (y - x))
            ends.append(y)
        x = sum(ends) / 2
    loop = fitted(FedProx(BY_ROUND[0]), "mu", engine, for_clients)
    assert loop.state.x.item() == pytest.approx(x, abs=1e-14)
    assert loop.state.state["mu"].item() == BY_ROUND[2]


@pytest.mark.filterwarnings("ignore:.*engine='auto' restarts")
@pytest.mark.parametrize(("engine", "for_clients"), CASES)
@pytest.mark.parametrize("name", ["lam", "personal_rate"])
def test_ditto_uses_options_set_by_hooks(engine: Any, for_clients: bool, name: str) -> None:
    x, own = 1.0, [1.0, 1.0]
    for number in range(3):
        ends = []
        for i, (a, b, value) in enumerate(zip(A, B, pulls(number, for_clients), strict=True)):
            lam, rate = (value, 0.75) if name == "lam" else (0.25, value)
            y = x
            for _ in range(3):
                y -= 0.1 * (a * y + b)
                own[i] -= 0.1 * rate * (a * own[i] + b + lam * (own[i] - x))
            ends.append(y)
        x = sum(ends) / 2
    options = {"lam": 0.25, "personal_rate": 0.75, name: BY_ROUND[0]}
    loop = fitted(Ditto(**options), name, engine, for_clients)
    found = torch.stack([loop.state.client_state(i)["v"] for i in range(2)]).flatten().tolist()
    assert found == pytest.approx(own, abs=1e-14)
