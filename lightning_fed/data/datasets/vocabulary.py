"""Words as numbers: a vocabulary of the most frequent ones, with given vectors or without."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_fed.core.errors import FederatedError

__all__ = ["Vocabulary", "read_embedding", "words"]

Tokenizer = Callable[[str], list[str]]


def words(text: str) -> list[str]:
    """Return the words and the marks . , ! ? ; of a text, in lower case.

    Example:
        >>> words("Don't panic, @bob!")
        ["don't", 'panic', ',', 'bob', '!']
    """
    return re.findall(r"[\w']+|[.,!?;]", text.lower())


class Vocabulary:
    """Word -> number: 0 is padding, 1 any unknown word, and the known words follow, the most frequent first.

    Args:
        known: The known words, each once.

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
        """Return the most frequent words; among equally frequent ones the first in alphabetical order.

        Args:
            counts: How often each word occurs.
            max_words: The number of words at most.
        """
        return Vocabulary(sorted(counts, key=lambda word: (-counts[word], word))[:max_words])

    def __len__(self) -> int:
        """Return the number of numbers V: the known words, padding and unknown."""
        return len(self.words) + 2

    def __getitem__(self, word: str) -> int:
        """Return a word's number."""
        return self._numbers.get(word, self.unknown)

    def encode(self, texts: Iterable[Sequence[str]], length: int) -> Tensor:
        """Return tokenized texts as int64 [n, length], cut off at the end or padded in front.

        The last number of a text is then a word, which a recurrent network needs.
        """
        rows = [[self[word] for word in text[:length]] for text in texts]
        padded = [[self.padding] * (length - len(row)) + row for row in rows]
        return torch.tensor(padded, dtype=torch.int64).view(-1, length)


def read_embedding(path: Path, counts: Counter[str], max_words: int) -> tuple[Vocabulary, Tensor]:
    """Return the most frequent words that have a vector, and the vectors [V, D], float32.

    Padding has the vector 0 and unknown words have the mean of the vectors kept.

    Args:
        path: UTF-8 text in GloVe's format, a line ``word v1 ... vD`` for each word. Only vectors of words that occur
            are kept.
        counts: How often each word occurs.
        max_words: The number of words at most.

    Raises:
        FederatedError: If lines differ in the number of fields, hold more than numbers, or no word occurs.
    """
    vectors: dict[str, Tensor] = {}
    fields = 0
    with path.open(encoding="utf-8", errors="strict", newline="\n") as file:
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
            raise FederatedError(f"{path} is no UTF-8 text: {error}.") from error
    if not vectors:
        raise FederatedError(
            f"{path} has no vector of any word in the texts. Are its words in lower case, as theirs are?"
        )
    vocabulary = Vocabulary.of(Counter({word: counts[word] for word in vectors}), max_words)
    known = torch.stack([vectors[word] for word in vocabulary.words])
    return vocabulary, torch.cat([torch.zeros(1, fields), known.mean(0, keepdim=True), known])


def _vector(values: list[str], place: str) -> Tensor:
    try:
        vector = np.array(values, dtype=np.float32)
    except ValueError as error:
        raise FederatedError(f"{place}: not all fields after the word are numbers ({error}).") from error
    if not np.isfinite(vector).all():
        raise FederatedError(f"{place}: a number is not finite.")
    return torch.from_numpy(vector)
