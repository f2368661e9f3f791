"""LEAF's JSON files: users, their numbers of samples and their data."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_fed.core.arguments import check_count, check_flags, check_one_of, check_paths, check_texts
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.data.files.stored import StoredDataModule, find, listing

_PARTS = {"users": list, "num_samples": list, "user_data": dict}


class LeafUser(NamedTuple):
    """A user of a LEAF file: its n samples as stored, and its file and name for messages."""

    name: str
    x: list[Any]
    y: list[Any]
    where: str


def read_leaf(owner: str, path: Path) -> Iterator[LeafUser]:
    """Yield the users of a LEAF file, or of all ``*.json`` files in a folder, in their listed order.

    The format of Caldas et al., LEAF (arXiv:1812.01097), is an object with ``users``, ``num_samples`` and
    ``user_data``, which holds ``x`` and ``y`` for each user. Other keys, such as ``hierarchies``, are ignored. Only one
    file is in memory at a time, without the users already yielded.
    """
    seen: set[str] = set()
    for file in [path] if path.is_file() else listing(owner, path, ".json"):
        content = _parsed(file)
        users, num_samples, user_data = (content[key] for key in _PARTS)
        if not all(isinstance(name, str) for name in users):
            raise FederatedError(f"{file}: users must be a list of names (strings).")
        if len(users) != len(num_samples):
            raise FederatedError(f"{file}: there are {len(users)} users and {len(num_samples)} num_samples.")
        for name, size in zip(users, num_samples, strict=True):
            where = f"{file}, user {name!r}"
            if name in seen:
                raise FederatedError(f"{where}: this user has been read already. Keep all samples of a user together.")
            seen.add(name)
            samples = user_data.pop(name, None)
            if not isinstance(samples, dict) or not all(isinstance(samples.get(key), list) for key in "xy"):
                raise FederatedError(f"{where}: user_data must have an object with the lists x and y for this user.")
            x, y = samples["x"], samples["y"]
            if not len(x) == len(y) == size:
                raise FederatedError(f"{where}: num_samples is {size!r}, but x has {len(x)} and y {len(y)} samples.")
            yield LeafUser(name, x, y, where)
        if user_data:
            raise FederatedError(
                f"{file}: user_data has {len(user_data)} users that are not among users, such as"
                f" {next(iter(user_data))!r}."
            )


def _parsed(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, too deeply nested, or a number is too long
        raise FederatedError(f"{file} is not valid JSON: {error}. Download or make it again.") from error
    if not isinstance(content, dict) or not all(isinstance(content.get(key), kind) for key, kind in _PARTS.items()):
        found = sorted(content) if isinstance(content, dict) else type(content).__name__
        raise FederatedError(
            f"{file}: a LEAF file is an object with the lists users and num_samples and the object user_data; found"
            f" {found}."
        )
    return content


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raise if a name is repeated, since ``json`` would silently keep its last value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"an object has the name {next(name for name in found if names.count(name) > 1)!r} twice")
    return found


class LeafDataModule(StoredDataModule):
    """One client per user of LEAF's JSON files with numeric inputs.

    LEAF splits its data into two folders, ``train`` and ``test``, by sample or by user. The users of the training files
    are the clients. ``val`` and ``test`` are both the test samples of all users, and ``client_val`` holds each client's
    test samples, if any.

    Inputs become float32 [n, ...]. Samples are converted user by user, and one file is in memory as text at a time.

    Args:
        train_path: The training files: a ``.json`` file, or a folder of them.
        test_path: The test files, in the same forms. None for no test data.
        shape: The shape of an input, such as [1, 28, 28]. None for the shape in the file.
        targets: "classes" for class numbers, int64 [n], or "values" for regression, float32 [n, ...]; one number per
            sample gives [n, 1].
        num_classes: With "classes", the number of classes; targets of this number or more raise.
        batch_size: Examples in a client's training batch.

    Raises:
        FederatedError: If an argument is not allowed; in ``setup``, if a file is missing or damaged.
    """

    _get = "Make them with LEAF's preprocess.sh (https://github.com/TalwalkarLab/leaf)."
    _put: str | None = None

    def __init__(
        self,
        train_path: str,
        test_path: str | None = None,
        shape: Sequence[int] | None = None,
        targets: Literal["classes", "values"] = "classes",
        num_classes: int | None = None,
        batch_size: int = 10,
    ) -> None:
        super().__init__(batch_size=batch_size)
        check_paths(self, train_path=train_path, **({} if test_path is None else {"test_path": test_path}))
        self.train_path = train_path
        self.test_path = test_path
        self.shape = shape
        self.targets = check_one_of(self, "targets", targets, ("classes", "values"))
        self.num_classes = None if num_classes is None else check_count(self, "num_classes", num_classes)
        if shape is not None and (not isinstance(shape, list | tuple) or not shape):
            raise FederatedError(
                f"{type(self).__name__}(shape={shape!r}): shape must be a list of sizes, such as [1, 28, 28]."
            )
        for size in shape or ():
            check_count(self, "shape", size)

    def _load(self) -> None:
        train = self._read(self.train_path, "train_path")
        test = {} if self.test_path is None else self._read(self.test_path, "test_path")
        for position, what in enumerate(("inputs", "targets")):
            users = [(name, tensors[position]) for name, tensors in (*train.items(), *test.items())]
            shapes = {tuple(part.shape[1:]): name for name, part in users if len(part)}
            if len(shapes) > 1:
                (one, user), (other, another) = list(shapes.items())[:2]
                raise FederatedError(
                    f"{type(self).__name__}: {what} of user {user!r} have the shape {list(one)}, and those of"
                    f" {another!r} {list(other)}."
                )
        self._set_parts(train, test)

    def _read(self, path: str, argument: str) -> dict[ClientId, tuple[Tensor, Tensor]]:
        owner = type(self).__name__
        found = find(owner, Path(path), self._get, self._put or f"Or correct {argument}.")
        return {user.name: (self._inputs(user), self._targets(user)) for user in read_leaf(owner, found)}

    def _inputs(self, user: LeafUser) -> Tensor:
        x = numbers(user.x, f"{user.where}, x")
        if self.shape is None:
            return x
        if len(x) and x[0].numel() != math.prod(self.shape):
            raise FederatedError(
                f"{user.where}: an input has {x[0].numel()} numbers, which do not make the shape {list(self.shape)}."
            )
        return x.view(len(x), *self.shape)

    def _targets(self, user: LeafUser) -> Tensor:
        if self.targets == "values":
            y = numbers(user.y, f"{user.where}, y")
            return y[:, None] if y.ndim == 1 else y
        y = numbers(user.y, f"{user.where}, y", torch.float64)  # float32 is inexact for class numbers above 2^24
        labels = y.long()
        if y.ndim != 1 or (labels != y).any() or (labels < 0).any():
            raise FederatedError(f"{user.where}: y holds more than class numbers 0, 1, ...; use targets='values'.")
        if self.num_classes is not None and len(labels) and int(labels.max()) >= self.num_classes:
            raise FederatedError(f"{user.where}: y has class {int(labels.max())} of {self.num_classes} classes.")
        return labels


class FEMNIST(LeafDataModule):
    """LEAF's Federated Extended MNIST: handwritten digits and letters by their writers.

    Images are float32 [1, 28, 28] in [0, 1], in 62 classes: 0-9, A-Z and a-z. Unlike MNIST, LEAF draws black on white,
    with ink 0 and paper 1. The files are in ``root/folder/train`` and ``root/folder/test``; see :class:`LeafDataModule`
    for the clients and the test data. All 805,263 images take 2.5 GB.

    Args:
        root: The folder of data sets.
        folder: The folder in ``root`` that contains ``train`` and ``test``.
        invert: Whether ink becomes 1 and paper 0, as in MNIST.
        batch_size: Examples in a client's training batch.

    Raises:
        FederatedError: If an argument is not allowed; in ``setup``, if a file is missing or damaged.
    """

    _get = (
        "Make it with LEAF (https://github.com/TalwalkarLab/leaf): in data/femnist, run ./preprocess.sh -s niid --sf"
        " 0.05 -k 0 -t sample."
    )

    def __init__(self, root: str = "data", folder: str = "femnist", invert: bool = False, batch_size: int = 10) -> None:
        check_paths("FEMNIST", root=root)
        check_texts("FEMNIST", folder=folder)
        check_flags("FEMNIST", invert=invert)
        base = Path(root) / folder
        super().__init__(
            str(base / "train"), str(base / "test"), shape=[1, 28, 28], num_classes=62, batch_size=batch_size
        )
        self.root = root
        self.folder = folder
        self.invert = invert
        self._put = f"Or correct root: the folders train and test belong in {base}."

    def _inputs(self, user: LeafUser) -> Tensor:
        images = super()._inputs(user)
        return 1 - images if self.invert else images


def numbers(values: list[Any], where: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert nested lists of finite numbers to a floating-point tensor; error messages name ``where``."""
    first: Any = values
    while isinstance(first, list) and first:
        first = first[0]
    if isinstance(first, str):
        raise FederatedError(
            f"{where}: the samples are texts, and LeafDataModule reads numbers. Use the classes Shakespeare and"
            " Sentiment140 of lightning_fed.data for LEAF's data sets of texts."
        )
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise FederatedError(f"{where}: the samples differ in shape.") from error
    if array.size and array.dtype.kind not in "iuf":
        raise FederatedError(f"{where}: the samples hold more than numbers.")
    tensor = torch.from_numpy(array.astype(np.float64)).to(dtype)
    if not bool(torch.isfinite(tensor).all()):
        raise FederatedError(f"{where}: the samples hold NaN, an infinity, or a number too large for float32.")
    return tensor
