"""The plays of Shakespeare as what each speaking role says."""

import gzip
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_fed.core.errors import FederatedError
from lightning_fed.data.files.stored import listing, read_json

__all__ = ["read_plays", "read_roles", "speeches"]

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


def read_roles(path: Path) -> dict[str, str]:
    """Return the text of each role, by "play/ROLE", from gzipped JSON ``{play: {ROLE: [speech, ...]}}``.

    Raises:
        FederatedError: If the file holds something else.
    """
    try:
        with gzip.open(path) as file:
            text = file.read().decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise FederatedError(f"{path} is no gzipped text: {error}. Download or make it again.") from error
    content: Any = read_json(path, text)
    texts: dict[str, str] = {}
    for play, roles in content.items() if isinstance(content, dict) else ():
        for role, said in roles.items() if isinstance(roles, dict) else ():
            if not isinstance(said, list) or not all(isinstance(speech, str) for speech in said):
                raise FederatedError(f"{path}: {role!r} in {play!r} must have a list of speeches (strings).")
            texts[f"{play}/{role}"] = " ".join(said)
    if not texts:
        raise FederatedError(f"{path} must hold {{play: {{ROLE: [speech, ...]}}}}; found no role.")
    return texts
