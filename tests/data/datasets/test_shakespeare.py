"""Speeches are read by role. Windows have the right places: within one text, and none across the cut."""

import gzip
import json
import logging
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedTrainer
from lightning_fed.core.errors import FederatedError
from lightning_fed.data import Shakespeare
from lightning_fed.data.batches.batches import TensorBatches
from lightning_fed.data.datasets.shakespeare import SYMBOLS, encode, read_plays, speeches
from lightning_fed.data.datasets.shakespeare import windows as cut
from lightning_fed.models import CharLSTM

PLAYS = {
    "hamlet": "ACT I\n\nHAMLET\tTo be, or not to be:\n\nGHOST\tMark me, Hamlet\n\nHAMLET\tthat is\n",
    "lear": "ACT I\n\nFOOL\tNo\n",
}


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "shakespeare" / "plays"
    folder.mkdir(parents=True)
    for name, text in PLAYS.items():
        (folder / f"{name}.txt").write_text(text)
    return str(tmp_path)


def decode(codes):
    return "".join(SYMBOLS[code] for code in codes.tolist())


def windows(dataset):
    return [(decode(x), decode(y.reshape(-1))) for x, y in (dataset[i] for i in range(len(dataset)))]


def expected(text, length, stride, sequence=False):
    starts = range(0, len(text) - length, stride)
    return [(text[i : i + length], text[i + 1 : i + length + 1] if sequence else text[i + length]) for i in starts]


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


def test_speech_is_its_lines_without_stage_directions():
    assert speeches(PLAY.splitlines()) == {
        "HAMLET": ["Words, words, words. The second line.", "I will. And this is a line of his.", "To be."],
        "GHOST OF KING HAMLET": ["Mark me."],
        "ALL": ["O wonder!"],
    }


def test_byte_order_mark_and_crlf_lose_no_act(tmp_path):
    text = "ACT I\r\n\r\nFOOL\tNo\r\n\r\nACT II\r\n\r\nFOOL\tYes\r\n"
    (tmp_path / "lear.txt").write_bytes(text.encode("utf-8-sig"))
    assert read_plays("Shakespeare", tmp_path) == {"lear/FOOL": "No Yes"}


def test_roles_are_named_by_play_and_poems_have_none(tmp_path):
    (tmp_path / "hamlet.txt").write_text(PLAY)
    (tmp_path / "sonnets.txt").write_text("\tSONNETS\n\nI.\n\nFROM fairest creatures we desire increase,\n")
    texts = read_plays("Shakespeare", tmp_path)
    assert list(texts) == ["hamlet/HAMLET", "hamlet/GHOST OF KING HAMLET", "hamlet/ALL"]
    assert texts["hamlet/HAMLET"].endswith("line of his. To be.")


def test_files_without_a_play_are_rejected(tmp_path):
    (tmp_path / "a.txt").write_text("HAMLET\tNo act.\n")
    with pytest.raises(FederatedError, match=r"no play in .* has a role. A play has a line 'ACT I'"):
        read_plays("Shakespeare", tmp_path)
    (tmp_path / "a.txt").write_bytes(b"ACT I\n\nHAMLET\t\xff\xfe\n")
    with pytest.raises(FederatedError, match=r"a.txt is not UTF-8 text"):
        read_plays("Shakespeare", tmp_path)


def test_vocabulary_matches_leaf():
    assert len(SYMBOLS) == len(set(SYMBOLS)) == 80
    assert (SYMBOLS[0], SYMBOLS[1], SYMBOLS[-1]) == ("\n", " ", "}")
    assert torch.equal(encode(SYMBOLS), torch.arange(80, dtype=torch.uint8))
    assert encode("|$é\U0001f600~\x00").tolist() == [79] * 6
    assert encode("").tolist() == []


@given(
    st.text(alphabet=SYMBOLS, max_size=40),
    st.integers(min_value=1, max_value=6),
    st.integers(min_value=1, max_value=9),
    st.booleans(),
)
def test_windows_match_slices_of_the_text(text, length, stride, sequence):
    assert windows(cut(encode(text), length, stride, sequence)) == expected(text, length, stride, sequence)


