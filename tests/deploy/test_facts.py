"""The facts that the server and its sites must share."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from lightning_fed import FederatedCallback
from lightning_fed.callbacks import ClientModels, Inexactness, LocalDrift, UpdateCosine
from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy import FederatedSite
from lightning_fed.deploy.facts import check_facts, optimizer_facts
from lightning_fed.server import BernoulliSampler, DifferentialPrivacy
from tests.deploy.site_models import Net, model
from tests.deploy.wire import Wire, make_data, make_trainer
from tests.helpers.selection import few

MAKE = partial(make_trainer, "Scaffold ii")


def with_optimizer(
    kind: Any = torch.optim.SGD, lr: float = 0.1, weight_decay: float = 0.01, gamma: float | None = 0.5
) -> Net:
    """Return the module with other options of its optimizer and its schedule."""
    module = model()

    def configure() -> Any:
        optimizer = kind(module.parameters(), lr=lr, weight_decay=weight_decay)
        schedules = [] if gamma is None else [torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=gamma)]
        return [optimizer], schedules

    module.configure_optimizers = configure
    return module


def with_layer(layer: torch.nn.Module) -> Net:
    """Return the module with another third layer."""
    module = model()
    module.net[2] = layer
    return module


def with_hyperparameters(**values: Any) -> Net:
    """Return the module with saved hyperparameters, for example of its loss."""
    module = model()
    module.save_hyperparameters(values)
    return module


PRIVATE: dict[str, Any] = {
    "aggregator": DifferentialPrivacy(0.1, 1.0, 1e-5),
    "sampler": BernoulliSampler(0.5),
    "clients_per_round": None,
}
DIFFERENT: dict[str, tuple[dict[str, Any], Callable[[], Any], str]] = {
    "method": ({"method": "FedAvg"}, model, "its method is FedAvg, the server's is Scaffold"),
    "options": ({"method": "Scaffold i"}, model, "its method options is .*'i'"),
    "seed": ({"seed": 3}, model, "its seed is 3"),
    "work": ({"local_epochs": 3}, model, "its local_epochs is 3, the server's is 2"),
    "precision": ({"precision": "64-true"}, model, "its precision is 64-true"),
    "clipping": (
        {"gradient_clip_val": 2, "gradient_clip_algorithm": "value"},
        model,
        "its gradient_clip_val is 2 by value, the server",
    ),
    "clipping after the correction": (
        {"gradient_clip_val": 2.0, "gradient_clip_on": "corrected"},
        model,
        "its gradient_clip_on is corrected, the server's is gradient",
    ),
    "rate": (
        {},
        lambda: with_optimizer(lr=0.2),
        'its optimizer is SGD .*"lr": 0.2, .*, the server.s is SGD .*"lr": 0.1,',
    ),
    "optimizer": (
        {},
        lambda: with_optimizer(torch.optim.Adam, lr=0.1),
        "its optimizer is Adam of 4 parameters .* with",
    ),
    "decay": ({}, lambda: with_optimizer(lr=0.1, weight_decay=0.0), '"weight_decay": 0.0}, the server.s is .*: 0.01'),
    "schedule": (
        {},
        lambda: with_optimizer(gamma=0.9),
        'its schedules is StepLR .*"gamma": 0.9, .* server.s is .*: 0.5,',
    ),
    "no schedule": ({}, lambda: with_optimizer(gamma=None), "its schedules is none, the server's is StepLR every 1"),
    "layer": (
        {},
        lambda: with_layer(torch.nn.Dropout(0.3)),
        r"its layers is \(2\): Dropout\(p=0.3.* is \(2\): Dropout\(p=0.2",
    ),
    "hyperparameters": (
        {},
        lambda: with_hyperparameters(smoothing=0.1),
        r"its hyperparameters is smoothing=0.1, the server's is none. .* leave it out of save_hyperparameters",
    ),
    "bound of messages": (
        {"method": "FedAvg", **PRIVATE},
        model,
        "its max_norm of DifferentialPrivacy is 0.1, the server's is None",
    ),
    "model": ({}, lambda: torch.nn.Module.register_buffer(m := model(), "more", torch.ones(1)) or m, "buffers at"),
}


@pytest.mark.parametrize("name", few(DIFFERENT, list(DIFFERENT)[::3]))
def test_site_with_different_settings_cannot_register(name: str, tmp_path: Path) -> None:
    options, make_model, why = DIFFERENT[name]
    own, wire = make_trainer(**{"method": "Scaffold ii", **options}), Wire(tmp_path, MAKE)
    said = f"'register': 2.*Client 2: The site of client 2 has other settings than the server: .*{why}"
    with FederatedSite(own, make_model(), make_data([2]), 2, tmp_path / "2") as site:
        wire.sites[2] = site
        with pytest.raises(FederatedError, match=said):
            wire.run()


def test_site_with_different_initial_personal_parameters_is_rejected(tmp_path: Path) -> None:
    wire = Wire(tmp_path, partial(make_trainer, "FedAvg", personal=["net.3.*"]), Net)
    with pytest.raises(FederatedError, match="its parameters at the start that stay with"):
        wire.run()


class Frozen(Net):
    """The module with a frozen first layer, which is never sent."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)


