"""Messages between server and sites: tensors by name and a header of plain values, nothing that runs code."""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.callbacks.client_metrics import ClientAccuracy
from lightning_fed.core.arguments import finite, kind_of
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.plain import place_of
from lightning_fed.core.rounds import ClientReport, Run
from lightning_fed.core.types import ClientId, State
from lightning_fed.data.files.tables import is_word
from lightning_fed.data.partitions import check_client_ids
from lightning_fed.engines.optimizer import FederatedOptimizer
from lightning_fed.rounds.messages import GRADIENTS, LOSS, TRAIN, Reply, Task
from lightning_fed.server.aggregation.mean import averaged_points
from lightning_fed.settings.settings import Settings

FORMAT = 1
"""The format of messages, incremented with every change that an older version cannot read."""

REGISTER = "register"
"""The phase before the first round, in which sites report their numbers of examples."""

WORDS = "words"
"""The phase before registration, if the sites agree on the words of columns: each sends its own."""

MEASURE = "measure"
"""The phase between rounds, in which a callback on the server measures clients."""

MOST = 2**53
"""The largest count: a float represents every whole number up to here."""

MOST_STEPS = 2**20
"""The largest numbers of rounds in a run and of local steps in a round: schedules step to them one by one."""

NAMES = 1000
"""The largest number of names in one mapping or list."""

_HEADER = "message"
_LONGEST = 2**24  # bytes of a header, which take 25 times as much memory; the ids of a million clients fit
_LENGTH = 200  # characters of a name
_SHOWN = 20  # names in an error
_PARTS = ("server", "cohort_grad", "buffers", "base", "keep", "send")
_REPORT = ("steps", "loss", "update_norm", "seconds")
_RUN, _FIT = re.compile(r"[0-9a-f]{16}"), re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class Message:
    """A task for a client, or its reply.

    Attributes:
        header: Numbers, texts, and lists and mappings of them, as in JSON. It always has ``format``, ``run`` (the run's
            name), ``phase``, ``round``, ``attempt`` (how often the round was restarted) and ``client``.
        tensors: Tensors on the CPU, by name.
    """

    header: Mapping[str, Any]
    tensors: State = field(default_factory=dict)

    @property
    def client(self) -> ClientId:
        """The client that the message is for, or from."""
        client: ClientId = self.header["client"]
        return client

    def to_bytes(self) -> bytes:
        """Return the message in safetensors format, with the header in the metadata."""
        return save(dict(self.tensors), {_HEADER: json.dumps(self.header)})

    @staticmethod
    def from_bytes(content: bytes) -> "Message":
        """Return the message in some bytes, parsed as numbers and texts; nothing is executed.

        Args:
            content: What :meth:`to_bytes` returned.

        Raises:
            FederatedError: If they are not a message.
        """
        try:
            if (length := int.from_bytes(content[:8], "little")) > _LONGEST:
                raise ValueError(f"a header of {length:,} bytes, where {_LONGEST:,} are the most")
            tensors = load(content)
            header = json.loads(json.loads(content[8 : 8 + length])["__metadata__"][_HEADER])
        except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise FederatedError(f"These {len(content):,} bytes are not a message: {printable(str(error))}.") from error
        return Message(header, tensors)


def address(task: Message) -> dict[str, Any]:
    """Return the part of a task's header that its reply repeats."""
    return {name: task.header[name] for name in ("format", "run", "phase", "round", "attempt", "client")}


