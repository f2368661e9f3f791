"""What cannot be is refused by name, and the round goes on as if it had not come."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fed.callbacks import GradientDissimilarity
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.deploy import FederatedServer, FederatedSite, Message
from tests.deploy.site_models import Net, model
from tests.deploy.wire import Wire, make_data, make_trainer, parameters, simulated

MAKE = partial(make_trainer, "Scaffold ii")


def changed(message: Message, tensors: dict[str, Any] | None = None, **header: Any) -> Message:
    return replace(message, header={**message.header, **header}, tensors={**message.tensors, **(tensors or {})})


def without(message: Message, name: str) -> Message:
    return replace(message, tensors={n: value for n, value in message.tensors.items() if n != name})


P = 83  # parameters of the network
NAN = torch.full((P,), float("nan"))
WRONG: dict[str, tuple[Callable[[Message], Message], str]] = {
    "another format": (lambda m: changed(m, format=2), "format 2, and knows format 1"),
    "another run": (lambda m: changed(m, run="other"), "is of run other"),
    "no client": (lambda m: changed(m, client=17), "of no client"),
    "a later round": (lambda m: changed(m, round=4), "of round 4 .*, and 'train' of round 0"),
    "another phase": (lambda m: changed(m, phase="loss"), "'loss' of round 0 .*'train' of round 0"),
    "another attempt": (lambda m: changed(m, attempt=1), "attempt 1.*attempt 0"),
    "a wrong shape": (lambda m: changed(m, {"model": torch.zeros(3)}), r"'model' of shape \\[3\\]"),
    "a wrong type": (lambda m: changed(m, {"model": torch.zeros(P, dtype=torch.float64)}), "of torch.float64"),
    "whole numbers": (lambda m: changed(m, {"model": torch.zeros(P, dtype=torch.int64)}), "of torch.int64"),
    "nothing": (lambda m: replace(m, tensors={}), "has the messages \\[.*\\], where .* are expected"),
    "one message too few": (lambda m: without(m, "send.lr_sum"), "where .*'lr_sum'.* are expected"),
    "one message too many": (lambda m: changed(m, {"send.more": torch.zeros(P)}), "'more'.*where"),
    "all is implied": (
        lambda m: changed(replace(m, tensors={}), implied=["delta", "delta_c"]),
        "where .* are expected",
    ),
    "more steps than asked": (
        lambda m: changed(m, report={**m.header["report"], "steps": 10**6}),
        "1000000 local steps",
    ),
    "a loss that is no number": (lambda m: changed(m, loss=float("nan")), "loss or a norm that is not finite"),
    "not a number": (lambda m: changed(m, {"model": NAN}), "'model' with numbers that are not finite"),
    "a strange tensor": (lambda m: changed(m, {"evil": torch.zeros(P)}), "tensor 'evil', which no reply has"),
    "no tensor": (lambda m: changed(m, {"model": "x"}), "model is no tensor"),
    "a strange buffer": (lambda m: changed(m, {"buffers.b": torch.zeros(2)}), "buffer 'b'"),
    "no report": (lambda m: changed(m, report=None), "is no reply"),
    "a strange report": (lambda m: changed(m, report={"size": "many"}), "is no reply"),
    "a strange metric": (lambda m: changed(m, metrics={"a": []}), "is no reply"),
    "strange names": (lambda m: changed(m, same={"a": "b"}), "the same as 'b'"),
    "a header that is none": (lambda m: Message([], m.tensors), "format None"),  # type: ignore[arg-type]
    "a round that is none": (lambda m: changed(m, round="0"), "round is '0'"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_a_reply_that_cannot_be_is_refused_and_the_round_goes_on(name: str, tmp_path: Path) -> None:
    change, why = WRONG[name]
    wire, module = Wire(tmp_path, MAKE), model()
    with wire.server(module) as server:
        wire.phase(server)
        tasks = server.tasks()
        first = next(iter(tasks))
        sound = wire.answer(tasks[first])
        with pytest.raises(FederatedError, match=why.replace("\\\\", "\\")):
            server.receive(change(sound))
        assert first in server.missing()
        wire.run(server)
    assert torch.equal(parameters(module), parameters(simulated(MAKE).lightning_module))


def test_a_second_copy_counts_once_and_a_late_reply_is_refused(tmp_path: Path) -> None:
    wire, module = Wire(tmp_path, MAKE), model()
    with wire.server(module) as server:
        wire.phase(server)
        replies = list(wire.exchange(server.tasks()))
        for reply in (*replies, replies[0]):
            server.receive(reply)
        assert server.close_phase() is not None
        with pytest.raises(FederatedError, match="is to 'train' of round 0 .*, and 'train' of round 1"):
            server.receive(replies[0])
        wire.run(server)
        with pytest.raises(FederatedError, match="all rounds are done"):
            server.receive(replies[0])
    assert torch.equal(parameters(module), parameters(simulated(MAKE).lightning_module))


def test_a_phase_does_not_close_without_clients_that_are_not_to_be_dropped(tmp_path: Path) -> None:
    wire = Wire(tmp_path, MAKE)
    with wire.server() as server:
        for reply in list(wire.exchange(server.tasks()))[1:]:
            server.receive(reply)
        with pytest.raises(FederatedError, match="1 clients have not answered to 'hello': .*on_client_error='drop'"):
            server.close_phase()
        wire.run(server)  # they may still answer


@pytest.mark.parametrize("method", ["FedAvg", "Scaffold ii", "Mime"])
def test_clients_that_do_not_answer_leave_the_round_where_that_is_wanted(method: str, tmp_path: Path) -> None:
    make = partial(make_trainer, method, clients_per_round=1.0, on_client_error="drop", max_rounds=2)
    wire = Wire(tmp_path, make)
    with wire.server() as server:
        wire.phase(server)
        while server.phase is not None:
            tasks = server.tasks()
            for reply in wire.exchange({i: task for i, task in tasks.items() if (task.header["round"], i) != (0, 1)}):
                server.receive(reply)
            report = server.close_phase()
            if report is not None:
                assert list(report.cohort) == ([0, 2, 3] if report.round == 0 else [0, 1, 2, 3])
                if report.round == 0:
                    assert "has sent no reply to" in report.failed[1]


class Failing(Net):
    """A network that fails on one client in the second round."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if len(batch[0]) == 3 and self.trainer.current_epoch == 1:  # the last batch of client 0
            raise RuntimeError("the disk is gone")
        return super().training_step(batch, batch_idx)


