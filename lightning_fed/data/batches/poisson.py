"""Batches by Poisson sampling: every example is in each of them independently, with one probability."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_fed.core.seeds import KeyedStream, Purpose
from lightning_fed.data.batches.batches import ClientBatches, LoaderBatches, TensorBatches
from lightning_fed.data.batches.settings import Batches


class PoissonBatches(ClientBatches):
    """A client's examples in batches by Poisson sampling, as many per epoch as without.

    Empty batches are yielded as None. The draws cannot be predicted without the run's seed. Those of other rounds and
    clients are independent also where a generator of batches, which has 32 bits of seed, is the same.
    """

    def __init__(self, batches: TensorBatches | LoaderBatches, seed: int, round: int, client: int) -> None:
        self.batches, self.size, self._key = batches, batches.size, (seed, Purpose.POISSON, round, client)
        self.expected_size = batches.size / max(1, batches.num_batches())

    def num_batches(self) -> int:
        """Return the number of training batches in one local epoch."""
        return self.batches.num_batches()

    def num_examples(self, num_batches: int) -> int:
        """Return the expected number of examples in some batches."""
        return round(num_batches * self.size / max(1, self.num_batches()))

    def epoch(self, generator: torch.Generator, shuffle: bool = True) -> Batches:
        """Yield the batches of one local epoch; ``shuffle`` does not matter."""
        settings = self.batches.settings
        stream = settings.augment_stream(generator)
        of_epoch = int(torch.randint(2**63 - 1, (), generator=generator))
        bits = KeyedStream(*self._key, of_epoch)
        chosen = list(self._draws(bits))
        some = settings.finish(self.batches.load([rows for rows in chosen if len(rows)], generator), stream)
        for rows in chosen:
            yield next(some) if len(rows) else (None, 0)

    def _draws(self, bits: KeyedStream) -> Iterator[Tensor]:
        """Yield the positions of the examples in each batch, ascending."""
        count = self.num_batches()
        for _ in range(count):
            yield torch.nonzero(bits.uniform(self.size) < 1.0 / count).flatten()

    def full(self, generator: torch.Generator) -> Batches:
        """Yield every example once."""
        return self.batches.full(generator)

    def unaugmented(self, generator: torch.Generator) -> Batches:
        """Yield every example once, without augmentation."""
        return self.batches.unaugmented(generator)

    def one(self, generator: torch.Generator) -> Batches:
        """Yield a batch of one example."""
        return self.batches.one(generator)
