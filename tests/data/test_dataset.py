"""Clients by id: given one by one, built on demand, or split from one data set."""

import pickle
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from lightning_fed.core.errors import FederatedError
from lightning_fed.data import ByKey, Dirichlet, FederatedDataset, Iid, Shards
from lightning_fed.data.batches.examples import as_labels, labels_of


def tensors(n):
    return TensorDataset(torch.arange(float(n)), torch.arange(n) % 3)


class Plain(Dataset):
    """A data set whose examples the function ``example`` makes."""

    def __init__(self, n, example, **attributes):
        self.n = n
        self.example = example
        self.reads = 0
        vars(self).update(attributes)

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        if not 0 <= index < self.n:
            raise IndexError
        self.reads += 1
        return self.example(index)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def test_list_clients_get_ids_from_zero():
    first, second = tensors(3), tensors(0)
    data = FederatedDataset([first, second])
    assert data.ids == range(2)
    assert len(data) == 2
    assert data.known_sizes == [3, 0]
    assert data.dataset(0) is first
    assert data.dataset(np.int64(1)) is second


def test_mapping_keeps_its_ids_and_order():
    data = FederatedDataset({"bob": tensors(3), "ann": tensors(5), np.int64(7): tensors(1)})
    assert data.ids == ["bob", "ann", 7]
    assert type(data.ids[2]) is int
    assert data.known_sizes == [3, 5, 1]
    assert data.size("ann") == 5
    assert data.size(7) == 1


class Lazy(Mapping):
    """Builds clients on demand, and records each build."""

    def __init__(self, ids):
        self.ids = ids
        self.built = []

    def __len__(self):
        return len(self.ids)

    def __iter__(self):
        return iter(self.ids)

    def __getitem__(self, client_id):
        if client_id not in self.ids:
            raise KeyError(client_id)
        self.built.append(client_id)
        return {"broken": {}["missing"]} if client_id == "broken" else tensors(4)


def test_custom_mapping_builds_clients_on_demand():
    clients = Lazy(["ann", "bob", "broken"])
    data = FederatedDataset(clients)
    assert clients.built == []
    assert data.known_sizes is None
    assert "unknown" in data.summary()
    assert data.size("bob") == 4
    assert clients.built == ["bob"]
    with pytest.raises(KeyError, match="missing"):  # the user's own error, not "no such client"
        data.dataset("broken")


class LazyList(Sequence):
    def __len__(self):
        return 10**6

    def __getitem__(self, index):
        return tensors(index)


def test_custom_sequence_builds_clients_on_demand():
    data = FederatedDataset(LazyList())
    assert len(data) == 10**6
    assert data.known_sizes is None
    assert data.size(17) == 17


@pytest.mark.parametrize("partition", [Iid(4), Dirichlet(4, 0.5), Shards(4)], ids=repr)
def test_partition_creates_subsets_without_copies(partition):
    dataset = tensors(50)
    data = FederatedDataset.from_partition(dataset, partition)
    parts = partition(dataset.tensors[1])
    assert data.ids == range(4)
    assert data.known_sizes == [len(part) for part in parts]
    for client_id, part in enumerate(parts):
        subset = data.dataset(client_id)
        assert type(subset) is Subset
        assert subset.dataset is dataset
        assert subset.indices == part.tolist()
        assert data.size(client_id) == len(subset)


def test_keys_become_client_ids():
    data = FederatedDataset.from_partition(tensors(5), ByKey(["x", "y", "x", "x", "y"]))
    assert data.ids == ["x", "y"]
    assert data.dataset("y").indices == [1, 4]


def test_by_key_reads_an_attribute_through_nested_subsets():
    dataset = Plain(4, lambda i: i, writers=np.array(["b", "a", "b", "c"]))
    assert FederatedDataset.from_partition(dataset, ByKey("writers")).known_sizes == [2, 1, 1]
    nested = Subset(Subset(dataset, [3, 2, 0]), [1, 2])
    data = FederatedDataset.from_partition(nested, ByKey("writers"))
    assert data.ids == ["b"]
    assert data.dataset("b").indices == [0, 1]
    assert dataset.reads == 0
    with pytest.raises(FederatedError, match=r"ByKey\('authors'\): Plain has no attribute 'authors'"):
        FederatedDataset.from_partition(nested, ByKey("authors"))


