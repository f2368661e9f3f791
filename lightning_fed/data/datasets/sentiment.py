"""Sentiment140: whether a tweet is positive, with one client per account."""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lightning_fed.compat.private import rank_zero_info
from lightning_fed.core.arguments import check_count, check_number, check_one_of, check_paths, check_seed
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.data.datasets.leaf import read_leaf
from lightning_fed.data.files.stored import StoredDataModule, find, large_enough, read_rows
from lightning_fed.data.partitions import random_state


def words(text: str) -> list[str]:
    """Return the words and the marks . , ! ? ; of a text, in lower case.

    Example:
        >>> words("Don't panic, @bob!")
        ["don't", 'panic', ',', 'bob', '!']
    """
    return re.findall(r"[\w']+|[.,!?;]", text.lower())


class Vocabulary:
    """A mapping from words to numbers: 0 is padding, 1 any unknown word, then the known words, most frequent first.

    Example:
        >>> Vocabulary(["so", "good"]).encode([["good", "grief"], []], length=3).tolist()
        [[0, 3, 1], [0, 0, 0]]
    """

    padding = 0
    unknown = 1

    def __init__(self, known: Sequence[str]) -> None:
        self.words = list(known)
        self._numbers = {word: number for number, word in enumerate(self.words, start=2)}

    @staticmethod
    def of(counts: Counter[str], max_words: int) -> "Vocabulary":
        """Return the vocabulary of the most frequent words, with ties in alphabetical order."""
        return Vocabulary(sorted(counts, key=lambda word: (-counts[word], word))[:max_words])

    def __len__(self) -> int:
        """Return the vocabulary size V: the known words, padding and unknown."""
        return len(self.words) + 2

    def __getitem__(self, word: str) -> int:
        """Return a word's number."""
        return self._numbers.get(word, self.unknown)

    def encode(self, texts: Iterable[Sequence[str]], length: int) -> Tensor:
        """Return tokenized texts as int64 [n, length], truncated at the end or padded in front.

        Padding in front keeps a word in the last position, as a recurrent network needs.
        """
        rows = [[self[word] for word in text[:length]] for text in texts]
        padded = [[self.padding] * (length - len(row)) + row for row in rows]
        return torch.tensor(padded, dtype=torch.int64).view(-1, length)


def read_embedding(path: Path, counts: Counter[str], max_words: int) -> tuple[Vocabulary, Tensor]:
    """Return the vocabulary of the most frequent words that have a vector, and the vectors [V, D], float32.

    The file is UTF-8 text in GloVe's format, with a line ``word v1 ... vD`` per word. The vector of padding is 0, and
    unknown words have the mean of the known words' vectors.
    """
    vectors: dict[str, Tensor] = {}
    fields = 0
    with path.open(encoding="utf-8", newline="\n") as file:
        try:
            for number, line in enumerate(file, start=1):
                word, *values = line.rstrip().split(" ")
                fields = fields or len(values)
                if len(values) != fields or not fields:
                    raise FederatedError(
                        f"{path}, line {number}: {len(values)} numbers after the word; the first line has {fields}."
                        " Each line must be: word v1 v2 ..., with one space between and no heading."
                    )
                if word in counts and word not in vectors:
                    vectors[word] = _vector(values, f"{path}, line {number}")
        except UnicodeDecodeError as error:
            raise FederatedError(f"{path} is not UTF-8 text: {error}.") from error
    if not vectors:
        raise FederatedError(
            f"{path} has no vector of any word in the texts. Are its words in lower case, as theirs are?"
        )
    vocabulary = Vocabulary.of(Counter({word: counts[word] for word in vectors}), max_words)
    known = torch.stack([vectors[word] for word in vocabulary.words])
    return vocabulary, torch.cat([torch.zeros(1, fields), known.mean(0, keepdim=True), known])


def _vector(values: list[str], where: str) -> Tensor:
    try:
        vector = np.array(values, dtype=np.float32)
    except ValueError as error:
        raise FederatedError(f"{where}: not all fields after the word are numbers ({error}).") from error
    if not np.isfinite(vector).all():
        raise FederatedError(f"{where}: a number is not finite.")
    return torch.from_numpy(vector)


