"""Loaders for the evaluation of the server model."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.core.errors import FederatedError
from lightning_fed.data.batches.evaluation import (
    check_client_val,
    check_evaluation,
    evaluation_loader,
    transformed_loader,
)
from lightning_fed.data.batches.settings import BatchSettings
from tests.helpers.detection import Detection, Detector, collate
from tests.helpers.training import trainer


class Streamed(IterableDataset):
    def __iter__(self):
        return iter([Detection()[i] for i in range(10)])


@pytest.mark.parametrize(
    "val",
    [
        Detection(),
        DataLoader(Detection(), batch_size=4, collate_fn=collate),
        DataLoader(Streamed(), batch_size=4, collate_fn=collate),
    ],
    ids=["data set", "loader", "stream"],
)
def test_logged_evaluation_values_are_weighted_by_images_per_batch(val):
    data = FederatedDataModule(
        clients=[Detection(8)], val=val, batch_size=4, eval_batch_size=4, collate_fn=collate, shuffle=False
    )
    model = Detector()
    (result,) = trainer(clients_per_round=1).validate(model, data, verbose=False)
    assert result["val"] == pytest.approx(sum(i**2 / 2 for i in range(10)) / 10)


class Randomizable:
    """A transform with its own random state, as in MONAI."""

    def __init__(self):
        self.R = np.random.RandomState()

    def set_random_state(self, seed=None):
        self.R = np.random.RandomState(seed)

    def __call__(self, x):
        return x + self.R.uniform()


class Augmented(Dataset):
    def __init__(self, transform, n=6):
        self.transform, self.n = transform, n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return self.transform(torch.zeros(())), index


def test_evaluation_follows_the_global_generator():
    loader = evaluation_loader(Augmented(Randomizable()), BatchSettings(batch_size=4))
    passes = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        passes.append(torch.cat([batch[0] for batch in loader]).tolist())
    assert passes[0] == passes[1] != passes[2]


def test_part_of_a_loader_has_the_same_batches():
    for dataset in (TensorDataset(torch.arange(10)), list(range(10))):
        loader = evaluation_loader(dataset, BatchSettings(batch_size=3, transform=lambda batch: batch))
        whole = [torch.as_tensor(batch[0] if isinstance(batch, list) else batch).tolist() for batch in loader]
        assert whole == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
        part = [
            torch.as_tensor(batch[0] if isinstance(batch, list) else batch).tolist()
            for batch in loader.part(1, 2, stop=4)
        ]
        assert part == whole[1::2]


def test_invalid_evaluation_data_is_rejected():
    good = TensorDataset(torch.arange(3))
    for data in (None, good, [1, 2], DataLoader(good), [good, DataLoader(good)]):
        check_evaluation("Data", "val", data)
    for data, message in ((3, r"Data\(val=\.\.\.\) has an int"), ([good, 3], "has an int"), ("text", "has a str")):
        with pytest.raises(FederatedError, match=message):
            check_evaluation("Data", "val", data)
    check_client_val("Data", {0: good, 1: None})
    with pytest.raises(FederatedError, match=r"client_val\[1\]=\.\.\.\) has a list of TensorDataset.*ConcatDataset"):
        check_client_val("Data", {0: good, 1: [good, good]})


def test_loader_is_transformed_unless_it_overrides_iteration():
    loader = DataLoader(TensorDataset(torch.arange(4)), batch_size=2)
    transformed = transformed_loader(loader, lambda batch: batch[0] * 10)
    assert [batch.tolist() for batch in transformed] == [[0, 10], [20, 30]]
    assert [batch[0].tolist() for batch in loader] == [[0, 1], [2, 3]]  # the given loader is unchanged

    class Own(DataLoader):
        def __iter__(self):
            return iter([])

    with pytest.raises(FederatedError, match="A Own iterates in its own way, so transform"):
        transformed_loader(Own([1]), len)
