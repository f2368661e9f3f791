"""A folder for each client: listed once, read when needed, and never trusted."""

import os

import numpy as np
import pytest
import torch

from lightning_fed import FederatedTrainer
from lightning_fed.core.errors import FederatedError
from lightning_fed.data import ClientFolder, ClientImages
from lightning_fed.data.files import folders
from lightning_fed.models import MLPClassifier


def save(folder, part="train", n=3, **arrays):
    folder.mkdir(parents=True, exist_ok=True)
    values = {"x": np.arange(2.0 * n).reshape(n, 2), "y": np.arange(n, dtype=np.int32) % 2} | arrays
    np.savez(folder / f"{part}.npz", **values)


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "clients"
    for name, n in (("bob", 3), ("ann", 5), ("cat", 1)):
        save(folder / name, n=n)
    save(folder / "ann", "val", n=2)
    (folder / ".cache").mkdir()
    (folder / "notes.txt").write_text("not a client")
    return folder


def test_folders_are_clients_and_files_are_read_on_demand(root, monkeypatch):
    data = ClientFolder(str(root))
    monkeypatch.setattr(folders, "read_examples", None)
    assert list(data.client_ids) == ["ann", "bob", "cat"]
    assert (data.num_clients, data.known_sizes) == (3, None)
    assert [data.client_size(name) for name in data.client_ids] == [5, 3, 1]
    monkeypatch.undo()
    x, y = data.client_dataset("bob").tensors
    assert torch.equal(x, torch.arange(6.0).view(3, 2))
    assert (x.dtype, y.tolist(), y.dtype) == (torch.float32, [0, 1, 0], torch.int64)
    assert len(data.client_val_dataset("ann")) == 2
    assert data.client_val_dataset("bob") is None


def test_integer_inputs_keep_their_dtype_and_targets_can_be_values(root):
    save(root / "bob", x=np.ones((2, 4), np.uint8), y=np.ones((2, 1)))
    x, y = ClientFolder(str(root)).client_dataset("bob").tensors
    assert (x.dtype, y.dtype, list(y.shape)) == (torch.uint8, torch.float32, [2, 1])


def test_transform_converts_byte_batches_to_floats(root):
    save(root / "bob", x=np.full((2, 4), 51, np.uint8), y=np.ones(2, np.uint8))
    save(root, "val", x=np.full((3, 4), 51, np.uint8), y=np.ones(3, np.uint8))
    data = ClientFolder(str(root), transform=lambda batch: [batch[0] / 255, batch[1]])
    data.setup("fit")
    for batch in (next(data.client_batches("bob").epoch(torch.Generator()))[0], next(iter(data.val_dataloader()))):
        assert batch[0].unique().tolist() == pytest.approx([0.2])


def test_torch_files_are_supported(root):
    (root / "bob" / "train.npz").unlink()
    torch.save({"x": torch.ones(4, 2), "y": torch.zeros(4)}, root / "bob" / "train.pt")
    data = ClientFolder(str(root))
    assert data.client_size("bob") == len(data.client_dataset("bob")) == 4
    save(root / "bob")
    with pytest.raises(FederatedError, match=r"bob has both train.npz and train.pt"):
        data.client_dataset("bob")


def test_recently_used_clients_stay_in_memory(root, monkeypatch):
    read = []
    original = folders.read_examples
    monkeypatch.setattr(folders, "read_examples", lambda path: read.append(path.parent.name) or original(path))
    data = ClientFolder(str(root), cache_size=2)
    for name in ("ann", "bob", "ann", "cat", "ann", "bob"):
        data.client_dataset(name)
    assert read == ["ann", "bob", "cat", "bob"]
    read.clear()
    data = ClientFolder(str(root), cache_size=0)
    for name in ("ann", "ann"):
        data.client_dataset(name)
    assert read == ["ann", "ann"]


def test_server_has_its_own_evaluation_sets(root):
    data = ClientFolder(str(root))
    data.setup("fit")
    assert data.val is None
    save(root, "val", n=4)
    data = ClientFolder(str(root))
    data.setup("fit")
    assert data.test is data.val
    assert len(data.val) == 4
    save(root, "test", n=6)
    data = ClientFolder(str(root))
    data.setup("test")
    assert (len(data.val), len(data.test)) == (4, 6)


class Attack:
    def __reduce__(self):
        return os.mkdir, ("attacked",)


