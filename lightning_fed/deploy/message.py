"""What passes between server and sites: tensors by name, and a header of plain values; nothing that runs code."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.rounds import ClientReport
from lightning_fed.core.types import ClientId, State
from lightning_fed.rounds.messages import TRAIN, Reply, Task

__all__ = ["FORMAT", "HELLO", "Message", "check_message", "reply_of", "reply_to", "task_in"]

FORMAT = 1
"""Of messages, one more with every change that an older version could not read."""

HELLO = "hello"
"""The phase before the first round, in which sites say how many examples they have."""

_HEADER = "message"
_PARTS = ("server", "cohort_grad", "buffers", "keep")
_REPORT = ("size", "steps", "loss", "update_norm", "seconds")


@dataclass(frozen=True, slots=True)
class Message:
    """A task for a client, or its reply.

    Attributes:
        header: Numbers, texts, and lists and mappings of them, as JSON has them. Always there are ``format``, ``run``
            (which run it is of), ``phase``, ``round``, ``attempt`` (how often the round was begun again), ``client``.
        tensors: Tensors on the CPU, by name.
    """

    header: Mapping[str, Any]
    tensors: State = field(default_factory=dict)

    @property
    def client(self) -> ClientId:
        """Whom it is for, or from."""
        client: ClientId = self.header["client"]
        return client

    def to_bytes(self) -> bytes:
        """Return it in the format of safetensors, with the header among the file's metadata."""
        return save(dict(self.tensors), {_HEADER: json.dumps(self.header)})

    @staticmethod
    def from_bytes(content: bytes) -> "Message":
        """Return the message that some bytes are; they are read as numbers and texts, and nothing in them is run.

        Args:
            content: What :meth:`to_bytes` returned.

        Raises:
            FederatedError: If they are none.
        """
        try:
            tensors = load(content)
            length = int.from_bytes(content[:8], "little")
            header = json.loads(json.loads(content[8 : 8 + length])["__metadata__"][_HEADER])
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise FederatedError(f"These {len(content):,} bytes are no message: {error}.") from error
        return Message(header, tensors)


def check_message(message: Message, who: str) -> None:
    """Refuse what is no message of this version.

    Args:
        message: The message.
        who: Who has received it, for the error.

    Raises:
        FederatedError: Naming what is wrong.
    """
    header = message.header
    found = header.get("format") if isinstance(header, Mapping) else None
    if found != FORMAT:
        raise FederatedError(
            f"{who} has received a message of format {found!r}, and knows format {FORMAT}. Use the same version of"
            " lightning_fed everywhere."
        )
    kinds = {"run": str, "phase": str, "round": int, "attempt": int}
    for name, kind in kinds.items():
        if not isinstance(header.get(name), kind):
            raise FederatedError(f"{who} has received a message whose {name} is {header.get(name)!r}.")
    for name, value in message.tensors.items():
        if not isinstance(value, Tensor):
            raise FederatedError(f"{who} has received a message whose {name} is no tensor.")


# ---------------------------------------------------------------------- tasks


def shared_part(task: Task, moved_buffers: set[str]) -> State:
    """Return the tensors of a task that are the same for all clients, as copies on the CPU.

    Args:
        task: The task.
        moved_buffers: The buffers that are no longer those that the module began with: no other one is sent.
    """
    buffers = {name: value for name, value in task.buffers.items() if name in moved_buffers}
    parts = {"server": task.server, "cohort_grad": task.cohort_grad, "buffers": buffers}
    named = {f"{part}.{name}": value for part, state in parts.items() for name, value in state.items()}
    return {name: value.detach().cpu().clone() for name, value in {"x": task.x, **named}.items()}


def task_in(message: Message, index: int, buffers: State, device: torch.device) -> tuple[Task, State]:
    """Return the task that a message holds, and what the server still keeps for the client, if anything.

    Args:
        message: The message.
        index: The client's stored index.
        buffers: The module's own buffers, for those that are not sent.
        device: Where tensors go.

    Raises:
        FederatedError: If it holds none.
    """
    header, parts = message.header, _parts(message, device)
    if "x" not in message.tensors:
        raise FederatedError(f"The task for client {message.client!r} has no parameters x.")
    steps = header.get("steps")
    task = Task(
        round=header["round"],
        phase=header["phase"],
        clients=(index,),
        steps={} if steps is None else {index: steps},
        x=message.tensors["x"].to(device),
        server=parts["server"],
        cohort_grad=parts["cohort_grad"],
        buffers={**buffers, **parts["buffers"]},
        mean_examples=math.nan if header.get("mean_examples") is None else header["mean_examples"],
    )
    return task, parts["keep"]


def _parts(message: Message, device: torch.device) -> dict[str, State]:
    parts: dict[str, State] = {part: {} for part in (*_PARTS, "send")}
    for name, value in message.tensors.items():
        part, dot, own = name.partition(".")
        if dot and part in parts:
            parts[part][own] = value.to(device)
    return parts


# ---------------------------------------------------------------------- replies


