"""Speeches by role: how a play's lines are read, and the published plays where they are at hand."""

import gzip
import json
import os
from pathlib import Path

import pytest

from lightning_fed.core.errors import FederatedError
from lightning_fed.data.datasets.shakespeare import read_plays, read_roles, speeches

PLAY = """\tA PLAY

HAMLET\ta prince, not a speech.

ACT I

SCENE I\tElsinore.

\t[Enter HAMLET and
\tothers]

HAMLET\tWords,  words, [Aside] words.
\tThe second line.

\t[Exit]

Ghost
of King Hamlet\tMark me.

HAMLET:\tI will.
'\tAnd this is a line of his.

Somebody: a line without a tab
\tand its continuation, which belong to nobody.

ALL\t| O wonder!

ACT II

HAMLET\tTo be.
"""


def test_a_speech_is_its_lines_without_stage_directions():
    assert speeches(PLAY.splitlines()) == {
        "HAMLET": ["Words, words, words. The second line.", "I will. And this is a line of his.", "To be."],
        "GHOST OF KING HAMLET": ["Mark me."],
        "ALL": ["O wonder!"],
    }


def test_roles_are_named_by_play_and_poems_have_none(tmp_path):
    (tmp_path / "hamlet.txt").write_text(PLAY)
    (tmp_path / "sonnets.txt").write_text("\tSONNETS\n\nI.\n\nFROM fairest creatures we desire increase,\n")
    texts = read_plays("Shakespeare", tmp_path)
    assert list(texts) == ["hamlet/HAMLET", "hamlet/GHOST OF KING HAMLET", "hamlet/ALL"]
    assert texts["hamlet/HAMLET"].endswith("line of his. To be.")


def test_files_that_hold_no_play_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("HAMLET\tNo act.\n")
    with pytest.raises(FederatedError, match=r"no play in .* has a role. A play has a line 'ACT I'"):
        read_plays("Shakespeare", tmp_path)
    (tmp_path / "a.txt").write_bytes(b"ACT I\n\nHAMLET\t\xff\xfe\n")
    with pytest.raises(FederatedError, match=r"a.txt is no UTF-8 text"):
        read_plays("Shakespeare", tmp_path)


def packed(text: bytes) -> bytes:
    return gzip.compress(text, mtime=0)  # the same bytes at any time


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no gzip", "is no gzipped text"),
        (packed(b"text" * 100)[:-12], "is no gzipped text"),
        (packed(b"{"), "is no valid JSON, at line 1"),
        (packed(b"[]"), "found no role"),
        (packed(b'{"hamlet": {"HAMLET": [1]}}'), "'HAMLET' in 'hamlet' must have a list of speeches"),
        (
            packed(b'{"hamlet": {"HAMLET": "To be"}}'),
            "'HAMLET' in 'hamlet' must have a list of speeches",
        ),
    ],
)
def test_a_damaged_file_of_roles_is_refused(tmp_path, content, message):
    path = tmp_path / "by_role.json.gz"
    path.write_bytes(content)
    with pytest.raises(FederatedError, match=message):
        read_roles(path)


def test_roles_are_read_from_gzipped_json(tmp_path):
    path = tmp_path / "by_role.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"hamlet": {"HAMLET": ["To be.", "Or not."]}}).encode()))
    assert read_roles(path) == {"hamlet/HAMLET": "To be. Or not."}


def test_the_published_plays_agree_with_their_roles():
    folder = os.environ.get("LIGHTNING_FED_DATA")
    if not folder or not Path(folder, "shakespeare", "plays").exists():
        pytest.skip("LIGHTNING_FED_DATA names no folder with shakespeare/plays and shakespeare/by_role.json.gz")
    plays = read_plays("Shakespeare", Path(folder, "shakespeare", "plays"))
    roles = read_roles(Path(folder, "shakespeare", "by_role.json.gz"))
    assert (len(plays), len(roles)) == (1334, 1334)
    same = [name for name in roles if plays.get(name, "").split() == [w for w in roles[name].split() if w != "|"]]
    assert len(same) > 1300  # the rest are names on two lines, and lines of several roles at once