def test_site_with_different_frozen_parameters_is_rejected(tmp_path: Path) -> None:
    wire = Wire(tmp_path, partial(make_trainer, "FedAvg"), Frozen)  # the server and each site draw different ones
    with pytest.raises(FederatedError, match="its frozen parameters is .*, the server's is"):
        wire.run()


def test_callback_that_changes_local_work_is_rejected(tmp_path: Path) -> None:
    scheduler = pl.callbacks.GradientAccumulationScheduler({0: 1, 2: 2})
    with pytest.raises(FederatedError, match="GradientAccumulationScheduler changes the local work"):
        Wire(tmp_path, partial(make_trainer, "FedAvg", callbacks=[scheduler])).run()


@pytest.mark.parametrize("models", ["local", "personal"])
def test_saving_client_models_is_rejected_on_both_sides(models: Any, tmp_path: Path) -> None:
    plain = partial(make_trainer, "Ditto")
    wire = Wire(tmp_path, lambda: plain(callbacks=[ClientModels(models, folder=tmp_path / "models")]))
    for fitted in (None, plain()):  # at first, the server has the callback too
        with pytest.raises(FederatedError, match="ClientModels saves models of simulated clients"):
            wire.run(trainer=fitted)
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize("measure", [LocalDrift, UpdateCosine, Inexactness])
def test_callbacks_that_measure_local_work_are_rejected(measure: Any, tmp_path: Path) -> None:
    """No site calls them for the server, so the server would log nothing."""
    with pytest.raises(FederatedError, match=f"{measure.__name__} follows the local work of simulated clients"):
        Wire(tmp_path, partial(make_trainer, "FedAvg", callbacks=[measure()])).run()


OPTIONS: dict[str, Callable[[Any], Any]] = {
    "OneCycleLR": partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=9),
    "CosineAnnealingWarmRestarts": partial(torch.optim.lr_scheduler.CosineAnnealingWarmRestarts, T_0=2),
    "ReduceLROnPlateau": torch.optim.lr_scheduler.ReduceLROnPlateau,
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "MultiStepLR": partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[2, 3]),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
}


@pytest.mark.parametrize("name", list(OPTIONS))
def test_optimizer_facts_are_the_same_in_every_round(name: str) -> None:
    layers = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    groups = [{"params": list(layers[0].parameters()), "lr": 0.2}, {"params": list(layers[1].parameters())}]
    optimizer = torch.optim.SGD(groups, lr=torch.tensor(0.1), momentum=0.9, foreach=True)
    scheduler = OPTIONS[name](optimizer)
    config = SimpleNamespace(scheduler=scheduler, frequency=1)
    trainer = SimpleNamespace(optimizers=[optimizer], lr_scheduler_configs=[config], lightning_module=model())
    first = optimizer_facts(trainer)
    assert first["optimizer"].startswith("SGD of 2 parameters (")
    for number in range(5):
        optimizer.step()
        scheduler.step(*([float(number)] if name == "ReduceLROnPlateau" else []))
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer_facts(trainer) == first


