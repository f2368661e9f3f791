"""The exchange of a fit with its clients: replies, second copies, stale replies, refusals, and silence."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fed import FederatedCallback, FederatedTrainer
from lightning_fed.compat.private import SIGTERMException
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.deploy import Absent, Message, Refusal, exchange
from tests.deploy.site_models import Net, model
from tests.deploy.wire import Wire, make_trainer, parameters, simulated
from tests.helpers.processes import wait_until
from tests.helpers.selection import few

MAKE = partial(make_trainer, "Scaffold ii")
ALL = partial(make_trainer, "FedAvg", clients_per_round=1.0)


def test_duplicate_and_stale_replies_are_ignored_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wire, module, earlier = Wire(tmp_path, MAKE), model(), list[Message]()

    def comes(task: Message) -> list[Message]:
        reply, stale = wire.answer(task), list(earlier)
        if task.header["phase"] == "train":
            earlier[:] = [reply]
        return [*stale, *stale, reply, reply]

    wire.comes = comes
    with caplog.at_level("ERROR"):
        wire.run(module)
    assert torch.equal(parameters(module), parameters(simulated(MAKE).lightning_module))
    found = [text for text in caplog.messages if "is to 'train' of round 0" in text]
    assert [text for text in found if "and the current task is 'train' of round 1 (attempt 0)" in text]
    assert len(found) == len(set(found))


def test_log_names_asked_and_missing_clients_and_counts_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "_WAIT", 0.02)
    threads = threading.active_count()
    wire = Wire(tmp_path, partial(ALL, max_rounds=1))

    phases = {"register": "register", "train": "round 0 train"}
    waits: dict[str, list[tuple[str, str]]] = {}

    def comes(task: Message) -> list[Message]:
        phase = phases[task.header["phase"]]
        if task.client == wire.last:  # all others have answered
            line = re.compile(rf"{phase}: (\d) of 4 have answered in (.*) s; missing: .*\b{task.client}\b.*")

            def has_come() -> bool:
                waits[phase] = [found.groups() for found in map(line.fullmatch, caplog.messages) if found]
                return len(waits[phase]) > 1 and waits[phase][-1][0] == "3"

            wait_until(has_come)
        return [wire.answer(task)]

    wire.comes = comes
    with caplog.at_level("INFO", logger="lightning_fed.deploy"):
        wire.run()
    for phase in phases.values():
        assert caplog.messages.count(f"{phase}: 4 clients are asked: 0, 1, 2, 3") == 1
        assert caplog.messages.count(f"{phase}: 4 of 4 have answered") == 1
        for number, (_, seconds) in enumerate(waits[phase]):
            assert float(seconds) == pytest.approx(0.02 * 2**number)
    wait_until(lambda: threading.active_count() <= threads)


def test_log_line_names_only_a_few_clients() -> None:
    assert exchange.named(["bank", 2]) == "'bank', 2"
    assert exchange.named(list(range(1000))) == "0, 1, 2, 3, 4, ..."


@pytest.mark.thorough
def test_fit_raises_with_names_and_reasons_of_unresponsive_clients(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wire = Wire(tmp_path, ALL)

    def comes(task: Message) -> list[Message | Refusal]:
        if task.header["round"] == 1 and task.client in (1, 2):
            return [Refusal(2, "the disk is full")] if task.client == 2 else []
        return [wire.answer(task)]

    wire.comes = comes
    with pytest.raises(FederatedError, match="2 clients have not answered to 'train': .*on_client_error='drop'") as why:
        wire.run(save={None: tmp_path / "last.ckpt"})
    assert "Client 2: the disk is full" in str(why.value)
    assert "Client 2 does not answer: the disk is full" in caplog.messages
    assert wire.closed
    wire.comes, module = wire.answers, model()
    wire.run(module, ckpt_path=tmp_path / "last.ckpt")
    assert torch.equal(parameters(module), parameters(simulated(ALL).lightning_module))


def test_fit_requires_every_client_to_register(tmp_path: Path) -> None:
    wire = Wire(tmp_path, MAKE)
    wire.comes = lambda task: [] if task.client == 3 else [wire.answer(task)]
    with pytest.raises(FederatedError, match="1 client has not answered to 'register': 3"):
        wire.run()


@pytest.mark.parametrize("method", few(["FedAvg", "Scaffold ii", "Mime"], ["Scaffold ii", "Mime"]))
def test_unresponsive_clients_leave_the_round_with_drop(method: str, tmp_path: Path) -> None:
    wire = Wire(tmp_path, partial(make_trainer, method, clients_per_round=1.0, on_client_error="drop", max_rounds=2))

    def comes(task: Message) -> list[Message]:
        is_silent = (task.header["round"], task.client) == (0, 1) and task.header["phase"] != "register"
        return [] if is_silent else [wire.answer(task)]

    wire.comes = comes
    _, reports = wire.run()
    assert [list(report.cohort) for report in reports] == [[0, 2, 3], [0, 1, 2, 3]]
    assert "has sent no reply to" in reports[0].failed[1]


def test_absent_clients_are_awaited_only_if_the_round_requires_them(tmp_path: Path) -> None:
    """One of three absent clients returns. The round can continue without the other two only after its reply."""

    class Absents(Wire):
        def exchange(self, tasks: Mapping[Any, Message], registrations: Mapping[Any, Message]) -> Iterator[Any]:
            if next(iter(tasks.values())).header["phase"] != "train":
                yield from super().exchange(tasks, registrations)
                return
            replies = {client: self.answer(task) for client, task in tasks.items()}
            yield Absent((0, 1, 2), "its line is cut")
            for come in (replies[3], Absent((0, 1), "its line is cut"), replies[2]):
                asked.append(come)
                yield come
            if not drops:
                yield replies[0]
                yield replies[1]
                return
            pytest.fail("the fit waits for clients that are absent")

    for drops in (True, False):
        asked = list[Any]()
        make = partial(ALL, max_rounds=1, **({"on_client_error": "drop"} if drops else {}))
        _, reports = Absents(tmp_path / str(drops), make).run()
        assert len(asked) == 3
        assert list(reports[0].cohort) == ([2, 3] if drops else [0, 1, 2, 3])


def test_round_does_not_continue_with_an_empty_cohort(tmp_path: Path) -> None:
    class Absents(Wire):
        def exchange(self, tasks: Mapping[Any, Message], registrations: Mapping[Any, Message]) -> Iterator[Any]:
            if next(iter(tasks.values())).header["phase"] == "train":
                yield Absent(tuple(tasks), "its line is cut")
            yield from super().exchange(tasks, registrations)

    make = partial(ALL, max_rounds=1, on_client_error="drop", max_failed_share=1.0)
    _, reports = Absents(tmp_path, make).run()
    assert len(reports[0].cohort) > 0


def test_client_with_an_invalid_reply_is_not_awaited_but_can_resend(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Stale messages do not end the wait, since a transport may deliver twice."""
    asked = list[Any]()

    class Silent(Wire):
        def exchange(self, tasks: Mapping[Any, Message], registrations: Mapping[Any, Message]) -> Iterator[Any]:
            header = next(iter(tasks.values())).header
            if (header["phase"], header["round"]) != ("train", 1):
                yield from super().exchange(tasks, registrations)
                return
            replies = {client: self.answer(task) for client, task in tasks.items()}
            wrong = {client: Message(reply.header, {}) for client, reply in replies.items()}
            stale = Message({**replies[0].header, "round": 0}, replies[0].tensors)
            for come in (wrong[0], replies[0], wrong[1], stale, replies[2], stale, replies[3]):
                asked.append(come)
                yield come
            pytest.fail("the fit waits for a client that has sent what is not valid")

    wire = Silent(tmp_path, partial(ALL, on_client_error="drop", max_rounds=2))
    _, reports = wire.run()
    assert len(asked) == 7
    assert list(reports[1].cohort) == [0, 2, 3]
    for client in (0, 1):
        assert [m for m in caplog.messages if f"of client {client} to 'train' of round 1 has the messages []" in m]