Tweets = list[tuple[int, list[str]]]
"""An account's tweets: the class and the words of each."""

_CSV = "training.1600000.processed.noemoticon.csv"
_CLASSES = {"0": 0, "1": 1, "2": None, "4": 1}  # None is neutral


class Sentiment140(StoredDataModule):
    """Sentiment140 (Go, Bhayani and Huang) by Twitter account, as in LEAF (arXiv:1812.01097) and FedProx.

    Inputs are word numbers int64 [25], truncated at the end or padded in front (LEAF's code pads at the end). Targets
    are int64: 0 for negative, 1 for positive. ``vocabulary`` has the most frequent words of the training tweets, after
    0 for padding and 1 for any unknown word. With an ``embedding_file``, only words with a vector are known, and
    ``embedding`` holds the vectors [V, D], float32, 0 for padding and their mean for unknown words. ``setup`` sets
    both.

    ``val`` and ``test`` are both the test tweets of all clients; ``client_val`` has those of each client.

    Args:
        root: The folder of data sets. The files are in ``root/sentiment140``.
        source: "csv", the original training file (latin-1; target, id, date, query, user, text), or "leaf", LEAF's JSON
            files in ``train`` and ``test``.
        min_tweets: Accounts with fewer training and test tweets in total are left out; their number is logged.
        length: Words in an input.
        max_words: The largest number of words in the vocabulary.
        embedding_file: UTF-8 text with a line ``word v1 v2 ...`` per word, as in GloVe's files.
        tokenizer: A function from a text to its words; by default the words and the marks . , ! ? ; in lower case.
        test_fraction: The share of each account's tweets, drawn at random, for testing; None for 0.2. Not for "leaf",
            whose files are already split.
        seed: The seed of the test tweets. An account's test tweets do not depend on other accounts.
        batch_size: Examples in a client's training batch.

    Raises:
        FederatedError: If an argument is not allowed; in ``setup``, if a file is missing or damaged.
    """

    num_classes = 2
    vocabulary: Vocabulary
    embedding: Tensor | None = None

    def __init__(
        self,
        root: str = "data",
        source: Literal["csv", "leaf"] = "csv",
        min_tweets: int = 40,
        length: int = 25,
        max_words: int = 10_000,
        embedding_file: str | None = None,
        tokenizer: Callable[[str], list[str]] | None = None,
        test_fraction: float | None = None,
        seed: int = 0,
        batch_size: int = 10,
    ) -> None:
        super().__init__(batch_size=batch_size)
        check_paths("Sentiment140", root=root, **({} if embedding_file is None else {"embedding_file": embedding_file}))
        self.root = root
        self.source = check_one_of("Sentiment140", "source", source, ("csv", "leaf"))
        self.min_tweets = check_count("Sentiment140", "min_tweets", min_tweets, least=1)
        self.length = check_count("Sentiment140", "length", length, least=1)
        self.max_words = check_count("Sentiment140", "max_words", max_words, least=1)
        self.embedding_file = embedding_file
        if tokenizer is not None and not callable(tokenizer):
            raise FederatedError(f"Sentiment140(tokenizer={tokenizer!r}) must be a function from a text to its words.")
        self.tokenizer = tokenizer
        if test_fraction is not None:
            check_number("Sentiment140", "test_fraction", test_fraction, "[0, 1)")
            if source == "leaf":
                raise FederatedError("Sentiment140(source='leaf'): LEAF's files are split already; drop test_fraction.")
        self.test_fraction = test_fraction
        self.seed = check_seed("Sentiment140", seed)

    def _load(self) -> None:
        train, test = self._read_leaf() if self.source == "leaf" else self._read_csv()
        counts = Counter(word for tweets in train.values() for _, text in tweets for word in text)
        if self.embedding_file is None:
            self.vocabulary = Vocabulary.of(counts, self.max_words)
        else:
            get = "GloVe's vectors: https://nlp.stanford.edu/projects/glove."
            path = find("Sentiment140", Path(self.embedding_file), get, "Or correct embedding_file.")
            self.vocabulary, self.embedding = read_embedding(path, counts, self.max_words)
        self._set_parts(*({name: self._tensors(own) for name, own in part.items()} for part in (train, test)))

    def _find(self, name: str) -> Path:
        return find(
            "Sentiment140",
            Path(self.root) / "sentiment140" / name,
            f"Download {_CSV} (http://help.sentiment140.com/for-students), or make LEAF's files with its preprocess.sh"
            " for sent140 (https://github.com/TalwalkarLab/leaf) and set source='leaf'.",
            "Or set root to the folder that has sentiment140.",
        )

    def _read_leaf(self) -> tuple[dict[ClientId, Tweets], dict[ClientId, Tweets]]:
        train, test = (self._read_leaf_part(self._find(part)) for part in ("train", "test"))
        sizes = {name: len(train.get(name, ())) + len(test.get(name, ())) for name in (*train, *test)}
        kept = large_enough("Sentiment140", sizes, ("accounts", "tweets"), min_tweets=self.min_tweets)
        train, test = ({account: part[account] for account in part if account in kept} for part in (train, test))
        return train, test

    def _read_leaf_part(self, path: Path) -> dict[ClientId, Tweets]:
        found: dict[ClientId, Tweets] = {}
        for user in read_leaf("Sentiment140", path):
            tweets = found[user.name] = []
            for number, (x, y) in enumerate(zip(user.x, user.y, strict=True)):
                text = x[4] if isinstance(x, list) and len(x) > 4 else x
                label = None if isinstance(y, bool) else _CLASSES.get(str(y))
                if not isinstance(text, str) or label is None:
                    raise FederatedError(
                        f"{user.where}, sample {number}: x must be the text of a tweet or the list id, date, query,"
                        f" user, text, and y be 0, 1 or 4; found y={y!r} and an x of type {type(x).__name__}."
                    )
                tweets.append((label, self._words(text)))
        return found

    def _read_csv(self) -> tuple[dict[ClientId, Tweets], dict[ClientId, Tweets]]:
        path = self._find(_CSV)
        sizes: Counter[ClientId] = Counter()
        neutral = 0
        for label, account, _ in _rows(path):
            neutral += label is None
            sizes[account] += label is not None
        if not sizes:
            raise FederatedError(f"{path} is empty. Download it again.")
        if neutral:
            rank_zero_info(f"Sentiment140 leaves out {neutral:,} neutral tweets, whose target is 2.")
        kept = large_enough("Sentiment140", sizes, ("accounts", "tweets"), min_tweets=self.min_tweets)
        tweets: dict[str, Tweets] = {str(name): [] for name in sizes if name in kept}
        for label, account, text in _rows(path):
            if account in tweets and label is not None:
                tweets[account].append((label, self._words(text)))
        fraction = 0.2 if self.test_fraction is None else self.test_fraction
        train: dict[ClientId, Tweets] = {}
        test: dict[ClientId, Tweets] = {}
        for account, own in tweets.items():
            order = random_state(self.seed, account).permutation(len(own)).tolist()
            num_test = min(round(fraction * len(own)), len(own) - 1)
            test[account] = [own[index] for index in sorted(order[:num_test])]
            train[account] = [own[index] for index in sorted(order[num_test:])]
        return train, test

    def _words(self, text: str) -> list[str]:
        found = (self.tokenizer or words)(text)
        if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
            raise FederatedError(f"Sentiment140: tokenizer must return a list of words; it returned {found!r}.")
        return [sys.intern(str(word)) for word in found[: self.length]]  # repeated words share one string

    def _tensors(self, tweets: Tweets) -> tuple[Tensor, Tensor]:
        labels = torch.tensor([label for label, _ in tweets], dtype=torch.int64)
        return self.vocabulary.encode([text for _, text in tweets], self.length), labels


def _rows(path: Path) -> Iterator[tuple[int | None, str, str]]:
    """Yield the class, account and text of each row."""
    for line, row in read_rows(path, "latin-1"):
        if len(row) != 6 or row[0] not in _CLASSES:
            raise FederatedError(
                f"{path}, line {line}: a row has the six columns target (0, 2 or 4), id, date, query, user and text,"
                f" without a heading; found {len(row)} columns that begin with {row[0]!r}."
            )
        yield _CLASSES[row[0]], row[4], row[5]
