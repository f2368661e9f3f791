"""What passes between server and sites: tensors by name, and a header of plain values; nothing that runs code."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from lightning_fed.core.arguments import kind_of
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId, State
from lightning_fed.rounds.messages import Task

FORMAT = 1
"""Of messages, one more with every change that an older version could not read."""

REGISTER = "register"
"""The phase before the first round, in which sites say how many examples they have."""

WORDS = "words"
"""The phase before it, if the sites agree on the words of columns: each sends its own."""

MEASURE = "measure"
"""Between rounds: what a callback on the server measures of clients."""

MOST = 2**53
"""The largest count: a float has every whole number up to here."""

MOST_STEPS = 2**20
"""The most rounds of a run, and the most local steps in a round: schedules step up to them one by one."""

_HEADER = "message"
_LONGEST = 2**24  # bytes of a header, which take 25 times as many in memory; with the ids of a million clients it fits
_PARTS = ("server", "cohort_grad", "buffers", "base", "keep")


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
        """Return the message in some bytes, which are read as numbers and texts; nothing in them is run.

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
    """Return what a reply has of its task's header."""
    return {name: task.header[name] for name in ("format", "run", "phase", "round", "attempt", "client")}


def check_message(message: Message, who: str) -> None:
    """Refuse a message of another version, or without the fields that every message has, for ``who`` received it."""
    header = message.header
    found = header.get("format") if isinstance(header, Mapping) else None
    if found != FORMAT:
        raise FederatedError(
            f"{who} has received a message of format {quoted(found)}, and reads format {FORMAT}. Use the same version"
            " of lightning_fed everywhere."
        )
    for name, kind in {"run": str, "phase": str, "round": int, "attempt": int}.items():
        if not isinstance(header.get(name), kind):
            raise FederatedError(f"{who} has received a message whose {name} is {quoted(header.get(name))}.")
    for name, value in message.tensors.items():
        if not isinstance(value, Tensor):
            raise FederatedError(f"{who} has received a message whose {name} is not a tensor.")


def is_count(value: Any, least: int = 0, most: int = MOST) -> bool:
    """Return whether a value is a whole number within bounds."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def check_columns(owner: str, name: str, columns: Any) -> list[str]:
    """Return the names of columns in an argument; raise for anything else."""
    if not isinstance(columns, list | tuple) or not all(isinstance(column, str) for column in columns):
        raise FederatedError(f"{owner}({name}={columns!r}): {name} must be a list of columns.")
    return list(columns)


def quoted(value: Any) -> str:
    """Return a plain value as a short text; of a list or mapping, which may be nested without end, its kind."""
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return printable(repr(value), 60) if is_plain else kind_of(value)


def printable(text: str, most: int = 2000) -> str:
    """Return a text from elsewhere as one line without control characters, cut to some characters."""
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:most])
    return safe if len(text) <= most else f"{safe} ..."


def digest(value: Tensor) -> str:
    """Return shape, type and checksum of a tensor. Nobody can find another tensor with the same one."""
    own = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{list(value.shape)} {value.dtype} {hashlib.blake2b(own.numpy().tobytes(), digest_size=32).hexdigest()}"


# ---------------------------------------------------------------------- tasks


def shared_part(task: Task, moved_buffers: set[str], base: State | None = None) -> State:
    """Return the tensors of a task that are the same for all clients, as copies on the CPU.

    Only buffers that have moved are sent, and base weights of adapters: sites have the others from their module.
    """
    buffers = {name: value for name, value in task.buffers.items() if name in moved_buffers}
    parts = {"server": task.server, "cohort_grad": task.cohort_grad, "buffers": buffers, "base": base or {}}
    named = {f"{part}.{name}": value for part, state in parts.items() for name, value in state.items()}
    return {name: value.detach().cpu().clone() for name, value in {"x": task.x, **named}.items()}


def task_in(message: Message, index: int, buffers: State, device: torch.device) -> tuple[Task, State, State]:
    """Return the task in a message, what the server still keeps for the client, and the base weights of adapters.

    The module's own buffers stand in for those that are not sent.
    """
    header, parts = message.header, parts_of(message, device)
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
        first_step=header.get("first_step", 0),
    )
    return task, parts["keep"], parts["base"]


def parts_of(message: Message, device: torch.device) -> dict[str, State]:
    """Return the tensors of a message by what they are part of: "server", "send" and so on."""
    parts: dict[str, State] = {part: {} for part in (*_PARTS, "send")}
    for name, value in message.tensors.items():
        part, dot, own = name.partition(".")
        if dot and part in parts:
            parts[part][own] = value.to(device)
    return parts
