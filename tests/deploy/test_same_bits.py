"""A run over sites has the bits of the simulation, for every method."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fed import FederatedTrainer
from lightning_fed.server import (
    QSGD,
    BernoulliSampler,
    CoordinateMedian,
    DifferentialPrivacy,
    SystemsHeterogeneity,
    TopK,
)
from tests.deploy.site_models import Net, model
from tests.deploy.wire import METHODS, Wire, make_trainer, parameters, simulated


def logged_by(trainer: FederatedTrainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name != "round/seconds"}


def assert_same_run(make: Any, folder: Path, make_model: Any = model) -> None:
    expected = simulated(make, make_model)
    wire, module = Wire(folder, make, make_model), make_model()
    with wire.server(module) as server:
        reports = wire.run(server)
    assert [report.round for report in reports] == list(range(5))
    assert torch.equal(parameters(module), parameters(expected.lightning_module))
    assert all(torch.equal(a, b) for a, b in zip(module.buffers(), expected.lightning_module.buffers(), strict=True))
    state, other = server.trainer.fit_loop.state, expected.fit_loop.state
    assert state.state.keys() == other.state.keys()
    assert all(torch.equal(state.state[name], other.state[name]) for name in state.state)
    known, wanted = logged_by(server.trainer), logged_by(expected)
    if make.keywords.get("compression") is not None:
        del wanted["client/drift"]  # clients send no more than what is compressed
    assert known == pytest.approx(wanted, nan_ok=True)
    assert (state.bytes_up, state.bytes_down) == (other.bytes_up, other.bytes_down)


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
@pytest.mark.parametrize("method", list(METHODS))
def test_five_rounds_over_sites_have_the_bits_of_the_simulation(method: str, precision: Any, tmp_path: Path) -> None:
    assert_same_run(partial(make_trainer, method, precision=precision), tmp_path)


class Normalised(Net):
    """A network whose clients change buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(8))


def normalised() -> Normalised:
    torch.manual_seed(0)
    return Normalised()


OPTIONS: dict[str, dict[str, Any]] = {
    "uniform weights": {"weighting": "uniform"},
    "weights by steps": {"weighting": "steps"},
    "the local optimizer's state is kept": {"local_optimizer_state": "keep"},
    "robust": {"aggregator": CoordinateMedian()},
    "partial work": {"heterogeneity": SystemsHeterogeneity(stragglers=0.5)},
    "sparse with feedback": {"compression": TopK(0.3)},
    "quantised": {"compression": QSGD(4)},
    "all clients": {"clients_per_round": 1.0},
    "local steps, accumulated": {"local_epochs": None, "local_steps": 3, "accumulate_grad_batches": 2},
    "clipped": {"gradient_clip_val": 0.1},
}


@pytest.mark.parametrize("option", list(OPTIONS))
def test_options_of_the_rounds_work_over_sites(option: str, tmp_path: Path) -> None:
    assert_same_run(partial(make_trainer, "FedProx", **OPTIONS[option]), tmp_path)


@pytest.mark.parametrize("buffers", ["average", "local", "server"])
def test_buffers_are_treated_as_in_the_simulation(buffers: str, tmp_path: Path) -> None:
    assert_same_run(partial(make_trainer, "Scaffold ii", buffers=buffers), tmp_path, normalised)


def test_the_server_clips_and_adds_the_noise(tmp_path: Path) -> None:
    pytest.importorskip("opacus", reason="no Opacus, which accounts for privacy")
    privacy = DifferentialPrivacy(max_norm=0.5, noise_multiplier=1.0, delta=1e-3)
    options: dict[str, Any] = {"clients_per_round": None, "sampler": BernoulliSampler(0.5), "aggregator": privacy}
    wire = Wire(tmp_path, partial(make_trainer, "FedProx", **options))
    with wire.server() as server:
        assert len(wire.run(server)) == 5
    assert server.trainer.fit_loop.epsilon > 0
    assert "train_loss" not in server.trainer.callback_metrics  # of which nothing is to be known
