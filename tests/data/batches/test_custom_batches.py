"""Batches of a user's loader."""

import pytest
import torch
from pytorch_lightning.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_fed import FederatedDataModule
from lightning_fed.algorithms import FedAvg, Mime
from lightning_fed.core.errors import FederatedError
from lightning_fed.data.batches.custom_batches import CustomBatches
from lightning_fed.data.batches.settings import BatchSettings
from tests.helpers.detection import Buckets, Detection, Detector, collate
from tests.helpers.training import parameters, trainer


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def tensors(n, start=0):
    labels = torch.arange(start, start + n)
    return TensorDataset(labels[:, None] * torch.tensor([1.0, 0.5]), labels)


def labels_of(batches):
    return [batch[1].tolist() for batch, _ in batches]


@pytest.mark.parametrize("size", [None, 7])
def test_combined_loader_is_rejected(size):
    with pytest.raises(FederatedError, match="a CombinedLoader, whose items are not batches.* zips the loaders"):
        CustomBatches(lambda _: CombinedLoader({"a": DataLoader(tensors(7))}), "c", BatchSettings(4), size)


class Zipped:
    """What the error recommends."""

    def __init__(self, *loaders):
        self.loaders = loaders

    def __len__(self):
        return min(map(len, self.loaders))

    def __iter__(self):
        return zip(*self.loaders, strict=False)


def test_zipped_loaders_yield_pairs_of_batches():
    settings = BatchSettings(4, batch_size_of=lambda pair: len(pair[0][1]))
    batches = CustomBatches(
        lambda _: Zipped(DataLoader(tensors(7), 4), DataLoader(tensors(3, 10), 2)), "c", settings, size=7
    )
    found = [(a[1].tolist(), b[1].tolist(), n) for (a, b), n in batches.epoch(generator(), shuffle=True)]
    assert found == [([0, 1, 2, 3], [10, 11], 4), ([4, 5, 6], [12], 3)]


def test_custom_shuffling_loader_matches_its_batches():
    def make(stream):
        return DataLoader(tensors(7), batch_size=3, shuffle=True, generator=stream, drop_last=True)

    batches = CustomBatches(make, "ann", BatchSettings(full_batch_size=5))
    assert (batches.size, batches.num_batches()) == (7, 2)
    assert labels_of(batches.epoch(generator(1))) == [labels.tolist() for _, labels in make(generator(1))]
    assert [size for _, size in batches.epoch(generator(1))] == [3, 3]
    assert labels_of(batches.full(generator())) == [[0, 1, 2, 3, 4], [5, 6]]


@pytest.mark.parametrize(("batch_size", "expected"), [(4, [0, 4, 4]), (3, [0, 3, 6, 6]), (8, [0, 0])])
def test_custom_loader_with_drop_last_omits_the_last_examples(batch_size, expected):
    loader = DataLoader(tensors(7), batch_size, drop_last=True)
    batches = CustomBatches(lambda _: loader, 0, BatchSettings())
    assert [batches.num_examples(k) for k in range(len(expected))] == expected
    assert expected[-1] == sum(n for _, n in batches.epoch(generator()))
    assert batches.size == 7


def test_loader_over_a_subset_counts_and_reads_that_subset():
    def make(stream):
        return DataLoader(tensors(10), batch_size=2, sampler=SubsetRandomSampler([1, 5, 8], generator=stream))

    batches = CustomBatches(make, 0, BatchSettings())
    assert (batches.size, batches.num_batches()) == (3, 2)
    assert sorted(torch.cat([batch[1] for batch, _ in batches.full(generator())]).tolist()) == [1, 5, 8]


def batched(sampler, size=2, drop_last=False):
    """Return a function that makes loaders over [0, 1, ..., 6] with a given batch sampler, not the loader's."""
    return lambda stream: DataLoader(tensors(7), batch_sampler=BatchSampler(sampler(stream), size, drop_last))


def test_custom_batch_sampler_is_counted_by_its_sampler():
    make = batched(lambda stream: SubsetRandomSampler([1, 5, 6], generator=stream))
    batches = CustomBatches(make, 0, BatchSettings())
    assert sorted(torch.cat([batch[1] for batch, _ in batches.full(generator())]).tolist()) == [1, 5, 6]
    assert [batches.num_examples(k) for k in range(4)] == [0, 2, 3, 3]


def test_loader_with_a_custom_batch_sampler_has_a_stored_order():
    make = batched(lambda stream: RandomSampler(tensors(7), generator=stream), size=3, drop_last=True)
    batches = CustomBatches(make, 0, BatchSettings())
    assert labels_of(batches.epoch(generator(), shuffle=False)) == [[0, 1, 2], [3, 4, 5]]
    buckets = CustomBatches(lambda _: DataLoader(tensors(4), batch_sampler=[[3], [1, 0], [2]]), 0, BatchSettings())
    with pytest.warns(UserWarning, match="decides on its own which examples"):
        assert labels_of(buckets.epoch(generator(), shuffle=False)) == [[3], [1, 0], [2]]


