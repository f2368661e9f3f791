"""What passes between server and sites: tensors by name, and a header of plain values; nothing that runs code."""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from lightning_fed.core.arguments import kind_of
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId, State
from lightning_fed.data.files.tables import is_word

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

NAMES = 1000
"""The most names in one mapping or list."""

_HEADER = "message"
_LONGEST = 2**24  # bytes of a header, which take 25 times as many in memory; with the ids of a million clients it fits
_LENGTH = 200  # characters of a name
_SHOWN = 20  # names in an error
_PARTS = ("server", "cohort_grad", "buffers", "base", "keep", "send")
_RUN = re.compile(r"[0-9a-f]{16}")


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


class Fields:
    """The plain values of a message by name; those out of bounds raise :class:`FederatedError`."""

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
        """Refuse a value that is not good."""
        self._checked(name, self._values.get(name), is_good, expected)

    def count(self, name: str, least: int = 0, most: int = MOST) -> int:
        """Return a whole number within bounds."""
        value, bound = self._values.get(name), "2**53" if most == MOST else most
        return int(self._checked(name, value, is_count(value, least, most), f"a whole number from {least} to {bound}"))

    def number(self, name: str, least: float = -math.inf) -> float:
        """Return a number of at least some size, which is finite or none (nan)."""
        return self._number(name, self._values.get(name), least)

    def _number(self, name: str, value: Any, least: float = -math.inf) -> float:
        is_number = isinstance(value, float) or is_count(value, -MOST)
        is_good = is_number and not math.isinf(value) and not value < least
        return float(self._checked(name, value, is_good, f"a finite number{' of at least 0' if least == 0 else ''}"))

    def numbers(self, name: str) -> dict[str, float]:
        """Return numbers by name, which are finite or none (nan)."""
        return {key: self._number(f"{name} {key!r}", value) for key, value in self._items(name)}

    def text(self, name: str, pattern: re.Pattern[str], expected: str) -> str:
        """Return a text that a pattern describes."""
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
    """Refuse a message of another version, or without the fields that every message has; return what errors call it."""
    header = message.header
    who = f"{what} client {quoted(header.get('client') if isinstance(header, Mapping) else None)}"
    fields = Fields(who, header)
    if (found := header.get("format")) != FORMAT:
        raise FederatedError(
            f"{who} has the format {quoted(found)}, and format {FORMAT} is read here. Use the same version of"
            " lightning_fed everywhere."
        )
    fields.text("run", _RUN, "a name of 16 hex digits")  # it is a folder's name
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


def check_tensors(who: str, tensors: State, like: State) -> None:
    """Refuse tensors of other names, shapes or types than those of the module or the method."""
    for name, value in tensors.items():
        if name not in like:
            known = ", ".join(map(repr, sorted(like)[:_SHOWN]))
            raise FederatedError(f"{who} has a tensor {quoted(name)}, where [{known}] are expected.")
        shape, dtype = like[name].shape, like[name].dtype
        if value.shape != shape:
            raise FederatedError(f"{who} has {name!r} of shape {list(value.shape)}, where {list(shape)} is expected.")
        if value.dtype != dtype:
            raise FederatedError(f"{who} has {name!r} of {value.dtype}, where {dtype} is expected.")


def check_finite(who: str, name: str, value: Tensor) -> None:
    """Refuse a tensor with numbers that are not finite."""
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        raise FederatedError(f"{who} has {name!r} with numbers that are not finite. Look at its data and rates.")


def prefixed(part: str, state: State) -> State:
    """Return tensors under their names in a message, by what they are part of."""
    return {f"{part}.{name}": value for name, value in state.items()}


def parts_of(message: Message, device: torch.device) -> dict[str, State]:
    """Return the tensors of a message by what they are part of: "server", "send" and so on."""
    parts: dict[str, State] = {part: {} for part in _PARTS}
    for name, value in message.tensors.items():
        part, dot, own = name.partition(".")
        if dot and part in parts:
            parts[part][own] = value.to(device)
    return parts