def damage(path, how):
    if how == "pickle":
        np.savez(path, x=np.array([Attack()]), y=np.array([1]))
    elif how == "text":
        path.write_text("x,y")
    elif how == "names":
        np.savez(path, x=np.ones(3), labels=np.ones(3))
    elif how == "lengths":
        np.savez(path, x=np.ones(3), y=np.ones(2))
    elif how == "words":
        np.savez(path, x=np.array(["a"]), y=np.array([1]))
    elif how == "scalar":
        np.savez(path, x=np.ones(3), y=np.array(1))
    elif how == "complex":
        np.savez(path, x=np.ones(3) * 1j, y=np.ones(3))
    elif how == "nan":
        np.savez(path, x=np.array([1, np.nan]), y=np.zeros(2, int))
    elif how == "large":
        np.savez(path, x=np.ones(2), y=np.array([1, 1e39]))
    elif how == "uint64":
        np.savez(path, x=np.ones(1), y=np.array([2**63 + 5], np.uint64))
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-40])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("pickle", r"is damaged, or holds more than arrays of numbers.*numpy\.savez"),
        ("text", "is damaged"),
        ("names", r"must hold x and y, real numbers both; found \['x'\]"),
        ("lengths", r"x \[3\] and y \[2\] must have the same number of examples"),
        ("words", "holds more than arrays of numbers"),
        ("scalar", r"x \[3\] and y \[\] must have the same number"),
        ("complex", "must hold x and y, real numbers both"),
        ("cut", "is damaged"),
        ("nan", "x holds NaN, an infinity, or a number too large for float32"),
        ("large", "y holds NaN, an infinity, or a number too large for float32"),
        ("uint64", "y holds a number too large for int64"),
    ],
)
def test_corrupt_files_are_rejected_without_running_code(root, how, message):
    path = root / "bob" / "train.npz"
    damage(path, how)
    with pytest.raises(FederatedError, match=message) as caught:
        ClientFolder(str(root)).client_dataset("bob")
    assert str(path) in str(caught.value)
    assert not os.path.exists("attacked")


@pytest.mark.parametrize("how", ["text", "cut", "scalar", "missing"])
def test_corrupt_header_is_rejected_when_reading_a_size(root, how):
    path = root / "bob" / "train.npz"
    damage(path, how)
    if how == "missing":
        np.savez(path, x=np.ones(3))
    with pytest.raises(FederatedError, match="train.npz"):
        ClientFolder(str(root)).client_size("bob")


@pytest.mark.parametrize("method", [99, 14])  # unknown, and one with a truncated stream
def test_corrupt_compression_is_rejected_when_reading_a_size(root, method):
    path = root / "bob" / "train.npz"
    content = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):  # the headers of a file and of its entry
        start = content.find(signature)
        while start >= 0:
            content[start + offset] = method
            start = content.find(signature, start + 1)
    path.write_bytes(content)
    with pytest.raises(FederatedError, match=r"train.npz must be an .npz file"):
        ClientFolder(str(root)).client_size("bob")


@pytest.mark.parametrize("content", [Attack(), [1, 2], {"x": torch.ones(2)}, {"x": [1], "y": [1]}])
def test_torch_files_run_no_code(root, content):
    (root / "bob" / "train.npz").unlink()
    torch.save(content, root / "bob" / "train.pt")
    with pytest.raises(FederatedError, match=r"train.pt (is damaged.*torch.save|must hold x and y)"):
        ClientFolder(str(root)).client_dataset("bob")
    assert not os.path.exists("attacked")


@pytest.mark.parametrize("name", ["..", "../secret", ".", "", "ann/../bob", "notes.txt", ".cache", "zoe", 0])
def test_only_listed_folders_are_clients(root, name):
    save(root.parent / "secret")
    with pytest.raises(FederatedError, match="has no client folder"):
        ClientFolder(str(root)).client_dataset(name)


def test_missing_folders_and_files_are_rejected(root, tmp_path):
    with pytest.raises(FederatedError, match=r"there is no .*none.*a folder for each client"):
        ClientFolder(str(tmp_path / "none")).setup("fit")
    with pytest.raises(FederatedError, match=r"notes.txt is not a folder"):
        ClientFolder(str(root / "notes.txt")).setup("fit")
    with pytest.raises(FederatedError, match="has no folders, and so there are no clients"):
        ClientFolder(str(root / "ann")).setup("fit")
    (root / "bob" / "train.npz").unlink()
    with pytest.raises(FederatedError, match=r"there is no train.npz \(or train.pt\) in .*bob"):
        ClientFolder(str(root)).client_size("bob")
    with pytest.raises(FederatedError, match="are the folders in"):
        ClientFolder(str(root)).client_ids = ["ann"]
    with pytest.raises(FederatedError, match="cache_size=-1"):
        ClientFolder(str(root), cache_size=-1)


def test_run_trains_on_folders(root):
    save(root, "val")
    trainer = FederatedTrainer(
        max_rounds=2, clients_per_round=2, local_epochs=1, seed=0, logger=False, enable_progress_bar=False
    )
    trainer.fit(MLPClassifier(in_features=2, num_classes=2, hidden=[]), ClientFolder(str(root)))
    assert 0 <= trainer.callback_metrics["val_acc"] <= 1


CLASSES = ["dog", "cat", "ape"]