def test_any_function_of_the_labels_can_partition():
    def by_label(labels):
        return {f"label {k}": torch.nonzero(labels == k).flatten() for k in range(3)}

    data = FederatedDataset.from_partition(tensors(5), by_label)
    assert data.ids == ["label 0", "label 1", "label 2"]
    assert data.known_sizes == [2, 2, 1]
    assert FederatedDataset.from_partition(tensors(5), lambda _: [[0, 1], [], np.array([4])]).known_sizes == [2, 0, 1]
    assert FederatedDataset.from_partition(tensors(5), lambda _: []).known_sizes == []
    assert FederatedDataset.from_partition(tensors(5), lambda _: torch.arange(4).view(2, 2)).known_sizes == [2, 2]


def test_example_given_to_two_clients_warns():
    with pytest.warns(UserWarning, match="gave 2 examples to more than one client, example 3 to 'c' and to 'd'"):
        FederatedDataset.from_partition(tensors(5), lambda _: {"a": [4, 0], "b": [], "c": [3, 4], "d": [3]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn_twice = FederatedDataset.from_partition(tensors(5), lambda _: [[1, 1], [0]])
    assert drawn_twice.known_sizes == [2, 1]


def test_partition_function_supports_real_valued_targets():
    y = torch.tensor([[0.3], [-1.0], [2.0], [-0.5]])
    dataset = TensorDataset(torch.zeros(4, 2), y)
    federated = FederatedDataset.from_partition(
        dataset, lambda targets: [torch.nonzero(part).flatten() for part in (targets < 0, targets >= 0)]
    )
    assert [federated.indices(i).tolist() for i in (0, 1)] == [[1, 3], [0, 2]]
    assert "label skew" not in federated.summary()
    with pytest.raises(FederatedError, match="one integer class per example"):
        FederatedDataset.from_partition(dataset, Shards(2))


def test_labels_are_read_only_if_needed():
    dataset = Plain(6, lambda i: i)
    assert FederatedDataset.from_partition(dataset, Iid(3)).known_sizes == [2, 2, 2]
    assert dataset.reads == 0


MULTI = {
    "multi-label tensors": lambda i: (i, torch.tensor([i % 2, 1, 0])),
    "multi-label lists": lambda i: (i, [i % 2, 1]),
    "masks": lambda i: (i, torch.zeros(4, 4).long()),
    "masks of numpy": lambda i: (i, np.zeros((4, 4))),
    "mappings": lambda i: (i, {"boxes": torch.zeros(2, 4)}),
    "nothing": lambda i: (i, None),
    "no labels": lambda i: torch.zeros(3),
}


@pytest.mark.parametrize("example", MULTI.values(), ids=MULTI)
def test_examples_without_a_class_require_a_function_or_labels(example):
    dataset = Plain(6, example)
    halves = FederatedDataset.from_partition(dataset, lambda labels: torch.arange(len(labels)).chunk(2))
    assert halves.known_sizes == [3, 3]
    assert dataset.reads == 0
    assert "label skew" not in halves.summary()
    for partition in (Dirichlet(2, 1.0), lambda labels: [torch.nonzero(labels == 0)]):
        dataset.reads = 0
        with pytest.raises(FederatedError, match=r"from_partition\(dataset, partition, labels=...\)"):
            FederatedDataset.from_partition(dataset, partition)
        assert dataset.reads == 1  # not the whole data set
    for labels in (torch.arange(6) % 2, lambda example: int(example[0]) % 2):
        by_class = FederatedDataset.from_partition(dataset, Shards(2, 1), labels=labels)
        assert by_class.known_sizes == [3, 3]


def test_labels_are_read_when_a_function_uses_them():
    for use in (
        lambda labels: labels == 1,
        lambda labels: torch.unique(labels),
        lambda labels: np.asarray(labels),
        lambda labels: labels.tolist(),
        lambda labels: labels[0],
        lambda labels: list(labels),
        lambda labels: labels.dtype,
        lambda labels: int(labels.sum()),
    ):
        dataset = Plain(4, lambda i: (i, i % 2))
        found = []
        FederatedDataset.from_partition(dataset, lambda labels, use=use, to=found: to.append(use(labels)) or [[0]])
        expected = use(torch.tensor([0, 1, 0, 1]))
        assert np.array_equal(np.asarray(found[0]), np.asarray(expected)) or found[0] == expected
        assert dataset.reads == 4
    for use in (len, lambda labels: labels.shape, lambda labels: labels.size(0), lambda labels: labels.numel()):
        dataset = Plain(4, lambda i: (i, i % 2))
        FederatedDataset.from_partition(dataset, lambda labels, use=use: use(labels) and [[0]])
        assert dataset.reads == 0


# These read a tensor's memory directly, bypassing its class.
COPIES = {
    "as_tensor": lambda labels: torch.as_tensor(labels, dtype=torch.int32),
    "new_tensor": lambda labels: torch.zeros(1).new_tensor(labels),
    "numpy": lambda labels: torch.as_tensor(labels, dtype=torch.int32).numpy(),
}


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_function_that_copies_labels_gets_their_values_or_raises(copy):
    def partition(labels):
        return [np.flatnonzero(np.asarray(copy(labels)) == 1), torch.as_tensor(copy(labels) == 0).nonzero().flatten()]

    labels = torch.tensor([0, 1, 1, 0])
    for dataset in (
        TensorDataset(labels),
        Subset(TensorDataset(labels), range(4)),
        Plain(4, lambda i: (i, 9), targets=labels),
    ):
        data = FederatedDataset.from_partition(dataset, partition)
        assert [data.indices(i).tolist() for i in data.ids] == [[1, 2], [0, 3]]
    unread = Plain(4, lambda i: (i, int(labels[i])))
    with pytest.raises(FederatedError, match=r"before they were read.*labels\.clone\(\)"):
        FederatedDataset.from_partition(unread, lambda own: [copy(own)])


def test_federated_dataset_pickles():
    data = FederatedDataset.from_partition(tensors(9), Dirichlet(3, 1.0))
    data = pickle.loads(pickle.dumps(data))
    assert sum(data.known_sizes) == 9


x, y = torch.rand(4), torch.tensor([2, 0, 1, 2])


@pytest.mark.parametrize("kind", ["tensors", "attribute", "given", "examples"])
def test_in_place_label_changes_by_a_function_do_not_leak(kind):
    classes = torch.arange(12) % 3

    def merged(labels):
        labels[labels == 2] = 0  # merges two classes
        return [(labels == c).nonzero().flatten() for c in (0, 1)]

    source = {
        "tensors": TensorDataset(torch.zeros(12), classes),
        "attribute": Plain(12, lambda i: (0.0, 0), targets=classes),
        "given": Plain(12, lambda i: 0.0),
        "examples": Plain(12, lambda i: (0.0, classes[i])),
    }[kind]
    clients = FederatedDataset.from_partition(source, merged, classes if kind == "given" else None)
    assert [len(clients.indices(c)) for c in clients.ids] == [8, 4]
    assert classes.tolist() == [0, 1, 2] * 4
    assert sorted(torch.cat(clients.targets()).tolist()) == [0] * 4 + [1] * 4 + [2] * 4


def test_given_labels_take_precedence():
    data = FederatedDataset.from_partition(tensors(4), Shards(2, 1), labels=[1, 0, 1, 0])
    assert sorted(sorted(data.dataset(i).indices) for i in range(2)) == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FederatedDataset(tensors(3)), r"clients=TensorDataset.*train=.*partition="),
        (lambda: FederatedDataset(5), r"clients=int"),
        (lambda: FederatedDataset({"ann": tensors(3), "bob": Stream()}), r"Client 'bob' has a Stream.*__len__"),
        (lambda: FederatedDataset([tensors(3), None]), r"Client 1 has a NoneType"),
        (lambda: FederatedDataset({(1, 2): tensors(3)}), r"int or a str; found \(1, 2\)"),
        (lambda: FederatedDataset([tensors(3)]).dataset(1), r"no client 1 among the 1 clients \(0\)"),
        (lambda: FederatedDataset([tensors(3)]).dataset(-1), r"no client -1"),
        (lambda: FederatedDataset([tensors(3)]).size("ann"), r"no client 'ann'"),
        (lambda: FederatedDataset({"ann": tensors(3)}).dataset(0), r"no client 0 among the 1 clients \('ann'\)"),
        (lambda: FederatedDataset.from_partition(tensors(4), Iid(4)).size(4), r"no client 4.*\(0, 1, 2, ...\)"),
        (lambda: FederatedDataset.from_partition(tensors(1), ByKey(["a"])).size("b"), r"no client 'b'"),
        (lambda: FederatedDataset.from_partition(Stream(), Iid(1)), r"train has a Stream"),
        (lambda: FederatedDataset.from_partition(tensors(3), Iid), r"partition=Iid is a class: instantiate it"),
        (lambda: FederatedDataset.from_partition(tensors(3), 10), r"partition=10 must be a Partition"),
        (lambda: FederatedDataset.from_partition(tensors(3), lambda _: [[0, 3]]), r"from 0 to 3 for 3 examples"),
        (lambda: FederatedDataset.from_partition(tensors(3), lambda _: [[-1]]), r"indices from -1 to -1"),
        (lambda: FederatedDataset.from_partition(tensors(3), lambda _: [[0], [0.5]]), r"client 1 a torch.float32"),
        (lambda: FederatedDataset.from_partition(tensors(3), lambda _: [[[0]]]), r"client 0.*shape \[1, 1\]"),
        (
            lambda: FederatedDataset.from_partition(tensors(3), lambda _: None),
            r"returned a NoneType: it must",
        ),
        (lambda: FederatedDataset.from_partition(tensors(3), lambda _: iter([[0]])), r"returned a list_iterator"),
        (lambda: FederatedDataset.from_partition(tensors(3), lambda _: {0, 1}), r"returned a set"),
        (lambda: FederatedDataset.from_partition(tensors(3), lambda _: "012"), r"returned a str"),
        (lambda: FederatedDataset.from_partition(tensors(3), lambda _: torch.tensor(1)), r"returned a Tensor"),
        (
            lambda: FederatedDataset.from_partition(tensors(3), lambda _: [[0], {1}]),
            r"client 1 a set that is no",
        ),
        (lambda: FederatedDataset.from_partition(tensors(3), lambda _: {"ann": ["0"]}), r"client 'ann' a list that is"),
        (lambda: FederatedDataset.from_partition(tensors(3), lambda _: [None]), r"client 0 a NoneType that is no"),
        (lambda: FederatedDataset.from_partition(tensors(3), lambda _: [[1j]]), r"client 0 a torch.complex64"),
        (lambda: FederatedDataset.from_partition(tensors(3), Shards(1), labels=[0, 1]), r"labels.*\[3\].*shape \[2\]"),
        (lambda: labels_of(Subset(tensors(60), [0, 100])), r"examples 0 to 100, but its TensorDataset has only 60:"),
        (lambda: FederatedDataset([Subset(tensors(3), [-4])]).targets(), r"examples -4 to -4.*has only 3: correct"),
        (
            lambda: FederatedDataset([Subset(Subset(tensors(60), [3, 4]), [0, 2])]).targets(),
            r"Subset selects examples 0 to 2, but its Subset has only 2:",
        ),
        (lambda: labels_of(Plain(2, lambda i: i)), r"Cannot find labels in Plain.*`targets`"),
        (
            lambda: labels_of(Plain(2, lambda i: i)),
            r"FederatedDataModule\(clients=FederatedDataset.from_partition\(dataset, partition, labels=...\)\)",
        ),
        (lambda: labels_of(Plain(2, lambda i: {"x": i})), r"an example is a dict without one"),
        (lambda: labels_of(Plain(2, lambda i: (i, 0.5))), r"one integer class per example \[2\]; found torch.float"),
        (lambda: labels_of(Plain(2, lambda i: (i, torch.zeros(3)))), r"last element of each example of Plain"),
        (lambda: labels_of(Plain(2, lambda i: i, targets=torch.zeros(2, 5).long())), r"Plain.targets.*shape \[2, 5\]"),
        (lambda: as_labels(np.zeros((2, 5)), 2, "labels"), r"labels.*shape \[2, 5\].*labels=..."),
    ],
)
def test_errors_say_what_to_change(make, message):
    with pytest.raises(FederatedError, match=message):
        make()


def test_summary_reports_counts():
    text = FederatedDataset({"a": tensors(1), "b": tensors(0), "c": tensors(1500)}).summary()
    assert text.splitlines() == [
        "clients        3",
        "examples       1,501",
        "per client     min 0, median 1, max 1,500",
        "empty clients  1",
    ]
    even = FederatedDataset([tensors(1), tensors(4)]).summary()
    assert "per client     min 1, median 2.5, max 4" in even.splitlines()
    assert FederatedDataset([]).summary().splitlines() == ["clients        0", "examples       0"]


def test_summary_reports_label_skew():
    dataset = TensorDataset(torch.arange(8) % 2)  # half of each label

    def skew(*parts):
        return FederatedDataset.from_partition(dataset, lambda _: parts).summary().splitlines()[-1].split()[2]

    assert skew([0, 1, 2, 3], [4, 5, 6, 7]) == "0.00"
    assert skew([0, 2, 4, 6], [1, 3, 5, 7]) == "0.50"  # each distribution is 1/2 away from (1/2, 1/2)
    assert skew([0, 2], [1, 3, 4, 5, 6, 7]) == "0.25"  # (2 * 1/2 + 6 * 1/6) / 8