class Shorter(list):
    """Batches that end before their stated length."""

    def __len__(self):
        return 1 + super().__len__()


def test_loader_that_ends_before_its_length_warns():
    def epoch(kind):
        loader = kind([torch.zeros(2, 1), torch.zeros(2, 1)])
        return [n for _, n in CustomBatches(lambda _: loader, "ann", BatchSettings(), size=4).epoch(generator())]

    assert epoch(list) == [2, 2]
    with pytest.warns(
        UserWarning, match=r"client_dataloader\('ann'.*ends after 2 batches, and its length is 3.*__len__"
    ):
        assert epoch(Shorter) == [2, 2]


def weighted(stream):
    return WeightedRandomSampler([9.0, 1, 1, 1, 1, 1, 1], 7, generator=stream)


@pytest.mark.parametrize(
    "make",
    [
        lambda stream: DataLoader(tensors(7), 2, sampler=weighted(stream)),
        lambda stream: DataLoader(tensors(7), 2, sampler=RandomSampler(tensors(7), num_samples=5, generator=stream)),
        batched(weighted),
    ],
    ids=["weighted", "some", "in a batch sampler"],
)
def test_full_pass_over_a_resampling_loader_warns(make):
    batches = CustomBatches(make, "ann", BatchSettings())
    assert sum(n for _, n in batches.epoch(generator())) == batches.size  # local epochs keep the loader's sampling
    for passes in (batches.full, batches.unaugmented):
        with pytest.warns(UserWarning, match="with (Weighted)?RandomSampler.*full-batch gradients.* random draw"):
            assert sum(n for _, n in passes(generator())) == batches.size


def test_iterable_with_a_length_is_accepted_if_the_size_is_given():
    batches = CustomBatches(lambda _: [{"x": torch.zeros(3, 2)}, {"x": torch.zeros(1, 2)}], 0, BatchSettings(), size=4)
    assert (batches.size, batches.num_batches()) == (4, 2)
    assert [size for _, size in batches.epoch(generator())] == [3, 1]
    assert [size for _, size in batches.full(generator())] == [3, 1]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(5))


def test_loader_that_cannot_count_is_rejected():
    with pytest.raises(FederatedError, match=r"client_dataloader\('ann'.*DataLoader.*number of examples.*client_size"):
        CustomBatches(lambda _: DataLoader(Stream(), batch_size=2), "ann", BatchSettings())
    batches = CustomBatches(lambda _: DataLoader(Stream(), batch_size=2), "ann", BatchSettings(), size=5)
    assert [size for _, size in batches.full(generator())] == [2, 2, 1]
    with pytest.raises(FederatedError, match=r"client_dataloader\('ann'.*no len.*__len__"):
        batches.num_batches()


def marked(batch, stream):
    """Append a random number for each example to a batch."""
    return [*batch, torch.randint(2**40, batch[1].shape, generator=stream)]


def test_epochs_of_a_fixed_loader_are_augmented_differently():
    batches = CustomBatches(lambda _: DataLoader(tensors(3), batch_size=3), 0, BatchSettings(augment=marked))
    stream = generator()
    first, second = ([batch[2] for batch, _ in batches.epoch(stream)] for _ in range(2))
    assert not torch.equal(first[0], second[0])


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        (lambda stream: {"batch_size": 4, "shuffle": True, "generator": stream}, [4, 4, 2]),
        (lambda stream: {"batch_size": 4, "shuffle": True, "generator": stream, "drop_last": True}, [4, 4]),
        (lambda stream: {"batch_sampler": Buckets(stream)}, [4, 5, 1]),
        (lambda stream: {"batch_sampler": [[0, 1, 2], [3], list(range(4, 10))]}, [3, 1, 6]),
    ],
)
def test_loader_is_counted_by_its_sampler_for_any_batch_structure(options, sizes, workers):
    def make(stream):
        return DataLoader(Detection(), collate_fn=collate, num_workers=workers, **options(stream))

    batches = CustomBatches(make, "ann", BatchSettings(full_batch_size=6))
    assert batches.size == 10
    assert [n for _, n in batches.epoch(torch.Generator())] == sizes
    assert [len(batch[0]) for batch, _ in batches.epoch(torch.Generator())] == sizes
    assert sum(n for _, n in batches.full(torch.Generator())) == 10


class Short(Buckets):
    def __iter__(self):
        return iter([[0, 1, 2], [3]])


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda stream: DataLoader(Detection(), batch_sampler=Short(stream), collate_fn=collate), None),
        (lambda _: [torch.zeros(3, 1)] * 2, 5),
        (lambda _: DataLoader(Detection(), batch_size=2, collate_fn=collate), 9),
    ],
)
def test_pass_that_misses_or_repeats_examples_is_rejected(make, size):
    batches = CustomBatches(make, "ann", BatchSettings(), size)
    for full in (batches.full, batches.unaugmented):
        with pytest.raises(FederatedError, match="'ann'.*gave [0-9]+ examples in a pass.*which has"):
            list(full(torch.Generator()))


