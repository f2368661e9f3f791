"""The data module: clients, their data, and the evaluation of the server model."""

import pickle
import sys
import warnings
from functools import cache

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from jsonargparse import ArgumentParser
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from lightning_fed import FederatedTrainer
from lightning_fed.core.errors import FederatedError
from lightning_fed.data import ByKey, ClientBatches, Digits, Dirichlet, FederatedDataModule, FederatedDataset, Iid
from lightning_fed.data.batches.batches import LoaderBatches, TensorBatches
from lightning_fed.data.batches.custom_batches import CustomBatches
from lightning_fed.data.datamodule import check_clients
from lightning_fed.models import MLPClassifier
from tests.helpers.training import trainer as fit_trainer


def tensors(n):
    return TensorDataset(torch.arange(float(n))[:, None], torch.arange(n) % 3)


def labels_of(batches):
    return [batch[1].tolist() for batch, _ in batches]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def doubled(batch):
    return [2 * batch[0], *batch[1:]]


def negated(batch):
    return [-batch[0], *batch[1:]]


def noisy(batch, stream):
    return [batch[0] + torch.rand(batch[0].shape, generator=stream), *batch[1:]]


# Clients


def test_clients_can_be_a_list_a_mapping_or_a_federated_dataset():
    for clients in ([tensors(3), tensors(5)], FederatedDataset([tensors(3), tensors(5)])):
        data = FederatedDataModule(clients)
        assert list(data.client_ids) == [0, 1]
        assert data.num_clients == 2
        assert data.known_sizes == [3, 5]
        assert data.client_size(1) == len(data.client_dataset(1)) == data.client_batches(1).size == 5
    data = FederatedDataModule(clients={"bob": tensors(3), "ann": tensors(5)})
    assert data.client_ids == ["bob", "ann"]
    assert data.client_size("ann") == 5


def test_clients_can_come_from_a_partition():
    train = tensors(30)
    data = FederatedDataModule(train=train, partition=Dirichlet(num_clients=4, alpha=0.5))
    assert data.client_ids == range(4)
    assert sum(data.known_sizes) == 30
    assert data.client_dataset(2).dataset is train
    assert data.clients is data.clients  # cut once


def test_partition_is_split_on_demand():
    data = FederatedDataModule(train=tensors(3), partition=Iid(num_clients=4))
    with pytest.raises(FederatedError, match="at least 4 examples"):
        data.num_clients  # noqa: B018


class OnDemand(FederatedDataModule):
    """A million clients, each built on demand."""

    built: list

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.built = []

    @property
    def num_clients(self):
        return 10**6

    def client_dataset(self, client_id):
        self.built.append(client_id)
        return tensors(1 + client_id % 7)


def test_million_on_demand_clients_are_not_scanned():
    data = OnDemand(batch_size=4)
    assert data.num_clients == 10**6
    assert data.client_ids == range(10**6)
    assert data.known_sizes is None
    assert data.built == []
    assert data.client_size(999_999) == 1 + 999_999 % 7
    assert data.client_batches(13).size == 7
    assert data.built == [999_999, 13]


def test_number_of_clients_can_be_an_attribute():
    class OnClass(FederatedDataModule):
        num_clients = 5

    class Before(FederatedDataModule):
        def __init__(self):
            self.num_clients = 5
            super().__init__()

    class After(FederatedDataModule):
        def __init__(self):
            super().__init__()
            self.num_clients = 5

    for kind in (OnClass, Before, After):
        assert kind().client_ids == range(5)
        assert kind().num_clients == 5
        assert kind().known_sizes is None
        with pytest.raises(FederatedError, match=rf"{kind.__name__} has no clients.*client_dataset"):
            kind().client_dataset(0)