class Fields:
    """The plain values of a message by name; values out of bounds raise :class:`FederatedError`."""

    def __init__(self, who: str, values: Any, name: str = "header") -> None:
        self._who = who
        self._values = self._checked(name, values, isinstance(values, Mapping), "a mapping")

    def _checked(self, name: str, value: Any, is_good: bool, expected: str) -> Any:
        if not is_good:
            raise FederatedError(
                f"{self._who} is not valid: its {name} is {quoted(value)}, and {expected} is expected."
            )
        return value

    def check(self, name: str, is_good: bool, expected: str) -> None:
        """Refuse an invalid value."""
        self._checked(name, self._values.get(name), is_good, expected)

    def count(self, name: str, least: int = 0, most: int = MOST) -> int:
        """Return a whole number within bounds."""
        value, bound = self._values.get(name), "2**53" if most == MOST else most
        return int(self._checked(name, value, is_count(value, least, most), f"a whole number from {least} to {bound}"))

    def number(self, name: str, least: float = -math.inf) -> float:
        """Return a number of at least ``least``, finite or NaN."""
        return self._number(name, self._values.get(name), least)

    def _number(self, name: str, value: Any, least: float = -math.inf) -> float:
        is_number = isinstance(value, float) or is_count(value, -MOST)
        is_good = is_number and not math.isinf(value) and not value < least
        return float(self._checked(name, value, is_good, f"a finite number{' of at least 0' if least == 0 else ''}"))

    def numbers(self, name: str) -> dict[str, float]:
        """Return numbers by name, finite or NaN."""
        return {key: self._number(f"{name} {key!r}", value) for key, value in self._items(name)}

    def text(self, name: str, pattern: re.Pattern[str], expected: str) -> str:
        """Return a text that matches a pattern."""
        value = self._values.get(name)
        return str(self._checked(name, value, isinstance(value, str) and bool(pattern.fullmatch(value)), expected))

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


def check_message(message: Message, what: str) -> str:
    """Refuse a message of another version or without required fields; return its name for errors."""
    header = message.header
    who = f"{what} client {quoted(header.get('client') if isinstance(header, Mapping) else None)}"
    fields = Fields(who, header)
    if (found := header.get("format")) != FORMAT:
        raise FederatedError(
            f"{who} has the format {quoted(found)}, and format {FORMAT} is read here. Use the same version of"
            " lightning_fed everywhere."
        )
    fields.text("run", _RUN, "a name of 16 hex digits")  # it names a folder
    fields.check("phase", isinstance(header.get("phase"), str), "a name")
    fields.count("round", most=MOST_STEPS)
    fields.count("attempt", most=MOST_STEPS)
    for name, value in message.tensors.items():
        if not isinstance(value, Tensor):
            raise FederatedError(f"{who} has {quoted(name)}, which is not a tensor.")
    return who


