"""Batches that are each trained on several times in a row."""

import torch

from lightning_fed.data.batches.batches import ClientBatches
from lightning_fed.data.batches.settings import Batches

__all__ = ["RepeatedBatches"]


class RepeatedBatches(ClientBatches):
    """A client's batches, each several times in a row.

    Args:
        batches: The client's batches.
        times: How often each comes.
    """

    def __init__(self, batches: ClientBatches, times: int) -> None:
        self.batches, self.times, self.size = batches, times, batches.size

    def num_batches(self) -> int:
        """Return the number of training batches in one local epoch, each counted as often as it comes."""
        return self.times * self.batches.num_batches()

    def num_examples(self, num_batches: int) -> int:
        """Return the number of examples in the first so many batches of a local epoch, repetitions included."""
        whole, rest = divmod(num_batches, self.times)
        before, after = self.batches.num_examples(whole), self.batches.num_examples(whole + 1) if rest else 0
        return self.times * before + rest * (after - before if rest else 0)

    def epoch(self, generator: torch.Generator, shuffle: bool = True) -> Batches:
        """Yield the batches of one local epoch."""
        for batch, examples in self.batches.epoch(generator, shuffle):
            for _ in range(self.times):
                yield batch, examples

    def full(self, generator: torch.Generator) -> Batches:
        """Yield every example once."""
        return self.batches.full(generator)

    def one(self, generator: torch.Generator) -> Batches:
        """Yield a batch of one example alone."""
        return self.batches.one(generator)

    def unaugmented(self, generator: torch.Generator) -> Batches:
        """Yield every example once, without augmentation."""
        return self.batches.unaugmented(generator)

    def check_counts(self) -> None:
        """Refuse batches whose examples cannot be counted."""
        self.batches.check_counts()
