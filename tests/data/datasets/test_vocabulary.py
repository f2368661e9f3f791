"""Words as numbers, and vectors out of a text file."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed.core.errors import FederatedError
from lightning_fed.data.datasets.sentiment import Vocabulary, read_embedding, words

COUNTS = Counter({"good": 3, "bad": 2, "awful": 2, "rare": 1})


def test_words_are_lower_case_and_marks_are_words():
    assert words("I don't LIKE it... é_1 #yes!") == ["i", "don't", "like", "it", ".", ".", ".", "é_1", "yes", "!"]
    assert words("") == []


def test_the_most_frequent_words_come_first_and_ties_are_alphabetical():
    vocabulary = Vocabulary.of(COUNTS, max_words=3)
    assert vocabulary.words == ["good", "awful", "bad"]
    assert [vocabulary[word] for word in ("good", "awful", "bad", "rare")] == [2, 3, 4, 1]
    assert len(vocabulary) == 5


@given(st.lists(st.lists(st.sampled_from([*COUNTS, "new"]), max_size=6), max_size=4), st.integers(1, 5))
def test_texts_are_cut_at_the_end_and_padded_in_front(texts, length):
    vocabulary = Vocabulary.of(COUNTS, max_words=2)
    codes = vocabulary.encode(texts, length)
    assert (list(codes.shape), codes.dtype) == ([len(texts), length], torch.int64)
    for text, code in zip(texts, codes.tolist(), strict=True):
        kept = [vocabulary[word] for word in text[:length]]
        assert code == [0] * (length - len(kept)) + kept


def write(tmp_path, text):
    path = tmp_path / "glove.txt"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_vectors_are_those_of_words_that_occur(tmp_path):
    path = write(tmp_path, "the 9 9\nbad 1 2\nrare 5 -6e0\ngood 3 4\nbad 7 7\n")
    vocabulary, vectors = read_embedding(path, COUNTS, max_words=2)
    assert vocabulary.words == ["good", "bad"]  # awful has no vector, and the first vector of a word counts
    assert torch.equal(vectors, torch.tensor([[0.0, 0.0], [2.0, 3.0], [3.0, 4.0], [1.0, 2.0]]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("good 1 2\nbad 1\n", "line 2: 1 numbers after the word; the first line has 2"),
        ("400000 2\ngood 1 2\n", "line 2: 2 numbers after the word; the first line has 1"),
        ("good\n", "line 1: 0 numbers"),
        ("the 1 2\ngood 1 x\n", "line 2: not all fields after the word are numbers"),
        ("good 1 nan\n", "line 1: a number is not finite"),
        ("Good 1 2\n", "has no vector of any word in the texts"),
        ("", "has no vector of any word in the texts"),
        (b"good 1 2\nb\xff 1 2\n", "is no UTF-8 text"),
    ],
)
def test_a_damaged_file_of_vectors_is_refused(tmp_path, text, message):
    with pytest.raises(FederatedError, match=message):
        read_embedding(write(tmp_path, text), COUNTS, max_words=10)
