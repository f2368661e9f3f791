"""Next-character prediction on the plays of Shakespeare, one client for each speaking role."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from lightning_fed.compat.private import rank_zero_info
from lightning_fed.core.arguments import check_count, check_fraction, check_one_of, check_paths, kind_of
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.data.dataset import FederatedDataset
from lightning_fed.data.datasets.leaf import LeafUser, read_leaf
from lightning_fed.data.files.stored import StoredDataModule, find, listing

__all__ = ["SYMBOLS", "Shakespeare", "Windows", "encode", "read_plays", "speeches"]

_START = re.compile(r"ACT [IVX]+\b")
_HEADING = re.compile(r"(ACT|SCENE|PROLOGUE|EPILOGUE|INDUCTION)\b")
_DIRECTION = re.compile(r"\[[^]]*\]|\|")  # a stage direction, or the brace beside lines that several roles speak


def speeches(lines: Iterable[str]) -> dict[str, list[str]]:
    r"""Return what each role of a play says: speeches in order, without stage directions, lines joined by a space.

    Args:
        lines: The lines of the play. A speech begins with ``NAME<TAB>text`` after the first ``ACT``; its other lines
            begin with a tab. Stage directions stand in brackets. The first part of a long name may stand on a line of
            its own right before. Lines that belong to no speech are left out.

    Example:
        >>> speeches(["ACT I", "HAMLET\tMy fate [Enter Ghost]", "\tcries out", "Ghost\tMark me."])
        {'HAMLET': ['My fate cries out'], 'GHOST': ['Mark me.']}
    """
    found: dict[str, list[str]] = {}
    name, said, first_part, started = "", [""], "", False
    for line in (*lines, "END"):
        head, tab, text = line.rstrip().partition("\t")
        if not started:
            started = _START.match(head) is not None
            continue
        if not head and not tab:  # an empty line inside a speech
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
    """Return the text of each role, by "play/ROLE", from one ``.txt`` file for each play; poems have no roles.

    Raises:
        FederatedError: If there are no such files, or one is not text.
    """
    texts: dict[str, str] = {}
    for file in listing(owner, folder, ".txt"):
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise FederatedError(f"{file} is no UTF-8 text: {error}.") from error
        texts |= {f"{file.stem}/{role}": " ".join(said) for role, said in speeches(lines).items()}
    if not texts:
        raise FederatedError(
            f"{owner}: no play in {folder} has a role. A play has a line 'ACT I', and a speech begins with NAME, a tab"
            " and the text."
        )
    return texts


SYMBOLS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The 80 characters of LEAF's vocabulary; a character's class is its position."""

_STRANGE = len(SYMBOLS) - 1
_SOURCES = {"plays": "plays", "leaf": "train"}
_TARGETS = ("next", "sequence")
_TEST_FRACTION = 0.2


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text: an input is ``length`` characters, its target the next one, or the input shifted by one.

    Only the text is kept; a window is cut out of it when it is asked for, and a batch of them at once.

    Args:
        text: Character codes [L], uint8.
        starts: Where the windows begin [n], int64; each needs ``length + 1`` characters.
        length: Characters in an input.
        sequence: Whether the target is the shifted input [length] instead of the next character.
    """

    def __init__(self, text: Tensor, starts: Tensor, length: int, sequence: bool = False) -> None:
        self.text = text
        self.starts = starts
        self.length = length
        self.sequence = sequence

    def __len__(self) -> int:
        """Return the number of windows n."""
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the input, int64 [length], and the target, int64 [] or [length], of one window."""
        return self.__getitems__([range(len(self))[index]])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return several windows; PyTorch's loaders fetch a batch in this way."""
        starts = self.starts[torch.as_tensor(indices, dtype=torch.int64)]
        rows = self.text[starts[:, None] + torch.arange(self.length + 1)].long()
        return list(zip(rows[:, :-1], rows[:, 1:] if self.sequence else rows[:, -1], strict=True))


