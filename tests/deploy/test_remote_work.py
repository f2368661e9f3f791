"""Phases of rounds over sites, and the contents of their replies."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fed import FederatedCallback, FederatedError, FederatedTrainer
from lightning_fed.callbacks import ClientAccuracy, PersonalizedAccuracy, TrainingLoss
from lightning_fed.deploy import Message
from lightning_fed.server import BernoulliSampler, DifferentialPrivacy
from tests.deploy.site_models import Net, model
from tests.deploy.wire import Wire, make_data, make_trainer, parameters
from tests.helpers.training import classification


def logged_by(trainer: FederatedTrainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name != "round/seconds"}


def private(**options: Any) -> FederatedTrainer:
    pytest.importorskip("opacus", reason="no Opacus, which accounts for privacy")
    privacy = DifferentialPrivacy(max_norm=0.01, noise_multiplier=1.0, delta=1e-3)
    drawn: dict[str, Any] = {"clients_per_round": None, "sampler": BernoulliSampler(0.5)}
    return make_trainer("FedProx", aggregator=privacy, **drawn, **options)


@pytest.mark.thorough
def test_sites_clip_updates_and_the_server_adds_the_noise(tmp_path: Path) -> None:
    wire = Wire(tmp_path, partial(private, max_rounds=2))

    def checked(task: Message) -> list[Message]:
        reply = wire.answer(task)
        if reply.header["phase"] == "train":
            assert set(reply.tensors) == {"send.delta"}
            assert float(reply.tensors["send.delta"].norm()) == pytest.approx(0.01)
            assert reply.header["metrics"] == {}
            assert str(reply.header["report"]["loss"]) == "nan"
        return [reply]

    wire.comes = checked
    fitted, _ = wire.run()
    assert fitted.fit_loop.epsilon > 0
    assert "train_loss" not in fitted.callback_metrics, "it would tell of clients"


class Validated(Net):
    """A network with a validation step."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_acc", (self.net(x).argmax(1) == y).float().mean())


def stepped() -> Net:
    """Return the network with a schedule of local steps."""
    module = model()

    def configure() -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    module.configure_optimizers = configure  # type: ignore[method-assign]
    return module


def validated() -> Validated:
    torch.manual_seed(0)
    return Validated()


@pytest.mark.thorough
def test_sites_measure_for_callbacks_of_the_server(tmp_path: Path) -> None:
    def make() -> FederatedTrainer:
        measures = [ClientAccuracy(), PersonalizedAccuracy(local_steps=2, every_n_rounds=2), TrainingLoss()]
        return make_trainer("FedProx adaptive", callbacks=measures, limit_val_batches=1.0, max_rounds=3)

    expected, module = make(), validated()
    expected.fit(validated(), make_data(with_val=True))
    wire = Wire(tmp_path, make, validated, with_val=True)
    fitted, _ = wire.run(module)
    assert [phase for _, phase, _ in wire.phases[:7]] == [
        "register",
        "loss",
        "train",
        "measure",
        "measure",
        "loss",
        "train",
    ]
    assert torch.equal(parameters(module), parameters(expected.lightning_module))
    found, wanted = logged_by(fitted), logged_by(expected)
    assert {"clients/val_acc/p10", "personalized/val_acc/mean", "population/train_loss"} <= found.keys()
    assert {name: found.get(name) for name in wanted if not name.startswith("val_acc")} == pytest.approx(
        {name: value for name, value in wanted.items() if not name.startswith("val_acc")}
    )


@pytest.mark.thorough
def test_sites_measure_personal_client_models(tmp_path: Path) -> None:
    def make() -> FederatedTrainer:
        measures = [ClientAccuracy(), PersonalizedAccuracy(local_steps=2, every_n_rounds=2)]
        return make_trainer("Scaffold ii", personal=["net.3.*"], callbacks=measures, max_rounds=3)

    expected = make()
    expected.fit(validated(), make_data(with_val=True))
    wire = Wire(tmp_path, make, validated, with_val=True)
    fitted, _ = wire.run(validated())
    found, wanted = logged_by(fitted), logged_by(expected)
    assert {"clients_own/val_acc/p10", "personalized_own/val_acc/mean"} <= found.keys()
    assert found == pytest.approx(wanted)


