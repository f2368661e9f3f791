"""Impossible replies are refused by name, and the round continues as if they had not arrived."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed.callbacks import TrainingLoss
from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy import Message
from lightning_fed.deploy.exchange import Exchange
from lightning_fed.deploy.message import MOST, Expected, Fields, check_finite, check_tensors, printable, quoted
from lightning_fed.rounds.messages import Reply
from tests.deploy.site_models import model
from tests.deploy.wire import METHODS, Wire, make_trainer, parameters, simulated

MAKE = partial(make_trainer, "Scaffold ii")
REPORT = ("steps", "loss", "update_norm", "seconds")


def changed(message: Message, tensors: dict[str, Any] | None = None, **header: Any) -> Message:
    return replace(message, header={**message.header, **header}, tensors={**message.tensors, **(tensors or {})})


def without(message: Message, name: str) -> Message:
    return replace(message, tensors={n: value for n, value in message.tensors.items() if n != name})


def told(message: Message, **report: Any) -> Message:
    return changed(message, report={**message.header["report"], **report})


def nested(depth: int) -> Any:
    found: Any = []
    for _ in range(depth):
        found = [found]
    return found


P = 83  # parameters of the network
NAN = torch.full((P,), float("nan"))
WRONG: dict[str, tuple[Callable[[Message], Message], str]] = {
    "a wrong shape": (lambda m: changed(m, {"model": torch.zeros(3)}), r"'model' of shape \\[3\\]"),
    "a wrong type": (lambda m: changed(m, {"model": torch.zeros(P, dtype=torch.float64)}), "of torch.float64"),
    "whole numbers": (lambda m: changed(m, {"model": torch.zeros(P, dtype=torch.int64)}), "of torch.int64"),
    "nothing": (lambda m: replace(m, tensors={}), "has the messages \\[.*\\], where .* are expected"),
    "one message too few": (lambda m: without(m, "send.lr_sum"), "where .*'lr_sum'.* are expected"),
    "one message too many": (lambda m: changed(m, {"send.more": torch.zeros(P)}), "'send.more'.*where"),
    "all is implied": (
        lambda m: changed(replace(m, tensors={}), implied=["delta", "delta_c"]),
        "where .* are expected",
    ),
    "more steps than asked": (
        lambda m: changed(m, report={**m.header["report"], "steps": 10**6}),
        "its steps is 1000000, and a whole number from 0 to",
    ),
    "a loss that is no number": (lambda m: changed(m, loss=float("nan")), "loss or a norm that is not finite"),
    "not a number": (lambda m: changed(m, {"model": NAN}), "'model' with numbers that are not finite"),
    "a strange tensor": (lambda m: changed(m, {"evil": torch.zeros(P)}), "tensor 'evil', where .* are expected"),
    "no tensor": (lambda m: changed(m, {"model": "x"}), "'model', which is not a tensor"),
    "a strange buffer": (
        lambda m: changed(m, {"buffers.b": torch.zeros(2)}),
        "tensor 'buffers.b', where",
    ),
    "a scalar for a vector": (
        lambda m: changed(m, {"send.delta": torch.tensor(1.0)}),
        r"'send.delta' of shape \\[\\], where \\[83\\] is expected",
    ),
    "a vector for a scalar": (
        lambda m: changed(m, {"send.lr_sum": torch.zeros(P)}),
        "'send.lr_sum' of shape .*83",
    ),
    "a scalar of another type": (
        lambda m: changed(m, {"send.lr_sum": torch.tensor(0.1, dtype=torch.float64)}),
        "'send.lr_sum' of torch.float64",
    ),
    "a factor of zero": (
        lambda m: changed(m, {"send.lr_sum": torch.tensor(0.0)}),
        "'delta_c' with numbers that are not",
    ),
    "a change without a finite norm": (
        lambda m: changed(m, {"model": torch.full((P,), 3e38)}),
        "norm that is not finite",
    ),
    "what only a client knows is implied": (
        lambda m: changed(without(m, "model"), {"send.delta_c": torch.zeros(P)}, implied=["delta"]),
        "leaves out \\['delta'\\], which the server cannot work out",
    ),
    "an infinite count": (lambda m: changed(m, examples=float("inf")), "its examples is inf"),
    "a count below zero": (lambda m: changed(m, own_examples=-1), "its own_examples is -1"),
    "a count that is true": (lambda m: changed(m, loss_examples=True), "its loss_examples is True"),
    "a count of many digits": (lambda m: changed(m, message_bytes=10**400), "its message_bytes is 1000.* \\.\\.\\."),
    "a loss of many digits": (lambda m: changed(m, loss=10**400), "its loss is 1000"),
    "an infinite metric": (lambda m: changed(m, metrics={"a": float("-inf")}), "metrics 'a' is -inf"),
    "a metric with a control character": (lambda m: changed(m, metrics={"\x1b[31m": 1.0}), r"metrics is '\\\\x1b"),
    "steps on no examples": (lambda m: changed(m, examples=0), "local steps on no examples"),
    "an infinite time": (lambda m: told(m, seconds=float("inf")), "its seconds is inf, and a finite number"),
    "a time below zero": (lambda m: told(m, seconds=-1.0), "its seconds is -1.0, and a finite number of at least 0"),
    "a norm below zero": (lambda m: told(m, update_norm=-2.0), "its update_norm is -2.0"),
    "a nested header": (lambda m: changed(m, server_read=nested(900)), "its server_read is a list"),
    "a nested metric": (lambda m: changed(m, metrics={"a": nested(900)}), "'a' is a list"),
    "no implied": (
        lambda m: Message({n: v for n, v in m.header.items() if n != "implied"}, m.tensors),
        "implied is None",
    ),
    "no report": (lambda m: changed(m, report=None), "is not valid"),
    "a strange report": (lambda m: changed(m, report={"steps": "many"}), "is not valid"),
    "a strange metric": (lambda m: changed(m, metrics={"a": []}), "is not valid"),
    "a change in the place of the model": (
        lambda m: changed(without(m, "model"), {"send.delta": torch.zeros(P)}),
        "has no model. The server computes the norm",
    ),
    "a metric that loggers take for the step": (lambda m: changed(m, metrics={"step": math.nan}), "'step' is nan"),
    "a step that no logger can count": (lambda m: changed(m, metrics={"step": 1e300}), "'step' is 1e\\+300"),
    "strange names": (lambda m: changed(m, same={"a": "b"}), "the same as 'b'"),
}


def test_invalid_reply_is_rejected_and_the_round_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wire, module, left = Wire(tmp_path, MAKE), model(), dict(WRONG)

    def comes(task: Message) -> list[Message]:
        sound, wrong = wire.answer(task), list[Message]()
        if task.header["phase"] == "train" and task.client != wire.last:
            wrong, _ = [change(sound) for change, _ in left.values()], left.clear()
        return [*wrong, sound]

    wire.comes = comes
    wire.run(module)
    assert not left
    for name, (_, why) in WRONG.items():
        assert any(re.search(why.replace("\\\\", "\\"), text) for text in caplog.messages), name
    assert torch.equal(parameters(module), parameters(simulated(MAKE).lightning_module))


@dataclass
class Phase:
    """The tasks of one phase of a fit, and the function that reads its replies."""

    exchange: Exchange
    tasks: Mapping[Any, Message]
    read: Callable[[Message], Any]
    reply: Message  # a valid one


@pytest.fixture(scope="module")
def phases(tmp_path_factory: pytest.TempPathFactory) -> list[Phase]:
    """Return phases of every kind, recorded during runs."""
    found: list[Phase] = []
    ask = Exchange.ask

    def noting(self: Exchange, tasks: Mapping[Any, Message], read: Any) -> Iterator[Any]:
        yield from ask(self, tasks, lambda reply: found.append(Phase(self, tasks, read, reply)) or read(reply))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "ask", noting)
        for method in ("Scaffold ii", "Mime", "FedProx adaptive", "FedExP"):
            make = partial(make_trainer, method, max_rounds=2, callbacks=[TrainingLoss()])
            Wire(tmp_path_factory.mktemp("sites"), make).run()
    return [phase for phase in found if phase.reply.client == 2]


@pytest.mark.thorough
def test_reply_with_zero_steps_changes_nothing(phases: list[Phase]) -> None:
    phase = next(phase for phase in phases if phase.reply.header["phase"] == "train")
    found = phase.read(told(phase.reply, steps=0))
    assert not found.send
    assert not found.changes.any()
    assert phase.read(phase.reply).changes.any()


@pytest.mark.thorough
def test_loss_with_an_invalid_example_count_is_rejected(phases: list[Phase]) -> None:
    phase = next(phase for phase in phases if phase.reply.header["phase"] == "loss")
    assert phase.read(phase.reply).loss_examples > 0
    with pytest.raises(FederatedError, match="its loss_examples is 0, and a whole number from 1 to 22"):
        phase.read(changed(phase.reply, loss_examples=0))
    with pytest.raises(FederatedError, match="its loss_examples is 23, and a whole number from 1 to 22"):
        phase.read(changed(phase.reply, loss_examples=23))


def test_client_size_is_taken_from_its_registration(phases: list[Phase]) -> None:
    phase = next(phase for phase in phases if phase.reply.header["phase"] == "train")
    (report,) = phase.read(told(phase.reply, size=2**53)).reports
    assert report.size == 22


plain = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from([10**400, 2**53])
)
values = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))
shapes = st.sampled_from([(), (1,), (P,), (2, P)])
tensors = st.builds(
    lambda shape, value, dtype: torch.full(shape, value, dtype=dtype),
    shapes,
    st.sampled_from([0.0, 1.0, 3e38, float("nan"), float("-inf")]),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
names = st.sampled_from(
    ["model", "send.delta", "send.delta_c", "send.lr_sum", "send.x", "send.square", "buffers.a", "x"]
)


@given(st.data())
def test_arbitrary_reply_is_either_read_or_rejected(phases: list[Phase], data: st.DataObject) -> None:
    phase = data.draw(st.sampled_from(phases))
    sound = phase.reply
    known = st.sampled_from([*sound.header, "failed", "measured"])
    header = {**sound.header, **data.draw(st.dictionaries(known, values, max_size=2))}
    if isinstance(header.get("report"), dict):
        header["report"] = {
            **header["report"],
            **data.draw(st.dictionaries(st.sampled_from(REPORT), values, max_size=1)),
        }
    for gone in data.draw(st.lists(known, max_size=1)):
        header.pop(gone, None)
    message = Message(header, {**sound.tensors, **data.draw(st.dictionaries(names, tensors, max_size=1))})
    try:
        arrived = Message.from_bytes(message.to_bytes())
        if phase.exchange._sender(arrived, phase.tasks) is None:
            return
        reply = phase.read(arrived)
    except FederatedError:
        return
    if not isinstance(reply, Reply) or reply.failed:
        return
    for value in (*reply.send.values(), reply.changes, reply.models):
        assert value is None or bool(torch.isfinite(value).all())
    for name, value in reply.send.items():
        sent = sound.tensors.get(f"send.{name}", sound.tensors.get("model"))
        assert sent is None or (value.shape[1:], value.dtype) == (sent.shape, sent.dtype)
    for report in reply.reports:
        assert 0 <= report.steps <= 12
        assert not math.isinf(report.loss)


def test_update_norm_is_computed_by_the_server(tmp_path: Path) -> None:
    make = partial(
        make_trainer, "FedAvg", clients_per_round=1.0, max_rounds=1, on_client_error="drop", max_update_ratio=10.0
    )
    wire = Wire(tmp_path, make)

    def comes(task: Message) -> list[Message]:
        reply = wire.answer(task)
        if task.client != 1 or task.header["phase"] == "register":
            return [reply]
        return [changed(told(reply, update_norm=0.1), {"model": reply.tensors["model"] + 1e4})]

    wire.comes = comes
    _, (report,) = wire.run()
    assert "max_update_ratio=10" in report.failed[1]


def test_client_failure_is_reported_in_one_printable_line(tmp_path: Path) -> None:
    wire = Wire(tmp_path, partial(make_trainer, "FedAvg", clients_per_round=1.0, max_rounds=1, on_client_error="drop"))

    def comes(task: Message) -> list[Message]:
        reply = wire.answer(task)
        lies = {0: "\x1b[2J\nINFO: all is well " + "x" * 10**5, 1: nested(900)}
        return [changed(reply, failed=lies[task.client])] if task.client in lies and reply.tensors else [reply]

    wire.comes = comes
    _, (report,) = wire.run()
    assert report.failed[0].startswith(r"Client 0 has failed: \x1b[2J\nINFO: all is well xxx")
    assert len(report.failed[0]) < 2200
    assert report.failed[1] == "Client 1 has failed: a list"


@pytest.mark.thorough
def test_expected_messages_are_known_for_every_method(tmp_path: Path, monkeypatch: Any) -> None:
    """A message must have the exact shape and dtype that the method's own ``finish`` gives it."""
    seen: dict[str, Any] = {}
    of = Expected.of
    monkeypatch.setattr(Expected, "of", lambda *args: seen.setdefault("expected", of(*args)))
    for number, method in enumerate(METHODS):
        seen.clear()
        Wire(tmp_path / str(number), partial(make_trainer, method, max_rounds=1)).run()
        algorithm = METHODS[method]()
        assert set(algorithm.reduces) <= seen["expected"].like.keys(), method


