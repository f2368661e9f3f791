"""Next-character prediction on the plays of Shakespeare, with one client per speaking role."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import dropwhile
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from lightning_fed.compat.private import rank_zero_info
from lightning_fed.core.arguments import check_count, check_number, check_one_of, check_paths, kind_of
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.data.batches.examples import size_of
from lightning_fed.data.dataset import FederatedDataset
from lightning_fed.data.datasets.leaf import LeafUser, read_leaf
from lightning_fed.data.files.stored import StoredDataModule, find, large_enough, listing

_START = re.compile(r"ACT [IVX]+\b")
_HEADING = re.compile(r"(ACT|SCENE|PROLOGUE|EPILOGUE|INDUCTION)\b")
_DIRECTION = re.compile(r"\[[^]]*\]|\|")  # a stage direction, or the brace next to lines that several roles speak


def speeches(lines: Iterable[str]) -> dict[str, list[str]]:
    r"""Return each role's speeches in order, without stage directions, lines joined by a space.

    A speech begins with ``NAME<TAB>text`` after the first ``ACT``; its other lines begin with a tab. A long name may
    begin on the line before. Stage directions are in brackets. Other lines are ignored.

    Example:
        >>> speeches(["ACT I", "HAMLET\tMy fate [Enter Ghost]", "\tcries out", "Ghost\tMark me."])
        {'HAMLET': ['My fate cries out'], 'GHOST': ['Mark me.']}
    """
    found: dict[str, list[str]] = {}
    name, said, first_part = "", [""], ""
    _, *play = dropwhile(lambda line: not _START.match(line), (*lines, "ACT I"))  # ends the last speech
    for line in play:
        head, tab, text = line.rstrip().partition("\t")
        if not head and not tab:  # an empty line within a speech
            first_part = ""
            continue
        if not any(map(str.isalpha, head)):
            said.append(text)
            continue
        speech = " ".join(_DIRECTION.sub(" ", " ".join(said)).split())
        if name and speech:
            found.setdefault(name, []).append(speech)
        speaks = bool(tab) and _HEADING.match(head) is None
        name = " ".join(f"{first_part} {head}".upper().split()).rstrip(":") if speaks else ""
        said = [text] if speaks else [""]
        first_part = head if not tab and head.replace(" ", "").isalpha() else ""
    return found


def read_plays(owner: str, folder: Path) -> dict[str, str]:
    """Return each role's text, by "play/ROLE", from one ``.txt`` file per play; poems have no roles."""
    texts: dict[str, str] = {}
    for file in listing(owner, folder, ".txt"):
        try:
            lines = file.read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            raise FederatedError(f"{file} is not UTF-8 text: {error}.") from error
        texts |= {f"{file.stem}/{role}": " ".join(said) for role, said in speeches(lines).items()}
    if not texts:
        raise FederatedError(
            f"{owner}: no play in {folder} has a role. A play has a line 'ACT I', and a speech begins with NAME, a tab"
            " and the text."
        )
    return texts


SYMBOLS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The 80 characters of LEAF's vocabulary; a character's class is its position."""

# The class of each ASCII character; index 128 is for all others. `find` gives -1 for these: the last symbol.
_CLASSES = np.array([SYMBOLS.find(chr(point)) % len(SYMBOLS) for point in range(129)], dtype=np.uint8)
_FOLDERS = {"plays": "plays", "leaf": "train"}


def encode(text: str) -> Tensor:
    r"""Return the positions of a text's characters in :data:`SYMBOLS`, uint8 [L]; unknown ones get the last position.

    Example:
        >>> encode("\n Az}é").tolist()
        [0, 1, 25, 78, 79, 79]
    """
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    return torch.from_numpy(_CLASSES[np.minimum(points, 128)])


def windows(text: Tensor, length: int, stride: int, sequence: bool) -> TensorDataset:
    """Return windows [n, length] of a text [L] and their targets, [n] or [n, length], as views of the text."""
    shape = (max(0, (len(text) - length - 1) // stride + 1), length)
    following = text[1:].as_strided(shape, (stride, 1)) if sequence else text[length::stride]
    return TensorDataset(text.as_strided(shape, (stride, 1)), following)


class _Roles(FederatedDataset):
    """Clients with texts stored as bytes; a participating client's windows are views of its text as int64."""

    def __init__(self, texts: Mapping[ClientId, Tensor], cut: Callable[[Tensor], TensorDataset]) -> None:
        self._texts = texts
        self._cut = cut
        super().__init__({role: cut(text) for role, text in texts.items()})

    def size(self, client_id: ClientId) -> int:
        return size_of(super().dataset(client_id))

    def dataset(self, client_id: ClientId) -> TensorDataset:
        super().dataset(client_id)  # raises if the id is unknown
        return self._cut(self._texts[client_id].long())


