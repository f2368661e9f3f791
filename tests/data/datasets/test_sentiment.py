"""Sentiment140 in its two real formats, at a small scale."""

import json
import logging
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed import FederatedTrainer
from lightning_fed.core.errors import FederatedError
from lightning_fed.data import Sentiment140
from lightning_fed.data.datasets.sentiment import Vocabulary, read_embedding, words
from lightning_fed.models import SentimentLSTM

FILE = "training.1600000.processed.noemoticon.csv"
TWEETS = {
    "ann": [
        ("0", "so bad"),
        ("4", "so good"),
        ("4", "good, really good"),
        ("0", 'he said ""bad"", twice'),
        ("4", "caf\xe9"),
    ],
    "bob": [("4", "good morning"), ("0", "bad night"), ("2", "who knows")],
    "cat": [("0", "alone")],
}


def row(target, number, user, text):
    return f'"{target}","{number}","Mon Apr 06 22:19:45 PDT 2009","NO_QUERY","{user}","{text}"\r\n'


@pytest.fixture
def root(tmp_path):
    rows = [row(target, n, user, text) for user, own in TWEETS.items() for n, (target, text) in enumerate(own)]
    rewrite(tmp_path, "".join(rows))
    return str(tmp_path)


def rewrite(root, text):
    path = Path(root) / "sentiment140" / FILE
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text.encode("latin-1"))


def texts(data, dataset):
    names = {number + 2: word for number, word in enumerate(data.vocabulary.words)} | {1: "?"}
    return [(" ".join(names[code] for code in x.tolist() if code), int(y)) for x, y in dataset]


def test_accounts_are_clients_and_their_tweets_are_split(root, caplog):
    with caplog.at_level(logging.INFO):
        data = Sentiment140(root, min_tweets=2, length=6, test_fraction=0.4)
        data.setup("fit")
    assert list(data.client_ids) == ["ann", "bob"]
    assert "leaves out 1 neutral tweets" in caplog.text
    assert "leaves out 1 of 3 accounts, with 1 of 8 tweets: they have fewer than min_tweets=2" in caplog.text
    assert data.known_sizes == [3, 1]
    assert (len(data.client_val["ann"]), len(data.client_val["bob"]), len(data.val)) == (2, 1, 3)
    every = [example for part in (data.client_dataset("ann"), data.client_val["ann"]) for example in part]
    assert sorted(int(y) for _, y in every) == [0, 0, 1, 1, 1]


def test_tweets_are_encoded_as_words_of_the_training_part(root):
    data = Sentiment140(root, min_tweets=2, length=4, test_fraction=0)
    data.setup("fit")
    assert data.val is None
    assert data.vocabulary.words[:2] == ["good", "bad"]
    assert texts(data, data.client_dataset("ann")) == [
        ("so bad", 0), ("so good", 1), ("good , really good", 1), ("he said bad ,", 0), ("caf\xe9", 1),
    ]  # fmt: skip
    x, y = data.client_dataset("bob").tensors
    assert (list(x.shape), x.dtype, y.dtype) == ([2, 4], torch.int64, torch.int64)
    small = Sentiment140(root, min_tweets=2, length=4, test_fraction=0, max_words=1)
    small.setup("fit")
    assert texts(small, small.client_dataset("ann"))[1:3] == [("? good", 1), ("good ? ? good", 1)]
    half = Sentiment140(root, min_tweets=2, test_fraction=0.4)
    half.setup("fit")
    seen = {
        word for name in half.client_ids for text, _ in texts(half, half.client_dataset(name)) for word in text.split()
    }
    assert set(half.vocabulary.words) == seen


def test_split_depends_on_the_seed(root):
    def test_labels(seed):
        data = Sentiment140(root, min_tweets=2, test_fraction=0.4, seed=seed)
        data.setup("fit")
        return data.val.tensors[1].tolist(), data.val.tensors[0].tolist()

    assert test_labels(3) == test_labels(3)
    assert len({str(test_labels(seed)) for seed in range(6)}) > 1


def test_custom_tokenizer_and_vectors_are_used(root, tmp_path):
    glove = tmp_path / "glove.txt"
    glove.write_text("BAD 1 2 3\nGOOD 4 5 6\nUNSEEN 7 8 9\n")
    data = Sentiment140(
        root, min_tweets=2, test_fraction=0, embedding_file=str(glove), tokenizer=lambda text: text.upper().split()
    )
    data.setup("fit")
    assert data.vocabulary.words == ["GOOD", "BAD"]
    assert data.embedding.tolist() == [[0, 0, 0], [2.5, 3.5, 4.5], [4, 5, 6], [1, 2, 3]]
    with pytest.raises(FederatedError, match="tokenizer must return a list of words; it returned 'so bad'"):
        Sentiment140(root, min_tweets=2, tokenizer=str).setup("fit")
    with pytest.raises(FederatedError, match=r"there is no .*nowhere.txt.*nlp.stanford.edu"):
        Sentiment140(root, min_tweets=2, embedding_file=str(tmp_path / "nowhere.txt")).setup("fit")


def leaf(users):
    return json.dumps(
        {
            "users": list(users),
            "num_samples": [len(own) for own in users.values()],
            "user_data": {name: {"x": [x for x, _ in own], "y": [y for _, y in own]} for name, own in users.items()},
        }
    )