@pytest.mark.parametrize("targets", ["next", "sequence"])
@pytest.mark.parametrize("stride", [1, 3, 7])
def test_clients_and_test_parts_are_split_by_time(root, stride, targets):
    data = Shakespeare(root, length=4, stride=stride, targets=targets, test_fraction=0.4)
    data.setup("fit")
    text = "To be, or not to be: that is"
    cut = len(text) - round(0.4 * len(text))
    assert windows(data.client_dataset("hamlet/HAMLET")) == expected(text[:cut], 4, stride, targets == "sequence")
    own = windows(data.client_val_dataset("hamlet/HAMLET"))
    assert own == expected(text[cut:], 4, stride, targets == "sequence")
    assert windows(data.val)[: len(own)] == own
    assert len(data.val) == sum(map(len, data.client_val.values()))
    assert data.known_sizes == [len(data.client_dataset(role)) for role in data.client_ids]


def test_client_windows_are_views_on_the_fast_path(root):
    data = Shakespeare(root, length=4)
    dataset = data.client_dataset("hamlet/HAMLET")
    assert isinstance(dataset, TensorDataset)
    assert isinstance(data.client_batches("hamlet/HAMLET"), TensorBatches)
    x, y = dataset.tensors
    assert x.untyped_storage().nbytes() <= 8 * len("To be, or not to be: that is")
    assert (x.dtype, y.dtype, list(y.shape)) == (torch.int64, torch.int64, [len(x)])


def test_loaders_fetch_whole_batches(root):
    data = Shakespeare(root, length=4)
    data.setup("fit")
    loader = data.val_dataloader()
    assert loader.dataset.source is data.val  # read by batches: single reads take ten times as long
    [(x, y)] = loader
    assert (list(x.shape), x.dtype, y.dtype) == ([len(data.val), 4], torch.int64, torch.int64)
    assert windows(TensorDataset(x, y)) == windows(data.val)


def test_small_roles_and_unknown_characters_are_logged(root, caplog):
    with caplog.at_level(logging.INFO):
        data = Shakespeare(root, length=4)
        assert list(data.client_ids) == ["hamlet/HAMLET", "hamlet/GHOST"]
    assert "leaves out 1 of 3 roles, with 0 of 26 windows: they have fewer than min_examples=1" in caplog.text
    assert "not among" not in caplog.text
    for path in Path(root, "shakespeare", "plays").iterdir():
        path.write_text("ACT I\nR\t$10 # $20 now\n" if path.stem == "hamlet" else "")
    with caplog.at_level(logging.INFO):
        assert decode(Shakespeare(root, length=4).client_dataset("hamlet/R").tensors[0][0]) == "}10 "
    assert "['#', '$'], 3 of 13 characters" in caplog.text
    with pytest.raises(FederatedError, match="none of the 1 roles has min_examples=99 windows"):
        Shakespeare(root, length=4, min_examples=99).setup("fit")


def test_small_roles_are_excluded_from_testing(root):
    data = Shakespeare(root, length=4, min_examples=12, test_fraction=0.4)
    data.setup("fit")
    assert list(data.client_ids) == ["hamlet/HAMLET"]
    assert len(data.val) == len(data.client_val["hamlet/HAMLET"])


def leaf(users):
    return json.dumps(
        {
            "users": list(users),
            "num_samples": [len(samples) for samples in users.values()],
            "user_data": {
                name: {"x": [s[:-1] for s in rows], "y": [s[-1:] for s in rows]} for name, rows in users.items()
            },
        }
    )


@pytest.fixture
def leaf_root(tmp_path):
    for part, users in (
        ("train", {"A": ["To be", "not t"], "B": ["Words"]}),
        ("test", {"A": ["o be:"], "C": ["ords,"]}),
    ):
        folder = tmp_path / "shakespeare" / part
        folder.mkdir(parents=True)
        (folder / "all.json").write_text(leaf(users))
    return str(tmp_path)


def test_leaf_files_hold_windows(leaf_root):
    data = Shakespeare(leaf_root, "leaf", length=4)
    data.setup("fit")
    assert windows(data.client_dataset("A")) == [("To b", "e"), ("not ", "t")]
    assert windows(data.val) == [("o be", ":"), ("ords", ",")]
    assert list(data.client_val) == ["A"]
    assert data.known_sizes == [2, 1]
    data = Shakespeare(leaf_root, "leaf", length=4, targets="sequence")
    assert windows(data.client_dataset("A")) == [("To b", "o be"), ("not ", "ot t")]