def test_measurement_continues_without_unresponsive_clients(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> FederatedTrainer:
        return make_trainer("FedAvg", callbacks=[TrainingLoss()], on_client_error="drop", max_rounds=2)

    wire = Wire(tmp_path, make)

    def comes(task: Message) -> list[Message]:
        reply, is_measure = wire.answer(task), task.header["phase"] == "measure"
        if is_measure and task.client == 0:
            return [Message({**reply.header, "measured": {"other": 1.0}})]
        return [] if is_measure and (task.header["round"] == 2 or task.client == 1) else [reply]

    wire.comes = comes
    fitted, _ = wire.run()
    assert "The reply of client 0 to 'measure' of round 1 has measured no loss." in caplog.messages
    assert next(at for at in wire.phases if at[1] == "measure") == (1, "measure", [0, 1, 2, 3])
    assert fitted.callback_metrics["population/train_loss"] > 0  # from the first round, since the second has no loss


@pytest.mark.parametrize("action", ["drop", "raise"])
def test_site_with_a_wrong_measurement_raises_or_is_dropped(action: str, tmp_path: Path) -> None:
    options = {"limit_val_batches": 1.0, "max_rounds": 1, "on_client_error": action}
    make = partial(make_trainer, "FedAvg", callbacks=[measures := ClientAccuracy()], **options)
    wire = Wire(tmp_path, make, validated, with_val=True)

    def comes(task: Message) -> list[Message]:
        reply = wire.answer(task)
        lies = task.client == 1 and task.header["phase"] == "measure"
        return [Message({**reply.header, "measured": {"other": 1.0}}) if lies else reply]

    wire.comes = comes
    told = r"ClientAccuracy\(monitor='val_acc'\): validation_step logs \['other'\] for client 1"
    if action == "raise":
        with pytest.raises(FederatedError, match=told):
            wire.run()
        return
    with pytest.warns(UserWarning, match=f"{told}, which is left out"):
        wire.run()
    assert list(measures.table) == [0, 2, 3]


@pytest.mark.thorough
@pytest.mark.parametrize("action", ["drop", "raise"])
def test_site_without_its_folder_does_not_measure(action: str, tmp_path: Path) -> None:
    options = {"limit_val_batches": 1.0, "max_rounds": 1, "on_client_error": action}
    make = partial(make_trainer, "FedAvg", callbacks=[measures := ClientAccuracy()], **options)
    wire = Wire(tmp_path, make, validated, with_val=True)

    def comes(task: Message) -> Any:
        if task.client == 1 and task.header["phase"] == "measure":
            wire.kill(1)
            shutil.rmtree(tmp_path / "1")
        return wire.answers(task)

    wire.comes = comes
    if action == "raise":
        with pytest.raises(FederatedError, match="Client 1: The reply of client 1 to 'measure' .* lost its state_dir"):
            wire.run()
        return
    wire.run()
    assert list(measures.table) == [0, 2, 3]


@pytest.mark.parametrize(
    ("name", "sanity_steps", "known"),
    [("val_acc", 2, 0), ("val_acc", 0, 3), ("client/loss", 2, 0)],
    ids=["a metric of validation", "without a sanity check", "a metric of the round"],
)
def test_site_cannot_override_a_server_metric(name: str, sanity_steps: int, known: int, tmp_path: Path) -> None:
    """This holds from the first validation or sanity check on. The first ``known`` values are read before it."""
    rounds = {"max_rounds": 3, "check_val_every_n_epoch": 2, "num_sanity_val_steps": sanity_steps}
    make = partial(make_trainer, "FedAvg", limit_val_batches=1.0, clients_per_round=1.0, **rounds)
    wire, found = Wire(tmp_path, make, validated), []

    def comes(task: Message) -> list[Message]:
        reply = wire.answer(task)
        if task.client == 1 and task.header["phase"] == "train":
            return [Message({**reply.header, "metrics": {**reply.header["metrics"], name: 1e9}}, reply.tensors)]
        return [reply]

    class Looks(FederatedCallback):
        def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
            found.append(trainer.callback_metrics.get(name, 0.0))

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            found.append(trainer.callback_metrics.get(name, 0.0))

    fitted, wire.comes = make(callbacks=[Looks()]), comes
    with pytest.warns(UserWarning, match=f"Clients log '{name}', which is the name of a value of the server"):
        fitted.fit(validated(), wire.clients(val=classification(12, 77)))
    assert max(*found[known:], fitted.callback_metrics[name]) < 10
    assert fitted.callback_metrics["train_loss"] > 0, "what only clients log stays"


def test_client_cannot_extend_schedules_without_limit(tmp_path: Path) -> None:
    make = partial(make_trainer, "FedAvg", local_schedule="total", max_rounds=1, clients_per_round=1.0)
    wire = Wire(tmp_path, partial(make, on_client_error="drop"), stepped)

    def comes(task: Message) -> list[Message]:
        reply, lies = wire.answer(task), task.client == 1 and task.header["phase"] == "register"
        return [Message({**reply.header, "batches": 2**50, "size": 2**50}) if lies else reply]

    wire.comes = comes
    _, (report,) = wire.run()
    assert "has 2,251,799,813,685,248 local steps in a round, and local_schedule='total' allows" in report.failed[1]


class Tightens(FederatedCallback):
    """Changes an option of the method, or a setting of the trainer, from a round on."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
        if round == 1:
            owner = trainer.fit_loop.settings.algorithm if self.name == "mu" else trainer
            setattr(owner, self.name, 0.5)


@pytest.mark.parametrize(("name", "told"), [("mu", "method options"), ("gradient_clip_val", "gradient_clip_val")])
def test_callback_change_unknown_to_sites_is_rejected(name: str, told: str, tmp_path: Path) -> None:
    make = partial(make_trainer, "FedProx", max_rounds=2)
    wire = Wire(tmp_path, make)
    with pytest.raises(FederatedError, match=f"A callback has changed {told} from .* to .*0.5.* by round 1, and sites"):
        wire.run(trainer=make(callbacks=[Tightens(name)]))