def test_on_demand_client_ids_can_be_names():
    class Assigned(FederatedDataModule):
        def setup(self, stage):
            self.client_ids = ["ann", "bob"]

        def client_dataset(self, client_id):
            return tensors(len(client_id))

    class Overridden(FederatedDataModule):
        client_ids = ("ann", "bob")

    assigned = Assigned()
    assigned.setup("fit")
    for data in (assigned, Overridden()):
        assert list(data.client_ids) == ["ann", "bob"]
        assert data.num_clients == 2
        assert data.known_sizes is None
    assert assigned.client_size("bob") == 3


class Named(FederatedDataModule):
    def __init__(self, ids):
        super().__init__()
        self.client_ids = ids

    def client_dataset(self, client_id):
        return tensors(3)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ({"a", "b"}, r"Named.client_ids is a set: give a sequence of ints or strs"),
        ((name for name in "ab"), r"client_ids is a generator"),
        (torch.arange(3), r"client_ids is a Tensor.*ids.tolist\(\)"),
        ("ab", r"client_ids is a str"),
        ({"a": 1}, r"client_ids is a dict"),
        (None, r"client_ids is a NoneType"),
        ([1.0, 2.0], r"must be an int or a str; found 1.0 \(float\)"),
    ],
)
def test_invalid_ids_are_rejected_on_assignment(ids, message):
    with pytest.raises(FederatedError, match=message):
        Named(ids)


def test_ids_can_be_any_sequence_and_a_range_is_not_iterated():
    assert list(Named(np.arange(3)).client_ids) == [0, 1, 2]
    assert Named(range(10**15)).num_clients == 10**15


def test_ids_that_contradict_num_clients_are_rejected():
    class Both(Named):
        num_clients = 5

    data = Named(["a", "b"])
    data.num_clients = 2
    with pytest.raises(FederatedError, match=r"Named has 2 client_ids and num_clients=5. Give client_ids alone"):
        data.num_clients = 5
    data = Named(range(5))
    data.num_clients = 5
    with pytest.raises(FederatedError, match=r"1 client_ids and num_clients=5"):
        data.client_ids = ["a"]
    check_clients(Named(["a"]))
    with pytest.raises(FederatedError, match=r"Both has 2 client_ids and num_clients=5"):
        check_clients(Both(["a", "b"]))


def test_validation_sets_of_unknown_on_demand_clients_are_rejected():
    check_clients(OnDemand(client_val={0: tensors(1), 999_999: tensors(1)}))
    with pytest.raises(
        FederatedError, match=r"unknown client ids: '0', 1000000. The 1,000,000 clients are 0, 1, 2, ..."
    ):
        check_clients(OnDemand(client_val={"0": tensors(1), 1_000_000: tensors(1), 1: tensors(1)}))
    named = Named(["a", "b"])
    named.client_val = {"a": tensors(1), "c": tensors(1)}
    with pytest.raises(FederatedError, match=r"unknown client ids: 'c'. The 2 clients are 'a', 'b'\."):
        check_clients(named)


def test_overridden_ids_are_checked_in_fit():
    class Overridden(FederatedDataModule):
        client_ids = frozenset("ab")

    with pytest.raises(FederatedError, match=r"Overridden.client_ids is a frozenset"):
        FederatedTrainer(max_rounds=1, local_steps=1, logger=False, enable_checkpointing=False).fit(
            MLPClassifier(1, 3, hidden=[]), Overridden()
        )


def test_subclass_can_load_in_setup():
    class Listed(FederatedDataModule):
        def setup(self, stage):
            self.set_clients([tensors(2), tensors(3)])
            self.val = tensors(4)

    class Cut(FederatedDataModule):
        def setup(self, stage):
            self.train = tensors(9)

    listed, cut = Listed(), Cut(partition=Iid(3))
    for data in (listed, cut):
        with pytest.raises(FederatedError, match=rf"{type(data).__name__} has no clients.*setup"):
            data.client_ids  # noqa: B018
        data.setup("fit")
    assert listed.known_sizes == [2, 3]
    assert len(listed.val_dataloader().dataset) == 4
    assert cut.known_sizes == [3, 3, 3]