def failing() -> Failing:
    torch.manual_seed(0)
    return Failing()


def test_a_client_that_fails_says_why_and_leaves_the_round_where_that_is_wanted(tmp_path: Path) -> None:
    make = partial(make_trainer, "FedAvg", clients_per_round=1.0, on_client_error="drop")
    wire, module = Wire(tmp_path / "drop", make, failing), failing()
    with wire.server(module) as server:
        reports = wire.run(server)
    assert "the disk is gone" in reports[1].failed[0]
    assert torch.equal(parameters(module), parameters(simulated(make, failing).lightning_module))
    wire = Wire(tmp_path / "raise", partial(make_trainer, "FedAvg", clients_per_round=1.0), failing)
    with wire.server() as server, pytest.raises(ClientError, match="the disk is gone"):
        wire.run(server)
    assert server.phase is None


def hello(server: FederatedServer) -> Message:
    return server.tasks()[2]


DIFFERENT: dict[str, tuple[dict[str, Any], Callable[[], Any], str]] = {
    "method": ({"method": "FedAvg"}, model, "its method is FedAvg, the server's is Scaffold"),
    "options": ({"method": "Scaffold i"}, model, "its method options is .*'i'"),
    "seed": ({"seed": 3}, model, "its seed is 3"),
    "work": ({"local_epochs": 3}, model, "its local_epochs is 3, the server's is 2"),
    "precision": ({"precision": "64-true"}, model, "its precision is 64-true"),
    "model": ({}, lambda: torch.nn.Module.register_buffer(m := model(), "more", torch.ones(1)) or m, "buffers at"),
}


@pytest.mark.parametrize("name", list(DIFFERENT))
def test_a_site_that_runs_something_else_refuses_to_say_hello(name: str, tmp_path: Path) -> None:
    options, make_model, why = DIFFERENT[name]
    own = make_trainer(**{"method": "Scaffold ii", **options})
    with (
        Wire(tmp_path / "wire", MAKE).server() as server,
        FederatedSite(own, make_model(), make_data([2]), 2, tmp_path / "2") as site,
        pytest.raises(FederatedError, match=f"The site of client 2 does not run what the server runs: .*{why}"),
    ):
        site.answer(hello(server))