def reply_to(task: Message, reply: Reply | None, error: ClientError | None = None) -> Message:
    """Return a client's reply as a message, without what the server can work out.

    Args:
        task: The task.
        reply: The reply, of this client alone; None if it failed.
        error: Why it failed.
    """
    header = {name: task.header[name] for name in ("format", "run", "phase", "round", "attempt", "client")}
    if error is None and reply is not None and reply.failed:
        error = next(iter(reply.failed.values()))
    if reply is None or error is not None:
        return Message({**header, "failed": str(error)})
    first, same = dict[tuple[int, torch.Size], str](), dict[str, str]()
    tensors = {}
    for name, value in reply.send.items():
        if name in reply.implied:
            continue
        once = first.setdefault((value.data_ptr(), value.shape), name)
        if once != name:  # one tensor under two names travels once
            same[name] = once
        elif name == "delta" and reply.models is not None:  # which is what is summed, and gives the change as well
            tensors["model"] = _own(reply.models[0])
        else:
            tensors[f"send.{name}"] = _own(value[0])
    for name, value in (reply.buffers[0] if reply.buffers else {}).items():
        tensors[f"buffers.{name}"] = _own(value)
    report = reply.reports[0] if reply.reports else None
    facts = {
        "norms": {point: next(iter(of.values())) for point, of in reply.norms.items() if of},
        "report": None if report is None else {name: getattr(report, name) for name in _REPORT},
        "metrics": {} if report is None else {name: float(value) for name, value in report.metrics.items()},
        "examples": reply.examples[0] if reply.examples else 0,
        "loss": reply.loss,
        "loss_examples": reply.loss_examples,
        "implied": list(reply.implied),
        "same": same,
        "message_bytes": reply.message_bytes,
        "server_read": sorted(reply.server_read),
        "cohort_grad_read": sorted(reply.cohort_grad_read),
    }
    return Message({**header, **facts}, tensors)


def _own(value: Tensor) -> Tensor:
    return value.detach().cpu().clone()


def reply_of(message: Message, index: int, task: Task) -> Reply:
    """Return the reply that a message holds.

    Args:
        message: The message.
        index: The client's stored index.
        task: What was asked.

    Raises:
        FederatedError: If it holds none, or something in it cannot be.
    """
    client, header, x = message.client, message.header, task.x
    who = f"The reply of client {client!r} to {task.phase!r} of round {task.round}"
    base = Reply(task.round, task.phase, (index,))
    if header.get("failed") is not None:
        return replace(base, failed={index: ClientError(f"Client {client!r} has failed: {header['failed']}", client)})
    parts = _parts(message, x.device)
    for name, value in message.tensors.items():
        _check_tensor(who, name, value, x, task.buffers)
    try:
        norms = {str(point): {index: float(norm)} for point, norm in header["norms"].items()}
        reply = replace(
            base,
            norms=norms,
            loss=float(header["loss"]),
            loss_examples=int(header["loss_examples"]),
            implied=tuple(map(str, header["implied"])),
            server_read=frozenset(map(str, header["server_read"])) & task.server.keys(),
            cohort_grad_read=frozenset(map(str, header["cohort_grad_read"])) & task.cohort_grad.keys(),
            message_bytes=None if header["message_bytes"] is None else int(header["message_bytes"]),
        )
        report, examples = _report(client, header) if task.phase == TRAIN else None, int(header["examples"])
        same = {str(name): str(other) for name, other in header["same"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FederatedError(f"{who} is no reply: {type(error).__name__}: {error}.") from error
    send = {name: value[None] for name, value in parts["send"].items()}
    if report is None:
        return replace(reply, send=send)
    model = message.tensors.get("model")
    models = None if model is None else model.to(x.device)[None]
    if models is not None:
        send["delta"] = models - x
    changes = send["delta"] if models is not None else None
    if changes is None and not report.steps:
        changes = torch.zeros_like(x)[None]  # nobody moves without a step
    for name, other in same.items():
        if other not in send:
            raise FederatedError(f"{who} says that {name!r} is the same as {other!r}, which it has not.")
        send[name] = send[other]
    return replace(
        reply,
        send=send,
        reports=(report,),
        models=models,
        changes=changes,
        buffers=(parts["buffers"],) if parts["buffers"] else (),
        examples=(examples,),
    )


def _report(client: ClientId, header: Mapping[str, Any]) -> ClientReport:
    found, metrics = header["report"], {str(name): float(value) for name, value in header["metrics"].items()}
    numbers = {name: float(found[name]) for name in ("loss", "update_norm", "seconds")}
    return ClientReport(client, int(found["size"]), int(found["steps"]), metrics=metrics, **numbers)


def _check_tensor(who: str, name: str, value: Tensor, x: Tensor, buffers: State) -> None:
    """Refuse a tensor that cannot be a message of the method, or a buffer of the module.

    Raises:
        FederatedError: Naming it.
    """
    part, _, own = name.partition(".")
    if part == "buffers":
        like = buffers.get(own)
        if like is None or value.shape != like.shape or value.dtype != like.dtype:
            raise FederatedError(f"{who} has a buffer {own!r} that the module does not have in this shape and type.")
    elif part not in ("send", "model"):
        raise FederatedError(f"{who} has a tensor {name!r}, which no reply has.")
    elif value.shape not in (x.shape, torch.Size(())) or (part == "model" and value.shape != x.shape):
        raise FederatedError(f"{who} has {name!r} of shape {list(value.shape)}, where {list(x.shape)} is expected.")
    elif value.is_floating_point() and value.dtype != x.dtype and value.shape == x.shape:
        raise FederatedError(f"{who} has {name!r} of {value.dtype}, where {x.dtype} is expected.")
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        raise FederatedError(f"{who} has {name!r} with numbers that are not finite. Look at its data and rates.")
