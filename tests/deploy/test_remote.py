"""Clients that answer from elsewhere, as the rounds of a fit see them."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fed import FederatedTrainer
from lightning_fed.callbacks import ClientAccuracy, GradientDissimilarity, PersonalizedAccuracy, TrainingLoss
from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy.announced import Announced
from lightning_fed.deploy.remote import RemoteData
from lightning_fed.server import (
    BernoulliSampler,
    DifferentialPrivacy,
)
from tests.deploy.site_models import Net
from tests.deploy.wire import Wire, make_data, make_trainer, parameters


def test_a_callback_that_looks_at_clients_data_is_refused_on_the_server(tmp_path: Path) -> None:
    wire = Wire(tmp_path, partial(make_trainer, "FedAvg", callbacks=[GradientDissimilarity()]))
    with wire.server() as server, pytest.raises(FederatedError, match="are on its site"):
        wire.run(server)


def logged_by(trainer: FederatedTrainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name != "round/seconds"}


def private(**options: Any) -> FederatedTrainer:
    pytest.importorskip("opacus", reason="no Opacus, which accounts for privacy")
    privacy = DifferentialPrivacy(max_norm=0.01, noise_multiplier=1.0, delta=1e-3)
    drawn: dict[str, Any] = {"clients_per_round": None, "sampler": BernoulliSampler(0.5)}
    return make_trainer("FedProx", aggregator=privacy, **drawn, **options)


def test_sites_clip_and_say_no_more_and_the_server_adds_the_noise(tmp_path: Path) -> None:
    wire = Wire(tmp_path, partial(private, max_rounds=2))
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
        return make_trainer("FedProx adaptive", callbacks=measures, limit_val_batches=1.0, max_rounds=3)

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
    assert sum(told) == 3
    assert torch.equal(parameters(module), parameters(expected.lightning_module))
    found, wanted = logged_by(server.trainer), logged_by(expected)
    assert {"clients/val_acc/p10", "personalized/val_acc/mean", "population/train_loss"} <= found.keys()
    assert {name: found.get(name) for name in wanted if not name.startswith("val_acc")} == pytest.approx(
        {name: value for name, value in wanted.items() if not name.startswith("val_acc")}
    )


def test_sites_measure_clients_own_models(tmp_path: Path) -> None:
    def make() -> FederatedTrainer:
        measures = [ClientAccuracy(), PersonalizedAccuracy(local_steps=2, every_n_rounds=2)]
        return make_trainer("Scaffold ii", personal=["net.3.*"], callbacks=measures, max_rounds=3)

    expected = make()
    expected.fit(validated(), make_data(with_val=True))
    wire = Wire(tmp_path, make, validated, with_val=True)
    with wire.server(validated()) as server:
        wire.run(server)
    found, wanted = logged_by(server.trainer), logged_by(expected)
    assert {"clients_own/val_acc/p10", "personalized_own/val_acc/mean"} <= found.keys()
    assert found == pytest.approx(wanted)


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


def test_a_server_knows_the_sizes_of_data_that_it_does_not_have() -> None:
    data = RemoteData({"a": Announced(5, 2, 4, val_size=3), "b": Announced(7, 4, 2), "c": Announced(6, 0, None)})
    assert (data.client_ids, data.known_sizes, data.batch_size) == (["a", "b", "c"], [5, 7, 6], 2)
    assert len(data.client_val_dataset("a")) == 3
    assert data.client_val_dataset("b") is None
    with pytest.raises(FederatedError, match="are on its site"):
        data.client_batches("a")