class _Roles(FederatedDataset):
    """Clients whose texts are kept as uint8; the windows of one who takes part are a view into its int64 text."""

    def __init__(self, texts: Mapping[ClientId, Tensor], length: int, stride: int, sequence: bool) -> None:
        self.ids = list(texts)
        self._texts = dict(texts)
        self._length = length
        self._stride = stride
        self._sequence = sequence

    @property
    def known_sizes(self) -> list[int]:
        return [self.size(client_id) for client_id in self.ids]

    def size(self, client_id: ClientId) -> int:
        return count_windows(len(self._text(client_id)), self._length, self._stride)

    def dataset(self, client_id: ClientId) -> TensorDataset:
        text = self._text(client_id).long()
        inputs = text[:-1].unfold(0, self._length, self._stride)  # overlapping rows of one tensor, not copies
        following = text[1:] if self._sequence else text[self._length :: self._stride][: len(inputs)]
        return TensorDataset(inputs, following.unfold(0, self._length, self._stride) if self._sequence else following)

    def _text(self, client_id: ClientId) -> Tensor:
        if client_id not in self._texts:
            raise FederatedError(f"There is no client {client_id!r} among the {len(self.ids):,} roles.")
        return self._texts[client_id]


class Shakespeare(StoredDataModule):
    """The plays of Shakespeare by speaking role: predict the character that follows 80 others.

    This is the task of McMahan et al. (arXiv:1602.05629), as LEAF (arXiv:1812.01097) and FedProx (arXiv:1812.06127)
    have it: inputs int64 [80] and targets int64 in 0, ..., 79, the positions of characters in :data:`SYMBOLS`. Other
    characters become the last symbol, ``}``, as the labels do in LEAF's code; how many there are is announced.

    A role's text is its speeches in order, joined by a space. It is cut in time: the first part is for training and the
    rest for testing, and no window reaches over the cut. ``val`` and ``test`` are both the test windows of all roles,
    and ``client_val`` has each role's own. Texts are kept as one byte a character; windows are cut out when needed.

    Args:
        root: The folder of data sets. The files are looked for in ``root/shakespeare``.
        source: "plays" for the text files ``plays/*.txt`` with speeches as ``NAME<TAB>line``; or "leaf" for LEAF's JSON
            files in ``train`` and ``test``, which are windows already and take 81 bytes each. LEAF's split at random
            puts overlapping windows into both parts.
        length: Characters in an input.
        stride: Characters between the beginnings of a role's training windows; 1 for "leaf".
        eval_stride: The same for test windows; None for ``stride``. ``eval_stride=80`` tests 80 times as fast.
        test_fraction: The share of a role's characters that is for testing; None for 0.2. Not for "leaf".
        targets: "next" for the character after the input, [], or "sequence" for the input shifted by one, [length].
        min_examples: Roles with fewer training windows are left out, with their test windows; how many is announced.
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
        self.source = check_one_of("Shakespeare", "source", source, tuple(_SOURCES))
        self.length = check_count("Shakespeare", "length", length, least=1)
        self.stride = check_count("Shakespeare", "stride", stride, least=1)
        self.eval_stride = eval_stride
        if eval_stride is not None:
            check_count("Shakespeare", "eval_stride", eval_stride, least=1)
        self.test_fraction = test_fraction
        if test_fraction is not None:
            check_fraction("Shakespeare", "test_fraction", test_fraction)
        self.targets = check_one_of("Shakespeare", "targets", targets, _TARGETS)
        self.min_examples = check_count("Shakespeare", "min_examples", min_examples, least=1)
        if source == "leaf" and (stride != 1 or eval_stride not in (None, 1) or test_fraction is not None):
            raise FederatedError(
                "Shakespeare(source='leaf'): LEAF's files are cut into windows and split already. Leave out stride,"
                " eval_stride and test_fraction."
            )

    def _load(self) -> None:
        folder = Path(self.root) / "shakespeare"
        path = self._find(folder)
        if self.source == "leaf":
            # A window and its target are length + 1 characters: end to end they are a text read at that stride.
            stride = eval_stride = self.length + 1
            train, test = self._read_leaf(path), self._read_leaf(self._find(folder, "test"))
        else:
            stride, eval_stride = self.stride, self.eval_stride or self.stride
            train, test = self._split(_encode_all(read_plays("Shakespeare", path).items()))
        small = self._too_small(train, test, stride)
        train, test = ({role: part[role] for role in part if role not in small} for part in (train, test))
        sequence = self.targets == "sequence"
        self.client_val = {
            role: Windows(test[role], self._starts(test[role], eval_stride), self.length, sequence)
            for role in train
            if role in test and count_windows(len(test[role]), self.length, eval_stride)
        }
        self.val = self.test = self._pool(test, eval_stride, sequence)
        self.set_clients(_Roles(train, self.length, stride, sequence))

    def _find(self, folder: Path, part: str | None = None) -> Path:
        others = [name for name, entry in _SOURCES.items() if (folder / entry).exists() and name != self.source]
        get = (
            "Plays of this format: https://github.com/martin-gorner/tensorflow-rnn-shakespeare; LEAF's files: its"
            " preprocess.sh for shakespeare, https://github.com/TalwalkarLab/leaf."
        )
        remedy = f"Or set source={others[0]!r}, whose files are there." if others else "Or set root to where it is."
        return find("Shakespeare", folder / (part or _SOURCES[self.source]), get, remedy)

    def _read_leaf(self, path: Path) -> dict[ClientId, Tensor]:
        return _encode_all((user.name, self._join(user)) for user in read_leaf("Shakespeare", path))

    def _join(self, user: LeafUser) -> str:
        """Return a user's windows end to end, each followed by its target."""
        for part, values, size in (("x", user.x, self.length), ("y", user.y, 1)):
            for number, value in enumerate(values):
                if not isinstance(value, str) or len(value) != size:
                    found = f"a string of {len(value)}" if isinstance(value, str) else kind_of(value)
                    raise FederatedError(
                        f"{user.place}, {part}[{number}]: found {found}; {part} must be {size} character(s)."
                    )
        return "".join(x + y for x, y in zip(user.x, user.y, strict=True))

    def _split(self, texts: Mapping[ClientId, Tensor]) -> tuple[dict[ClientId, Tensor], dict[ClientId, Tensor]]:
        fraction = _TEST_FRACTION if self.test_fraction is None else self.test_fraction
        cuts = {role: len(text) - round(fraction * len(text)) for role, text in texts.items()}
        return (
            {role: text[: cuts[role]] for role, text in texts.items()},
            {role: text[cuts[role] :] for role, text in texts.items()},
        )

    def _too_small(
        self, train: Mapping[ClientId, Tensor], test: Mapping[ClientId, Tensor], stride: int
    ) -> set[ClientId]:
        """Return the roles with fewer than ``min_examples`` training windows, and announce them."""
        least = self.min_examples
        small = {role for role, text in train.items() if count_windows(len(text), self.length, stride) < least}
        if len(small) == len(train):
            raise FederatedError(f"Shakespeare: none of the {len(train):,} roles has min_examples={least} windows.")
        if small:
            lost = sum(len(text) for part in (train, test) for role, text in part.items() if role in small)
            rank_zero_info(
                f"Shakespeare leaves out {len(small):,} of {len(train):,} roles, with {lost:,} characters: they have"
                f" fewer than min_examples={least} training windows."
            )
        return small

    def _starts(self, text: Tensor, stride: int) -> Tensor:
        return torch.arange(count_windows(len(text), self.length, stride)) * stride

    def _pool(self, test: Mapping[ClientId, Tensor], stride: int, sequence: bool) -> Windows | None:
        starts, begin = [], 0
        for text in test.values():
            starts.append(begin + self._starts(text, stride))
            begin += len(text)
        if not sum(map(len, starts)):
            return None
        return Windows(torch.cat(list(test.values())), torch.cat(starts), self.length, sequence)


