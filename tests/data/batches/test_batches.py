"""Batches: both implementations agree exactly, and only the generator determines the order."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
)

from lightning_fed.core.errors import FederatedError
from lightning_fed.data.batches.batches import ClientBatches, LoaderBatches, PoissonBatches, TensorBatches
from lightning_fed.data.batches.custom_batches import CustomBatches
from lightning_fed.data.batches.evaluation import evaluation_loader
from lightning_fed.data.batches.settings import BatchSettings


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def tensors(n, start=0):
    labels = torch.arange(start, start + n)
    return TensorDataset(labels[:, None] * torch.tensor([1.0, 0.5]), labels)


def assert_same(left, right):
    left, right = list(left), list(right)
    assert len(left) == len(right)
    for (batch, size), (other, other_size) in zip(left, right, strict=True):
        assert type(batch) is type(other)
        assert size == other_size
        for tensor, twin in zip(batch, other, strict=True):
            assert tensor.dtype == twin.dtype
            assert torch.equal(tensor, twin)


def labels_of(batches):
    return [batch[1].tolist() for batch, _ in batches]


class Doubled(Dataset):
    """A map-style data set other than TensorDataset."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return torch.tensor([2.0 * index]), index


class Random(Doubled):
    """Examples that draw from the global generators, like augmentations."""

    def __getitem__(self, index):
        return torch.rand(3), np.random.rand(), index


@given(
    n=st.integers(0, 25),
    batch_size=st.integers(1, 30),
    full_batch_size=st.integers(1, 30),
    drop_last=st.booleans(),
    by_setting=st.booleans(),
    by_call=st.booleans(),
    nested=st.integers(0, 2),
    seed=st.integers(0, 2**40),
)
def test_tensor_and_loader_batches_agree_exactly(
    n, batch_size, full_batch_size, drop_last, by_setting, by_call, nested, seed
):
    dataset = tensors(n + nested)
    for _ in range(nested):
        dataset = Subset(dataset, list(range(1, len(dataset)))[::-1])
    chosen = BatchSettings(batch_size, full_batch_size, by_setting, drop_last)
    fast, slow = TensorBatches.of(dataset, chosen), LoaderBatches(dataset, chosen)
    assert fast.size == slow.size == n
    assert fast.num_batches() == slow.num_batches()
    left, right = generator(seed), generator(seed)
    for _ in range(2):  # the second epoch continues with the generator's state
        assert_same(fast.epoch(left, by_call), slow.epoch(right, by_call))
        assert_same(fast.full(left), slow.full(right))
        assert torch.equal(left.get_state(), right.get_state())