def is_count(value: Any, least: int = 0, most: int = MOST) -> bool:
    """Return whether a value is a whole number within bounds."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def check_columns(owner: str, name: str, columns: Any) -> list[str]:
    """Return the names of columns in an argument; raise for anything else."""
    if not isinstance(columns, list | tuple) or not all(isinstance(column, str) for column in columns):
        raise FederatedError(f"{owner}({name}={columns!r}): {name} must be a list of columns.")
    return list(columns)


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


def quoted(value: Any) -> str:
    """Return a plain value as a short text, or the kind of a list or mapping, which may be nested deeply."""
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return printable(repr(value), 60) if is_plain else kind_of(value)


def printable(text: str, most: int = 2000) -> str:
    """Return an external text as one line without control characters, cut to ``most`` characters."""
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:most])
    return safe if len(text) <= most else f"{safe} ..."


def digest(value: Tensor) -> str:
    """Return shape, dtype and checksum of a tensor. Finding another tensor with the same one is infeasible."""
    own = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{list(value.shape)} {value.dtype} {hashlib.blake2b(own.numpy().tobytes(), digest_size=32).hexdigest()}"


def check_tensors(who: str, tensors: State, like: State) -> None:
    """Refuse tensors whose names, shapes or dtypes are not in the module or the method."""
    for name, value in sorted(tensors.items()):  # safetensors reads in any order; the error names the first fault
        if name not in like:
            known = ", ".join(map(repr, sorted(like)[:_SHOWN]))
            raise FederatedError(f"{who} has a tensor {quoted(name)}, where [{known}] are expected.")
        shape, dtype = like[name].shape, like[name].dtype
        if value.shape != shape:
            raise FederatedError(f"{who} has {name!r} of shape {list(value.shape)}, where {list(shape)} is expected.")
        if value.dtype != dtype:
            raise FederatedError(f"{who} has {name!r} of {value.dtype}, where {dtype} is expected.")


def check_finite(who: str, name: str, value: Tensor) -> None:
    """Refuse a tensor with non-finite numbers."""
    if not bool(torch.isfinite(value).all()):
        raise FederatedError(f"{who} has {name!r} with numbers that are not finite. Look at its data and rates.")


def copied(value: Tensor) -> Tensor:
    """Return a copy of a tensor on the CPU."""
    return value.detach().cpu().clone()


def prefixed(part: str, state: State) -> State:
    """Return tensors under their names in a message, prefixed with their part."""
    return {f"{part}.{name}": value for name, value in state.items()}


def parts_of(message: Message, device: torch.device) -> dict[str, State]:
    """Return the tensors of a message by part: "server", "send" and so on."""
    parts: dict[str, State] = {part: {} for part in _PARTS}
    for name, value in message.tensors.items():
        part, dot, own = name.partition(".")
        if dot and part in parts:
            parts[part][own] = value.to(device)
    return parts


def shared_part(task: Task, moved_buffers: set[str], base: State | None = None) -> State:
    """Return the tensors of a task that are the same for all clients, as copies on the CPU.

    Only moved buffers and base weights of adapters are sent: sites have the others from their module.
    """
    buffers = {name: value for name, value in task.buffers.items() if name in moved_buffers}
    parts = {"server": task.server, "cohort_grad": task.cohort_grad, "buffers": buffers, "base": base or {}}
    named = [prefixed(part, state) for part, state in parts.items()]
    return {name: copied(value) for own in ({"x": task.x}, *named) for name, value in own.items()}


def task_in(message: Message, index: int, x: Tensor, buffers: State, base: State) -> tuple[Task, State, State]:
    """Return the task in a message, the client state that the server still keeps, and the base weights of adapters.

    ``x``, ``buffers`` and ``base`` are from the site's module. The tensors in the message must have their shapes and
    dtypes. Buffers that are not sent default to the site's own.
    """
    who, header, parts = f"The task for client {message.client!r}", message.header, parts_of(message, x.device)
    if "x" not in message.tensors:
        raise FederatedError(f"{who} has no parameters x.")
    if parts["base"] and parts["base"].keys() != base.keys():
        raise FederatedError(
            f"{who} has {len(parts['base'])} base weights of adapters, and this site's module has {len(base)} that"
            " change."
        )
    sent = {"x": message.tensors["x"], **prefixed("buffers", parts["buffers"]), **prefixed("base", parts["base"])}
    check_tensors(who, sent, {"x": x, **prefixed("buffers", buffers), **prefixed("base", base)})
    steps = header.get("steps")
    task = Task(
        round=header["round"],
        phase=header["phase"],
        clients=(index,),
        steps={} if steps is None else {index: steps},
        x=message.tensors["x"].to(x.device),
        server=parts["server"],
        cohort_grad=parts["cohort_grad"],
        buffers={**buffers, **parts["buffers"]},
        mean_examples=math.nan if header.get("mean_examples") is None else header["mean_examples"],
        first_step=header["first_step"],
    )
    return task, parts["keep"], parts["base"]


def check_registration(message: Message) -> None:
    """Raise if a registration request lacks the run's clients or the server's facts."""
    who = f"The server's registration request to client {message.client!r}"
    facts = message.header.get("facts")
    if not isinstance(facts, Mapping) or not all(isinstance(fact, str) for pair in facts.items() for fact in pair):
        raise FederatedError(
            f"{who} does not contain the server's settings. Use the same version of lightning_fed everywhere."
        )
    check_client_ids(f"{who}: its clients", message.header.get("clients"))


def check_phase(message: Message, settings: Settings) -> None:
    """Refuse phases that the site's method does not have, and measures under differential privacy."""
    phase, algorithm = message.header["phase"], settings.algorithm
    is_private = settings.is_private or settings.client_privacy is not None
    if is_private and phase == MEASURE:
        name = "client_privacy" if settings.client_privacy else "DifferentialPrivacy"
        raise FederatedError(
            f"The server asks for {phase!r}, and this site runs {name}: measures are neither clipped nor noisy. Leave"
            " out callbacks and options that measure clients."
        )
    answered = {
        TRAIN: True,
        GRADIENTS: bool(averaged_points(algorithm, message.header["round"])),
        LOSS: algorithm.population_loss,
        MEASURE: not is_private,
    }
    allowed = [name for name, is_answered in answered.items() if is_answered]
    if phase not in allowed:
        raise FederatedError(
            f"The server asks for {quoted(phase)}, which {type(algorithm).__name__} does not need: this site answers"
            f" {', '.join(map(repr, allowed))}."
        )


