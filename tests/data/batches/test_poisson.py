"""Poisson batches: who is in them, that they repeat with the seed, and empty ones."""

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from lightning_fed.data.batches.batches import ClientBatches, LoaderBatches, TensorBatches
from lightning_fed.data.batches.poisson import PoissonBatches
from lightning_fed.data.batches.settings import BatchSettings

SIZE = 40


class Plain(Dataset[Any]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(float(index)), index


def batches(kind: str = "tensors", seed: int = 0, where: tuple[int, int] = (0, 0), **settings: Any) -> PoissonBatches:
    given = BatchSettings(**{"batch_size": 10, **settings})
    inner: Any = LoaderBatches(Plain(), given)
    if kind == "tensors":
        inner = TensorBatches.of(TensorDataset(torch.arange(float(SIZE)), torch.arange(SIZE)), given)
    return PoissonBatches(inner, seed, *where)


def drawn(of: ClientBatches, epochs: int = 1, seed: int = 0) -> list[list[int]]:
    stream = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(epochs):
        for batch, examples in of.epoch(stream):
            rows = [] if batch is None else batch[1].tolist()
            assert len(rows) == examples
            found.append(rows)
    return found


def test_both_kinds_of_data_have_the_same_batches() -> None:
    assert drawn(batches("tensors"), 3) == drawn(batches("loader"), 3)


@pytest.mark.thorough
def test_every_example_is_in_each_batch_with_the_same_probability() -> None:
    found = drawn(batches(), epochs=500)
    assert len(found) == 500 * 4
    counts = torch.bincount(torch.tensor([row for rows in found for row in rows]), minlength=SIZE) / len(found)
    assert float((counts - 0.25).abs().max()) < 0.05  # five standard deviations
    sizes = torch.tensor([float(len(rows)) for rows in found])
    assert float(sizes.mean()) == pytest.approx(10, abs=0.4)
    assert float(sizes.var()) == pytest.approx(SIZE * 0.25 * 0.75, rel=0.15)
    both = sum(0 in a and 0 in b for a, b in zip(found[::2], found[1::2], strict=True)) / 1000
    assert both == pytest.approx(1 / 16, abs=0.03)  # batches are independent


def test_draws_follow_from_the_run_and_the_epoch() -> None:
    assert drawn(batches(), 2) == drawn(batches(), 2)
    assert drawn(batches(), 1) != drawn(batches(), 2)[4:]
    # also for the same generator of batches, whose 32 bits coincide for some of many rounds and clients
    assert drawn(batches(where=(1, 0))) != drawn(batches()) != drawn(batches(where=(0, 1)))
    assert drawn(batches(seed=1)) != drawn(batches())
    assert drawn(batches(), seed=1) != drawn(batches())


def test_one_batch_has_everybody() -> None:
    assert drawn(batches(batch_size=SIZE)) == [list(range(SIZE))]


@pytest.mark.parametrize("kind", ["tensors", "loader"])
def test_empty_batches_are_none_and_see_no_transform(kind: str) -> None:
    def changed(batch: Any) -> Any:
        assert len(batch[0]) > 0
        return [batch[0] + 1, batch[1]]

    of = batches(kind, batch_size=1, transform=changed, augment=lambda batch, stream: changed(batch))
    found = list(of.epoch(torch.Generator().manual_seed(0)))
    assert len(found) == SIZE
    assert any(batch is None for batch, _ in found)
    assert all(examples == 0 for batch, examples in found if batch is None)
    assert all(torch.equal(batch[0], batch[1] + 2.0) for batch, _ in found if batch is not None)


def test_the_rest_is_that_of_the_batches() -> None:
    of = batches(batch_size=16)
    assert (of.size, of.num_batches(), of.num_examples(2)) == (SIZE, 3, 27)
    assert of.expected_size == pytest.approx(SIZE / 3)
    for name in ("full", "unaugmented", "one"):
        assert sum(examples for _, examples in getattr(of, name)(torch.Generator())) in (SIZE, 1)