class Folds(FederatedDataModule):
    """Trains on every second example, starting at the fold's."""

    fold = 0

    def setup(self, stage=None):
        rows = torch.arange(self.fold, 20, 2)
        self.train, self.partition = TensorDataset(rows.double()), Iid(2)


def rows_of(data):
    return sorted(int(row) for i in data.client_ids for row, *_ in data.client_dataset(i))


def test_new_fold_or_partition_is_split_again():
    data = Folds()
    data.setup()
    assert rows_of(data) == list(range(0, 20, 2))
    data.fold = 1
    data.setup()
    assert rows_of(data) == list(range(1, 20, 2))
    assert data.client_batches(0).size == 5
    data.partition = Iid(5)
    assert data.num_clients == 5


def test_changed_partition_option_is_used_by_the_next_fit():
    data = FederatedDataModule(train=TensorDataset(torch.arange(20.0)), partition=Iid(2), batch_size=4)
    assert data.num_clients == 2
    data.partition.num_clients = 5
    check_clients(data)  # as a fit does before it reads the clients
    assert [data.client_size(i) for i in data.client_ids] == [4] * 5


def test_changed_keys_of_a_partition_are_used():
    data = FederatedDataModule(train=TensorDataset(torch.arange(20.0)), partition=ByKey(["ann", "bob"] * 10))
    assert data.client_size("ann") == 10
    data.partition.keys = ["ann"] * 5 + ["bob"] * 15
    check_clients(data)
    assert data.client_size("ann") == 5


def test_changed_option_of_preset_clients_is_rejected():
    data = Digits(partition=Iid(4), client_val_fraction=0.3)
    check_clients(data)
    data.partition.num_clients = 5
    with pytest.raises(FederatedError, match="an option of partition of Digits has been set, .* Call set_clients"):
        check_clients(data)


def test_replacing_the_partition_of_preset_clients_is_rejected():
    data = Digits(client_val_fraction=0.3)
    before = data.client_size(0)
    assert data.client_size(0) == before
    data.partition = Iid(5)
    with pytest.raises(FederatedError, match=r"partition of Digits has been replaced, .* Call set_clients again"):
        data.client_size(0)


@pytest.mark.parametrize("name", ["transform", "augment"])
def test_assigned_transform_is_rejected_and_batch_transform_is_used(name):
    data = FederatedDataModule(train=TensorDataset(torch.arange(20.0)), partition=Iid(2), batch_size=4)
    data.batch_transform = lambda batch: [part + 100 for part in batch]
    batch, _ = next(data.client_batches(0).epoch(torch.Generator()))
    assert batch[0].min() >= 100
    setattr(data, name, lambda batch: batch)
    with pytest.raises(FederatedError, match=f"FederatedDataModule.{name} was assigned.*Assign batch_{name}"):
        fit_trainer(max_rounds=1).fit(BoringModel(), data)