def test_unknown_characters_in_leaf_files_are_logged(leaf_root, caplog):
    path = Path(leaf_root) / "shakespeare" / "test" / "all.json"
    path.write_text(leaf({"A": ["o be$", "}|be$"]}))
    with caplog.at_level(logging.INFO):
        Shakespeare(leaf_root, "leaf", length=4).setup("fit")
    assert "['$', '|'], 3 of 10 characters" in caplog.text


def test_leaf_windows_of_the_wrong_length_are_rejected(leaf_root):
    with pytest.raises(FederatedError, match=r"user 'A', x\[0\]: found a string of 4; x must be 5 character"):
        Shakespeare(leaf_root, "leaf", length=5).setup("fit")
    path = Path(leaf_root) / "shakespeare" / "train" / "all.json"
    path.write_text(leaf({"A": ["To be"]}).replace('"e"', "3"))
    with pytest.raises(FederatedError, match=r"user 'A', y\[0\]: found an int; y must be 1 character"):
        Shakespeare(leaf_root, "leaf", length=4).setup("fit")


def test_missing_files_raise_and_name_the_available_source(leaf_root, tmp_path):
    with pytest.raises(FederatedError, match=r"there is no .*plays .*set source='leaf', whose files are there"):
        Shakespeare(leaf_root).setup("fit")
    with pytest.raises(FederatedError, match=r"there is no .*https://github.com.*Or set root"):
        Shakespeare(str(tmp_path / "none")).setup("fit")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "tiny"}, "source must be 'plays' or 'leaf'"),
        ({"length": 0}, "length=0"),
        ({"stride": 0}, "stride=0"),
        ({"eval_stride": 0}, "eval_stride=0"),
        ({"test_fraction": 1.0}, r"test_fraction must be a finite number in \[0, 1\)"),
        ({"targets": "all"}, "targets must be 'next' or 'sequence'"),
        ({"min_examples": 0}, "min_examples=0"),
        ({"source": "leaf", "stride": 2}, "cut into windows and split already"),
        ({"source": "leaf", "test_fraction": 0.1}, "cut into windows and split already"),
    ],
)
def test_invalid_options_are_rejected_at_construction(options, message):
    with pytest.raises(FederatedError, match=message):
        Shakespeare(**options)


def test_unknown_role_is_rejected(root):
    with pytest.raises(FederatedError, match="There is no client 'hamlet/YORICK' among the 2 clients"):
        Shakespeare(root, length=4).client_dataset("hamlet/YORICK")


@pytest.mark.parametrize("targets", ["next", "sequence"])
def test_run_trains_on_plays(root, targets):
    data = Shakespeare(root, length=4, targets=targets)
    model = CharLSTM(hidden_size=4, num_layers=1)
    trainer = FederatedTrainer(max_rounds=2, local_epochs=1, seed=0, logger=False, enable_progress_bar=False)
    trainer.fit(model, data)
    assert trainer.callback_metrics["val_loss"] > 0
    assert isinstance(model, nn.Module)


def test_published_plays_match_their_roles():
    folder = os.environ.get("LIGHTNING_FED_DATA")
    if not folder or not Path(folder, "shakespeare", "plays").exists():
        pytest.skip("LIGHTNING_FED_DATA names no folder with shakespeare/plays and shakespeare/by_role.json.gz")
    plays = read_plays("Shakespeare", Path(folder, "shakespeare", "plays"))
    with gzip.open(Path(folder, "shakespeare", "by_role.json.gz")) as file:  # another program's split
        by_role = json.load(file)
    roles = {f"{play}/{role}": " ".join(said) for play, own in by_role.items() for role, said in own.items()}
    assert (len(plays), len(roles)) == (1334, 1334)
    same = [name for name in roles if plays.get(name, "").split() == [w for w in roles[name].split() if w != "|"]]
    assert len(same) > 1300  # the rest are names on two lines, and lines of several roles at once


def test_published_plays_have_the_known_statistics():
    folder = os.environ.get("LIGHTNING_FED_DATA")
    if not folder or not Path(folder, "shakespeare", "plays").exists():
        pytest.skip("LIGHTNING_FED_DATA names no folder with shakespeare/plays")
    data = Shakespeare(folder, min_examples=64)
    data.setup("fit")
    assert data.num_clients > 900
    assert sum(data.known_sizes) > 3_000_000
    x, y = data.client_dataset("hamlet/HAMLET").tensors
    assert decode(x[0]).startswith("A little more than kin, and less than kind.")
    assert torch.equal(x[81, :-1], x[80, 1:])
    assert torch.equal(y[:-80], x[80:, 0])
