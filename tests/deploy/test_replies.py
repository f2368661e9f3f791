"""Replies that cannot be are refused by name, and the round goes on as if they had not come."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fed.deploy import Message
from tests.deploy.site_models import model
from tests.deploy.wire import Wire, make_trainer, parameters, simulated

MAKE = partial(make_trainer, "Scaffold ii")


def changed(message: Message, tensors: dict[str, Any] | None = None, **header: Any) -> Message:
    return replace(message, header={**message.header, **header}, tensors={**message.tensors, **(tensors or {})})


def without(message: Message, name: str) -> Message:
    return replace(message, tensors={n: value for n, value in message.tensors.items() if n != name})


P = 83  # parameters of the network
NAN = torch.full((P,), float("nan"))
WRONG: dict[str, tuple[Callable[[Message], Message], str]] = {
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
}


def test_a_reply_that_cannot_be_is_refused_and_the_round_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
