"""LEAF's JSON files: small ones in the real format, and the published samples if available.

Set ``LIGHTNING_FED_DATA`` to a folder with ``femnist_leaf_sample/train/train.json`` and
``fedprox_synthetic/synthetic_1_1/data/test/mytest.json`` for the latter.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_fed import FederatedTrainer
from lightning_fed.core.errors import FederatedError
from lightning_fed.data import FEMNIST, LeafDataModule
from lightning_fed.models import MLPClassifier

ANN = ([[0.5, 1], [2, 3], [4, 5.5]], [0, 2, 1])
BOB = ([[6, 7]], [1.0])
CAT = ([[8, 9], [1, 1]], [0, 0])


def leaf(users):
    return {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {name: {"x": x, "y": y} for name, (x, y) in users.items()},
    }


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "train" / "b.json", leaf({"bob": BOB}))
    write(tmp_path / "train" / "a.json", leaf({"ann": ANN}) | {"hierarchies": ["x"]})
    write(tmp_path / "train" / "notes.txt", "no data")
    write(tmp_path / "test" / "all.json", leaf({"cat": CAT, "ann": BOB, "bob": ([], [])}))
    return tmp_path


def test_users_of_all_files_are_clients(folder):
    data = LeafDataModule(str(folder / "train"), str(folder / "test"), batch_size=2)
    data.setup("fit")
    assert list(data.client_ids) == ["ann", "bob"]
    assert data.known_sizes == [3, 1]
    x, y = data.client_dataset("ann").tensors
    assert torch.equal(x, torch.tensor(ANN[0]))
    assert torch.equal(y, torch.tensor(ANN[1]))
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)


def test_class_numbers_keep_all_digits(tmp_path):
    path = write(tmp_path / "a.json", leaf({"ann": ([[1], [1], [1]], [2**24 + 1, 2**24, 2**53])}))
    assert LeafDataModule(path).client_dataset("ann").tensors[1].tolist() == [2**24 + 1, 2**24, 2**53]
    path = write(tmp_path / "b.json", leaf({"ann": ([[1]], [0.9999999999])}))
    with pytest.raises(FederatedError, match="y holds more than class numbers"):
        LeafDataModule(path).setup()


def test_duplicate_user_in_one_file_is_rejected(tmp_path):
    twice = '"ann": {"x": [[1]], "y": [0]}, "ann": {"x": [[2]], "y": [1]}'
    path = write(tmp_path / "a.json", f'{{"users": ["ann"], "num_samples": [1], "user_data": {{{twice}}}}}')
    with pytest.raises(FederatedError, match=r"a.json is not valid JSON: an object has the name 'ann' twice"):
        LeafDataModule(path).setup()


def test_test_users_are_pooled_and_also_kept_per_client(folder):
    data = LeafDataModule(str(folder / "train"), str(folder / "test"))
    data.setup("fit")
    x, y = data.val.tensors
    assert torch.equal(x, torch.tensor([*CAT[0], *BOB[0]], dtype=torch.float32))
    assert torch.equal(y, torch.tensor([0, 0, 1]))
    assert data.test is data.val
    assert list(data.client_val) == ["ann"]  # bob's is empty; cat is only in the test part, as in LEAF's split by user
    assert torch.equal(data.client_val_dataset("ann").tensors[0], torch.tensor(BOB[0], dtype=torch.float32))


def test_files_are_read_once_on_demand(folder):
    data = LeafDataModule(str(folder / "nowhere"))  # not read yet
    with pytest.raises(FederatedError, match=r"there is no .*nowhere.*preprocess.sh.*Or correct train_path"):
        data.setup("fit")
    data = LeafDataModule(str(folder / "train"))
    assert data.num_clients == 2
    (folder / "train" / "a.json").unlink()
    data.setup("fit")
    assert data.num_clients == 2
    assert data.val is None


def test_target_values_are_columns_and_input_shapes_can_be_set(folder):
    data = LeafDataModule(str(folder / "train"), shape=[1, 2, 1], targets="values")
    x, y = data.client_dataset("bob").tensors
    assert (list(x.shape), list(y.shape), y.dtype) == ([1, 1, 2, 1], [1, 1], torch.float32)


def test_run_trains_on_leaf_data(folder):
    data = LeafDataModule(str(folder / "train"), str(folder / "test"))
    trainer = FederatedTrainer(max_rounds=2, local_epochs=1, seed=0, logger=False, enable_progress_bar=False)
    trainer.fit(MLPClassifier(in_features=2, num_classes=3, hidden=[]), data)
    assert 0 <= trainer.callback_metrics["val_acc"] <= 1


GOOD = leaf({"ann": ANN, "bob": BOB})
DAMAGED = [
    ('{"users": [', "is not valid JSON: .*: line 1 column 12"),
    ([1, 2], "a LEAF file is an object .* found list"),
    ({"users": ["ann"], "user_data": {}}, r"found \['user_data', 'users'\]"),
    (GOOD | {"users": ["ann", 3]}, "must be a list of names"),
    (GOOD | {"num_samples": [3]}, "there are 2 users and 1 num_samples"),
    (GOOD | {"num_samples": [3, 2]}, r"user 'bob': num_samples is 2, but x has 1 and y 1"),
    (GOOD | {"users": ["ann", "ann"]}, "user 'ann': this user has been read already"),
    (GOOD | {"users": ["ann", "zoe"]}, "user 'zoe': user_data must have an object"),
    (GOOD | {"users": ["ann"], "num_samples": [3]}, "1 users that are not among users, such as 'bob'"),
    (leaf({"ann": ([[1, 2], [3]], [0, 1])}), "user 'ann', x: the samples differ in shape"),
    (leaf({"ann": (["to be", "or"], [0, 1])}), "'ann', x: the samples are texts.*Shakespeare and Sentiment140"),
    (leaf({"ann": ([["1", "2"], ["3"]], [0, 1])}), "'ann', x: the samples are texts.*Shakespeare and Sentiment140"),
    (leaf({"ann": ([[1, 2]], ["a"])}), "'ann', y: the samples are texts.*Shakespeare and Sentiment140"),
    (leaf({"ann": ([[1, None]], [0])}), "user 'ann', x: the samples hold more than numbers"),
    (leaf({"ann": ([[1, float("nan")]], [0])}), "user 'ann', x: the samples hold NaN"),
    (leaf({"ann": ([[1, 2]], [0.5])}), "y holds more than class numbers"),
    (leaf({"ann": ([[1, 2]], [-1])}), "y holds more than class numbers"),
    (leaf({"ann": ([[1, 2]], [7])}), "y has class 7 of 3 classes"),
    (
        leaf({"ann": ANN, "bob": ([[1, 2, 3]], [0])}),
        r"inputs of user 'ann' have the shape \[2\], and those of 'bob' \[3",
    ),
]


@pytest.mark.parametrize(("content", "message"), DAMAGED)
def test_corrupt_files_are_rejected_with_the_location(tmp_path, content, message):
    path = write(tmp_path / "train.json", content)
    with pytest.raises(FederatedError, match=message) as caught:
        LeafDataModule(path, num_classes=3).setup("fit")
    assert "train.json" in str(caught.value) or "shape" in message


def test_same_user_in_two_files_is_rejected(tmp_path):
    for name in ("a.json", "b.json"):
        write(tmp_path / name, leaf({"ann": ANN}))
    with pytest.raises(FederatedError, match=r"b.json, user 'ann': this user has been read already"):
        LeafDataModule(str(tmp_path)).setup("fit")


def test_folder_without_files_is_rejected(tmp_path):
    with pytest.raises(FederatedError, match=r"has no files named \*.json"):
        LeafDataModule(str(tmp_path)).setup("fit")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": "labels"}, "targets must be 'classes' or 'values'"),
        ({"num_classes": 0}, "num_classes=0"),
        ({"shape": [28, 0]}, "shape=0"),
        ({"batch_size": 0}, "batch_size=0"),
    ],
)
def test_invalid_options_are_rejected_at_construction(options, message):
    with pytest.raises(FederatedError, match=message):
        LeafDataModule("train", **options)


def test_femnist_images_are_as_stored_or_inverted(tmp_path):
    image = np.linspace(0, 1, 784)
    for part, labels in (("train", [61, 0]), ("test", [3, 10])):
        write(tmp_path / "femnist" / part / "0.json", leaf({"f0": ([image.tolist()] * 2, labels)}))
    x, y = FEMNIST(str(tmp_path)).client_dataset("f0").tensors
    assert (list(x.shape), x.dtype, y.tolist()) == ([2, 1, 28, 28], torch.float32, [61, 0])
    assert torch.equal(x[0].flatten(), torch.tensor(image, dtype=torch.float32))
    inverted = FEMNIST(str(tmp_path), invert=True)
    inverted.setup("test")
    assert torch.equal(inverted.client_dataset("f0").tensors[0], 1 - x)
    assert torch.equal(inverted.test.tensors[0], 1 - x)


def test_femnist_error_names_the_expected_location(tmp_path):
    message = r"there is no .*femnist.*preprocess.sh.*Or correct root: the folders train and test belong in .*femnist"
    with pytest.raises(FederatedError, match=message):
        FEMNIST(str(tmp_path)).setup("fit")
    write(tmp_path / "femnist" / "train" / "0.json", leaf({"f0": ([[0.0] * 783], [1])}))
    write(tmp_path / "femnist" / "test" / "0.json", leaf({}))
    with pytest.raises(FederatedError, match=r"an input has 783 numbers, which do not make the shape \[1, 28, 28\]"):
        FEMNIST(str(tmp_path)).setup("fit")


def published(*names):
    folder = os.environ.get("LIGHTNING_FED_DATA")
    if not folder:
        pytest.skip("LIGHTNING_FED_DATA names no folder of data sets")
    path = Path(folder, *names)
    if not path.exists():
        pytest.skip(f"LIGHTNING_FED_DATA has no {Path(*names)}")
    return path


def test_published_femnist_sample_has_the_known_statistics():
    published("femnist_leaf_sample", "train", "train.json")
    data = FEMNIST(os.environ["LIGHTNING_FED_DATA"], folder="femnist_leaf_sample")
    data.setup("fit")
    assert (data.num_clients, sum(data.known_sizes), len(data.val)) == (5, 78, 89)
    assert sum(map(len, data.client_val.values())) == 89
    images = torch.cat([data.client_dataset(name).tensors[0] for name in data.client_ids])
    assert images.amin() == 0
    assert images.median() == 1  # paper is 1


@pytest.mark.parametrize(("name", "size"), [("synthetic_0_0", 897), ("synthetic_1_1", 1084), ("synthetic_iid", 805)])
def test_published_synthetic_sets_have_the_known_sizes(name, size):
    data = LeafDataModule(str(published("fedprox_synthetic", name, "data", "test", "mytest.json")), num_classes=10)
    assert (data.num_clients, sum(data.known_sizes)) == (30, size)
    assert data.client_dataset("f_00000").tensors[0].shape[1] == 60


def test_targets_of_different_shapes_are_rejected(tmp_path):
    path = tmp_path / "train.json"
    path.write_text(json.dumps(leaf({"ann": ([[1, 2]], [0.5]), "bob": ([[1, 2]], [[0.5, 1.5]])})))
    with pytest.raises(FederatedError, match=r"targets of user 'ann' have the shape \[1\], and those of 'bob' \[2\]"):
        LeafDataModule(str(path), str(path), targets="values").setup("fit")