def test_wrapped_client_is_counted_again():
    class FirstHalf(FederatedDataModule):
        def client_dataset(self, client_id):
            whole = super().client_dataset(client_id)
            return Subset(whole, range(len(whole) // 2))

    data = FirstHalf([tensors(10)])
    assert data.known_sizes is None
    assert data.client_size(0) == data.client_batches(0).size == 5


# A client's data


class Plain(Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return torch.tensor([float(index)]), index


def test_batches_follow_the_settings():
    data = FederatedDataModule([tensors(7), Plain()], batch_size=3, full_batch_size=4, drop_last=True, shuffle=False)
    fast, slow = data.client_batches(0), data.client_batches(1)
    assert isinstance(fast, ClientBatches)
    assert type(fast) is TensorBatches
    assert type(slow) is LoaderBatches
    assert labels_of(fast.epoch(generator())) == [[0, 1, 2], [0, 1, 2]]
    assert labels_of(slow.epoch(generator())) == [[0, 1, 2]]
    assert [size for _, size in fast.full(generator())] == [4, 3]
    assert [size for _, size in slow.full(generator())] == [4, 1]


def test_full_batches_are_large_by_default():
    assert FederatedDataModule([tensors(1)]).client_batches(0).settings.full_batch_size == 512
    assert FederatedDataModule([tensors(1)], batch_size=900).client_batches(0).settings.full_batch_size == 900


def test_collate_function_applies_to_clients_and_evaluation():
    def collate(examples):
        return {"count": torch.ones(len(examples))}

    data = FederatedDataModule([tensors(3)], val=tensors(2), collate_fn=collate)
    [(batch, size)] = data.client_batches(0).epoch(generator())
    assert (len(batch["count"]), size) == (3, 3)
    assert [len(batch["count"]) for batch in data.val_dataloader()] == [2]


def test_client_loader_yields_its_epoch():
    data = FederatedDataModule([tensors(8)], batch_size=3)
    loader = data.client_dataloader(0, generator(5))
    assert [labels.tolist() for _, labels in loader] == labels_of(data.client_batches(0).epoch(generator(5)))


class OwnLoader(FederatedDataModule):
    def client_dataloader(self, client_id, generator):
        return DataLoader(self.client_dataset(client_id), batch_size=2, shuffle=True, generator=generator)


def test_custom_client_loader_is_used():
    data = OwnLoader([tensors(5)])
    batches = data.client_batches(0)
    assert type(batches) is CustomBatches
    assert batches.num_batches() == 3
    assert data.client_size(0) == batches.size == 5
    assert data.known_sizes is None
    assert labels_of(batches.epoch(generator(1))) == labels_of(data.client_batches(0).epoch(generator(1)))


def test_custom_loader_can_leave_counting_to_client_size():
    class Iterates(FederatedDataModule):
        num_clients = 3

        def client_dataloader(self, client_id, generator):
            return [[torch.zeros(2, 1)], [torch.zeros(1, 1)]]

    class Counts(Iterates):
        def client_size(self, client_id):
            return 3

    assert Counts().client_batches(0).size == 3
    with pytest.raises(FederatedError, match=r"client_dataloader\(1.*returned a list.*client_size"):
        Iterates().client_batches(1)


def test_single_clients_can_have_validation_sets():
    own = tensors(2)
    data = FederatedDataModule({"ann": tensors(3), "bob": tensors(3)}, client_val={"ann": own})
    assert data.client_val_dataset("ann") is own
    assert data.client_val_dataset("bob") is None


# Evaluation of the server model


def test_evaluation_loaders():
    val, test, ready = tensors(300), tensors(3), DataLoader(tensors(4), batch_size=4)
    data = FederatedDataModule([tensors(1)], val=val, test=test)
    assert [len(labels) for _, labels in data.val_dataloader()] == [256, 44]
    assert torch.cat([features for features, _ in data.val_dataloader()]).equal(val.tensors[0])  # not shuffled
    assert data.test_dataloader().dataset.source is data.predict_dataloader().dataset.source is test
    data = FederatedDataModule([tensors(1)], val=[val, ready], test=ready, predict=val, eval_batch_size=100)
    assert data.val_dataloader()[0].batch_size == 100
    assert data.val_dataloader()[1] is data.test_dataloader() is ready
    assert data.predict_dataloader().dataset.source is val
    data.eval_batch_size = 7
    assert data.predict_dataloader().batch_size == 7


def test_evaluation_sets_accept_example_lists_and_reject_none():
    pairs = [*tensors(3)]
    loaders = FederatedDataModule([tensors(1)], val=[tensors(4), pairs]).val_dataloader()
    assert [len(loader.dataset) for loader in loaders] == [4, 3]
    assert len(FederatedDataModule([tensors(1)], val=pairs).val_dataloader().dataset) == 3
    with pytest.raises(FederatedError, match=r"FederatedDataModule\(test=...\) has a NoneType"):
        FederatedDataModule([tensors(1)], test=[tensors(4), None])


class Listed(Dataset):
    """Hides that the examples of a data set are tensors."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset[index]


@pytest.mark.parametrize("dataset", [tensors(300), Subset(tensors(300), list(range(299, 20, -1))), tensors(0)])
@pytest.mark.parametrize("transform", [None, [doubled, negated]])
def test_tensor_evaluation_batches_match_a_plain_loader(dataset, transform):
    fast = FederatedDataModule([tensors(1)], val=dataset, transform=transform).val_dataloader()
    slow = FederatedDataModule([tensors(1)], val=Listed(dataset), transform=transform).val_dataloader()
    assert type(fast) is type(slow)
    assert len(fast) == len(slow)
    for left, right in zip(fast, slow, strict=True):
        assert type(left) is type(right) is list
        assert all(a.dtype == b.dtype and a.equal(b) for a, b in zip(left, right, strict=True))
    for index in range(0, len(dataset), 100):
        assert all(a.equal(b) for a, b in zip(fast.dataset[index], dataset[index], strict=True))


# Functions of whole batches


def test_transform_applies_to_client_and_evaluation_batches():
    parts = [tensors(6), Listed(tensors(6)), DataLoader(Listed(tensors(6)), batch_size=4)]
    for part in parts[:2]:
        data = FederatedDataModule([part], val=parts, test=part, transform=[doubled, negated], batch_size=4)
        stored = torch.arange(6.0)[:, None]
        clients = [data.client_batches(0).epoch(generator(), shuffle=False), data.client_batches(0).full(generator())]
        loaders = [*data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()]
        for batches in [*([batch for batch, _ in batches] for batches in clients), *loaders]:
            assert torch.cat([features for features, _ in batches]).equal(-2 * stored)
    assert [features.tolist() for features, _ in parts[2]] == [[[0.0], [1.0], [2.0], [3.0]], [[4.0], [5.0]]]


def test_loader_that_cannot_be_transformed_is_rejected():
    class Own(DataLoader):
        def __iter__(self):
            return iter(())

    with pytest.raises(FederatedError, match=r"A Own iterates in its own way.*transform"):
        FederatedDataModule([tensors(1)], val=Own(tensors(4)), transform=doubled).val_dataloader()


def test_subclass_can_have_a_single_example_transform():
    class Own(FederatedDataModule):
        def __init__(self):
            super().__init__([tensors(2)], val=tensors(2))
            self.transform = self.augment = None.__getattribute__

    [(features, _)] = Own().val_dataloader()
    assert features.equal(tensors(2).tensors[0])
    assert labels_of(Own().client_batches(0).full(generator())) == [[0, 1]]


def test_augmentation_applies_only_to_gradients():
    data = FederatedDataModule([tensors(6)], val=tensors(6), augment=[noisy, noisy], batch_size=2)
    stored = tensors(6).tensors[0]
    for batches in (data.client_batches(0).epoch(generator(), shuffle=False), data.client_batches(0).full(generator())):
        noise = torch.cat([features for (features, _), _ in batches]) - stored
        assert noise.unique().numel() == 6
        assert noise.max() > 1  # the sum of two
    measured = torch.cat([features for (features, _), _ in data.client_batches(0).unaugmented(generator())])
    assert measured.equal(stored)
    assert torch.cat([features for features, _ in data.val_dataloader()]).equal(stored)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transform": 3}, r"transform=3.*function of a whole batch"),
        ({"transform": [doubled, None]}, r"transform=None"),
        ({"augment": Listed}, r"augment=Listed\) is a class: instantiate it"),
    ],
)
def test_invalid_batch_functions_are_rejected(options, message):
    with pytest.raises(FederatedError, match=message):
        FederatedDataModule([tensors(1)], **options)


class Silent(pl.LightningModule):
    """One weight; trains on any batch."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.validated = 0

    def training_step(self, batch, batch_idx):
        return (self.weight * batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Validating(Silent):
    def validation_step(self, batch, batch_idx):
        self.validated += len(batch[0])

    test_step = validation_step


class Centralised(FederatedDataModule):
    """Lets a plain Trainer fit: these tests need no more."""

    def train_dataloader(self):
        return DataLoader(tensors(4))


class LateValidation(Centralised):
    def setup(self, stage):
        self.val = tensors(6)


def quiet_trainer():
    return pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


class Passing(Silent):
    """Predicts its own batches."""

    def predict_step(self, batch, batch_idx):
        return batch[0]


@pytest.mark.parametrize("kind", [lambda part: part, Listed, lambda part: DataLoader(Listed(part), batch_size=3)])
def test_lightning_predicts_on_transformed_batches(kind):  # Lightning recreates their loader
    data = FederatedDataModule([tensors(1)], predict=kind(tensors(7)), transform=[doubled, negated])
    predicted = quiet_trainer().predict(Passing(), data)
    assert torch.cat(predicted).equal(-2 * tensors(7).tensors[0])


NO_LOADER = "You defined a `validation_step` but have no `val_dataloader`. Skipping val loop."


@pytest.mark.parametrize(
    ("model", "make", "validated", "said"),
    [
        (Silent, lambda: Centralised([tensors(1)]), 0, set()),
        (Validating, lambda: Centralised([tensors(1)]), 0, {NO_LOADER}),
        (Validating, lambda: Centralised([tensors(1)], val=tensors(5)), 5, set()),
        (Validating, lambda: LateValidation([tensors(1)]), 6, set()),
    ],
)
def test_lightning_skips_validation_without_a_validation_set(model, make, validated, said):
    model = model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer().fit(model, make())
    messages = {str(warning.message) for warning in caught}
    assert {text for text in messages if "validation_step" in text or "is zero" in text} == said
    assert model.validated == validated


def test_missing_evaluation_set_is_rejected():
    data, trainer, model = FederatedDataModule([tensors(1)]), quiet_trainer(), Validating()
    with pytest.raises(FederatedError, match=r"no val set: pass val="):
        data.val_dataloader()
    with pytest.raises(FederatedError, match=r"no test set: pass test="):
        trainer.test(model, data)
    with pytest.raises(FederatedError, match=r"no predict set: pass predict="):
        data.predict_dataloader()
    data.val = tensors(3)
    trainer.validate(model, data, verbose=False)
    assert model.validated == 3


def test_plain_trainer_is_rejected():
    with pytest.raises(FederatedError, match=r"FederatedTrainer"):
        quiet_trainer().fit(Silent(), FederatedDataModule([tensors(1)]))


def test_subclass_can_override_loaders():
    class Own(FederatedDataModule):
        def val_dataloader(self):
            return DataLoader(tensors(2))

    assert len(Own([tensors(1)]).val_dataloader()) == 2
    assert FederatedDataModule.val_dataloader.__doc__.startswith("Return the loader")


# Refusals


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"either clients=.*both train=.*partition=.*found neither"),
        ({"train": tensors(3)}, r"found train alone"),
        ({"partition": Iid(3)}, r"found partition alone"),
        ({"clients": [tensors(1)], "train": tensors(3)}, r"clients=..., train=.*give either clients, or train"),
        ({"clients": [tensors(1)], "partition": Iid(1)}, r"clients=..., partition="),
        ({"clients": tensors(3)}, r"clients=TensorDataset"),
        ({"clients": [tensors(1), Stream()]}, r"Client 1 has a Stream.*map-style"),
        ({"train": Stream(), "partition": Iid(1)}, r"train=...\) has a Stream"),
        ({"train": (torch.ones(3), torch.ones(3)), "partition": Iid(1)}, r"tuple of 2 arrays.*TensorDataset\(inputs"),
        ({"train": [torch.ones(3, 2), torch.ones(3)], "partition": Iid(1)}, r"train=...\) has a list of 2 arrays"),
        ({"clients": [], "val": (torch.ones(3), torch.ones(3))}, r"val=...\) has a tuple of 2 arrays.*TensorDataset"),
        ({"clients": [], "test": [torch.ones(3, 2), torch.ones(3, 1)]}, r"test=...\) has a list of 2 arrays"),
        ({"clients": [], "predict": [tensors(1), (torch.ones(3),)]}, r"predict=...\) has a tuple of 1 arrays"),
        (
            {"clients": [tensors(1)], "client_val": {0: (torch.ones(3), torch.ones(3))}},
            r"client_val\[0\]=...\) has a tuple of 2 arrays",
        ),
        (
            {"clients": [tensors(1)], "client_val": {0: DataLoader(tensors(1))}},
            r"client_val\[0\]=...\) has a DataLoader, .*: give loader.dataset, with batch_size=1 and",
        ),
        (
            {"clients": [tensors(1)], "client_val": {0: [tensors(1), tensors(1)]}},
            r"client_val\[0\]=...\) has a list of TensorDataset: give one map-style Dataset",
        ),
        ({"clients": {"ann": (torch.ones(3), torch.ones(3))}}, r"Client 'ann' has a tuple of 2 arrays"),
        ({"train": tensors(3), "partition": Iid}, r"Iid is a class"),
        ({"train": tensors(3), "partition": "iid"}, r"partition='iid'"),
        ({"clients": [tensors(1)], "batch_size": 0}, r"batch_size=0.*at least 1"),
        ({"clients": [tensors(1)], "batch_size": 2.0}, r"batch_size=2.0"),
        ({"clients": [tensors(1)], "eval_batch_size": 0}, r"eval_batch_size=0"),
        ({"clients": [tensors(1)], "full_batch_size": -1}, r"full_batch_size=-1"),
        ({"clients": [tensors(1)], "num_workers": -1}, r"num_workers=-1"),
        ({"clients": [tensors(1)], "collate_fn": "stack"}, r"collate_fn='stack'"),
        ({"clients": [tensors(1)], "client_val": {"ann": tensors(1)}}, r"client_val has unknown client ids: 'ann'"),
        ({"clients": [tensors(1)], "client_val": {99: tensors(1)}}, r"client_val has unknown client ids: 99"),
    ],
)
def test_invalid_arguments_are_rejected_at_construction(arguments, message):
    with pytest.raises(FederatedError, match=message):
        FederatedDataModule(**arguments)


@pytest.mark.parametrize(
    "inputs",
    [
        [torch.ones(3, 32, 32)] * 5,
        [torch.ones(3, 32, 32), torch.ones(3, 8, 8)],
        [torch.ones(80, 7), torch.ones(80, 5)],
        [torch.ones(7), torch.ones(5)],
        [torch.ones(2, 2), torch.ones(2), torch.ones(2)],
        [torch.tensor(1.0), torch.tensor(2.0)],
    ],
)
def test_list_of_bare_inputs_is_a_dataset(inputs):
    data = FederatedDataModule([inputs], val=inputs, client_val={0: inputs})
    assert data.client_size(0) == len(data.val_dataloader().dataset) == len(inputs)


def test_on_demand_stream_is_rejected_with_its_client():
    class Streams(FederatedDataModule):
        num_clients = 3

        def client_dataset(self, client_id):
            return Stream()

    with pytest.raises(FederatedError, match=r"Client 2 has a Stream"):
        Streams().client_batches(2)
    with pytest.raises(FederatedError, match=r"Client 2 has a Stream"):
        Streams().client_size(2)


# Pickle and command line


def test_data_module_round_trips_through_pickle():
    data = FederatedDataModule(train=tensors(10), partition=Iid(3), val=tensors(2))
    before = data.known_sizes
    copy = pickle.loads(pickle.dumps(data))
    assert copy.known_sizes == before
    assert len(copy.val_dataloader()) == 1


@cache
def parser():
    """Return a parser of the section ``data``, as LightningCLI has one."""
    made = ArgumentParser(exit_on_error=False)
    made.add_subclass_arguments(FederatedDataModule, "data")
    return made


def from_configuration(class_path, **init_args):
    read = parser().parse_object({"data": {"class_path": class_path, "init_args": init_args}})
    return parser().instantiate_classes(read).data


@pytest.mark.thorough
def test_lightning_cli_configuration_can_choose_the_data(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train"])
    part = {"class_path": "lightning_fed.data.Iid", "init_args": {"num_clients": 6}}
    section = {"class_path": "lightning_fed.data.Digits", "init_args": {"partition": part}}
    trainer = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    data = LightningCLI(
        BoringModel,
        FederatedDataModule,
        subclass_mode_data=True,
        run=False,
        args={"data": section, "trainer": trainer},
        save_config_callback=None,
    ).datamodule
    assert data.num_clients == 6


def test_configuration_can_choose_datasets_and_partition():
    path = "pytorch_lightning.demos.boring_classes.RandomDataset"
    part = {"class_path": "lightning_fed.data.Iid", "init_args": {"num_clients": 6}}
    whole = {"class_path": path, "init_args": {"size": 2, "length": 12}}
    module = "lightning_fed.data.FederatedDataModule"
    assert from_configuration(module, train=whole, partition=part, val=whole).known_sizes == [2] * 6
    assert from_configuration(module, clients=[whole, whole]).known_sizes == [12, 12]


def idx(values):
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return bytes([0, 0, 8, values.ndim]) + sizes + values.to(torch.uint8).numpy().tobytes()


def test_configuration_can_choose_torchvision_datasets_and_functions(tmp_path):
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        (raw / f"{part}-images-idx3-ubyte").write_bytes(idx(torch.full((20, 28, 28), 51)))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(idx(torch.arange(20) % 10))
    to_tensor = {"class_path": "torchvision.transforms.ToTensor"}
    normalize = {"class_path": "lightning_fed.data.Normalize", "init_args": {"mean": [0.1], "std": [0.5]}}
    flip = {"class_path": "lightning_fed.data.RandomFlip"}
    crop = {"class_path": "lightning_fed.data.RandomCrop", "init_args": {"padding": 0}}
    data = from_configuration(
        "lightning_fed.data.FederatedDataModule",
        train={
            "class_path": "torchvision.datasets.FashionMNIST",
            "init_args": {"root": str(tmp_path), "transform": to_tensor},
        },
        partition={"class_path": "lightning_fed.data.Shards", "init_args": {"num_clients": 5}},
        transform=normalize,
        augment=[flip, crop],
    )
    assert data.known_sizes == [4] * 5
    assert repr(data.batch_augment) == "[RandomFlip(), RandomCrop(padding=0)]"
    [(batch, size)] = data.client_batches(0).epoch(generator())
    assert size == 4
    assert batch[0].sub(0.2).abs().max() < 1e-6
    several = from_configuration(
        "lightning_fed.data.FederatedDataModule",
        clients=[
            {
                "class_path": "pytorch_lightning.demos.boring_classes.RandomDataset",
                "init_args": {"size": 2, "length": 3},
            }
        ],
        transform=["torch.neg", "torch.abs"],
        augment=crop,
        batch_size_of="torch.numel",
        worker_init_fn="torch.manual_seed",
        num_workers=1,
        loader_options={"timeout": 5, "prefetch_factor": 3},
    )
    assert (several.batch_size_of, several.worker_init_fn) == (torch.numel, torch.manual_seed)
    assert several.loader_options == {"timeout": 5, "prefetch_factor": 3}
    assert several.batch_transform(torch.tensor([-1.0, 2.0])).tolist() == [1.0, 2.0]
    assert repr(several.batch_augment) == "RandomCrop(padding=0)"
    mnist = from_configuration("lightning_fed.data.CIFAR10", augment=[flip], transform=[normalize])
    assert repr(mnist.batch_augment) == "RandomFlip()"
    assert from_configuration("lightning_fed.data.CIFAR10", augment=False).batch_augment is None


def test_call_of_train_dataloader_is_rejected_with_the_number_of_examples() -> None:
    data = FederatedDataModule([tensors(3), tensors(2)])
    with pytest.raises(
        FederatedError, match=r"sum\(map\(data\.client_size, data\.client_ids\)\) is the number"
    ) as error:
        data.train_dataloader()
    assert "override the hook" in str(error.value)
    assert sum(map(data.client_size, data.client_ids)) == 5
