"""A client that says hello when rounds are run already: it takes part from the next round on."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fed import FederatedCallback, FederatedDataModule
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.rounds import RoundReport
from lightning_fed.deploy import FederatedServer, Message
from lightning_fed.deploy.announced import Announced, Announcements
from lightning_fed.server import WeightedSampler
from tests.deploy.site_models import model
from tests.deploy.wire import SIZES, Wire, make_trainer, parameters
from tests.helpers.selection import few
from tests.helpers.training import clients

DROPS = {"on_client_error": "drop", "max_failed_share": 0.9}
LATE = 2  # the client


def begin(wire: Wire, server: FederatedServer) -> None:
    """Let all clients but one say hello."""
    for client, task in server.tasks().items():
        if client != LATE:
            server.receive(wire.answer(task))
    server.close_phase()


def greet(wire: Wire, server: FederatedServer) -> None:
    assert list(server.greetings()) == [LATE]
    server.receive(wire.answer(server.greetings()[LATE]))
    assert not server.greetings()


@pytest.mark.parametrize("method", few(["Scaffold ii", "FedProx adaptive", "Mime"], ["FedProx adaptive", "Mime"]))
def test_a_late_client_takes_part_from_the_next_round_on_as_after_a_restart(method: str, tmp_path: Path) -> None:
    sampler = WeightedSampler(3, weights="examples")
    make = partial(make_trainer, method, clients_per_round=None, sampler=sampler, **DROPS)
    wire, module, again = Wire(tmp_path, make), model(), model()
    with wire.server(module) as server:
        begin(wire, server)
        reports = wire.run(server, rounds=1)
        greet(wire, server)
        reports += wire.run(server, rounds=1)
        server.save(tmp_path / "two.ckpt")
        reports += wire.run(server)
    there = [LATE in report.clients for report in reports]
    assert there[:2] == [False, False]
    assert any(there)
    wire.kill()
    with wire.server(again) as server:
        server.load(tmp_path / "two.ckpt")
        wire.run(server)
    assert torch.equal(parameters(module), parameters(again))


class Ill(FederatedDataModule):
    """Clients of a simulation, one of which cannot be read at first."""

    is_ill = True

    def client_batches(self, client_id: Any) -> Any:
        if client_id == LATE and self.is_ill:
            raise OSError("not there")
        return super().client_batches(client_id)


class Cure(FederatedCallback):
    """Let all clients be read from a round on."""

    def __init__(self, round: int) -> None:
        self.round = round

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: RoundReport) -> None:
        trainer.datamodule.is_ill = round_report.round + 1 < self.round


@pytest.mark.parametrize("method", few(["FedAvg", "Scaffold ii"], ["Scaffold ii"]))
def test_a_client_that_comes_late_counts_as_one_that_failed_in_the_rounds_before(method: str, tmp_path: Path) -> None:
    """So N counts it from the start, on which SCAFFOLD's mean of control variates rests."""
    expected = make_trainer(method, callbacks=[Cure(2)], **DROPS)
    expected.fit(model(), Ill(clients=clients(SIZES), batch_size=4))
    module, wire = model(), Wire(tmp_path, partial(make_trainer, method, **DROPS))
    with wire.server(module) as server:
        begin(wire, server)
        wire.run(server, rounds=1)
        greet(wire, server)
        wire.run(server)
    assert torch.equal(parameters(module), parameters(expected.lightning_module))


def test_an_absent_client_is_named_and_too_many_end_the_run(tmp_path: Path) -> None:
    wire = Wire(tmp_path, partial(make_trainer, "FedAvg", clients_per_round=1.0, **DROPS))
    with wire.server() as server:
        begin(wire, server)
        report = wire.run(server, rounds=1)[0]
        assert report.failed == {LATE: f"Client {LATE} has not said hello."}
        with pytest.raises(FederatedError, match="of client 1 is to 'hello' of round 0"):
            server.receive(wire.answer(server._greeting(1)))  # which has said hello before
        greet(wire, server)
        assert LATE not in server.tasks()
        wire.run(server, rounds=1)
        assert LATE in server.tasks()
        with pytest.raises(FederatedError, match="of client 2 is to 'hello' of round 0"):
            server.receive(wire.answer(server._greeting(LATE)))
    wire.kill()
    few = {**DROPS, "max_failed_share": 0.1}
    strict = Wire(tmp_path, partial(make_trainer, "FedAvg", clients_per_round=1.0, **few))
    with (
        strict.server() as server,
        pytest.raises(ClientError, match="1 of 4 clients failed.*\n- Client 2 has not said"),
    ):
        begin(strict, server)


def test_a_late_client_that_runs_something_else_is_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    wire = Wire(tmp_path, partial(make_trainer, "FedAvg", **DROPS))
    with wire.server() as server:
        begin(wire, server)
        wire.make = partial(make_trainer, "FedAvg", seed=3, **DROPS)
        with pytest.raises(FederatedError, match="does not run what the server runs: its seed is 3"):
            wire.answer(server.greetings()[LATE])
        wire.kill(LATE)
        wire.make = partial(make_trainer, "FedAvg", **DROPS)
        reply = wire.answer(server.greetings()[LATE])
        with pytest.raises(FederatedError, match="of client 2 says that its size is -1"):
            server.receive(Message({**reply.header, "size": -1}))
        reports: list[RoundReport] = wire.run(server)
        assert [report.round for report in reports] == list(range(5))


def hello(size: int, **more: Any) -> dict[str, Any]:
    return {"size": size, "batches": 3, "val_size": 0, "batch_size": 4, **more}


def test_a_client_without_a_hello_counts_with_the_mean_size_until_it_is_admitted() -> None:
    found = Announcements(["a", "b", "c"])
    found.take("c", hello(10))
    found.take("a", hello(5))
    found.close()
    assert list(found.known) == ["a", "b", "c"]  # in the order of their stored indices
    assert [found.known[client].size for client in "abc"] == [5, 8, 10]
    assert (found.absent, found.silent(), found.admit()) == ({"b"}, ["b"], False)
    found.take("b", hello(3))
    assert (found.absent, found.silent(), found.known["b"].size) == ({"b"}, [], 8)
    assert found.admit()
    assert (found.absent, found.known["b"]) == (set(), Announced(3, 3, 4))


def test_a_hello_without_counts_is_refused() -> None:
    for name, value in (("size", -1), ("batches", True), ("val_size", "7"), ("size", None)):
        with pytest.raises(FederatedError, match=f"The reply of client 'a' says that its {name} is {value!r}"):
            Announcements(["a"]).take("a", {**hello(1), name: value})