def test_a_site_refuses_tasks_that_are_not_for_it(tmp_path: Path) -> None:
    wire, other = Wire(tmp_path, MAKE), Wire(tmp_path / "other", MAKE)
    with wire.server() as server, other.server() as another:
        site = wire.site(2)
        with pytest.raises(FederatedError, match="which has said hello to run none"):
            site.answer(changed(hello(server), phase="train"))
        with pytest.raises(FederatedError, match="A task for client 1 has come to the site of 2"):
            site.answer(server.tasks()[1])
        site.answer(hello(server))
        with pytest.raises(FederatedError, match="A task of run .* has said hello to run"):
            site.answer(changed(hello(another), phase="train"))
        with pytest.raises(FederatedError, match="has no client 2. Its client_ids must name all"):
            site.answer(changed(hello(server), clients=[0, 1]))
        wire.run(server)
        for path in (tmp_path / "2").rglob("*.state"):
            path.unlink()
        task = changed(hello(server) if server.phase == "hello" else wire_task(wire, tmp_path), state=4)
        with pytest.raises(FederatedError, match="asked to go on from what it kept after 4 rounds, and .* none"):
            site.answer(task)


def wire_task(wire: Wire, folder: Path) -> Message:
    """Return a task of the run that the sites know."""
    with FederatedServer(wire.make(), model(), range(4)) as server:
        server._run = wire.sites[2]._agreed["run"]  # type: ignore[index]
        wire.phase(server)
        return (
            next(task for task in server.tasks().values() if task.client == 2)
            if 2 in server.tasks()
            else (changed(next(iter(server.tasks().values())), client=2))
        )


@pytest.mark.parametrize("content", [b"", b"hello", b"\x80\x04}.", bytes(100), (2**60).to_bytes(8, "little") + b"{}"])
def test_bytes_that_are_no_message_are_refused(content: bytes) -> None:
    with pytest.raises(FederatedError, match=f"These {len(content)} bytes are no message"):
        Message.from_bytes(content)


def test_a_message_survives_being_bytes() -> None:
    tensors = {"a": torch.arange(3), "b": torch.tensor(1.5, dtype=torch.bfloat16), "c": torch.zeros(0, 2)}
    header = {"client": "Zürich", "loss": float("nan"), "list": [1, {"x": None}], "float": 0.1 + 0.2}
    found = Message.from_bytes(Message(header, tensors).to_bytes())
    assert str(found.header) == str(header)
    assert all(torch.equal(found.tensors[name], value) for name, value in tensors.items())
    assert found.tensors["b"].dtype == torch.bfloat16


def test_two_processes_do_not_share_a_sites_folder(tmp_path: Path) -> None:
    with (
        FederatedSite(MAKE(), model(), make_data([2]), 2, tmp_path),
        pytest.raises(FederatedError, match="Another process works with the site's folder"),
    ):
        FederatedSite(MAKE(), model(), make_data([2]), 2, tmp_path)


def test_a_callback_that_looks_at_clients_data_is_refused_on_the_server(tmp_path: Path) -> None:
    wire = Wire(tmp_path, partial(make_trainer, "FedAvg", callbacks=[GradientDissimilarity()]))
    with wire.server() as server, pytest.raises(FederatedError, match="are on its site"):
        wire.run(server)


def test_a_server_takes_a_new_trainer_and_loads_before_it_begins(tmp_path: Path) -> None:
    fitted = simulated(partial(make_trainer, "FedAvg"))
    with pytest.raises(FederatedError, match="found 5 rounds done"):
        FederatedServer(fitted, model(), range(4))
    fitted.save_checkpoint(tmp_path / "five.ckpt")
    wire = Wire(tmp_path, partial(make_trainer, "FedAvg"))
    with wire.server() as server:
        with pytest.raises(FederatedError, match="nothing to save"):
            server.save(tmp_path / "x.ckpt")
        (tmp_path / "none.ckpt").write_text("none")
        with pytest.raises(FederatedError, match="is no checkpoint of federated rounds"):
            server.load(tmp_path / "none.ckpt")
        wire.phase(server)
        with pytest.raises(FederatedError, match="before the first message"):
            server.load(tmp_path / "five.ckpt")