@pytest.fixture
def images(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for client, classes in (("ann", ["cat", "ape"]), ("bob", ["dog"])):
        for name in classes:
            folder = tmp_path / "clients" / client / name
            folder.mkdir(parents=True)
            (folder / "readme.txt").write_text("no image")
            for n in range(2):
                image.new("L", (4, 3), color=255 * n).save(folder / f"{n}.png")
    return tmp_path / "clients"


def test_all_clients_share_the_image_classes(images):
    data = ClientImages(str(images), CLASSES, batch_size=3)
    assert list(data.client_ids) == ["ann", "bob"]
    assert [label for _, label in data.client_dataset("ann")] == [2, 2, 1, 1]
    x, label = data.client_dataset("bob")[1]
    assert torch.equal(x, torch.ones(3, 3, 4))
    assert label == 0
    (batch, size), *_ = data.client_batches("ann").epoch(torch.Generator(), shuffle=False)
    assert (size, list(batch[0].shape), batch[1].tolist()) == (3, [3, 3, 3, 4], [2, 2, 1])


def test_validation_images_come_from_a_folder_of_classes(images):
    data = ClientImages(str(images), CLASSES, val_root=str(images / "ann"), image_transform=lambda image: torch.ones(2))
    data.setup("fit")
    x, y = next(iter(data.val_dataloader()))
    assert (x.tolist(), y.tolist()) == ([[1, 1]] * 4, [2, 2, 1, 1])
    with pytest.raises(FederatedError, match="Or correct val_root"):
        ClientImages(str(images), CLASSES, val_root=str(images / "none")).setup("fit")


def test_unknown_classes_and_corrupt_images_are_rejected(images):
    with pytest.raises(FederatedError, match=r"'ape' is not among the classes \['dog', 'cat'\]"):
        ClientImages(str(images), ["dog", "cat"]).client_dataset("ann")
    path = images / "bob" / "dog" / "0.png"
    path.write_bytes(b"no image")
    with pytest.raises(FederatedError, match=r"0.png cannot be opened as an image"):
        ClientImages(str(images), CLASSES).client_dataset("bob")[0]
    for options, message in (
        ({"classes": "dog"}, "give a list of different names"),
        ({"classes": ["dog", "dog"]}, "give a list of different names"),
        ({"classes": []}, "give a list of different names"),
        ({"classes": CLASSES, "image_transform": 3}, "must be a function of an image"),
    ):
        with pytest.raises(FederatedError, match=message):
            ClientImages(str(images), **options)


def test_images_of_more_than_8_bits_require_image_transform(images):
    image = pytest.importorskip("PIL.Image")
    pixels = np.array([[0, 255], [256, 65535]], np.uint16)
    path = images / "bob" / "dog" / "0.png"
    image.fromarray(pixels).save(path)
    with pytest.raises(FederatedError, match=r"bob/dog/0.png has more than 8 bits a pixel.*Pass image_transform"):
        ClientImages(str(images), CLASSES).client_dataset("bob")[0]
    data = ClientImages(
        str(images), CLASSES, image_transform=lambda image: torch.from_numpy(np.asarray(image, np.float32) / 65535)
    )
    assert torch.equal(data.client_dataset("bob")[0][0], torch.from_numpy(pixels / np.float32(65535)))


def test_files_without_any_image_are_rejected(images):
    for path in (images / "bob" / "dog").glob("*.png"):
        path.rename(path.with_suffix(".gif"))
    with pytest.raises(FederatedError, match=r"bob holds files, such as dog/0.gif, and no image.*end in .bmp, .jpeg"):
        ClientImages(str(images), CLASSES).client_dataset("bob")
    for path in (images / "bob" / "dog").iterdir():
        path.unlink()
    (images / "bob" / "dog" / ".DS_Store").touch()
    assert len(ClientImages(str(images), CLASSES).client_dataset("bob")) == 0
    (images / "bob" / "0.png").touch()
    with pytest.raises(FederatedError, match=r"bob holds files, such as 0.png, and no image in the folder of a class"):
        ClientImages(str(images), CLASSES).client_dataset("bob")


HUGE = b"BM" + bytes(8) + b"\x36\0\0\0\x28\0\0\0" + b"\xff\xff\0\0" * 2 + b"\1\0\x18\0" + bytes(24)


@pytest.mark.parametrize(("name", "content"), [("0.ppm", b"P6 4 x 255 "), ("0.bmp", HUGE)], ids=["ppm", "bmp"])
def test_every_corrupt_image_error_names_the_file(images, name, content):
    for path in (images / "bob" / "dog").iterdir():
        path.unlink()
    (images / "bob" / "dog" / name).write_bytes(content)
    with pytest.raises(FederatedError, match=f"{name} cannot be opened as an image"):
        ClientImages(str(images), CLASSES).client_dataset("bob")[0]