@pytest.mark.filterwarnings("ignore:Clients' loaders draw examples with RandomSampler")
def test_sampler_that_repeats_or_omits_examples_ignores_stored_order():
    for options, count in (({"num_samples": 4}, 4), ({"num_samples": 14, "replacement": True}, 14)):

        def make(stream, options=options):
            sampler = RandomSampler(range(10), generator=stream, **options)
            return DataLoader(Detection(), batch_size=2, sampler=sampler, collate_fn=collate)

        batches = CustomBatches(make, 0, BatchSettings())
        assert batches.size == sum(n for _, n in batches.full(torch.Generator())) == count


def test_dataset_of_whole_batches_is_not_counted_as_examples():
    ready = [[torch.zeros(4, 2)], [torch.zeros(3, 2)]]
    with pytest.raises(FederatedError, match="batch_size=None.*client_size"):
        CustomBatches(lambda _: DataLoader(ready, batch_size=None), 0, BatchSettings())
    batches = CustomBatches(lambda _: DataLoader(ready, batch_size=None), 0, BatchSettings(), size=7)
    assert [n for _, n in batches.full(torch.Generator())] == [4, 3]


def test_example_counts_of_the_first_batches_are_exact():
    batches = CustomBatches(lambda _: DataLoader(Detection(), batch_size=4, collate_fn=collate), 0, BatchSettings())
    assert [batches.num_examples(k) for k in range(4)] == [0, 4, 8, 10]
    batches = CustomBatches(lambda _: DataLoader(Detection(), batch_sampler=[[0, 1, 2], [3]]), 0, BatchSettings())
    assert [batches.num_examples(k) for k in range(3)] == [0, 3, 4]


class OwnLoaders(FederatedDataModule):
    num_clients = 2
    make = staticmethod(lambda dataset: DataLoader(dataset, batch_size=4, collate_fn=collate))

    def client_dataset(self, client_id):
        return Detection(10 - 3 * client_id)

    def client_dataloader(self, client_id, generator):
        return self.make(self.client_dataset(client_id))


class Iterates:
    """A loader that is not a ``DataLoader``."""

    def __init__(self, dataset, collate_fn=collate):
        self.dataset, self.collate_fn = dataset, collate_fn

    def __len__(self):
        return -(-len(self.dataset) // 4)

    def __iter__(self):
        for k in range(len(self)):
            yield self.collate_fn([self.dataset[i] for i in range(4 * k, min(4 * k + 4, len(self.dataset)))])


def train(data, algorithm=None, **options):
    model = Detector()
    fitted = trainer(algorithm=algorithm or FedAvg(), clients_per_round=2, max_rounds=1, engine="sequential", **options)
    fitted.fit(model, data)
    return parameters(model), {k: float(v) for k, v in fitted.callback_metrics.items() if "seconds" not in k}


@pytest.mark.parametrize("make", [OwnLoaders.make, Iterates])
def test_losses_and_full_gradients_are_weighted_by_images_per_batch(make):
    plain = FederatedDataModule(
        clients=[Detection(10), Detection(7)], batch_size=4, full_batch_size=4, collate_fn=collate, shuffle=False
    )
    own = type("Own", (OwnLoaders,), {"make": staticmethod(make)})(batch_size=4, full_batch_size=4)
    for algorithm in (FedAvg, Mime):
        one, other = train(plain, algorithm()), train(own, algorithm())
        assert torch.equal(one[0], other[0])
        assert one[1] == other[1]


def time_first(examples):
    return {"x": torch.zeros(7, len(examples), 2), "y": torch.zeros(len(examples))}


def images_alone(examples):
    return [image[:, :, :4] for image, _ in examples]


@pytest.mark.parametrize(("collate_fn", "message"), [(time_first, "not clear"), (images_alone, "may hold 3 or 4")])
def test_ambiguous_batches_are_rejected_unless_counted_by_a_function(collate_fn, message):
    own = type("Own", (OwnLoaders,), {"make": staticmethod(lambda dataset: Iterates(dataset, collate_fn))})

    class Model(Detector):
        steps = 0

        def _loss(self, batch):
            self.steps += 1
            return self.w**2

    model = Model()
    with pytest.raises(FederatedError, match=rf"client_dataloader\(0.*{message}.*batch_size_of"):
        trainer(clients_per_round=2).fit(model, type("Sized", (own,), {"client_size": lambda self, i: 10 - 3 * i})())
    assert model.steps == 0
    count = len if collate_fn is images_alone else (lambda batch: len(batch["y"]))
    trainer(clients_per_round=2, engine="sequential").fit(model, own(batch_size_of=count))
    assert model.steps > 0
