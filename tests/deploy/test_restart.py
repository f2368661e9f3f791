"""Servers and sites that end at any moment go on with the bits of an undisturbed run."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy import FederatedServer
from tests.deploy.site_models import model
from tests.deploy.wire import METHODS, Wire, make_data, make_trainer, parameters, simulated
from tests.helpers.selection import few

STATEFUL = ["Scaffold i", "Scaffold ii", "FedDyn"]


@pytest.mark.parametrize("method", few(["FedAvg", "Mime", *STATEFUL], ["Mime", "Scaffold i", "FedDyn"]))
def test_a_run_goes_on_from_the_servers_checkpoint_and_the_sites_folders(method: str, tmp_path: Path) -> None:
    make = partial(make_trainer, method)
    expected = simulated(make)
    wire = Wire(tmp_path, make)
    with wire.server() as server:
        wire.run(server, rounds=2)
        server.save(tmp_path / "two.ckpt")
        wire.run(server, rounds=1)  # which is lost: sites have done it, and the server has not kept it
    wire.kill()
    module = model()
    with wire.server(module) as server:
        server.load(tmp_path / "two.ckpt")
        assert [report.round for report in wire.run(server)] == [2, 3, 4]
    assert torch.equal(parameters(module), parameters(expected.lightning_module))


@pytest.mark.parametrize("method", few(["FedAvg", *STATEFUL], ["Scaffold ii", "FedDyn"]))
def test_a_run_that_began_in_simulation_goes_on_with_sites(method: str, tmp_path: Path) -> None:
    make = partial(make_trainer, method)
    expected = simulated(make)
    begun = make_trainer(method, max_rounds=2)
    begun.fit(model(), make_data())
    begun.save_checkpoint(tmp_path / "two.ckpt")
    wire, module = Wire(tmp_path / "sites", make), model()
    with wire.server(module) as server:
        server.load(tmp_path / "two.ckpt")
        wire.run(server, rounds=1)
        server.save(tmp_path / "three.ckpt")  # some states are on sites by now, others here
    wire.kill()
    with wire.server(module) as server:
        server.load(tmp_path / "three.ckpt")
        wire.run(server)
    assert torch.equal(parameters(module), parameters(expected.lightning_module))


def test_a_run_goes_back_to_simulation_unless_sites_keep_states(tmp_path: Path) -> None:
    for method in ("FedAvg", "Scaffold ii"):
        make = partial(make_trainer, method)
        wire = Wire(tmp_path / method, make)
        with wire.server() as server:
            wire.run(server, rounds=2)
            server.save(tmp_path / f"{method}.ckpt")
    fitted = simulated(partial(make_trainer, "FedAvg"), ckpt_path=tmp_path / "FedAvg.ckpt")
    expected = simulated(partial(make_trainer, "FedAvg"))
    assert torch.equal(parameters(fitted.lightning_module), parameters(expected.lightning_module))
    with pytest.raises(FederatedError, match="keep states on their sites.*FederatedServer.load"):
        simulated(partial(make_trainer, "Scaffold ii"), ckpt_path=tmp_path / "Scaffold ii.ckpt")


def disturbed(method: str, folder: Path, seed: int) -> tuple[Any, int]:
    """Run over sites, with ends of servers and sites at random moments; return the module and how many there were."""
    chance, make = random.Random(seed), partial(make_trainer, method)
    wire, checkpoint, ends = Wire(folder, make, seed=seed), folder / "last.ckpt", 0

    def begun() -> FederatedServer:
        server = wire.server(model())
        if checkpoint.is_file():
            server.load(checkpoint)
        return server

    server = begun()
    while server.phase is not None:
        tasks = list(server.tasks().values())
        chance.shuffle(tasks)
        for task in tasks:
            reply = wire.answer(task)
            if chance.random() < 0.15:  # a site ends when it has answered, and the reply is lost
                wire.kill(int(task.client))
                ends += 1
                reply = wire.answer(task)
            server.receive(reply)
            if chance.random() < 0.1:
                wire.kill(chance.choice(range(4)))
                ends += 1
        if chance.random() < 0.1:  # the server ends with all replies of a phase
            server.close()
            server, ends = begun(), ends + 1
            continue
        if server.close_phase() is not None and server.phase is not None:
            server.save(checkpoint)
    module = server.model
    server.close()
    wire.kill()
    return module, ends


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(n, marks=pytest.mark.thorough) for n in range(3, 33))])
def test_ends_at_random_moments_leave_no_trace(seed: int, tmp_path: Path) -> None:
    method = list(METHODS)[(5 * seed + 6) % len(METHODS)]
    module, ends = disturbed(method, tmp_path, seed)
    assert ends
    assert torch.equal(parameters(module), parameters(simulated(partial(make_trainer, method)).lightning_module))
