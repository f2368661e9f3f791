"""A run over sites has the bits of the simulation, for every method."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from lightning_fed import FederatedTrainer
from lightning_fed.algorithms import FedSpeed, PFedMe
from lightning_fed.callbacks import ClientAccuracy, PersonalizedAccuracy, TrainingLoss
from lightning_fed.core.errors import FederatedError
from lightning_fed.server import (
    QSGD,
    BernoulliSampler,
    CoordinateMedian,
    DifferentialPrivacy,
    SystemsHeterogeneity,
    TopK,
)
from tests.deploy.site_models import Net, model
from tests.deploy.wire import METHODS, Wire, make_data, make_trainer, parameters, simulated
from tests.helpers.selection import covering


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
    sends_no_change = isinstance(expected.fit_loop.settings.algorithm, (FedSpeed, PFedMe))
    if make.keywords.get("compression") is not None or sends_no_change:
        del wanted["client/drift"]
    assert known == pytest.approx(wanted, nan_ok=True)
    assert (state.bytes_up, state.bytes_down) == (other.bytes_up, other.bytes_down)


@pytest.mark.parametrize(("method", "precision"), covering(list(METHODS), ["32-true", "64-true"]))
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
    "personal parameters": {"personal": ["net.3.*"]},
}


@pytest.mark.parametrize("option", list(OPTIONS))
def test_options_of_the_rounds_work_over_sites(option: str, tmp_path: Path) -> None:
    assert_same_run(partial(make_trainer, "FedProx", **OPTIONS[option]), tmp_path)


@pytest.mark.parametrize("buffers", ["average", "local", "server"])
def test_buffers_are_treated_as_in_the_simulation(buffers: str, tmp_path: Path) -> None:
    assert_same_run(partial(make_trainer, "Scaffold ii", buffers=buffers), tmp_path, normalised)


def private(**options: Any) -> FederatedTrainer:
    pytest.importorskip("opacus", reason="no Opacus, which accounts for privacy")
    privacy = DifferentialPrivacy(max_norm=0.01, noise_multiplier=1.0, delta=1e-3)
    drawn: dict[str, Any] = {"clients_per_round": None, "sampler": BernoulliSampler(0.5)}
    return make_trainer("FedProx", aggregator=privacy, **drawn, **options)


def test_sites_clip_and_say_no_more_and_the_server_adds_the_noise(tmp_path: Path) -> None:
    wire = Wire(tmp_path, private)
    with wire.server() as server:
        while server.phase is not None:
            for reply in wire.exchange(server.tasks()):
                server.receive(reply)
                if server.phase == "train":
                    assert set(reply.tensors) == {"send.delta"}
                    assert float(reply.tensors["send.delta"].norm()) == pytest.approx(0.01)
                    assert reply.header["metrics"] == {}
                    assert str(reply.header["report"]["loss"]) == "nan"
            server.close_phase()
    assert server.trainer.fit_loop.epsilon > 0
    assert "train_loss" not in server.trainer.callback_metrics  # of which nothing is to be known


class Validated(Net):
    """A network with a validation step."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_acc", (self.net(x).argmax(1) == y).float().mean())


def validated() -> Validated:
    torch.manual_seed(0)
    return Validated()


def test_sites_measure_what_the_servers_callbacks_ask_for(tmp_path: Path) -> None:
    def make() -> FederatedTrainer:
        measures = [ClientAccuracy(), PersonalizedAccuracy(local_steps=2, every_n_rounds=2), TrainingLoss()]
        return make_trainer("FedProx adaptive", callbacks=measures, limit_val_batches=1.0)

    expected, module = make(), validated()
    expected.fit(validated(), make_data(with_val=True))
    wire = Wire(tmp_path, make, validated, with_val=True)
    with wire.server(module) as server:
        phases = []
        while server.phase is not None:
            phases.append((server.phase, wire.phase(server)))
    told = [report is not None for _, report in phases]
    assert [name for name, _ in phases[:7]] == ["hello", "loss", "train", "measure", "measure", "loss", "train"]
    assert [index for index, is_told in enumerate(told) if is_told][:1] == [4]  # when all is measured
    assert sum(told) == 5
    assert torch.equal(parameters(module), parameters(expected.lightning_module))
    found, wanted = logged_by(server.trainer), logged_by(expected)
    assert {"clients/val_acc/p10", "personalized/val_acc/mean", "population/train_loss"} <= found.keys()
    assert {name: found.get(name) for name in wanted if not name.startswith("val_acc")} == pytest.approx(
        {name: value for name, value in wanted.items() if not name.startswith("val_acc")}
    )


def test_sites_measure_clients_own_models(tmp_path: Path) -> None:
    def make() -> FederatedTrainer:
        measures = [ClientAccuracy(), PersonalizedAccuracy(local_steps=2, every_n_rounds=2)]
        return make_trainer("Scaffold ii", personal=["net.3.*"], callbacks=measures)

    expected = make()
    expected.fit(validated(), make_data(with_val=True))
    wire = Wire(tmp_path, make, validated, with_val=True)
    with wire.server(validated()) as server:
        wire.run(server)
    found, wanted = logged_by(server.trainer), logged_by(expected)
    assert {"clients_own/val_acc/p10", "personalized_own/val_acc/mean"} <= found.keys()
    assert found == pytest.approx(wanted)


def test_a_site_whose_personal_parameters_begin_elsewhere_is_refused(tmp_path: Path) -> None:
    wire = Wire(tmp_path, partial(make_trainer, "FedAvg", personal=["net.3.*"]), Net)
    with wire.server() as server, pytest.raises(FederatedError, match="its parameters at the start that stay with"):
        wire.run(server)


def test_a_measure_goes_on_without_clients_that_do_not_answer(tmp_path: Path) -> None:
    def make() -> FederatedTrainer:
        return make_trainer("FedAvg", callbacks=[TrainingLoss()], on_client_error="drop", max_rounds=2)

    wire = Wire(tmp_path, make)
    with wire.server() as server:
        while server.phase is not None:
            tasks = server.tasks()
            left_out = tasks if server.trainer.fit_loop.round == 1 else {1: None}
            is_measure = server.phase == "measure"
            for reply in wire.exchange({i: t for i, t in tasks.items() if not (is_measure and i in left_out)}):
                server.receive(reply)
            server.close_phase()
    assert server.trainer.callback_metrics["population/train_loss"] > 0  # of the first round; of the second is none


class Cooling(Net):
    """A network whose loss has a temperature that falls from round to round."""

    def on_train_epoch_start(self) -> None:
        self.temperature = 0.5**self.current_epoch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) / self.temperature


def cooling() -> Cooling:
    torch.manual_seed(0)
    return Cooling()


@pytest.mark.parametrize("method", ["Mime", "FedProx adaptive"])
def test_hooks_of_epochs_are_called_on_sites(method: str, tmp_path: Path) -> None:
    assert_same_run(partial(make_trainer, method), tmp_path, cooling)


def test_local_work_that_a_callback_changes_is_refused(tmp_path: Path) -> None:
    scheduler = pl.callbacks.GradientAccumulationScheduler({0: 1, 2: 2})
    with pytest.raises(FederatedError, match="GradientAccumulationScheduler changes the local work"):
        Wire(tmp_path, partial(make_trainer, "FedAvg", callbacks=[scheduler])).server()
