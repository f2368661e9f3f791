"""A site answers the tasks that are for it, and no others."""

import os
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fed import FederatedDataModule, FederatedTrainer
from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy import FederatedServer, FederatedSite, Message
from tests.deploy.site_models import model
from tests.deploy.wire import Wire, make_trainer, parameters
from tests.helpers.selection import few
from tests.helpers.training import clients

MAKE = partial(make_trainer, "Scaffold ii")


def changed(message: Message, tensors: dict[str, Any] | None = None, **header: Any) -> Message:
    return replace(message, header={**message.header, **header}, tensors={**message.tensors, **(tensors or {})})


def hello(server: FederatedServer) -> Message:
    return server.tasks()[2]


def test_a_site_refuses_tasks_that_are_not_for_it(tmp_path: Path) -> None:
    wire, other = Wire(tmp_path, MAKE), Wire(tmp_path / "other", MAKE)
    with wire.server() as server, other.server() as another:
        site = wire.site(2)
        with pytest.raises(FederatedError, match="which has not said hello to it"):
            site.answer(changed(hello(server), phase="train"))
        with pytest.raises(FederatedError, match="A task for client 1 has come to the site of 2"):
            site.answer(server.tasks()[1])
        site.answer(hello(server))
        with pytest.raises(FederatedError, match="A task of run .* has not said hello to it"):
            site.answer(changed(hello(another), phase="train"))
        with pytest.raises(FederatedError, match="has no client 2. Its client_ids must name all"):
            site.answer(changed(hello(server), clients=[0, 1]))
        wire.run(server)
        for path in (tmp_path / "2").rglob("*.state"):
            path.unlink()
        task = changed(hello(server) if server.phase == "hello" else wire_task(wire, tmp_path), state=4, round=4)
        with pytest.raises(FederatedError, match="asked to go on from what it kept after 4 rounds, and .* none"):
            site.answer(task)


def wire_task(wire: Wire, folder: Path) -> Message:
    """Return a task of the run that the sites know."""
    with FederatedServer(wire.make(), model(), range(4)) as server:
        server._run = wire.sites[2]._run
        wire.phase(server)
        return (
            next(task for task in server.tasks().values() if task.client == 2)
            if 2 in server.tasks()
            else (changed(next(iter(server.tasks().values())), client=2))
        )


SIXTY = tuple(3 + (7 * i) % 11 for i in range(60))
NAMES = [f"client {i}" for i in range(60)]


def sixty(names: list[str]) -> FederatedDataModule:
    data = clients(SIXTY)
    return FederatedDataModule(clients={name: data[NAMES.index(name)] for name in names}, batch_size=4)


@pytest.mark.parametrize("method", few(["Scaffold ii", "Mime"], ["Scaffold ii"]))
def test_sixty_clients_on_three_sites_have_the_bits_of_the_simulation(method: str, tmp_path: Path) -> None:
    def make() -> FederatedTrainer:
        return make_trainer(method, clients_per_round=10, max_rounds=3)

    expected, module = make(), model()
    expected.fit(model(), sixty(NAMES))
    sites = [
        FederatedSite(make(), model(), sixty(NAMES[start::3]), NAMES[start::3], tmp_path / str(start))
        for start in range(3)
    ]
    with FederatedServer(make(), module, NAMES) as server:
        while tasks := server.tasks():
            for name, task in reversed(tasks.items()):
                arrived = Message.from_bytes(task.to_bytes())
                server.receive(sites[NAMES.index(str(name)) % 3].answer(arrived))
            server.close_phase()
    for site in sites:
        site.close()
    assert torch.equal(parameters(module), parameters(expected.lightning_module))


@pytest.mark.thorough
def test_two_hundred_rounds_leave_no_more_behind_than_twenty(tmp_path: Path) -> None:
    psutil = pytest.importorskip("psutil", reason="no psutil, which counts descriptors")
    process, wire = psutil.Process(), Wire(tmp_path, partial(make_trainer, "Scaffold ii", max_rounds=200))

    def standing() -> dict[str, Any]:
        return {
            "files": sum(len(files) for _, _, files in os.walk(tmp_path)),
            "descriptors": process.num_fds(),
            "threads": threading.active_count(),
            "memory": process.memory_info().rss,
        }

    with wire.server() as server:
        wire.run(server, rounds=20)
        before = standing()
        wire.run(server)
        after = standing()
        assert server.phase is None
    assert after["memory"] < before.pop("memory") + 2**25
    assert {name: after[name] for name in before} == {**before, "threads": before["threads"] - 1}  # the fit's has ended
