"""Settings of batches, also taken from an existing loader."""

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, WeightedRandomSampler
from torchvision.transforms import v2

from lightning_fed import FederatedDataModule
from lightning_fed.core.errors import FederatedError
from lightning_fed.data import Iid
from lightning_fed.data.batches.settings import BatchSettings, Chain, chain
from tests.helpers.training import classification


class Augmented(Dataset):
    def __init__(self, transform, n=6):
        self.transform, self.n = transform, n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return self.transform(torch.zeros(())), index


def note(worker_id):
    np.random.seed(5)


class Drawn(Augmented):
    def __getitem__(self, index):
        return torch.tensor(np.random.rand()), index


def make_loader(**options):
    return DataLoader(Drawn(None), batch_size=6, num_workers=1, **options)


def test_from_loader_keeps_worker_options():
    loader = make_loader(worker_init_fn=note, timeout=50, prefetch_factor=3, multiprocessing_context="fork")
    data = FederatedDataModule.from_loader(loader, partition=Iid(1))
    made = data.client_dataloader(0, torch.Generator())
    assert (made.timeout, made.prefetch_factor, made.num_workers) == (50, 3, 1)
    assert made.multiprocessing_context.get_start_method() == "fork"
    [(batch, _)] = data.client_batches(0).epoch(torch.Generator())
    expected = np.random.RandomState(5).rand(6)  # the user's function runs last
    assert batch[0].tolist() == pytest.approx(expected.tolist())


def test_from_loader_reads_a_custom_batch_sampler():
    dataset = Augmented(None)
    loader = DataLoader(dataset, batch_sampler=BatchSampler(RandomSampler(dataset), 4, drop_last=True))
    data = FederatedDataModule.from_loader(loader, partition=Iid(2))
    assert (data.batch_size, data.shuffle, data.drop_last) == (4, True, True)


def test_from_loader_warns_about_unused_options():
    with pytest.warns(UserWarning, match="does not use the loader's generator"):
        FederatedDataModule.from_loader(
            DataLoader(Augmented(None), shuffle=True, generator=torch.Generator()), partition=Iid(2)
        )
    with pytest.warns(UserWarning, match="persistent_workers=True"):
        FederatedDataModule.from_loader(make_loader(persistent_workers=True), partition=Iid(2))


class Own(DataLoader):
    def __iter__(self):
        return super().__iter__()


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda: Own(Augmented(None)), "an Own makes its batches in its own way.*client_dataloader"),
        (lambda: DataLoader(Augmented(None), batch_size=None), "batch_size=None.*client_dataloader"),
        (
            lambda: DataLoader(
                Augmented(None), batch_sampler=BatchSampler(WeightedRandomSampler(torch.ones(6), 6), 2, False)
            ),
            "order comes from WeightedRandomSampler.*client_dataloader",
        ),
    ],
)
def test_from_loader_rejects_unsupported_loaders(loader, message):
    with pytest.raises(FederatedError, match=message):
        FederatedDataModule.from_loader(loader(), partition=Iid(2))


@pytest.mark.parametrize("options", [{"shuffle": True}, [("timeout", 3)]])
def test_unknown_loader_options_are_rejected(options):
    with pytest.raises(FederatedError, match="loader_options may give timeout, prefetch_factor"):
        FederatedDataModule(clients=[Augmented(None)], loader_options=options)


def test_loader_options_without_workers_are_rejected():
    with pytest.raises(
        FederatedError, match=r"loader_options=\{'timeout': 3\}\) is for loader processes, and num_workers=0"
    ):
        FederatedDataModule(clients=[Augmented(None)], loader_options={"timeout": 3})
    loader = DataLoader(Augmented(None), num_workers=1, timeout=3)
    assert FederatedDataModule.from_loader(loader, Iid(2)).loader_options["timeout"] == 3
    assert FederatedDataModule.from_loader(loader, Iid(2), num_workers=0).loader_options == {}


def test_batch_functions_are_chained_in_order():
    assert chain("Data", "transform", None) is chain("Data", "transform", []) is None
    assert chain("Data", "transform", [len]) is chain("Data", "transform", len) is len
    several = chain("Data", "transform", [lambda batch: [*batch, 1], lambda batch: batch * 2])
    assert several([0]) == [0, 1, 0, 1]
    for functions, message in (
        (3, r"Data\(transform=3\): transform must be a function of a whole batch"),
        ([len, "x"], "transform must be a function"),
        ([Chain], r"Data\(transform=Chain\) is a class: instantiate it"),
    ):
        with pytest.raises(FederatedError, match=message):
            chain("Data", "transform", functions)


def test_augmentation_takes_one_number_per_epoch_from_the_generator():
    stream, twin = (torch.Generator().manual_seed(1) for _ in range(2))
    assert BatchSettings().augment_stream(stream) is None
    assert torch.equal(stream.get_state(), twin.get_state())
    first, second = (BatchSettings(augment=len).augment_stream(stream) for _ in range(2))
    assert first.initial_seed() == int(torch.randint(2**63 - 1, (), generator=twin))
    assert first.initial_seed() != second.initial_seed()


def test_function_of_inputs_only_is_rejected_as_augmentation():
    data = FederatedDataModule([classification(4, 0)], augment=v2.RandomHorizontalFlip())
    with pytest.raises(
        FederatedError, match=r"augment=RandomHorizontalFlip\(p=0.5\) returned the generator.*RandomFlip"
    ):
        next(data.client_batches(0).epoch(torch.Generator()))
