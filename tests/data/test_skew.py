"""Partitions of the literature: every example once, the documented sizes and classes, and refusals by name."""

import copy
import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed.core.errors import FederatedError
from lightning_fed.data.partitions import (
    BalancedDirichlet,
    ClassesPerClient,
    Dirichlet,
    Iid,
    LogNormalSizes,
    PowerLaw,
    QuantitySkew,
    Shards,
    Similarity,
)
from tests.helpers.partitions import assert_every_index_once, deal, label_lists, seeds

clients = st.integers(1, 70)
alphas = st.one_of(st.floats(1e-320, 1e300), st.sampled_from([1e-8, 0.01, 0.3, 1.0]))
sigmas = st.one_of(st.floats(0, 1e300), st.sampled_from([0.0, 0.3, 2.0]))


def assert_equal_sizes(parts, n):
    assert {len(part) for part in parts} <= {n // len(parts), -(-n // len(parts))}


def counts(parts, labels):
    """Return each client's number of examples of each class."""
    classes, codes = torch.unique(labels, return_inverse=True)
    return torch.stack([torch.bincount(codes[part], minlength=len(classes)) for part in parts])


@given(
    labels=label_lists,
    num_clients=clients,
    alpha=alphas,
    concentration=st.sampled_from(["per_class", "total"]),
    seed=seeds,
)
def test_balanced_dirichlet_assigns_every_index_once_in_equal_shares(labels, num_clients, alpha, concentration, seed):
    parts = deal(BalancedDirichlet(num_clients, alpha, concentration, seed), labels)
    assert (parts is None) == (num_clients > len(labels))
    if parts is not None:
        assert len(parts) == num_clients
        assert_every_index_once(parts, len(labels))
        assert_equal_sizes(parts, len(labels))


@given(labels=label_lists, num_clients=clients, similarity=st.floats(0, 1), seed=seeds)
def test_similarity_assigns_every_index_once_in_equal_shares(labels, num_clients, similarity, seed):
    parts = deal(Similarity(num_clients, similarity, seed), labels)
    assert (parts is None) == (num_clients > len(labels))
    if parts is not None:
        assert len(parts) == num_clients
        assert_every_index_once(parts, len(labels))
        assert_equal_sizes(parts, len(labels))


@given(labels=label_lists, num_clients=st.integers(1, 12), each=st.integers(1, 9), seed=seeds)
def test_classes_per_client_assigns_every_index_and_exact_class_counts(labels, num_clients, each, seed):
    parts = deal(ClassesPerClient(num_clients, each, seed), labels)
    sizes = np.unique(labels, return_counts=True)[1]
    if parts is None:
        most_viewers = -(-num_clients * each // len(sizes))
        assert each > len(sizes) or num_clients * each < len(sizes) or min(sizes) < most_viewers
        return
    assert len(parts) == num_clients
    assert_every_index_once(parts, len(labels))
    seen = counts(parts, torch.tensor(labels))
    assert (seen > 0).sum(1).tolist() == [each] * num_clients
    viewers = (seen > 0).sum(0)
    assert viewers.max() - viewers.min() <= 1
    for column in seen.T:  # equal parts
        assert column.max() - column[column > 0].min() <= 1


@given(
    labels=label_lists,
    num_clients=st.integers(1, 6),
    each=st.integers(1, 3),
    sigma=sigmas,
    least=st.integers(1, 3),
    seed=seeds,
)
def test_power_law_assigns_every_index_and_the_class_minimum(labels, num_clients, each, sigma, least, seed):
    parts = deal(PowerLaw(num_clients, each, sigma, least, seed), labels)
    sizes = np.unique(labels, return_counts=True)[1]
    if parts is None:
        most_viewers = -(-num_clients * each // len(sizes))
        assert each > len(sizes) or num_clients * each < len(sizes) or min(sizes) < least * most_viewers
    else:
        assert_every_index_once(parts, len(labels))
        seen = counts(parts, torch.tensor(labels))
        assert (seen >= least).sum(1).tolist() == (seen > 0).sum(1).tolist() == [each] * num_clients


@given(
    n=st.integers(1, 200), num_clients=clients, sigma=sigmas, alpha=alphas, least=st.integers(0, 3), seed=seeds
)  # fmt: skip
def test_skewed_sizes_assign_every_index_and_the_minimum_size(n, num_clients, sigma, alpha, least, seed):
    for partition in (LogNormalSizes(num_clients, sigma, least, seed), QuantitySkew(num_clients, alpha, least, seed)):
        parts = deal(partition, [0] * n)
        assert (parts is None) == (num_clients * least > n)
        if parts is not None:
            assert len(parts) == num_clients
            assert_every_index_once(parts, n)
            assert min(len(part) for part in parts) >= least


EVERY = [
    BalancedDirichlet(4, 0.5, seed=3),
    BalancedDirichlet(4, 0.5, "total", seed=3),
    Similarity(4, 0.5, seed=3),
    ClassesPerClient(4, 3, seed=3),
    PowerLaw(4, seed=3),
    LogNormalSizes(4, 1.0, seed=3),
    QuantitySkew(4, 0.5, seed=3),
]


@pytest.mark.parametrize("partition", EVERY, ids=repr)
def test_partition_depends_only_on_the_seed(partition):
    labels = torch.arange(210) % 7
    torch.manual_seed(1)
    np.random.seed(1)
    first = partition(labels)
    torch.manual_seed(2)
    np.random.seed(2)
    assert all(torch.equal(a, b) for a, b in zip(first, partition(labels), strict=True))
    other = type(partition)(**{**vars(partition), "seed": 4})
    assert not all(torch.equal(a, b) for a, b in zip(first, other(labels), strict=True))


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        (BalancedDirichlet(3, 0.5), [[2, 8, 9, 11], [3, 5, 6, 10], [0, 1, 4, 7]]),
        (Similarity(3, 0.5), [[0, 1, 3, 4], [6, 7, 10, 11], [2, 5, 8, 9]]),
        (ClassesPerClient(3, 2), [[0, 1, 3, 10], [4, 5, 7, 8], [2, 6, 9, 11]]),
        (PowerLaw(3, 2, 1.0, 1), [[0, 3, 4], [1, 7, 10, 11], [2, 5, 6, 8, 9]]),
        (LogNormalSizes(3, 1.0), [[1, 3, 10], [2, 5], [0, 4, 6, 7, 8, 9, 11]]),
        (QuantitySkew(3, 0.5), [[8, 9], [2, 7], [0, 1, 3, 4, 5, 6, 10, 11]]),
    ],
    ids=repr,
)
def test_seed_gives_the_same_clients_on_every_machine(partition, expected):
    assert [part.tolist() for part in partition(torch.arange(12) % 3)] == expected


LARGE = {  # many clients, missing and rare classes, and a seed of more than 32 bits
    Iid(300, seed=2**40): "3400a0da5b26bc11",
    Dirichlet(300, 0.1, min_size=0, seed=2**40): "c7279315df875160",
    Shards(300, 3, seed=2**40): "4f9e42bc15110622",
    BalancedDirichlet(300, 0.1, seed=2**40): "c41a0bbdfe985270",
    BalancedDirichlet(300, 0.1, "total", seed=2**40): "e78810e45c654747",
    Similarity(300, 0.3, seed=2**40): "0ce1a81f40a5bd15",
    ClassesPerClient(300, 4, seed=2**40): "71d7b44bce3cc21c",
    PowerLaw(300, 3, min_per_class=1, seed=2**40): "02d47518f6d2193b",
    LogNormalSizes(300, 1.5, seed=2**40): "fb8a7f8376fafa84",
    QuantitySkew(300, 0.3, seed=2**40): "107d9a4c2acc150a",
}
MANY_LABELS = (torch.arange(20_000) ** 2 % 97) // 3 * 5  # 31 classes, some three times as large as others


def digest(parts):
    """Return a hash of a split, including the order of the indices."""
    text = ";".join(",".join(map(str, part.tolist())) for part in parts)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize(("partition", "expected"), LARGE.items(), ids=lambda value: repr(value)[:40])
def test_seed_gives_the_same_large_partition_on_every_machine(partition, expected):
    assert digest(partition(MANY_LABELS)) == expected


@pytest.mark.parametrize("partition", LARGE, ids=repr)
def test_partition_uses_all_seed_bits_and_ignores_class_numbering(partition):
    first = digest(partition(MANY_LABELS))
    for same in (MANY_LABELS.int(), (MANY_LABELS // 5).to(torch.uint8), 7 * MANY_LABELS - 1000, MANY_LABELS.numpy()):
        assert digest(partition(same)) == first
    other = copy.copy(partition)
    other.seed = 0  # the lower 32 bits of 2^40
    assert digest(other(MANY_LABELS)) != first


@pytest.mark.parametrize(("concentration", "alpha"), [("per_class", 0.5), ("total", 2.0)])
def test_balanced_mixtures_match_theoretical_mean_and_variance(concentration, alpha):
    labels = torch.arange(4).repeat(100_000)
    parts = BalancedDirichlet(1000, alpha, concentration)(labels)  # 400 examples each, Dir(0.5, 0.5, 0.5, 0.5)
    shares = counts(parts, labels).double() / 400
    assert shares.mean(0) == pytest.approx([0.25] * 4, abs=1e-12)  # every class is exhausted
    q = 0.25 * 0.75 / (4 * 0.5 + 1)  # the variance of a coordinate of q ...
    expected = q + (0.25 * 0.75 - q) / 400  # ... and of counts drawn with it
    assert shares.var(0) == pytest.approx([expected] * 4, rel=0.12)


def test_total_concentration_follows_the_label_distribution():
    labels = torch.cat([torch.zeros(900), torch.ones(100)]).long()
    parts = BalancedDirichlet(100, 1e6, "total")(labels)  # q = p for everybody; binomial counts, 10 examples each
    flat = BalancedDirichlet(100, 1e6)(labels)  # q = (1/2, 1/2) until the rare class has run out
    assert counts(parts, labels)[:, 1].max() <= 6
    assert counts(parts, labels)[:, 1].double().var() == pytest.approx(0.9, rel=0.4)
    assert int(counts(flat, labels)[:, 1].sum()) == 100


def test_balanced_dirichlet_favors_no_client():
    labels = torch.cat([torch.zeros(1000), torch.ones(3000)]).long()
    seen = counts(BalancedDirichlet(40, 1e6)(labels), labels)[:, 0]  # all want 50 of class 0, which has 25 for each
    assert seen.sum() == 1000
    assert 5 <= seen.min() <= seen.max() <= 45  # five standard deviations; in turns, the first would get 50, the last 0
    assert seen[:20].sum() == pytest.approx(500, abs=60)


@pytest.mark.parametrize("alpha", [1e-320, 1e-300, 1e-8])
@pytest.mark.parametrize("concentration", ["per_class", "total"])
def test_tiny_alpha_concentrates_clients_on_few_classes(alpha, concentration):
    labels = torch.arange(10).repeat(300)
    seen = counts(BalancedDirichlet(30, alpha, concentration)(labels), labels)
    assert seen.sum(1).tolist() == [100] * 30
    assert (seen.max(1).values == 100).sum() >= 5
    assert (seen > 0).sum(1).double().mean() < 3


def test_similarity_is_iid_at_one_and_sorted_at_zero():
    labels = torch.arange(10).repeat(100)
    assert counts(Similarity(10, 0.0)(labels), labels).equal(100 * torch.eye(10, dtype=torch.int64))
    at_random = counts(Similarity(10, 1.0)(labels), labels)
    assert 1 <= at_random.min() <= at_random.max() <= 25  # 10, plus or minus five standard deviations
    mixed = counts(Similarity(10, 0.5)(labels), labels)
    near = [int(row[max(0, client - 1) : client + 2].sum()) for client, row in enumerate(mixed)]
    assert min(near) >= 50  # the sorted half: cuts are near the borders of the classes
    assert sum(near) == pytest.approx(500 + 500 * 28 / 100, abs=60)  # 28 of the 100 pairs are near, by chance


def test_similarity_zero_matches_hand_computed_counts():
    labels = torch.tensor([1, 0, 1, 0, 1])
    assert counts(Similarity(2, 0)(labels), labels).tolist() == [[2, 1], [0, 2]]


def test_log_normal_sizes_have_the_requested_spread():
    sizes = torch.tensor([len(part) for part in LogNormalSizes(2000, 0.7)(torch.zeros(400_000))]).double()
    assert sizes.log().std().item() == pytest.approx(0.7, rel=0.06)
    equal = [len(part) for part in LogNormalSizes(7, 0.0)(torch.zeros(100))]
    assert sum(equal) == 100
    assert max(equal) - min(equal) <= 1


def test_quantity_skew_sizes_match_theoretical_variance():
    n, num_clients, alpha = 400_000, 2000, 0.5
    sizes = torch.tensor([len(part) for part in QuantitySkew(num_clients, alpha, 0)(torch.zeros(n))]).double() / n
    p = 1 / num_clients
    assert sizes.var().item() == pytest.approx(p * (1 - p) / (num_clients * alpha + 1), rel=0.15)


def test_skewed_sizes_keep_the_label_proportions():
    labels = torch.arange(2).repeat(5000)
    for partition in (LogNormalSizes(4, 0.5), QuantitySkew(4, 5.0)):
        for part in partition(labels):
            assert abs(labels[part].double().mean() - 0.5) < 2.5 / math.sqrt(len(part))  # five standard deviations


def test_power_law_is_heavy_tailed_and_equal_with_zero_sigma():
    labels = torch.arange(10).repeat(6000)
    sizes = sorted(len(part) for part in PowerLaw(1000)(labels))
    assert sizes[0] >= 10
    assert sum(sizes[-100:]) > 0.4 * 60_000
    assert {len(part) for part in PowerLaw(10, sigma=0.0)(labels)} == {6000}


def test_non_contiguous_labels_are_supported():
    labels = torch.tensor([7, 7, 7, -2, -2, -2])
    for partition in (BalancedDirichlet(2, 0.5), Similarity(2, 0.5), ClassesPerClient(2, 2), PowerLaw(2, 2, 1.0, 1)):
        assert_every_index_once(partition(labels), 6)


@pytest.mark.parametrize("clients", [5_000, pytest.param(100_000, marks=pytest.mark.thorough)])
def test_partitions_support_thousands_of_clients(clients):
    labels = torch.arange(2 * clients) % 10
    for partition in (
        BalancedDirichlet(clients, 0.3),
        Similarity(clients, 0.1),
        ClassesPerClient(clients, 2),
        PowerLaw(clients, 1, min_per_class=1),
        LogNormalSizes(clients, 1.0),
        QuantitySkew(clients, 0.5),
    ):
        parts = partition(labels)
        assert len(parts) == clients
        assert torch.cat(list(parts)).sort().values.equal(torch.arange(2 * clients))


ZEROS = torch.zeros(6, dtype=torch.int64)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BalancedDirichlet(0, 1.0), r"BalancedDirichlet\(num_clients=0\)"),
        (lambda: BalancedDirichlet(3, 0.0), r"BalancedDirichlet\(alpha=0.0\).*in \(0, inf\)"),
        (lambda: BalancedDirichlet(3, math.nan), r"alpha=nan"),
        (lambda: BalancedDirichlet(3, True), r"alpha=True"),
        (lambda: BalancedDirichlet(3, "0.3"), r"alpha='0.3'"),
        (lambda: BalancedDirichlet(3, 1.0, "each"), r"concentration='each'.*'per_class' or 'total'"),
        (lambda: BalancedDirichlet(7, 1.0)(ZEROS), r"at least 7 examples.*has 6.*num_clients"),
        (lambda: BalancedDirichlet(2, 1.0)(ZEROS.double()), r"integer labels"),
        (lambda: Similarity(3, 10), r"similarity=10.*\[0, 1\]"),
        (lambda: Similarity(3, -0.1), r"similarity=-0.1"),
        (lambda: Similarity(3, math.nan), r"similarity=nan"),
        (lambda: Similarity(3, None), r"similarity=None"),
        (lambda: Similarity(7, 0.5)(ZEROS), r"at least 7 examples"),
        (lambda: ClassesPerClient(3, 0), r"classes_per_client=0"),
        (lambda: ClassesPerClient(3, 2)(ZEROS), r"for 1 classes: classes_per_client is at most that"),
        (lambda: ClassesPerClient(1, 1)(torch.arange(6)), r"leave out some of the 6 classes. Raise num_clients"),
        (lambda: ClassesPerClient(7, 1)(ZEROS), r"one class to 7 clients, each at least 1, and it has 6"),
        (lambda: PowerLaw(3, sigma=-1.0), r"PowerLaw\(sigma=-1.0\).*finite number in \[0, inf\)"),
        (lambda: PowerLaw(3, min_per_class=0), r"min_per_class=0"),
        (lambda: PowerLaw(2, 1)(ZEROS), r"to 2 clients, each at least 5, and it has 6"),
        (lambda: LogNormalSizes(3, math.inf), r"sigma=inf"),
        (lambda: LogNormalSizes(3, 1.0, min_size=-1), r"LogNormalSizes\(min_size=-1\)"),
        (lambda: LogNormalSizes(3, 1.0, min_size=3)(ZEROS), r"at least 9 examples.*has 6"),
        (lambda: QuantitySkew(3, -1.0), r"QuantitySkew\(alpha=-1.0\)"),
        (lambda: QuantitySkew(3, 1.0, seed=-1), r"seed=-1"),
    ],
)
def test_errors_name_the_argument_and_value(make, message):
    with pytest.raises(FederatedError, match=message):
        make()


def test_repr_shows_the_arguments():
    shown = "PowerLaw(num_clients=3, seed=0, classes_per_client=2, sigma=2.0, min_per_class=5)"
    assert repr(PowerLaw(3)) == shown
