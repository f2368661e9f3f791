"""Partitions: every example once, the documented shapes, the same on every machine, and refusals by name."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed.core.errors import FederatedError
from lightning_fed.data.partitions import ByKey, Dirichlet, Iid, Partition, Shards
from tests.helpers.partitions import assert_every_index_once, deal, label_lists, seeds


@given(labels=label_lists, num_clients=st.integers(1, 70), seed=seeds)
def test_iid_assigns_every_index_once_in_equal_shares(labels, num_clients, seed):
    parts = deal(Iid(num_clients, seed), labels)
    assert (parts is None) == (num_clients > len(labels))
    if parts is not None:
        assert_every_index_once(parts, len(labels))
        assert {len(part) for part in parts} <= {len(labels) // num_clients, -(-len(labels) // num_clients)}


@given(
    labels=label_lists,
    num_clients=st.integers(1, 8),
    alpha=st.floats(1e-300, 1e300),
    min_size=st.integers(0, 3),
    seed=seeds,
)
def test_dirichlet_assigns_every_index_once_or_raises(labels, num_clients, alpha, min_size, seed):
    parts = deal(Dirichlet(num_clients, alpha, min_size, seed), labels)
    if min_size == 0:
        assert parts is not None
    if parts is not None:
        assert len(parts) == num_clients
        assert_every_index_once(parts, len(labels))
        assert min(len(part) for part in parts) >= min_size


@given(labels=label_lists, num_clients=st.integers(1, 30), shards=st.integers(1, 4), seed=seeds)
def test_shards_assign_every_index_once(labels, num_clients, shards, seed):
    parts = deal(Shards(num_clients, shards, seed), labels)
    assert (parts is None) == (num_clients * shards > len(labels))
    if parts is not None:
        assert_every_index_once(parts, len(labels))
        size = len(labels) // (num_clients * shards)
        assert all(size * shards <= len(part) <= (size + 1) * shards for part in parts)


@given(keys=st.lists(st.one_of(st.integers(0, 5), st.text("ab", max_size=2)), min_size=1, max_size=40))
def test_by_key_groups_indices_by_key(keys):
    parts = ByKey(keys)(torch.zeros(len(keys)))
    assert list(parts) == list(dict.fromkeys(keys))
    assert_every_index_once(parts.values(), len(keys))
    assert all(keys[index] == key for key, part in parts.items() for index in part)


@pytest.mark.parametrize("partition", [Iid(4, seed=3), Dirichlet(4, 0.5, seed=3), Shards(4, seed=3)], ids=repr)
def test_partition_depends_only_on_the_seed(partition):
    labels = torch.arange(200) % 7
    torch.manual_seed(1)
    np.random.seed(1)
    first = partition(labels)
    torch.manual_seed(2)
    np.random.seed(2)
    assert all(torch.equal(a, b) for a, b in zip(first, partition(labels), strict=True))
    for other in (4, 3 + 2**64, 3 + 2**127):  # seeds have up to 128 bits
        partition.seed = other
        assert not all(torch.equal(a, b) for a, b in zip(first, partition(labels), strict=True))


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        (Iid(3), [[1, 2, 10, 11], [3, 4, 5, 6], [0, 7, 8, 9]]),
        (Dirichlet(3, 0.5), [[0], [1, 3, 4, 6, 7], [2, 5, 8, 9, 10, 11]]),
        (Shards(3), [[0, 2, 3, 11], [4, 6, 7, 9], [1, 5, 8, 10]]),
    ],
    ids=repr,
)
def test_seed_gives_the_same_clients_on_every_machine(partition, expected):
    assert [part.tolist() for part in partition(torch.arange(12) % 3)] == expected


def test_iid_ignores_the_stored_order():
    first = Iid(2)(torch.zeros(1000))[0]
    assert 210 < int((first < 500).sum()) < 290  # 250, plus or minus five standard deviations


def test_dirichlet_proportions_match_theoretical_mean_and_variance():
    labels = torch.arange(2000).repeat(100)
    parts = Dirichlet(num_clients=4, alpha=0.5)(labels)
    shares = torch.stack([torch.bincount(labels[part], minlength=2000) for part in parts]).double() / 100
    assert shares.mean(1) == pytest.approx([0.25] * 4, rel=0.05)
    variance = 0.25 * 0.75 / (4 * 0.5 + 1)  # one coordinate of Dir(alpha, ..., alpha)
    assert shares.var(1) == pytest.approx([variance] * 4, rel=0.1)


@pytest.mark.parametrize("alpha", [1e-300, 1e-8, 1e-4])
def test_dirichlet_with_tiny_alpha_gives_each_class_to_one_client(alpha):
    labels = torch.arange(40).repeat(10)
    owners = torch.empty(400, dtype=torch.int64)
    for client, part in enumerate(Dirichlet(4, alpha, min_size=0)(labels)):
        owners[part] = client
    assert all(len(owners[labels == label].unique()) == 1 for label in range(40))
    assert torch.bincount(owners, minlength=4).min() >= 30


def test_dirichlet_with_huge_alpha_splits_every_class_equally():
    labels = torch.arange(5).repeat(40)
    for part in Dirichlet(4, 1e12)(labels):
        assert torch.bincount(labels[part], minlength=5).tolist() == [10] * 5


def test_dirichlet_raises_when_no_draw_meets_the_minimum_size():
    with pytest.raises(FederatedError, match=r"Dirichlet\(num_clients=50.*1,000 draws.*min_size=1.*Raise alpha"):
        Dirichlet(50, 0.01)(torch.arange(100) % 2)


def test_dirichlet_without_minimum_allows_more_clients_than_examples():
    parts = Dirichlet(10, 1.0, min_size=0)(torch.tensor([0, 1, 1]))
    assert_every_index_once(parts, 3)


def test_shards_hold_few_classes():
    labels = torch.arange(1000) % 10
    assert max(len(labels[part].unique()) for part in Shards(50, 2)(labels)) <= 2
    assert [len(labels[part].unique()) for part in Shards(10, 1)(labels)] == [1] * 10


def test_by_key_supports_tensors_and_arrays():
    for keys in (torch.tensor([7, 5, 7]), np.array([7, 5, 7])):
        parts = ByKey(keys)(torch.zeros(3))
        assert {key: part.tolist() for key, part in parts.items()} == {7: [0, 2], 5: [1]}
        assert all(type(key) is int for key in parts)


def test_by_key_ids_are_plain_strings():
    assert [type(key) for key in ByKey(list(np.array(["a", "b"])))(torch.zeros(2))] == [str, str]


@pytest.mark.parametrize("clients", [5_000, pytest.param(100_000, marks=pytest.mark.thorough)])
def test_partitions_support_thousands_of_clients(clients):
    labels = torch.arange(4 * clients) % 10
    for partition in (Iid(clients), Dirichlet(clients, 1.0, min_size=0), Shards(clients)):
        parts = partition(labels)
        assert len(parts) == clients
        assert torch.cat(list(parts)).sort().values.equal(torch.arange(4 * clients))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Iid(0), r"Iid\(num_clients=0\).*at least 1"),
        (lambda: Iid(2.5), r"Iid\(num_clients=2.5\)"),
        (lambda: Iid(True), r"num_clients=True"),
        (lambda: Iid(3, seed=-1), r"Iid\(seed=-1\)"),
        (lambda: Dirichlet(3, 0.0), r"alpha=0.0.*in \(0, inf\)"),
        (lambda: Dirichlet(3, -1), r"alpha=-1"),
        (lambda: Dirichlet(3, math.nan), r"alpha=nan"),
        (lambda: Dirichlet(3, math.inf), r"alpha=inf"),
        (lambda: Dirichlet(3, "0.3"), r"alpha='0.3'"),
        (lambda: Dirichlet(3, 1.0, min_size=-1), r"min_size=-1"),
        (lambda: Shards(3, 0), r"shards_per_client=0"),
        (lambda: Iid(4)(torch.zeros(3)), r"Iid\(num_clients=4.*at least 4 examples.*has 3.*num_clients"),
        (lambda: Dirichlet(4, 1.0, 2)(torch.zeros(7).long()), r"at least 8 examples.*has 7"),
        (lambda: Shards(2, 2)(torch.zeros(3).long()), r"at least 4 examples.*has 3"),
        (lambda: Iid(1)(torch.zeros(0)), r"\[0\]"),
        (lambda: Shards(1)(torch.zeros(2, 2).long()), r"\[2, 2\]"),
        (lambda: Shards(1)(torch.rand(5)), r"integer labels, not torch.float32"),
        (lambda: ByKey(["a"])(torch.zeros(2)), r"1 keys.*2 examples"),
        (lambda: ByKey([1.5])(torch.zeros(1)), r"int or a str; found 1.5"),
        (lambda: ByKey([None])(torch.zeros(1)), r"found None"),
        (lambda: ByKey([["a"]])(torch.zeros(1)), r"each key must be an int or a str"),
        (lambda: ByKey("writer")(torch.zeros(1)), r"ByKey\('writer'\) names an attribute"),
    ],
)
def test_errors_name_the_argument_and_value(make, message):
    with pytest.raises(FederatedError, match=message):
        make()


def test_repr_shows_the_arguments():
    assert repr(Dirichlet(3, 0.5, seed=7)) == "Dirichlet(num_clients=3, seed=7, alpha=0.5, min_size=1)"
    assert repr(ByKey("writer")) == "ByKey('writer')"
    assert repr(ByKey(["a", "b"])) == "ByKey(<2 keys>)"


def test_custom_partition_requires_only_call():
    class Halves(Partition):
        def __call__(self, labels):
            return torch.arange(len(labels)).chunk(2)

    assert repr(Halves()) == "Halves()"
    assert [part.tolist() for part in Halves()(torch.zeros(4))] == [[0, 1], [2, 3]]
    with pytest.raises(TypeError):
        Partition()
