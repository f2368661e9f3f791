"""A client's reply as a message, and back."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.rounds import ClientReport
from lightning_fed.core.types import ClientId, State
from lightning_fed.deploy.message import MEASURE, Message, address, parts_of
from lightning_fed.rounds.messages import GRADIENTS, TRAIN, Reply, Task

__all__ = ["reply_of", "reply_to"]

_REPORT = ("size", "steps", "loss", "update_norm", "seconds")


def reply_to(task: Message, reply: Reply, bound: float | None = None) -> Message:
    """Return the reply of one client as a message, without what the server can work out.

    ``bound`` is the largest norm of a message under differential privacy: the message then describes nothing else.
    """
    for error in reply.failed.values():
        return Message({**address(task), "failed": str(error)})
    first, same = dict[tuple[int, torch.Size], str](), dict[str, str]()
    tensors = {}
    for name, value in reply.send.items():
        if name in reply.implied:
            continue
        once = first.setdefault((value.data_ptr(), value.shape), name)
        if once != name:  # one tensor under two names travels once
            same[name] = once
        elif bound is not None:
            tensors[f"send.{name}"] = _own(value[0] * min(1.0, bound / max(float(value[0].norm()), bound)))
        elif name == "delta" and reply.models is not None:  # which is what is summed, and gives the change as well
            tensors["model"] = _own(reply.models[0])
        else:
            tensors[f"send.{name}"] = _own(value[0])
    for name, value in (reply.buffers[0] if reply.buffers else {}).items():
        tensors[f"buffers.{name}"] = _own(value)
    report = reply.reports[0] if reply.reports else None
    if report is not None and bound is not None:
        report = ClientReport(report.client_id, report.size, report.steps, math.nan, {}, math.nan, 0.0)
    facts = {
        "norms": {point: next(iter(of.values())) for point, of in reply.norms.items() if of},
        "report": None if report is None else {name: getattr(report, name) for name in _REPORT},
        "metrics": {} if report is None else {name: float(value) for name, value in report.metrics.items()},
        "examples": reply.examples[0] if reply.examples else 0,
        "own_examples": reply.own_examples[0] if reply.own_examples else 0,
        "loss": reply.loss,
        "loss_examples": reply.loss_examples,
        "implied": list(reply.implied),
        "same": same,
        "message_bytes": reply.message_bytes,
        "server_read": sorted(reply.server_read),
        "cohort_grad_read": sorted(reply.cohort_grad_read),
    }
    return Message({**address(task), **facts}, tensors)


def _own(value: Tensor) -> Tensor:
    return value.detach().cpu().clone()


def reply_of(message: Message, index: int, task: Task, algorithm: Algorithm) -> Reply:
    """Return the reply to a task in the message of the client with a stored index; the method says what must be there.

    A message with anything else raises :class:`FederatedError`.
    """
    client, header, x = message.client, message.header, task.x
    who = f"The reply of client {client!r} to {task.phase!r} of round {task.round}"
    base = Reply(task.round, task.phase, (index,))
    if header.get("failed") is not None:
        return replace(base, failed={index: ClientError(f"Client {client!r} has failed: {header['failed']}", client)})
    if task.phase == MEASURE:
        return replace(base, reports=(ClientReport(client, 0, 0, math.nan, _measured(who, header), math.nan, 0.0),))
    parts = parts_of(message, x.device)
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
            own_examples=(int(header["own_examples"]),),
            message_bytes=None if header["message_bytes"] is None else int(header["message_bytes"]),
        )
        report, examples = _report(client, header) if task.phase == TRAIN else None, int(header["examples"])
        same = {str(name): str(other) for name, other in header["same"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FederatedError(f"{who} is no reply: {type(error).__name__}: {error}.") from error
    if not all(map(math.isfinite, (reply.loss, *(norm for of in norms.values() for norm in of.values())))):
        raise FederatedError(f"{who} has a loss or a norm that is not finite. Look at its data and rates.")
    send = {name: value[None] for name, value in parts["send"].items()}
    if report is None:
        _check_names(who, set(send), set(algorithm.full_grad_at) if task.phase == GRADIENTS else set())
        return replace(reply, send=send)
    if not 0 <= report.steps <= task.steps.get(index, 0):
        raise FederatedError(f"{who} tells of {report.steps} local steps, where {task.steps.get(index, 0)} were asked.")
    model = message.tensors.get("model")
    models = None if model is None else model.to(x.device)[None]
    changes = torch.zeros_like(x)[None] if not report.steps else None  # nobody moves without a step
    if models is not None:
        changes = send["delta"] = models - x
    for name, other in same.items():
        if other not in send:
            raise FederatedError(f"{who} says that {name!r} is the same as {other!r}, which it has not.")
        send[name] = send[other]
    if report.steps or not algorithm.local_work:
        aside = set(algorithm.aside) if reply.implied else set()
        _check_names(who, set(send) | set(reply.implied), set(algorithm.reduces) | aside)
    return replace(
        reply,
        send=send,
        reports=(report,),
        models=models,
        changes=changes,
        buffers=(parts["buffers"],) if parts["buffers"] else (),
        examples=(examples,),
    )


def _measured(who: str, header: Mapping[str, Any]) -> dict[str, float]:
    found = header.get("measured")
    if not isinstance(found, Mapping) or not all(isinstance(value, float) for value in found.values()):
        raise FederatedError(f"{who} has measured {found!r}, which are no numbers by name.")
    return {str(name): value for name, value in found.items()}


def _report(client: ClientId, header: Mapping[str, Any]) -> ClientReport:
    found, metrics = header["report"], {str(name): float(value) for name, value in header["metrics"].items()}
    numbers = {name: float(found[name]) for name in ("loss", "update_norm", "seconds")}
    return ClientReport(client, int(found["size"]), int(found["steps"]), metrics=metrics, **numbers)


def _check_names(who: str, found: set[str], expected: set[str]) -> None:
    """Refuse messages that are not those of the method."""
    if found != expected:
        raise FederatedError(f"{who} has the messages {sorted(found)}, where {sorted(expected)} are expected.")


def _check_tensor(who: str, name: str, value: Tensor, x: Tensor, buffers: State) -> None:
    """Refuse a tensor that cannot be a message of the method, or a buffer of the module."""
    part, _, own = name.partition(".")
    if part == "buffers":
        like = buffers.get(own)
        if like is None or value.shape != like.shape or value.dtype != like.dtype:
            raise FederatedError(f"{who} has a buffer {own!r} that the module does not have in this shape and type.")
    elif part not in ("send", "model"):
        raise FederatedError(f"{who} has a tensor {name!r}, which no reply has.")
    elif value.shape not in (x.shape, torch.Size(())) or (part == "model" and value.shape != x.shape):
        raise FederatedError(f"{who} has {name!r} of shape {list(value.shape)}, where {list(x.shape)} is expected.")
    elif value.dtype != x.dtype and value.shape == x.shape:
        raise FederatedError(f"{who} has {name!r} of {value.dtype}, where {x.dtype} is expected.")
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        raise FederatedError(f"{who} has {name!r} with numbers that are not finite. Look at its data and rates.")