def check_numbers(message: Message, planned: int, trainer: Any) -> None:
    """Refuse numbers out of bounds, given the site's trainer and the local steps that it plans for the client."""
    header, number, settings = message.header, message.header["round"], trainer.fit_loop.settings
    fields, is_measure = Fields(f"The task for client {message.client!r}", header), header["phase"] == MEASURE
    fields.count("state", most=number + is_measure)
    for name in ("of", "fit"):  # it is part of a file's name
        fields.text(name, _FIT, "a name of 8 hex digits")
    if header.get("steps") is not None:
        fields.count("steps", most=planned)
    if is_measure:
        own = (callback.steps for callback in trainer.callbacks if isinstance(callback, ClientAccuracy))
        fields.check("what", header.get("what") in ("loss", "val", "train"), "'loss', 'val' or 'train'")
        fields.check("own", isinstance(header.get("own"), bool), "true or false")
        fields.count("local_steps", most=max([planned, *own]))
    mean = header.get("mean_examples")
    fields.check("mean_examples", mean is None or finite(mean) >= 0, "a number of examples")
    fields.check("rates", isinstance(header.get("rates"), str), "a text")
    plateaus: Any = header.get("plateaus")
    configs = [config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    keys = [config.scheduler.state_dict().keys() for config in configs]
    is_list = isinstance(plateaus, list) and all(isinstance(state, Mapping) for state in plateaus)
    is_own = is_list and [state.keys() for state in plateaus] == keys
    fields.check("plateaus", is_own, "the state of the schedules of this site's module")
    # Only a step that the run can be at in this round, since stepping to it takes time
    least, most = 0, number * MOST_STEPS
    if settings.local_schedule != "total":
        most = 0
    elif settings.local_steps is not None:
        least = most = number * settings.local_steps
    fields.count("first_step", least, most)


@dataclass(frozen=True, slots=True)
class Expected:
    """The content of a method's messages in a round."""

    like: State  # a meta tensor of each message's shape and dtype, by name
    implied: frozenset[str]  # the names of messages that need not be sent
    model: bool  # whether the model replaces the change "delta", so that the server computes its norm

    @staticmethod
    def of(algorithm: Algorithm, optimizer: FederatedOptimizer, task: Task, client: State) -> "Expected":
        """Return the messages that the method sends for a client that does not move, given a new client's state."""
        x, zero = task.x, torch.zeros_like(task.x)
        gradients = dict.fromkeys(algorithm.full_grad_at, zero)
        lr = optimizer.spread(optimizer.rates)
        is_straight, moves = optimizer.plan_of(algorithm).is_straight, optimizer.schedule is not None
        follows = is_straight and isinstance(lr, float) and (lr != 0 or moves)  # a schedule may raise a zero rate
        local = algorithm.init_local(x, task.server, client)
        run = Run(
            x, zero, task.server, client, local, gradients, dict(task.cohort_grad),
            1.0, 1.0, 1, lr, lambda: zero, follows,
        )  # fmt: skip
        update = algorithm.finish(x, run)
        like = {name: value.to("meta") for name, value in update.send.items()}
        model = update.send.get("delta") is zero and "delta" not in update.implied
        return Expected(like, frozenset(update.implied), model)


def reply_to(task: Message, reply: Reply, bound: float | None = None, timed: bool = True) -> Message:
    """Return the reply of one client as a message, without the parts that the server can compute.

    ``bound`` is the largest norm of a message under differential privacy: the report then has only the steps. Seconds
    are left out unless ``timed``, since they depend on the examples.
    """
    for error in reply.failed.values():
        return Message({**address(task), "failed": str(error)})
    first, same = dict[tuple[Any, ...], str](), dict[str, str]()
    tensors = {}
    for name, value in reply.send.items():
        if name in reply.implied:
            continue
        once = first.setdefault(place_of(value), name)
        if once != name:  # a tensor with two names is sent once
            same[name] = once
        elif bound is not None:
            tensors[f"send.{name}"] = copied(value[0] * min(1.0, bound / max(float(value[0].norm()), bound)))
        elif name == "delta" and reply.models is not None:  # the server sums models, and computes the change
            tensors["model"] = copied(reply.models[0])
        else:
            tensors[f"send.{name}"] = copied(value[0])
    for name, value in (reply.buffers[0] if reply.buffers else {}).items():
        tensors[f"buffers.{name}"] = copied(value)
    report = reply.reports[0] if reply.reports else None
    if report is not None and bound is not None:
        report = ClientReport(report.client_id, report.size, report.steps, math.nan, {}, math.nan, 0.0)
    elif report is not None and not timed:
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
        if task.phase == MEASURE:
            raise FederatedError(f"{who} is a failure: {why}")
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
        loss_examples=fields.count("loss_examples", int(task.phase == LOSS), size),
        implied=tuple(fields.names("implied")),
        server_read=frozenset(fields.names("server_read")) & task.server.keys(),
        cohort_grad_read=frozenset(fields.names("cohort_grad_read")) & task.cohort_grad.keys(),
        own_examples=(fields.count("own_examples"),),
        message_bytes=None if header.get("message_bytes") is None else fields.count("message_bytes"),
    )
    report = _report(client, size, task.steps.get(index, 0), header, who) if task.phase == TRAIN else None
    examples = fields.count("examples")
    same, points = fields.texts("same"), dict.fromkeys(algorithm.full_grad_at, x)
    sent = points if report is None else expected.like
    model = {} if report is None else {"model": x}
    check_tensors(who, message.tensors, {**model, **prefixed("send", sent), **prefixed("buffers", task.buffers)})
    for name, value in message.tensors.items():
        check_finite(who, name, value)
    parts = parts_of(message, x.device)
    send = {name: value[None] for name, value in parts["send"].items()}
    if report is None:
        _check_names(who, send, points if task.phase == GRADIENTS else ())
        norms |= {point: float(torch.linalg.vector_norm(value)) for point, value in send.items()}
    _check_finite(who, reply.loss, *norms.values())
    reply = replace(reply, norms={point: {index: norm} for point, norm in norms.items()})
    if report is None:
        return replace(reply, send=send)
    if report.steps and not examples:
        raise FederatedError(f"{who} reports {report.steps} local steps on no examples.")
    moved = replace(reply, reports=(report,), examples=(examples,))
    changes = None if report.steps else torch.zeros_like(x)[None]  # no client moves without a step
    if algorithm.local_work and not report.steps:
        return replace(moved, changes=changes, implied=())
    models = None
    if "model" in message.tensors:
        models = message.tensors["model"].to(x.device)[None]
        changes = send["delta"] = models - x
        norm = float(torch.linalg.vector_norm(changes))
        _check_finite(who, norm)
        moved = replace(moved, reports=(replace(report, update_norm=norm),))
    for name, other in same.items():
        if other not in send:
            raise FederatedError(f"{who} says that {name!r} is the same as {other!r}, which it has not.")
        send[name] = send[other]
    aside = set(algorithm.aside) if reply.implied else set()
    _check_names(who, {*send, *reply.implied}, {*algorithm.reduces, *aside})
    check_tensors(who, {name: value[0] for name, value in send.items()}, expected.like)
    if implied := set(reply.implied) - send.keys():
        if not implied <= expected.implied:
            raise FederatedError(f"{who} leaves out {sorted(implied)}, which the server cannot work out.")
        for name, value in algorithm.implied(send, task.server).items():
            check_finite(who, name, value)
    if expected.model and models is None:
        raise FederatedError(f"{who} has no model. The server computes the norm of the change from it.")
    buffers = (parts["buffers"],) if parts["buffers"] else ()
    return replace(moved, send=send, models=models, changes=changes, buffers=buffers)


def _report(client: ClientId, size: int, steps: int, header: Mapping[str, Any], who: str) -> ClientReport:
    report, metrics = Fields(who, header.get("report"), "report"), Fields(who, header).numbers("metrics")
    seconds = report.number("seconds", 0)
    report.check("seconds", seconds == seconds, "a number")
    if not abs(metrics.get("step", 0.0)) <= MOST:  # Lightning's loggers use it as the step number
        raise FederatedError(f"{who} is not valid: its metrics 'step' is {metrics['step']!r}, which no logger takes.")
    norm = report.number("update_norm", 0)
    return ClientReport(client, size, report.count("steps", most=steps), report.number("loss"), metrics, norm, seconds)


def _check_finite(who: str, *numbers: float) -> None:
    if not all(map(math.isfinite, numbers)):
        raise FederatedError(f"{who} has a loss or a norm that is not finite. Look at its data and rates.")


def _check_names(who: str, found: Iterable[str], expected: Iterable[str]) -> None:
    """Refuse messages whose names differ from the method's."""
    if set(found) != set(expected):
        names = [quoted(name) for name in sorted(found)[:_SHOWN]]
        raise FederatedError(f"{who} has the messages [{', '.join(names)}], where {sorted(expected)} are expected.")