@pytest.mark.parametrize("value", [-1, MOST + 1, 10**400, True, 1.0, float("inf"), "1", None, [], {"a": 1}])
def test_count_must_be_an_integer_that_a_float_can_hold(value: Any) -> None:
    with pytest.raises(FederatedError, match="it is not valid: its a is .*, and a whole number from 0 to 2"):
        Fields("it", {"a": value}).count("a")
    assert [Fields("it", {"a": n}).count("a") for n in (0, MOST)] == [0, MOST]
    assert float(MOST) + 1.0 == MOST, "the first whole number that is none"


@pytest.mark.parametrize("value", [10**400, -(10**400), math.inf, True, "1", None, [], {}])
def test_number_must_be_representable_as_a_finite_float(value: Any) -> None:
    with pytest.raises(FederatedError, match="its a is .*, and a finite number is expected"):
        Fields("it", {"a": value}).number("a")
    assert [Fields("it", {"a": n}).number("a") for n in (3, -0.5)] == [3.0, -0.5]
    assert math.isnan(Fields("it", {"a": math.nan}).number("a", 0))


def test_named_numbers_reject_infinities_and_invalid_names() -> None:
    found = Fields("it", {"a": {"x": 1, "y": float("nan")}}).numbers("a")
    assert found["x"] == 1.0
    assert found["y"] != found["y"]
    wrong: list[Any] = [None, [], {"x": float("inf")}, {"x": {}}, {"x" * 201: 1.0}, {"a\nb": 1.0}, {1: 1.0}]
    for value in [*wrong, {str(i): 1.0 for i in range(1001)}]:
        with pytest.raises(FederatedError, match="it is not valid"):
            Fields("it", {"a": value}).numbers("a")


