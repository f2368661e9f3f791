"""Many clients on few sites, and many rounds: the same bits, and nothing that grows."""

import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lightning_fed import FederatedDataModule, FederatedTrainer
from lightning_fed.deploy import FederatedServer, FederatedSite, Message
from tests.deploy.site_models import model
from tests.deploy.wire import Wire, make_trainer, parameters
from tests.helpers.training import clients

SIXTY = tuple(3 + (7 * i) % 11 for i in range(60))
NAMES = [f"client {i}" for i in range(60)]


def sixty(names: list[str]) -> FederatedDataModule:
    data = clients(SIXTY)
    return FederatedDataModule(clients={name: data[NAMES.index(name)] for name in names}, batch_size=4)


@pytest.mark.parametrize("method", ["Scaffold ii", "Mime"])
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