class Shakespeare(StoredDataModule):
    """The plays of Shakespeare by speaking role: predict the character that follows 80 others.

    This is the task of McMahan et al. (arXiv:1602.05629), in the form of LEAF (arXiv:1812.01097) and FedProx
    (arXiv:1812.06127). Inputs are int64 [80] and targets int64 in 0, ..., 79: positions of characters in
    :data:`SYMBOLS`. Other characters become the last symbol, ``}``, as in LEAF's code; their number is logged.

    A role's text is its speeches in order, joined by a space. Its first part is for training and the rest for testing,
    and no window crosses the cut. ``val`` and ``test`` are both the test windows of all roles; ``client_val`` has those
    of each role. A character takes one byte in training texts and eight in test texts.

    Args:
        root: The folder of data sets. The files are in ``root/shakespeare``.
        source: "plays" for the text files ``plays/*.txt`` with speeches as ``NAME<TAB>line``; or "leaf" for LEAF's JSON
            files in ``train`` and ``test``, which contain windows of 81 characters. LEAF's random split puts
            overlapping windows into both parts.
        length: Characters in an input.
        stride: Characters between the starts of a role's training windows, 1 for "leaf".
        eval_stride: The stride of test windows; None for ``stride``. 80 makes tests 80 times faster.
        test_fraction: The share of a role's characters for testing; None for 0.2. Not for "leaf".
        targets: "next" for the character after the input, [], or "sequence" for the input shifted by one, [length].
        min_examples: Roles with fewer training windows are left out, with their test windows; their number is logged.
        batch_size: Examples in a client's training batch.

    Raises:
        FederatedError: If an argument is not allowed; in ``setup``, if a file is missing or damaged.
    """

    num_classes = len(SYMBOLS)

    def __init__(
        self,
        root: str = "data",
        source: Literal["plays", "leaf"] = "plays",
        length: int = 80,
        stride: int = 1,
        eval_stride: int | None = None,
        test_fraction: float | None = None,
        targets: Literal["next", "sequence"] = "next",
        min_examples: int = 1,
        batch_size: int = 10,
    ) -> None:
        super().__init__(batch_size=batch_size)
        check_paths("Shakespeare", root=root)
        self.root = root
        self.source = check_one_of("Shakespeare", "source", source, tuple(_FOLDERS))
        self.length = check_count("Shakespeare", "length", length, least=1)
        self.stride = check_count("Shakespeare", "stride", stride, least=1)
        self.eval_stride = None if eval_stride is None else check_count(self, "eval_stride", eval_stride)
        self.test_fraction = (
            None if test_fraction is None else check_number(self, "test_fraction", test_fraction, "[0, 1)")
        )
        self.targets = check_one_of("Shakespeare", "targets", targets, ("next", "sequence"))
        self.min_examples = check_count("Shakespeare", "min_examples", min_examples, least=1)
        if source == "leaf" and (stride != 1 or eval_stride not in (None, 1) or test_fraction is not None):
            raise FederatedError(
                "Shakespeare(source='leaf'): LEAF's files are cut into windows and split already. Leave out stride,"
                " eval_stride and test_fraction."
            )

    def _load(self) -> None:
        if self.source == "leaf":
            # A window and its target are length + 1 characters: read the joined text at that stride.
            stride = eval_stride = self.length + 1
            train, test = (self._read_leaf(self._find(part)) for part in ("train", "test"))
        else:
            stride, eval_stride = self.stride, self.eval_stride or self.stride
            texts = _encode_all(read_plays("Shakespeare", self._find("plays")).items())
            fraction = 0.2 if self.test_fraction is None else self.test_fraction
            cuts = {role: len(text) - round(fraction * len(text)) for role, text in texts.items()}
            train = {role: text[: cuts[role]] for role, text in texts.items()}
            test = {role: text[cuts[role] :] for role, text in texts.items()}
        cut = partial(windows, length=self.length, stride=stride, sequence=self.targets == "sequence")
        sizes = {role: len(cut(text)) for role, text in train.items()}
        kept = large_enough("Shakespeare", sizes, ("roles", "windows"), min_examples=self.min_examples)
        test = {role: text for role, text in test.items() if role in kept or role not in train}
        self._set_test(test, kept, eval_stride)
        self.set_clients(_Roles({role: text for role, text in train.items() if role in kept}, cut))

    def _set_test(self, texts: Mapping[ClientId, Tensor], clients: set[ClientId], stride: int) -> None:
        """Set ``val`` and ``test`` to the windows of all texts, and ``client_val`` to each client's windows."""
        whole = windows(torch.cat([encode(""), *texts.values()]).long(), self.length, 1, self.targets == "sequence")
        begin, starts = 0, dict[ClientId, Tensor]()
        for role, text in texts.items():
            if len(text) > self.length:
                starts[role] = torch.arange(begin, begin + len(text) - self.length, stride)
            begin += len(text)
        parts = {role: Subset(whole, rows) for role, rows in starts.items()}  # type: ignore[arg-type]
        self.val = self.test = Subset(whole, torch.cat(list(starts.values()))) if starts else None  # type: ignore[arg-type]
        self.client_val = {role: part for role, part in parts.items() if role in clients}

    def _find(self, part: str) -> Path:
        folder = Path(self.root) / "shakespeare"
        get = (
            "Plays of this format: https://github.com/martin-gorner/tensorflow-rnn-shakespeare; LEAF's files: its"
            " preprocess.sh for shakespeare, https://github.com/TalwalkarLab/leaf."
        )
        others = [name for name, entry in _FOLDERS.items() if (folder / entry).exists() and name != self.source]
        put = f"Or set source={others[0]!r}, whose files are there." if others else "Or set root to where it is."
        return find("Shakespeare", folder / part, get, put)

    def _read_leaf(self, path: Path) -> dict[ClientId, Tensor]:
        return _encode_all((user.name, self._join(user)) for user in read_leaf("Shakespeare", path))

    def _join(self, user: LeafUser) -> str:
        """Return a user's windows as one text, each followed by its target."""
        for part, values, size in (("x", user.x, self.length), ("y", user.y, 1)):
            for number, value in enumerate(values):
                if not isinstance(value, str) or len(value) != size:
                    found = f"a string of {len(value)}" if isinstance(value, str) else kind_of(value)
                    raise FederatedError(
                        f"{user.where}, {part}[{number}]: found {found}; {part} must be {size} character(s)."
                    )
        return "".join(x + y for x, y in zip(user.x, user.y, strict=True))


def _encode_all(texts: Iterable[tuple[str, str]]) -> dict[ClientId, Tensor]:
    """Return the codes of each role's text; log the number of characters not in the vocabulary."""
    codes: dict[ClientId, Tensor] = {}
    unexpected: Counter[str] = Counter()
    for role, text in texts:
        codes[role] = encode(text)
        unexpected.update({character: text.count(character) for character in set(text).difference(SYMBOLS)})
    if unexpected:
        rank_zero_info(
            f"Shakespeare reads characters that are not among its {len(SYMBOLS)} symbols as {SYMBOLS[-1]!r}:"
            f" {sorted(unexpected)}, {unexpected.total():,} of {sum(map(len, codes.values())):,} characters."
        )
    return codes
