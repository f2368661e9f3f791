"""Labels, real numbers and sizes of a map-style data set's examples."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from lightning_fed.core.errors import FederatedError
from lightning_fed.data import Dirichlet, FederatedDataModule, FederatedDataset
from lightning_fed.data.batches.examples import check_map_style, column_of, labels_of, rows_in


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


def test_float_targets_are_found_behind_nested_subsets():
    y = torch.tensor([0.3, -1.0, 2.0, -0.5])
    nested = Subset(Subset(TensorDataset(torch.zeros(4, 2), y[:, None]), [3, 1, 0]), torch.tensor([2, -3]))
    assert FederatedDataset([nested]).targets()[0].equal(y[[0, 3]])
    seen = []
    FederatedDataset.from_partition(nested, lambda targets: seen.append(targets) or [[0], [1]])
    assert seen[0].equal(y[[0, 3]])


def test_dataset_behind_nested_subsets_is_read_once():
    base = Plain(6, lambda i: (i, i))
    halves = [Subset(base, range(3)), Subset(base, range(3, 6))]
    data = FederatedDataset([Subset(half, [2, 0]) for half in halves])
    assert [part.tolist() for part in data.targets()] == [[2, 0], [5, 3]]
    assert base.reads == 6


def test_labels_of_the_subset_itself_take_precedence():
    class Relabelled(Subset):
        targets = (7, 8)

    relabelled = Relabelled(tensors(4), [0, 1])
    data = FederatedDataset([relabelled, Subset(Subset(relabelled, [1, 0]), [0])])
    assert [part.tolist() for part in data.targets()] == [[7, 8], [8]]


def test_class_names_are_labels():
    for dataset in (
        Plain(4, lambda i: (i, "ab"[i % 2])),
        Plain(4, lambda i: i, targets=np.array(["a", "b"] * 2)),
        Plain(4, lambda i: (i, np.array([i % 2]))),
        Plain(4, lambda i: i, targets=torch.tensor([[0], [1], [0], [1]])),
    ):
        assert labels_of(dataset).tolist() == [0, 1, 0, 1]


def test_float_targets_are_not_classes():
    dataset = Plain(6, lambda i: (i, torch.tensor(i / 2)))
    with pytest.raises(FederatedError, match="torch.float32.*labels=..."):
        FederatedDataset.from_partition(dataset, Dirichlet(2, 1.0))
    assert FederatedDataset.from_partition(dataset, lambda y: [range(len(y))]).known_sizes == [6]


class Targets(TensorDataset):
    def __init__(self, *tensors, **attributes):
        super().__init__(*tensors)
        vars(self).update(attributes)


x, y = torch.rand(4), torch.tensor([2, 0, 1, 2])


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(x, y),
        TensorDataset(y.int(), x),  # the last integer tensor [n]
        TensorDataset(torch.zeros(4).long(), y, x, torch.zeros(4, 2).long()),
        Subset(TensorDataset(torch.rand(6), torch.tensor([9, 2, 0, 9, 1, 2])), [1, 2, 4, 5]),
        Targets(x, torch.zeros(4).long(), targets=y.tolist()),
        Targets(x, torch.zeros(4).long(), labels=y.numpy()),
        Targets(x, y, labels=["names", "of", "classes"]),  # not one per example
        Targets(x, y, targets=None, labels=lambda: None),
        Plain(4, lambda i: (float(x[i]), int(y[i]))),
        Plain(4, lambda i: (x[i], y[i])),
        Plain(4, lambda i: [x[i], np.int64(y[i])]),
        Plain(4, lambda i: {"pixels": x[i], "label": int(y[i])}),
        Plain(4, lambda i: (x[i], "abc"[y[i]])),
        Plain(4, lambda i: (x[i], 0), targets=["abc"[k] for k in y]),
    ],
)
def test_labels_are_found(dataset):
    labels = labels_of(dataset)
    assert labels.dtype == torch.int64
    assert labels.tolist() == y.tolist()


def test_texts_mappings_streams_and_columns_are_rejected():
    for good in ([1, 2], (1, 2), TensorDataset(torch.zeros(3)), [torch.zeros(2), torch.zeros(2)]):
        check_map_style(good, "Client 0")
    for bad, message in (
        (DataLoader([1], batch_size=5), r"Client 0 has a DataLoader, .* give loader.dataset, with batch_size=5"),
        ("text", "Client 0 has a str, whose examples cannot be counted"), ({0: 1}, "has a dict"), (iter([]), "a list_"),
        (list, "has a type"), ((torch.zeros(5, 2), torch.zeros(5)), "of 2 arrays, which would be 2 examples"),
        ([torch.zeros(5, 2), torch.zeros(5)], "of 2 arrays.*TensorDataset"),
    ):  # fmt: skip
        with pytest.raises(FederatedError, match=message):
            check_map_style(bad, "Client 0")


def test_column_behind_subsets_requires_a_key_per_example():
    base = tensors(4)
    base.writer = np.array(["a", "b", "a", "c"])
    assert column_of(Subset(Subset(base, [3, 1]), [1, 0]), "writer", "ByKey") == ["b", "c"]
    base.writer = ["a"]
    for name in ("writer", "reader"):
        with pytest.raises(
            FederatedError, match=f"ByKey: TensorDataset has no attribute '{name}' with one key for each"
        ):
            column_of(base, name, "ByKey")


def test_negative_subset_rows_are_resolved():
    assert rows_in(tensors(4), [-1, 0]).tolist() == [3, 0]
    with pytest.raises(FederatedError, match="examples -5 to 0, but its TensorDataset has only 4"):
        rows_in(tensors(4), [-5, 0])


MASK = torch.tensor([False, True, True, False])


@pytest.mark.parametrize(
    ("indices", "found"),
    [
        (MASK, r"a Tensor of torch.bool, shape \[4\]"),
        (MASK.numpy(), r"a ndarray of bool, shape \[4\]"),
        (MASK.tolist(), "a list that begins with False"),
        (MASK.nonzero(), r"a Tensor of torch.int64, shape \[2, 1\]"),
        (torch.tensor([1.0, 2.0]), "a Tensor of torch.float32"),
        ([1.5], "a list that begins with 1.5"),
        (slice(2), "a slice"),
    ],
)
def test_invalid_subset_indices_are_rejected(indices, found):
    part = Subset(tensors(4), indices)
    message = rf"has a Subset whose indices are {found}.*mask.nonzero\(\).flatten\(\).tolist\(\)"
    for make in (
        lambda: FederatedDataModule([part]),
        lambda: FederatedDataModule([Subset(part, [0])]),
        lambda: FederatedDataModule([tensors(4)], val=part),
        lambda: FederatedDataModule([tensors(4)], test=[tensors(4), part]),
        lambda: FederatedDataModule([tensors(4)], client_val={0: part}),
    ):
        with pytest.raises(FederatedError, match=message):
            make()
    late = FederatedDataModule([tensors(4)])
    late.val = part
    with pytest.raises(FederatedError, match=message):
        late.val_dataloader()


@pytest.mark.parametrize(
    "indices", [np.arange(2), MASK.nonzero()[:, 0], range(2), (0, 1), [*torch.arange(2)], [], np.array([])]
)
def test_indices_of_any_type_are_accepted(indices):
    assert FederatedDataModule([Subset(tensors(4), indices)]).client_size(0) == len(indices)