def test_optimizer_facts_distinguish_parameter_groups() -> None:
    module = model()
    first, last = (list(module.net[number].parameters()) for number in (0, 3))

    def facts(*parameters: Any) -> dict[str, str]:
        groups = [{"params": own, "lr": 0.1 + number} for number, own in enumerate(parameters)]
        made = {"optimizers": [torch.optim.SGD(groups)], "lr_scheduler_configs": [], "lightning_module": module}
        return optimizer_facts(SimpleNamespace(**made))

    assert facts(first, last) == facts(first, last) != facts(last, first)


def with_lambda(factor: float) -> Net:
    """Return the module with a schedule whose options cannot be read."""
    module = model()

    def configure() -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda round: factor**round)]

    module.configure_optimizers = configure
    return module


class Slower(FederatedCallback):
    """Halves the rate on the server from round 1 on."""

    def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
        if round == 1:
            trainer.optimizers[0].param_groups[0]["lr"] /= 2


@pytest.mark.parametrize("difference", ["schedule", "callback"])
def test_round_with_different_learning_rates_on_the_server_is_rejected(difference: str, tmp_path: Path) -> None:
    make = partial(make_trainer, "FedAvg", max_rounds=2)
    wire = Wire(tmp_path, make, partial(with_lambda, 0.5))
    is_callback = difference == "callback"
    own = make(callbacks=[Slower()] if is_callback else [])
    said = r"begin round 1 with the learning rates \[0.05\], and the server says '\[0.0"
    with pytest.raises(FederatedError, match=said):
        wire.run(with_lambda(0.5 if is_callback else 0.9), trainer=own)
    assert own.fit_loop.round == 1


@pytest.mark.thorough
def test_run_resumed_in_mid_schedule_is_accepted(tmp_path: Path) -> None:
    wire = Wire(tmp_path, partial(make_trainer, "FedAvg"))
    wire.run(save={3: tmp_path / "three.ckpt"})
    wire.kill()
    trainer, _ = wire.run(ckpt_path=tmp_path / "three.ckpt")
    assert trainer.fit_loop.round == 5


def test_library_patch_mismatch_warns_and_version_mismatch_is_rejected(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="lightning_fed.deploy.site"):
        check_facts({"version of PyTorch": "2.13.0"}, {"version of PyTorch": "2.13.1"}, "bank")
    assert "The site of client 'bank': its version of PyTorch is 2.13.0, the server's is 2.13.1." in caplog.text
    for name, own in (("PyTorch", "2.12.1"), ("Lightning", "2.5.6"), ("lightning_fed", "2.13.0")):
        with pytest.raises(FederatedError, match=f"its version of {name} is {own}, .* Install the same version on b"):
            check_facts({f"version of {name}": own}, {f"version of {name}": "2.13.1"}, "bank")


def test_server_cannot_write_to_a_site_log_through_facts() -> None:
    with pytest.raises(FederatedError, match=r"the server's is 2\\r\\x1b\[2J\. Start"):
        check_facts({"seed": "1"}, {"seed": "2\r\x1b[2J\nmore"}, "bank")


def test_differing_facts_are_named_with_both_values() -> None:
    check_facts({"a": "1", "b": "2"}, {"b": "2", "a": "1"}, 3)
    with pytest.raises(FederatedError, match="The site of client 3 .* its b is 2, the server's is 4"):
        check_facts({"a": "1", "b": "2"}, {"a": "1", "b": "4"}, 3)
    with pytest.raises(FederatedError, match="its c is 5, the server's is None"):
        check_facts({"a": "1", "c": "5"}, {"a": "1"}, 3)


def test_fact_missing_on_the_server_is_named() -> None:
    with pytest.raises(FederatedError, match="its max_norm is None, the server's is not given"):
        check_facts({"max_norm": "None"}, {}, 3)
