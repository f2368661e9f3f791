"""The digits: a fixed, stratified split into clients, validation and test."""

import pytest
import torch

from lightning_fed.core.errors import FederatedError
from lightning_fed.data import Digits, Iid


def keys(images):
    """Return images as hashable values."""
    return [tuple(image.flatten().tolist()) for image in images]


@pytest.fixture(scope="module")
def digits():
    return Digits()


def test_split_is_disjoint_complete_and_correctly_sized(digits):
    datasets = pytest.importorskip("sklearn.datasets")
    parts = [part.tensors[0] for part in (digits.train, digits.val, digits.test)]
    assert [len(part) for part in parts] == [1259, 179, 359]
    everything = torch.tensor(datasets.load_digits().images, dtype=torch.float32) / 16
    assert sorted(keys(torch.cat(parts))) == sorted(keys(everything))


def test_split_is_stratified_by_class(digits):
    for part, share in ((digits.val, 0.1), (digits.test, 0.2)):
        whole = torch.bincount(torch.cat([d.tensors[1] for d in (digits.train, digits.val, digits.test)]))
        assert (torch.bincount(part.tensors[1]) - share * whole).abs().max() <= 0.5


def test_images_and_labels_have_the_expected_format(digits):
    images, labels = digits.train.tensors
    assert images.shape[1:] == (1, 8, 8)
    assert images.dtype == torch.float32
    assert (images.min(), images.max()) == (0, 1)
    assert labels.unique().tolist() == list(range(10))
    flat = Digits(flatten=True).train.tensors[0]
    assert torch.equal(flat, images.view(-1, 64))


def test_defaults_to_thirty_skewed_clients(digits):
    assert digits.num_clients == 30
    assert sum(digits.known_sizes) == 1259
    assert min(digits.known_sizes) >= 1
    assert digits.client_batches(0).settings.batch_size == 16
    few = Digits(num_clients=5, alpha=0.01).clients
    assert max(len({int(y) for _, y in few.dataset(i)}) for i in few.ids) < 10


def test_seed_changes_the_clients_and_not_the_test_set(digits):
    other = Digits(seed=1)
    assert torch.equal(other.test.tensors[0], digits.test.tensors[0])
    assert other.known_sizes != digits.known_sizes
    assert Digits().known_sizes == digits.known_sizes


def test_custom_partition_and_test_fraction_are_used():
    data = Digits(partition=Iid(7), test_fraction=0.5, batch_size=3)
    assert data.num_clients == 7
    assert len(data.test) == pytest.approx(1797 / 2, abs=5)
    assert len(data.train) + len(data.val) + len(data.test) == 1797


def test_prediction_uses_test_images_without_labels(digits):
    assert torch.cat(list(digits.predict_dataloader())).equal(digits.test.tensors[0])


@pytest.mark.parametrize("fraction", [0, 0.9, -0.1, 1])
def test_invalid_test_fraction_is_rejected(fraction):
    with pytest.raises(FederatedError, match=rf"test_fraction={fraction}"):
        Digits(test_fraction=fraction)


def test_fraction_of_each_client_is_held_out_from_its_training():
    whole, cut = Digits(num_clients=5, alpha=0.3), Digits(num_clients=5, alpha=0.3, client_val_fraction=0.3)
    for i in whole.client_ids:
        held_out, kept = cut.client_val_dataset(i), cut.client_dataset(i)
        assert len(held_out) == int(0.3 * len(whole.client_dataset(i)))
        found = keys([part[j][0] for part in (held_out, kept) for j in range(len(part))])
        own = whole.client_dataset(i)
        assert sorted(found) == sorted(keys([own[j][0] for j in range(len(own))]))


def test_held_out_fraction_must_be_below_one():
    with pytest.raises(FederatedError, match="client_val_fraction must be a finite number in"):
        Digits(client_val_fraction=1.0)