@given(n=st.integers(0, 25), batch_size=st.integers(1, 30), drop_last=st.booleans(), seed=st.integers(0, 2**40))
def test_epoch_sees_every_example_once(n, batch_size, drop_last, seed):
    batches = TensorBatches.of(tensors(n), BatchSettings(batch_size, drop_last=drop_last))
    epoch = list(batches.epoch(generator(seed)))
    sizes = [size for _, size in epoch]
    assert len(sizes) == batches.num_batches()
    assert sizes == [len(batch[1]) for batch, _ in epoch]
    seen = [label for labels in labels_of(epoch) for label in labels]
    assert len(seen) == len(set(seen))
    if drop_last and n >= batch_size:
        assert sizes == [batch_size] * (n // batch_size)
    else:
        assert sorted(seen) == list(range(n))


def test_order_is_one_permutation_per_epoch_from_the_generator():
    batches = TensorBatches.of(tensors(7), BatchSettings(batch_size=3))
    ours, plain = generator(5), generator(5)
    for _ in range(3):
        expected = torch.randperm(7, generator=plain)
        assert labels_of(batches.epoch(ours)) == [part.tolist() for part in expected.split(3)]


@pytest.mark.parametrize("kind", [TensorBatches.of, LoaderBatches])
def test_order_depends_only_on_the_generator(kind):
    batches = kind(tensors(20), BatchSettings(batch_size=6))
    torch.manual_seed(1)
    first = labels_of(batches.epoch(generator(3)))
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert labels_of(batches.epoch(generator(3))) == first
    assert labels_of(batches.epoch(generator(4))) != first
    torch.manual_seed(1)
    labels_of(batches.epoch(generator(3)))
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is unchanged
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_order_is_the_stored_one_without_shuffling():
    stored = [[0, 1, 2], [3, 4]]
    assert labels_of(TensorBatches.of(tensors(5), BatchSettings(3)).epoch(generator(), shuffle=False)) == stored
    assert labels_of(TensorBatches.of(tensors(5), BatchSettings(3, shuffle=False)).epoch(generator())) == stored


def test_full_pass_uses_the_stored_order_and_large_batches():
    batches = TensorBatches.of(tensors(5), BatchSettings(batch_size=1, full_batch_size=4, drop_last=True))
    assert labels_of(batches.full(generator())) == [[0, 1, 2, 3], [4]]


@pytest.mark.parametrize("kind", [TensorBatches.of, LoaderBatches])
def test_small_and_empty_clients(kind):
    tiny = kind(tensors(3), BatchSettings(batch_size=8, drop_last=True))
    assert tiny.num_batches() == 1  # its only batch, even though it is short
    assert [size for _, size in tiny.epoch(generator())] == [3]
    empty = kind(tensors(0), BatchSettings(batch_size=8, num_workers=1 if kind is LoaderBatches else 0))
    assert (empty.size, empty.num_batches()) == (0, 0)
    assert list(empty.epoch(generator())) == list(empty.full(generator())) == []


def test_batch_owns_its_memory():
    dataset = tensors(4)
    for batch, _ in TensorBatches.of(dataset, BatchSettings(4)).epoch(generator(), shuffle=False):
        batch[0].zero_()
    assert dataset.tensors[0][3].tolist() == [3.0, 1.5]


def test_nested_subsets_are_resolved():
    dataset = tensors(10)
    batches = TensorBatches.of(Subset(Subset(dataset, range(2, 10)), torch.tensor([0, 3, -1])), BatchSettings(2))
    assert batches.tensors is dataset.tensors
    assert batches.indices.tolist() == [2, 5, 9]
    assert labels_of(batches.full(generator())) == [[2, 5, 9]]
    assert labels_of(TensorBatches.of(Subset(dataset, [-1, 0]), BatchSettings(2)).full(generator())) == [[9, 0]]


def test_out_of_range_subset_is_rejected():
    with pytest.raises(FederatedError, match=r"examples 0 to 10.*only 10"):
        TensorBatches.of(Subset(tensors(10), [0, 10]), BatchSettings(2))


class WithTargets(TensorDataset):
    targets = None


class Shifted(TensorDataset):
    def __getitem__(self, index):
        return tuple(tensor + 1 for tensor in super().__getitem__(index))


class ShiftedMany(TensorDataset):
    def __getitems__(self, indices):
        return [tuple(tensor[index] + 1 for tensor in self.tensors) for index in indices]


class Shorter(TensorDataset):
    def __len__(self):
        return 2


class ShiftedSubset(Subset):
    def __getitem__(self, index):
        return tuple(tensor + 1 for tensor in super().__getitem__(index))

    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.parametrize(
    ("dataset", "fast"),
    [
        (tensors(4), True),
        (WithTargets(torch.arange(4.0), torch.arange(4)), True),
        (Subset(WithTargets(torch.arange(4.0), torch.arange(4)), [1, 2]), True),
        (Shifted(torch.arange(4.0), torch.arange(4)), False),
        (ShiftedMany(torch.arange(4.0), torch.arange(4)), False),
        (Shorter(torch.arange(4.0), torch.arange(4)), False),
        (Subset(Shifted(torch.arange(4.0), torch.arange(4)), [1, 2]), False),
        (ShiftedSubset(tensors(4), [1, 2]), False),
        (Subset(ShiftedSubset(tensors(4), [1, 2]), [1]), False),
        (Doubled(4), False),
        ([(torch.zeros(1), 0), (torch.ones(1), 1)], False),
    ],
)
def test_only_plain_tensor_datasets_are_read_directly(dataset, fast):
    chosen = BatchSettings(3)
    batches = TensorBatches.of(dataset, chosen)
    assert (batches is not None) == fast
    loader = DataLoader(dataset, batch_size=3)
    expected = [(batch, len(batch[1])) for batch in loader]
    assert_same((batches or LoaderBatches(dataset, chosen)).epoch(generator(), shuffle=False), expected)


def test_collate_function_makes_the_batches():
    def collate(examples):
        features, labels = default_collate(examples)
        return {"x": features, "y": labels}

    chosen = BatchSettings(batch_size=2, collate_fn=collate)
    assert TensorBatches.of(tensors(3), chosen) is None
    epoch = list(LoaderBatches(tensors(3), chosen).epoch(generator(), shuffle=False))
    assert [(batch["y"].tolist(), size) for batch, size in epoch] == [([0, 1], 2), ([2], 1)]


@pytest.mark.thorough
def test_workers_follow_the_generator_and_change_every_epoch():
    batches = LoaderBatches(Random(4), BatchSettings(batch_size=4, shuffle=False, num_workers=1))

    def draws(stream):
        [(batch, _)] = batches.epoch(stream)
        return torch.cat([batch[0].flatten().double(), batch[1]])

    stream = generator(1)
    first, second = draws(stream), draws(stream)
    assert torch.equal(first, draws(generator(1)))
    assert not torch.equal(first, second)


def test_loader_yields_the_epoch():
    batches = LoaderBatches(tensors(9), BatchSettings(batch_size=4))
    assert_same(((batch, len(batch[1])) for batch in batches.loader(generator(2))), batches.epoch(generator(2)))


def marked(batch, stream):
    """Append a random number for each example to a batch."""
    return [*batch, torch.randint(2**40, batch[1].shape, generator=stream)]


def custom(dataset, chosen):
    plain = LoaderBatches(dataset, chosen)
    return CustomBatches(lambda stream: plain.loader(stream), 0, chosen, size=len(dataset))


@pytest.mark.thorough
@given(n=st.integers(1, 12), batch_size=st.integers(1, 13), workers=st.just(0), seed=st.integers(0, 2**40))
@example(n=5, batch_size=2, workers=1, seed=3)
def test_augmentation_does_not_depend_on_how_batches_are_made(n, batch_size, workers, seed):
    dataset = tensors(n)
    chosen = BatchSettings(batch_size, 3, augment=marked)
    kinds = [TensorBatches.of(dataset, chosen), LoaderBatches(dataset, replace(chosen, num_workers=workers))]
    streams = [generator(seed) for _ in range(3)]
    epochs = []
    for _ in range(2):
        fast, slow = (list(kind.epoch(stream)) for kind, stream in zip(kinds, streams[:2], strict=True))
        assert_same(fast, slow)
        assert_same(fast, custom(dataset, chosen).epoch(streams[2]))
        streams[2].set_state(streams[0].get_state())  # a custom loader may draw more numbers
        epochs.append(torch.cat([batch[2] for batch, _ in fast]))
    assert_same(kinds[0].full(generator(seed)), kinds[1].full(generator(seed)))
    assert not set(epochs[0].tolist()) & set(epochs[1].tolist())  # an example's number changes in every epoch


@pytest.mark.parametrize("kind", [TensorBatches.of, LoaderBatches, custom])
def test_augmentation_uses_the_generator_and_precedes_transforms(kind):
    def last_only(batch):
        return batch[2]

    batches = kind(tensors(6), BatchSettings(batch_size=4, augment=marked, transform=last_only))
    for draw in (batches.epoch, batches.full):
        torch.manual_seed(1)
        first = torch.cat([numbers for numbers, _ in draw(generator(3))])
        state = torch.get_rng_state()
        torch.manual_seed(2)
        assert first.equal(torch.cat([numbers for numbers, _ in draw(generator(3))]))
        assert not first.equal(torch.cat([numbers for numbers, _ in draw(generator(4))]))
        assert len(first.unique()) == 6
        if kind is TensorBatches.of:
            torch.manual_seed(1)
            assert torch.equal(torch.get_rng_state(), state)  # the global generator is unchanged


@pytest.mark.parametrize("kind", [TensorBatches.of, LoaderBatches, custom])
def test_unaugmented_pass_is_transformed_and_draws_nothing(kind):
    plain, augmented = (kind(tensors(5), BatchSettings(2, transform=tuple, augment=a)) for a in (None, marked))
    left, right = generator(5), generator(5)
    assert_same(plain.full(left), augmented.unaugmented(right))
    assert torch.equal(left.get_state(), right.get_state())
    assert all(type(batch) is tuple and len(batch) == 2 for batch, _ in augmented.unaugmented(right))


class Pictures(Dataset):
    """Examples that are not converted to tensors."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return object(), index


def test_examples_that_cannot_be_batched_raise_with_a_remedy():
    batches = LoaderBatches(Subset(Pictures(), [2, 0]), BatchSettings(batch_size=2))
    with pytest.raises(
        FederatedError, match=r"Examples of Pictures do not make a batch.*found <class 'object'>.*ToTensor"
    ):
        next(batches.epoch(generator(0)))
    own = LoaderBatches(Pictures(), BatchSettings(batch_size=2, collate_fn=lambda examples: len(examples)))
    assert [batch for batch, _ in own.epoch(generator(0))] == [2, 1]


class Sizes(Dataset):
    """Examples of different sizes."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return torch.zeros(3, 4 + index), index


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_examples_of_different_sizes_raise_with_a_remedy(num_workers):
    options = BatchSettings(batch_size=2, num_workers=num_workers)
    remedy = r"Examples of Sizes do not make a batch.*\[3, 4\].*transform.*image_transform.*collate_fn"
    with pytest.raises(FederatedError, match=remedy):
        next(LoaderBatches(Subset(Sizes(), [0, 1]), options).epoch(generator(0)))
    for transform in (None, list):
        loader = evaluation_loader(Sizes(), replace(options, transform=transform))
        with pytest.raises(FederatedError, match=remedy):
            next(iter(loader))


def test_dataset_errors_are_not_changed():
    class Broken(Sizes):
        def __getitem__(self, index):
            raise RuntimeError("no disk")

    with pytest.raises(RuntimeError, match="no disk"):
        next(LoaderBatches(Broken(), BatchSettings(batch_size=2)).epoch(generator(0)))
    with pytest.raises(RuntimeError, match="no disk"):
        next(iter(evaluation_loader(Broken(), BatchSettings(batch_size=2))))


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


def test_poisson_batches_are_the_same_for_tensors_and_loaders() -> None:
    assert drawn(batches("tensors"), 3) == drawn(batches("loader"), 3)


@pytest.mark.thorough
def test_poisson_batches_sample_every_example_equally_often() -> None:
    found = drawn(batches(), epochs=500)
    assert len(found) == 500 * 4
    counts = torch.bincount(torch.tensor([row for rows in found for row in rows]), minlength=SIZE) / len(found)
    assert float((counts - 0.25).abs().max()) < 0.05  # five standard deviations
    sizes = torch.tensor([float(len(rows)) for rows in found])
    assert float(sizes.mean()) == pytest.approx(10, abs=0.4)
    assert float(sizes.var()) == pytest.approx(SIZE * 0.25 * 0.75, rel=0.15)
    both = sum(0 in a and 0 in b for a, b in zip(found[::2], found[1::2], strict=True)) / 1000
    assert both == pytest.approx(1 / 16, abs=0.03)  # batches are independent


def test_poisson_draws_depend_on_the_run_and_the_epoch() -> None:
    assert drawn(batches(), 2) == drawn(batches(), 2)
    assert drawn(batches(), 1) != drawn(batches(), 2)[4:]
    # even with the same batch generator: its 32-bit seeds collide for some of many rounds and clients
    assert drawn(batches(where=(1, 0))) != drawn(batches()) != drawn(batches(where=(0, 1)))
    assert drawn(batches(seed=1)) != drawn(batches())
    assert drawn(batches(), seed=1) != drawn(batches())


def test_single_batch_has_every_example() -> None:
    assert drawn(batches(batch_size=SIZE)) == [list(range(SIZE))]


@pytest.mark.parametrize("kind", ["tensors", "loader"])
def test_empty_batches_are_none_and_skip_transforms(kind: str) -> None:
    def changed(batch: Any) -> Any:
        assert len(batch[0]) > 0
        return [batch[0] + 1, batch[1]]

    of = batches(kind, batch_size=1, transform=changed, augment=lambda batch, stream: changed(batch))
    found = list(of.epoch(torch.Generator().manual_seed(0)))
    assert len(found) == SIZE
    assert any(batch is None for batch, _ in found)
    assert all(examples == 0 for batch, examples in found if batch is None)
    assert all(torch.equal(batch[0], batch[1] + 2.0) for batch, _ in found if batch is not None)


def test_sizes_and_full_passes_match_the_underlying_batches() -> None:
    of = batches(batch_size=16)
    assert (of.size, of.num_batches(), of.num_examples(2)) == (SIZE, 3, 27)
    assert of.expected_size == pytest.approx(SIZE / 3)
    for name in ("full", "unaugmented", "one"):
        assert sum(examples for _, examples in getattr(of, name)(torch.Generator())) in (SIZE, 1)
