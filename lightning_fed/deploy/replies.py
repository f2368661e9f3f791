"""A client's reply as a message, and back: every number, name and tensor of it has its bounds here."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.rounds import ClientReport, Run
from lightning_fed.core.types import ClientId, State
from lightning_fed.data.files.tables import is_word
from lightning_fed.deploy.message import MEASURE, MOST, Message, address, is_count, parts_of, printable, quoted
from lightning_fed.engines.optimizer import FederatedOptimizer
from lightning_fed.rounds.messages import GRADIENTS, LOSS, TRAIN, Reply, Task

NAMES = 1000
"""The most names in one mapping or list."""

_LENGTH = 200  # characters of a name


class Fields:
    """The plain values of a reply by name; those out of bounds raise :class:`FederatedError`."""

    def __init__(self, who: str, values: Any, name: str = "report") -> None:
        self._who = who
        self._values = self._checked(name, values, isinstance(values, Mapping), "a mapping")

    def _checked(self, name: str, value: Any, is_good: bool, expected: str) -> Any:
        if not is_good:
            raise FederatedError(
                f"{self._who} is not valid: its {name} is {quoted(value)}, and {expected} is expected."
            )
        return value

    def count(self, name: str) -> int:
        """Return a whole number from 0 to 2**53."""
        value = self._values.get(name)
        return int(self._checked(name, value, is_count(value), "a whole number from 0 to 2**53"))

    def number(self, name: str) -> float:
        """Return a number, which may be infinite or none (nan)."""
        return self._number(name, self._values.get(name))

    def _number(self, name: str, value: Any) -> float:
        return float(self._checked(name, value, isinstance(value, float) or is_count(value, -MOST), "a number"))

    def numbers(self, name: str) -> dict[str, float]:
        """Return numbers by name, which are finite or none (nan)."""
        found = {key: self._number(f"{name} {key!r}", value) for key, value in self._items(name)}
        for key, value in found.items():
            self._checked(f"{name} {key!r}", value, not math.isinf(value), "a finite number")
        return found

    def texts(self, name: str) -> dict[str, str]:
        """Return names by name."""
        return {key: self._name(f"{name} {key!r}", value) for key, value in self._items(name)}

    def names(self, name: str) -> list[str]:
        """Return a list of names."""
        found = self._values.get(name)
        self._checked(name, found, isinstance(found, list) and len(found) <= NAMES, "a list of names")
        return [self._name(name, value) for value in found]

    def _items(self, name: str) -> list[tuple[str, Any]]:
        found = self._values.get(name)
        self._checked(name, found, isinstance(found, Mapping) and len(found) <= NAMES, "a mapping of names")
        return [(self._name(name, key), value) for key, value in found.items()]

    def _name(self, name: str, value: Any) -> str:
        is_good = isinstance(value, str) and len(value) <= _LENGTH and value.isprintable()
        return str(self._checked(name, value, is_good, f"a name of up to {_LENGTH} printable characters"))


def words_in(message: Message, who: str, columns: Iterable[str] | None = None) -> dict[str, list[str]]:
    """Return the words of columns in a message, by default of all columns that it has."""
    given = message.header.get("words", {})
    words = Fields(who, given, "words")
    found = {name: words.names(name) for name in (given if columns is None else columns)}
    for name, own in found.items():
        if wrong := [word for word in own if not is_word(word)]:
            raise FederatedError(
                f"{who} is not valid: {wrong[0]!r} in its {name} stands for a missing value or has spaces around it."
            )
        if len(set(own)) < len(own):
            raise FederatedError(f"{who} is not valid: its {name} is a list with a word twice.")
    return found


@dataclass(frozen=True, slots=True)
class Expected:
    """The content of a method's messages in a round."""

    like: Mapping[str, tuple[torch.Size, torch.dtype]]  # shape and type of each
    implied: frozenset[str]  # the names of those that need not travel
    model: bool  # whether the model comes in place of the change "delta", so that the server knows the norm of that

    @staticmethod
    def of(algorithm: Algorithm, optimizer: FederatedOptimizer, task: Task, client: State) -> "Expected":
        """Ask the method what a client sends that stays where it is, given what a new client keeps."""
        x, zero = task.x, torch.zeros_like(task.x)
        gradients = dict.fromkeys(algorithm.full_grad_at, zero)
        lr = optimizer.spread(optimizer.rates)
        is_straight, moves = optimizer.plan_of(algorithm).is_straight, optimizer.schedule is not None
        follows = is_straight and isinstance(lr, float) and (lr != 0 or moves)  # a client's rates may not be zero
        local = algorithm.init_local(x, task.server, client)
        run = Run(
            x, zero, task.server, client, local, gradients, dict(task.cohort_grad),
            1.0, 1.0, 1, lr, lambda: zero, follows,
        )  # fmt: skip
        update = algorithm.finish(x, run)
        like = {name: (value.shape, value.dtype) for name, value in update.send.items()}
        model = update.send.get("delta") is zero and "delta" not in update.implied
        return Expected(like, frozenset(update.implied), model)


