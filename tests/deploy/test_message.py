"""Messages between the server and its sites, as bytes."""

import pytest
import torch

from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy import Message, message
from lightning_fed.deploy.message import FORMAT, check_message, shared_part, task_in
from lightning_fed.rounds.messages import TRAIN, Task


@pytest.mark.parametrize("content", [b"", b"hello", b"\x80\x04}.", bytes(100), (2**60).to_bytes(8, "little") + b"{}"])
def test_invalid_message_bytes_are_rejected(content: bytes) -> None:
    with pytest.raises(FederatedError, match=f"These {len(content)} bytes are not a message"):
        Message.from_bytes(content)


def test_oversized_header_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    content = Message({"client": 1, "lists": [[]] * 50}).to_bytes()
    monkeypatch.setattr(message, "_LONGEST", 100)
    with pytest.raises(FederatedError, match=r"are not a message: a header of \d+ bytes, where 100 are the most"):
        Message.from_bytes(content)


def test_message_round_trips_through_bytes() -> None:
    tensors = {"a": torch.arange(3), "b": torch.tensor(1.5, dtype=torch.bfloat16), "c": torch.zeros(0, 2)}
    header = {"client": "Zürich", "loss": float("nan"), "list": [1, {"x": None}], "float": 0.1 + 0.2}
    found = Message.from_bytes(Message(header, tensors).to_bytes())
    assert str(found.header) == str(header)
    assert all(torch.equal(found.tensors[name], value) for name, value in tensors.items())
    assert found.tensors["b"].dtype == torch.bfloat16


def test_task_round_trips_through_a_message() -> None:
    server, buffers = {"c": torch.ones(3)}, {"mean": torch.zeros(2), "count": torch.tensor(4)}
    task = Task(
        2,
        TRAIN,
        (1,),
        {1: 5},
        torch.arange(3.0),
        server,
        {"x": torch.full((3,), 2.0)},
        buffers=buffers,
        mean_examples=7.5,
    )
    tensors = shared_part(task, moved_buffers={"mean"})
    assert tensors.keys() == {"x", "server.c", "cohort_grad.x", "buffers.mean"}  # only buffers that have moved
    header = {
        "format": FORMAT,
        "run": "0123456789abcdef",
        "phase": TRAIN,
        "round": 2,
        "attempt": 0,
        "client": "a",
        "steps": 5,
        "mean_examples": 7.5,
        "first_step": 0,
    }
    message = Message.from_bytes(Message(header, {**tensors, "keep.c_i": torch.ones(3)}).to_bytes())
    check_message(message, "The site")
    own = {"mean": torch.full((2,), -1.0), "count": torch.tensor(9)}
    found, kept, _ = task_in(message, 1, torch.zeros(3), own, {})
    assert (found.round, found.phase, found.clients, found.steps, found.mean_examples) == (2, TRAIN, (1,), {1: 5}, 7.5)
    assert torch.equal(found.x, task.x)
    assert torch.equal(found.server["c"], server["c"])
    assert torch.equal(found.cohort_grad["x"], task.cohort_grad["x"])
    assert torch.equal(found.buffers["mean"], buffers["mean"])
    assert found.buffers["count"] == 9  # the module's own value
    assert kept.keys() == {"c_i"}
    with pytest.raises(FederatedError, match="The task for client 'a' has no parameters x"):
        task_in(Message(header), 1, torch.zeros(3), own, {})


def test_shared_tensors_are_copies() -> None:
    task = Task(0, TRAIN, (0,), {}, torch.zeros(3), {"c": torch.zeros(3)})
    tensors = shared_part(task, set())
    task.x.fill_(1.0)
    task.server["c"].fill_(1.0)
    assert not any(value.any() for value in tensors.values())