def test_names_must_be_printable_text() -> None:
    assert Fields("it", {"a": ["x", "y"]}).names("a") == ["x", "y"]
    assert Fields("it", {"a": {"x": "y"}}).texts("a") == {"x": "y"}
    for value in ("xy", {"x": 1}, [1], [["x"]], ["\x1b"]):
        with pytest.raises(FederatedError, match="it is not valid"):
            Fields("it", {"a": value}).names("a")
    with pytest.raises(FederatedError, match="'x' is a list, and a name"):
        Fields("it", {"a": {"x": []}}).texts("a")
    with pytest.raises(FederatedError, match="its report is None, and a mapping"):
        Fields("it", None, "report")


def test_tensor_requires_the_exact_name_shape_and_dtype() -> None:
    like = {"a": torch.zeros(2)}
    check_tensors("it", {"a": torch.ones(2)}, like)
    for value in (torch.zeros(()), torch.zeros(1, 2), torch.zeros(2).double()):
        with pytest.raises(FederatedError, match="it has 'a'"):
            check_tensors("it", {"a": value}, like)
    with pytest.raises(FederatedError, match=r"it has a tensor 'b', where \['a'\] are expected"):
        check_tensors("it", {"b": torch.zeros(2)}, like)
    with pytest.raises(FederatedError, match="it has 'a' with numbers that are not finite"):
        check_finite("it", "a", torch.tensor([0.0, float("inf")]))
    check_finite("it", "a", torch.zeros(2, dtype=torch.int64))


def test_quoted_text_is_one_short_line() -> None:
    assert printable("a\nb\x1b[0m\u2028ü") == "a\\nb\\x1b[0m\\u2028ü"
    assert printable("x" * 30, 10) == "x" * 10 + " ..."
    assert [quoted(value) for value in (None, 1.5, "a\tb", [[[]]], {"a": 1})] == [
        "None",
        "1.5",
        "'a\\tb'",
        "a list",
        "a dict",
    ]
    assert len(quoted(10**400)) < 70