def check_tensor(who: str, name: str, value: Tensor, like: tuple[torch.Size, torch.dtype]) -> None:
    """Refuse a tensor of another shape or type, or with numbers that are not finite."""
    shape, dtype = like
    if value.shape != shape:
        raise FederatedError(f"{who} has {name!r} of shape {list(value.shape)}, where {list(shape)} is expected.")
    if value.dtype != dtype:
        raise FederatedError(f"{who} has {name!r} of {value.dtype}, where {dtype} is expected.")
    check_finite(who, name, value)


def check_finite(who: str, name: str, value: Tensor) -> None:
    """Refuse a tensor with numbers that are not finite."""
    if not bool(torch.isfinite(value).all()):
        raise FederatedError(f"{who} has {name!r} with numbers that are not finite. Look at its data and rates.")


_SHOWN = 20  # names in an error
_REPORT = ("steps", "loss", "update_norm", "seconds")


def reply_to(task: Message, reply: Reply, bound: float | None = None, timed: bool = True) -> Message:
    """Return the reply of one client as a message, without what the server can work out.

    ``bound`` is the largest norm of a message under differential privacy: the message then describes nothing else.
    Seconds are left out unless ``timed``, since they depend on the examples.
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
    if report is not None and not timed:
        report = replace(report, seconds=0.0)
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


def reply_of(
    message: Message, index: int, size: int, task: Task, algorithm: Algorithm, expected: Expected, what: str = ""
) -> Reply:
    """Return the reply to a task in the message of a client, with the content that the method requires.

    A message with anything else raises :class:`FederatedError`. The norms of its tensors are computed here. ``size`` is
    the client's registered number of examples, ``what`` the requested measure between rounds.
    """
    client, header, x = message.client, message.header, task.x
    who = f"The reply of client {client!r} to {task.phase!r} of round {task.round}"
    base, fields = Reply(task.round, task.phase, (index,)), Fields(who, header)
    if (failed := header.get("failed")) is not None:
        why = printable(failed) if isinstance(failed, str) else quoted(failed)
        return replace(base, failed={index: ClientError(f"Client {client!r} has failed: {why}", client)})
    if task.phase == MEASURE:
        found = fields.numbers("measured")
        if what == "loss" and found.keys() != {"loss"}:
            raise FederatedError(f"{who} has measured no loss.")
        return replace(base, reports=(ClientReport(client, 0, 0, math.nan, found, math.nan, 0.0),))
    norms = {point: norm for point, norm in fields.numbers("norms").items() if point in algorithm.full_grad_at}
    reply = replace(
        base,
        loss=fields.number("loss"),
        loss_examples=fields.count("loss_examples"),
        implied=tuple(fields.names("implied")),
        server_read=frozenset(fields.names("server_read")) & task.server.keys(),
        cohort_grad_read=frozenset(fields.names("cohort_grad_read")) & task.cohort_grad.keys(),
        own_examples=(fields.count("own_examples"),),
        message_bytes=None if header.get("message_bytes") is None else fields.count("message_bytes"),
    )
    if reply.loss_examples > size:
        raise FederatedError(f"{who} has a loss over {reply.loss_examples:,} examples, and has registered {size:,}.")
    report = _report(client, size, fields, header, who) if task.phase == TRAIN else None
    examples = fields.count("examples")
    same, points = fields.texts("same"), dict.fromkeys(algorithm.full_grad_at, (x.shape, x.dtype))
    for name, value in message.tensors.items():
        _check_tensor(who, name, value, x, task.buffers, points if report is None else expected.like)
    parts = parts_of(message, x.device)
    send = {name: value[None] for name, value in parts["send"].items()}
    if report is None:
        _check_names(who, set(send), set(points) if task.phase == GRADIENTS else set())
        if task.phase == LOSS and not reply.loss_examples:
            raise FederatedError(f"{who} has a loss over no examples.")
        norms |= {point: float(torch.linalg.vector_norm(value)) for point, value in send.items()}
    _check_finite(who, reply.loss, *norms.values())
    reply = replace(reply, norms={point: {index: norm} for point, norm in norms.items()})
    if report is None:
        return replace(reply, send=send)
    if report.steps > task.steps.get(index, 0):
        raise FederatedError(
            f"{who} reports {report.steps} local steps, and {task.steps.get(index, 0)} were requested."
        )
    if report.steps and not examples:
        raise FederatedError(f"{who} reports {report.steps} local steps on no examples.")
    moved = replace(reply, reports=(report,), examples=(examples,))
    changes = None if report.steps else torch.zeros_like(x)[None]  # nobody moves without a step
    if algorithm.local_work and not report.steps:
        return replace(moved, changes=changes, implied=())
    models = None
    if (model := message.tensors.get("model")) is not None:
        models = model.to(x.device)[None]
        changes = send["delta"] = models - x
        norm = float(torch.linalg.vector_norm(changes))
        _check_finite(who, norm)
        moved = replace(moved, reports=(replace(report, update_norm=norm),))
    for name, other in same.items():
        if other not in send:
            raise FederatedError(f"{who} says that {name!r} is the same as {other!r}, which it has not.")
        send[name] = send[other]
    aside = set(algorithm.aside) if reply.implied else set()
    _check_names(who, set(send) | set(reply.implied), set(algorithm.reduces) | aside)
    for name, value in send.items():
        _check_tensor(who, f"send.{name}", value[0], x, {}, expected.like)
    if implied := set(reply.implied) - send.keys():
        if not implied <= expected.implied:
            raise FederatedError(f"{who} leaves out {sorted(implied)}, which the server cannot work out.")
        for name, value in algorithm.implied(send, task.server).items():
            check_finite(who, name, value)
    if expected.model and models is None:
        raise FederatedError(f"{who} has no model, from which the server computes the norm of the change.")
    buffers = (parts["buffers"],) if parts["buffers"] else ()
    return replace(moved, send=send, models=models, changes=changes, buffers=buffers)


def _report(client: ClientId, size: int, fields: Fields, header: Mapping[str, Any], who: str) -> ClientReport:
    report, metrics = Fields(who, header.get("report")), fields.numbers("metrics")
    loss, norm, seconds = (report.number(name) for name in ("loss", "update_norm", "seconds"))
    if math.isinf(loss) or math.isinf(norm) or not math.isfinite(seconds):
        raise FederatedError(f"{who} is not valid: its loss, norm or time is not finite.")
    if norm < 0 or seconds < 0:
        raise FederatedError(f"{who} is not valid: its norm or its time is negative.")
    if not abs(metrics.get("step", 0.0)) <= MOST:  # Lightning's loggers take it for the number of the step
        raise FederatedError(f"{who} is not valid: its metrics 'step' is {metrics['step']!r}, which no logger takes.")
    return ClientReport(client, size, report.count("steps"), loss, metrics, norm, seconds)


def _check_finite(who: str, *numbers: float) -> None:
    if not all(map(math.isfinite, numbers)):
        raise FederatedError(f"{who} has a loss or a norm that is not finite. Look at its data and rates.")


def _check_names(who: str, found: set[str], expected: set[str]) -> None:
    """Refuse messages that are not those of the method."""
    if found != expected:
        names = [quoted(name) for name in sorted(found)[:_SHOWN]]
        raise FederatedError(f"{who} has the messages [{', '.join(names)}], where {sorted(expected)} are expected.")


def _check_tensor(who: str, name: str, value: Tensor, x: Tensor, buffers: State, like: Mapping[str, Any]) -> None:
    """Refuse a tensor that cannot be a message of the method, like those given, or a buffer of the module."""
    part, _, own = name.partition(".")
    if part == "buffers" and own in buffers:
        check_tensor(who, name, value, (buffers[own].shape, buffers[own].dtype))
    elif part == "buffers":
        raise FederatedError(f"{who} has a buffer {quoted(own)}, which the module does not have.")
    elif name == "model" or (part == "send" and own in like):
        check_tensor(who, own or name, value, like.get(own, (x.shape, x.dtype)))
    elif part == "send":
        raise FederatedError(f"{who} has the message {quoted(own)}, where {sorted(like)} are expected.")
    else:
        raise FederatedError(f"{who} has a tensor {quoted(name)}, which no reply has.")
