"""A site answers its own tasks and no others."""

import gc
import os
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics import MeanMetric

from lightning_fed import FederatedCallback, FederatedDataModule, FederatedTrainer
from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy import FederatedSite, InProcess, Message, RemoteClients
from tests.deploy.site_models import Net, model
from tests.deploy.wire import Wire, make_data, make_trainer, parameters
from tests.helpers.selection import few
from tests.helpers.training import clients

MAKE = partial(make_trainer, "Scaffold ii")


def changed(message: Message, tensors: dict[str, Any] | None = None, **header: Any) -> Message:
    return replace(message, header={**message.header, **header}, tensors={**message.tensors, **(tensors or {})})


def noted(wire: Wire, phase: str = "register", **fit: Any) -> dict[Any, Message]:
    """Return the tasks of a fit's last exchange of a phase, by client."""
    tasks: dict[Any, Message] = {}

    def comes(task: Message) -> Any:
        if task.header["phase"] == phase:
            tasks[task.client] = task
        return wire.answers(task)

    wire.comes = comes
    wire.run(**fit)
    return tasks


class Worst(Net):
    """Logs the largest loss and a metric object in addition to means."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.metric(loss)
        self.log("worst", loss, reduce_fx="max")
        self.log("of_all", self.metric, on_step=False, on_epoch=True)
        return loss


def test_logged_values_that_are_not_means_are_named_in_the_site_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fitted, _ = Wire(tmp_path, partial(make_trainer, "FedAvg", max_rounds=2), Worst).run()
    said = [record for record in caplog.records if "as 'of_all', 'worst': these stay here" in record.getMessage()]
    assert len(said) == 4, "once on each site"
    assert "train_loss" in fitted.callback_metrics
    assert not {"worst", "of_all"} & fitted.callback_metrics.keys()


def test_site_rejects_tasks_that_are_not_for_it(tmp_path: Path) -> None:
    make = partial(MAKE, clients_per_round=1.0, max_rounds=2)
    wire, other = Wire(tmp_path / "one", make), Wire(tmp_path / "other", make)
    registrations, train = noted(wire), noted(other, "train")
    with FederatedSite(make(), model(), make_data([2]), 2, tmp_path / "new") as site:
        unregistered = site.answer(train[2])
        assert "has not registered for run" in unregistered.header["failed"]
        assert not unregistered.tensors
        with pytest.raises(FederatedError, match="The site of 2 has received a task for client 1"):
            site.answer(registrations[1])
        site.answer(registrations[2])
        assert "has not registered for run" in site.answer(train[2]).header["failed"], "it is of another run"
        with pytest.raises(FederatedError, match="has no client 2. Its client_ids must name all"):
            site.answer(changed(registrations[2], clients=[0, 1]))
    for path in (tmp_path / "other").rglob("*.state"):
        path.unlink()
    with pytest.raises(FederatedError, match="asked to continue from its state after 1 rounds, .* none"):
        other.site(2).answer(train[2])


SIXTY = tuple(3 + (7 * i) % 11 for i in range(60))
NAMES = [f"client {i}" for i in range(60)]


def sixty(names: list[str]) -> FederatedDataModule:
    data = clients(SIXTY)
    return FederatedDataModule(clients={name: data[NAMES.index(name)] for name in names}, batch_size=4)


@pytest.mark.parametrize(
    "method",
    few(["Scaffold ii", "Mime", "FedDane", "FedDane own", "Scaffold ii gradient"], ["Scaffold ii", "FedDane own"]),
)
def test_sixty_clients_on_three_sites_match_simulation_bits(method: str, tmp_path: Path) -> None:
    def make() -> FederatedTrainer:
        return make_trainer(method, clients_per_round=10, max_rounds=3)

    expected, module = make(), model()
    expected.fit(model(), sixty(NAMES))
    sites = [
        FederatedSite(make(), model(), sixty(NAMES[start::3]), NAMES[start::3], tmp_path / str(start))
        for start in range(3)
    ]
    make().fit(module, RemoteClients(InProcess(sites), NAMES))
    for site in sites:
        site.close()
    assert torch.equal(parameters(module), parameters(expected.lightning_module))


@pytest.mark.thorough
def test_two_hundred_rounds_leak_no_resources(tmp_path: Path) -> None:
    psutil = pytest.importorskip("psutil", reason="no psutil, which counts descriptors")
    gc.collect()  # until then, sites of earlier tests hold their locks
    process, wire = psutil.Process(), Wire(tmp_path, partial(make_trainer, "Scaffold ii", max_rounds=200))

    def standing() -> dict[str, Any]:
        return {
            "files": sum(len(files) for _, _, files in os.walk(tmp_path)),
            "descriptors": process.num_fds(),
            "threads": threading.active_count(),
            "memory": process.memory_info().rss,
        }

    found: dict[int, dict[str, Any]] = {}

    class Looks(FederatedCallback):
        def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
            if round_report.round in (19, 199):
                found[round_report.round] = standing()

    fitted = wire.make()
    fitted.callbacks.append(Looks())
    wire.run(trainer=fitted)
    before, after = found[19], found[199]
    assert after.pop("memory") < before.pop("memory") + 2**25
    assert after == before