def encode(text: str) -> Tensor:
    r"""Return the positions in :data:`SYMBOLS` of the characters of a text, uint8 [L]; others get the last position.

    Example:
        >>> encode("\n Az}é").tolist()
        [0, 1, 25, 78, 79, 79]
    """
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    return torch.from_numpy(_codes()[np.minimum(points, 128)])


def count_windows(size: int, length: int, stride: int) -> int:
    """Return how many windows with the character after them a text of ``size`` characters has."""
    return max(0, (size - length - 1) // stride + 1)


def _codes() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return the class of each ASCII character, and of the rest at position 128."""
    codes = np.full(129, _STRANGE, dtype=np.uint8)
    codes[[ord(symbol) for symbol in SYMBOLS]] = np.arange(len(SYMBOLS))
    return codes


def _encode_all(texts: Iterable[tuple[str, str]]) -> dict[ClientId, Tensor]:
    """Return the codes of each role's text, and announce characters that are not in the vocabulary."""
    codes: dict[ClientId, Tensor] = {}
    strange: Counter[str] = Counter()
    for role, text in texts:
        codes[role] = encode(text)
        strange.update({character: text.count(character) for character in set(text).difference(SYMBOLS)})
    if strange:
        rank_zero_info(
            f"Shakespeare reads characters that are not among its {len(SYMBOLS)} symbols as {SYMBOLS[-1]!r}:"
            f" {sorted(strange)}, {strange.total():,} of {sum(map(len, codes.values())):,} characters."
        )
    return codes