def test_leaf_files_are_read(tmp_path):
    tweet = ["1", "Mon", "NO_QUERY", "ann", "so good", "4"]
    for part, users in (
        ("train", {"ann": [(tweet, "4"), (tweet, 1)], "bob": [("so bad", "0")]}),
        ("test", {"ann": [(tweet, 0)], "cat": [(tweet, 1)]}),
    ):
        folder = tmp_path / "sentiment140" / part
        folder.mkdir(parents=True)
        (folder / "all.json").write_text(leaf(users))
    data = Sentiment140(str(tmp_path), "leaf", min_tweets=1)
    data.setup("fit")
    assert texts(data, data.client_dataset("ann")) == [("so good", 1), ("so good", 1)]
    assert texts(data, data.client_dataset("bob")) == [("so bad", 0)]
    assert data.val.tensors[1].tolist() == [0, 1]
    assert list(data.client_val) == ["ann"]
    data = Sentiment140(str(tmp_path), "leaf", min_tweets=3)
    assert list(data.client_ids) == ["ann"]
    for x, y in ((tweet, 2), (tweet[:3], 1), (7, 1), (tweet, True)):
        (tmp_path / "sentiment140" / "train" / "all.json").write_text(leaf({"ann": [(tweet, 1), (x, y)]}))
        with pytest.raises(FederatedError, match=r"user 'ann', sample 1: x must be the text .* found y="):
            Sentiment140(str(tmp_path), "leaf", min_tweets=1).setup("fit")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (row("4", 1, "ann", "good") + '"4","2","ann"\r\n', "line 2: .* found 3 columns that begin with '4'"),
        ("target,id,date,query,user,text\n", "line 1: .* found 6 columns that begin with 'target'"),
        ("", "is empty"),
        (row("4", 1, "ann", "x" * 200_000), "line 1 is not CSV"),
    ],
)
def test_corrupt_files_are_rejected_with_the_line(root, text, message):
    rewrite(root, text)
    with pytest.raises(FederatedError, match=message):
        Sentiment140(root, min_tweets=1).setup("fit")


def test_missing_files_and_accounts_are_rejected(root, tmp_path):
    with pytest.raises(
        FederatedError, match=r"there is no .*noemoticon.csv .*help.sentiment140.com.*source='leaf'.*set root"
    ):
        Sentiment140(str(tmp_path / "none")).setup("fit")
    with pytest.raises(FederatedError, match="none of the 3 accounts has min_tweets=40 tweets"):
        Sentiment140(root).setup("fit")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "json"}, "source must be 'csv' or 'leaf'"),
        ({"min_tweets": 0}, "min_tweets=0"),
        ({"length": 0}, "length=0"),
        ({"max_words": 0}, "max_words=0"),
        ({"tokenizer": "split"}, "must be a function from a text to its words"),
        ({"test_fraction": -0.1}, "test_fraction must be a finite number in"),
        ({"source": "leaf", "test_fraction": 0.1}, "LEAF's files are split already"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_invalid_options_are_rejected_at_construction(options, message):
    with pytest.raises(FederatedError, match=message):
        Sentiment140(**options)


def test_run_trains_on_tweets(root):
    data = Sentiment140(root, min_tweets=2, test_fraction=0.4)
    trainer = FederatedTrainer(max_rounds=2, local_epochs=1, seed=0, logger=False, enable_progress_bar=False)
    trainer.fit(SentimentLSTM(vocab_size=20, embedding_dim=4, hidden_size=4), data)
    assert 0 <= trainer.callback_metrics["val_acc"] <= 1


# Words as numbers, and vectors out of a text file

COUNTS = Counter({"good": 3, "bad": 2, "awful": 2, "rare": 1})


def test_words_are_lowercase_and_punctuation_marks_are_words():
    assert words("I don't LIKE it... é_1 #yes!") == ["i", "don't", "like", "it", ".", ".", ".", "é_1", "yes", "!"]
    assert words("") == []


def test_most_frequent_words_come_first_and_ties_are_alphabetical():
    vocabulary = Vocabulary.of(COUNTS, max_words=3)
    assert vocabulary.words == ["good", "awful", "bad"]
    assert [vocabulary[word] for word in ("good", "awful", "bad", "rare")] == [2, 3, 4, 1]
    assert len(vocabulary) == 5


@given(st.lists(st.lists(st.sampled_from([*COUNTS, "new"]), max_size=6), max_size=4), st.integers(1, 5))
def test_texts_are_truncated_at_the_end_and_padded_in_front(texts, length):
    vocabulary = Vocabulary.of(COUNTS, max_words=2)
    codes = vocabulary.encode(texts, length)
    assert (list(codes.shape), codes.dtype) == ([len(texts), length], torch.int64)
    for text, code in zip(texts, codes.tolist(), strict=True):
        kept = [vocabulary[word] for word in text[:length]]
        assert code == [0] * (length - len(kept)) + kept


def write_vectors(tmp_path, text):
    path = tmp_path / "glove.txt"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_vectors_cover_only_words_that_occur(tmp_path):
    path = write_vectors(tmp_path, "the 9 9\nbad 1 2\nrare 5 -6e0\ngood 3 4\nbad 7 7\n")
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
        (b"good 1 2\nb\xff 1 2\n", "is not UTF-8 text"),
    ],
)
def test_corrupt_vector_file_is_rejected(tmp_path, text, message):
    with pytest.raises(FederatedError, match=message):
        read_embedding(write_vectors(tmp_path, text), COUNTS, max_words=10)