class Failing(Net):
    """A network that fails on one client in the second round."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if len(batch[0]) == 3 and self.trainer.current_epoch == 1:  # the last batch of client 0
            raise RuntimeError("the disk is gone")
        return super().training_step(batch, batch_idx)


def failing() -> Failing:
    torch.manual_seed(0)
    return Failing()


def test_failing_client_reports_why_and_leaves_the_round_with_drop(tmp_path: Path) -> None:
    make = partial(ALL, on_client_error="drop")
    wire, module = Wire(tmp_path / "drop", make, failing), failing()
    _, reports = wire.run(module)
    assert "the disk is gone" in reports[1].failed[0]
    assert torch.equal(parameters(module), parameters(simulated(make, failing).lightning_module))
    wire = Wire(tmp_path / "raise", ALL, failing)
    with pytest.raises(ClientError, match="the disk is gone"):
        wire.run()
    assert wire.closed


def test_error_in_the_fit_ends_the_exchange(tmp_path: Path) -> None:
    class Breaks(FederatedCallback):
        def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
            trainer.fit_loop.training_losses([0, 1])

    def comes(task: Message) -> list[Message]:
        if task.header["phase"] == "measure":
            raise KeyError("an error of the transport's own")
        return [wire.answer(task)]

    wire = Wire(tmp_path, partial(ALL, callbacks=[Breaks()]))
    wire.comes = comes
    with pytest.raises(KeyError, match="of the transport's own"):
        wire.run()
    assert wire.closed


@pytest.fixture
def sigterm() -> Iterator[Callable[[Any], None]]:
    """Return a function that installs a SIGTERM handler, as another package may do."""
    before = signal.getsignal(signal.SIGTERM)
    yield lambda handler: signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
@pytest.mark.parametrize("phase", ["register", "train"])
def test_signal_ends_the_wait_for_replies_immediately(phase: str, number: int, tmp_path: Path, sigterm: Any) -> None:
    before = signal.getsignal(signal.SIGINT)
    sigterm(signal.SIG_DFL)
    wire = Wire(tmp_path, ALL)

    def comes(task: Message) -> list[Message]:
        if (task.header["phase"], task.header["round"]) == (phase, 1 if phase == "train" else 0):
            os.kill(os.getpid(), number)
            time.sleep(600)
        return [wire.answer(task)]

    wire.comes = comes
    try:
        with pytest.raises(SystemExit if number == signal.SIGINT else SIGTERMException):
            wire.run()
    finally:
        signal.signal(signal.SIGINT, before)
    assert wire.closed


def test_signal_with_another_handler_is_left_to_it(tmp_path: Path, sigterm: Any) -> None:
    heard = list[int]()
    sigterm(lambda number, frame: heard.append(number))
    wire = Wire(tmp_path, ALL)

    def comes(task: Message) -> list[Message]:
        if task.header["round"] == 1 and not heard:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
        return [wire.answer(task)]

    wire.comes = comes
    with pytest.raises(SIGTERMException):
        wire.run()
    assert heard == [signal.SIGTERM]
    assert wire.closed


def changed(message: Message, tensors: dict[str, Any] | None = None, **header: Any) -> Message:
    return Message({**message.header, **header}, {**message.tensors, **(tensors or {})})


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another format": ({"format": 2}, "format 2, and format 1 is read here"),
    "another run": ({"run": "f" * 16}, "The reply of client 1 is of run ffffffffffffffff, and this is run"),
    "no client": ({"client": 17}, "The reply of client 17 is of no client of this run"),
    "a truth value": ({"client": True}, "The reply of client True is of no client of this run"),
    "a later round": ({"round": 4}, "of round 4 (attempt 0), and the current task is 'train' of round 0 (attempt 0)"),
    "another phase": ({"phase": "loss"}, "'loss' of round 0 (attempt 0), and the current task is 'train' of round 0"),
    "another attempt": ({"attempt": 1}, "(attempt 1), and the current task is 'train' of round 0 (attempt 0)"),
    "a registration of one that is there": ({"phase": "register"}, "The reply of client 1 is to 'register' of round 0"),
    "a round that is none": ({"round": "0"}, "round is '0'"),
}


def test_mismatched_messages_are_rejected_and_not_taken_as_replies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wire, module = Wire(tmp_path, ALL), model()

    def comes(task: Message) -> list[Message]:
        reply = wire.answer(task)
        if (task.client, task.header["phase"], task.header["round"]) != (1, "train", 0):
            return [reply]
        return [*(changed(reply, **header) for header, _ in WRONG.values()), Message([], reply.tensors), reply]  # type: ignore[arg-type]

    wire.comes = comes
    wire.run(module)
    for name, (_, said) in WRONG.items():
        assert [text for text in caplog.messages if said in text], name
    assert [text for text in caplog.messages if "its header is a list, and a mapping is expected" in text]
    assert torch.equal(parameters(module), parameters(simulated(ALL).lightning_module))


def test_reply_from_a_client_that_was_not_asked_is_rejected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wire = Wire(tmp_path, partial(MAKE, max_rounds=1))

    def comes(task: Message) -> list[Message]:
        reply, phase = wire.answer(task), task.header["phase"]
        others = set(range(4)) - set(wire.phases[-1][2])
        return [*(changed(reply, client=client) for client in others if phase == "train"), reply]

    wire.comes = comes
    trained: tuple[FederatedTrainer, Any] = wire.run()
    assert "it was not asked in this phase" in caplog.text
    assert trained[1][0].failed == {}
