"""The error of control variates where it is known."""

from functools import partial
from typing import Any

import pytest
import torch

from lightning_fed import FederatedError
from lightning_fed.algorithms import FedAvg, FedDyn, Scaffold
from lightning_fed.callbacks import ControlVariateError
from lightning_fed.data import Quadratics
from lightning_fed.models import Quadratic
from tests.helpers.training import data, fit, seeded, trainer

A, G = (3.0, 1.0), 10.0


def measure(server_lr: float = 1.0, model: Any = None, datamodule: Any = None, **kwargs: Any) -> Any:
    """Return a callback after a run, and what was logged last."""
    callback = ControlVariateError(clients=kwargs.pop("clients", None))
    who = {} if "sampler" in kwargs else {"clients_per_round": 1.0}
    options = {"max_rounds": 1, "local_steps": 1, **who, "algorithm": Scaffold(option="i"), **kwargs}
    run = trainer(callbacks=callback, server_optimizer=partial(torch.optim.SGD, lr=server_lr), **options)
    run.fit(model or Quadratic(x0=2.0, lr=0.1), datamodule or Quadratics(a=A, G=G))
    return callback, {k: float(v) for k, v in run.callback_metrics.items() if k.startswith("control/")}


@pytest.mark.parametrize("option", ["i", "ii"])
def test_control_variates_of_the_same_point_are_exact(option: Any) -> None:
    # the server stands still, and with one step option ii's c_i is the gradient at x as well
    callback, found = measure(server_lr=0.0, algorithm=Scaffold(option=option))
    assert list(callback.errors.values()) == pytest.approx([0, 0], abs=1e-12)
    assert found == {
        "control/error": pytest.approx(0, abs=1e-12),
        "control/relative_error": pytest.approx(0, abs=1e-12),
        "control/server_error": pytest.approx(0, abs=1e-12),
    }


def test_exact_control_variates_of_a_network_are_exact_to_the_last_bit() -> None:
    callback, found = measure(0.0, seeded(dropout=0.0), data())
    assert set(callback.errors.values()) == {0.0}
    assert found["control/server_error"] < 1e-6


def test_the_error_is_how_far_the_gradients_have_moved_with_the_server() -> None:
    model = Quadratic(x0=2.0, lr=0.1)
    callback, found = measure(model=model)
    x = model.x.item()
    moved = abs(x - 2.0)
    assert callback.errors == {0: pytest.approx(3 * moved), 1: pytest.approx(moved)}
    assert found["control/error"] == pytest.approx(2 * moved)
    assert found["control/server_error"] == pytest.approx(2 * moved)
    squares = (3 * x + 10) ** 2 + (x - 10) ** 2
    assert found["control/relative_error"] == pytest.approx((10 * moved**2 / squares) ** 0.5)


def test_a_client_that_never_took_part_misses_its_whole_gradient() -> None:
    callback, found = measure(0.0, sampler=lambda seed, round, population: [0])
    assert callback.errors == {0: 0.0, 1: pytest.approx(abs(2.0 - 10))}
    mean = (16 - 8) / 2
    assert found["control/server_error"] == pytest.approx(abs(16 / 2 - mean))


def test_a_sample_says_nothing_of_the_servers_control_variate() -> None:
    _, found = measure(clients=1)
    assert set(found) == {"control/error", "control/relative_error"}


@pytest.mark.parametrize("method", [FedAvg(), FedDyn(alpha=0.1)], ids=repr)
def test_methods_without_control_variates_are_refused(method: Any) -> None:
    with pytest.raises(FederatedError, match=f"Scaffold; found {type(method).__name__}"):
        fit(algorithm=method, callbacks=ControlVariateError())
