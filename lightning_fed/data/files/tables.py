"""A table whose rows say which client they belong to, from a CSV or a Parquet file."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_fed.compat.private import rank_zero_info, rank_zero_warn
from lightning_fed.core.arguments import check_fraction, check_one_of, check_paths, check_seed, check_texts
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.data.files.columns import Columns, as_number, read_columns
from lightning_fed.data.files.stored import StoredDataModule, find, pool
from lightning_fed.data.partitions.draws import Ints, random_state
from lightning_fed.data.partitions.partition import check_client_id

__all__ = ["ClientTable"]

Parts: TypeAlias = dict[ClientId, tuple[Tensor, Tensor]]
"""Inputs [n_i, features] and targets of each client that has any."""

_SUFFIXES = (".csv", ".parquet")
_PARTS = ("train", "val", "test")
_VAL_FRACTION = 0.2


class ClientTable(StoredDataModule):
    """One row an example, one column the client: a federation in a CSV or a Parquet file.

    A CSV file is UTF-8 with a heading and commas; its clients are named as they are written. Parquet needs pyarrow
    (``pip install lightning_fed[tables]``), and its whole numbers are clients' names as numbers. Inputs are float32
    [n, features], in the order of the columns; they are not standardised. True and false are 1 and 0. Numbers in a CSV
    file need a decimal point; a column of numbers with commas is refused.

    Args:
        path: The file, ``.csv`` or ``.parquet``.
        client: The column that names the client.
        target: The column to predict.
        features: The columns that are the input; None for all other columns that hold numbers only. A warning names the
            columns left out. A row index that pandas wrote (no name, or ``__index_level_0__``) is left out too.
        targets: "classes" for labels int64 [n], the sorted distinct values of the target numbered 0, 1, ..., which
            ``classes`` lists after ``setup`` (texts without spaces around them); or "values" for numbers to regress
            on, float32 [n, 1].
        split: A column with the words "train", "val" and "test"; None to set ``val_fraction`` aside. Without test rows,
            the test set is the validation set.
        val_fraction: The share of each client's rows, drawn at random, in the validation set; None for 0.2. Not beside
            ``split``.
        batch_size: Examples in a client's training batch.
        seed: Draws other validation rows.

    Raises:
        FederatedError: If an argument is not allowed; in ``setup``, if the file, a column or a value is missing, or
            a feature is not a number.
    """

    classes: list[Any]

    def __init__(
        self,
        path: str,
        client: str,
        target: str,
        features: Sequence[str] | None = None,
        targets: Literal["classes", "values"] = "classes",
        split: str | None = None,
        val_fraction: float | None = None,
        batch_size: int = 32,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size=batch_size)
        check_paths("ClientTable", path=path)
        check_texts("ClientTable", client=client, target=target, **({} if split is None else {"split": split}))
        if Path(path).suffix not in _SUFFIXES:
            raise FederatedError(f"ClientTable(path={path!r}): path must end in {' or '.join(_SUFFIXES)}.")
        named = features is None or (isinstance(features, list | tuple) and all(isinstance(f, str) for f in features))
        if not named or (features is not None and len(features) == 0):
            raise FederatedError(f"ClientTable(features={features!r}): features must be a list of columns, or None.")
        roles = [client, target, *(features or []), *([] if split is None else [split])]
        if repeated := sorted({name for name in roles if roles.count(name) > 1}):
            raise FederatedError(
                f"ClientTable: {repeated} is named more than once among client, target, features and split."
            )
        if val_fraction is not None:
            check_fraction("ClientTable", "val_fraction", val_fraction)
            if split is not None:
                raise FederatedError(f"ClientTable(split={split!r}, val_fraction={val_fraction!r}): give one of them.")
        self.path = path
        self.client = client
        self.target = target
        self.features = features
        self.targets = check_one_of("ClientTable", "targets", targets, ("classes", "values"))
        self.split = split
        self.val_fraction = val_fraction
        self.seed = check_seed("ClientTable", seed)

    def _load(self) -> None:
        path = find("ClientTable", Path(self.path), "Write the table there.", "Or correct path.")
        if not path.is_file():
            raise FederatedError(f"ClientTable: {path} is no file. Correct path.")
        keys, numeric = [self.client, *([] if self.split is None else [self.split])], list(self.features or [])
        (keys if self.targets == "classes" else numeric).append(self.target)
        table = read_columns(path, keys, numeric, rest=self.features is None)
        features = {name: column for name, column in table.numbers.items() if name != self.target}
        if table.row_indices:
            rank_zero_info(f"ClientTable leaves out {table.row_indices} of {path}: the names are those of a row index.")
        if table.left_out:
            reasons = ", ".join(f"{name!r} ({reason})" for name, reason in table.left_out.items())
            rank_zero_warn(
                f"ClientTable leaves out columns of {path} that do not hold numbers: {reasons}. The features are"
                f" {list(features)}. Encode the others as numbers, or name the columns to use in features."
            )
        if not features or not len(table.keys[self.client]):
            raise FederatedError(f"{path} has no rows, or no column of numbers that could be a feature.")
        x = torch.from_numpy(np.stack(list(features.values()), axis=1))
        y = self._labels(path, table) if self.targets == "classes" else self._values(table.numbers)
        train, val, test = self._divide(path, table, x, y)
        if not train:
            raise FederatedError(f"{path}: column {self.split!r} leaves no row for training.")
        self.val, _ = pool(val)
        self.test = pool(test)[0] or self.val
        self.client_val = {key: TensorDataset(*tensors) for key, tensors in val.items() if key in train}
        self.set_clients({key: TensorDataset(*tensors) for key, tensors in train.items()})

    def _values(self, numbers: Mapping[str, npt.NDArray[np.float32]]) -> Tensor:
        return torch.from_numpy(numbers[self.target])[:, None]

    def _labels(self, path: Path, table: Columns) -> Tensor:
        """Return the position of each value among the sorted distinct ones; numbers sort as numbers."""
        values = table.keys[self.target]
        key: dict[Any, Any] = {value: _exact(str(value).strip()) for value in dict.fromkeys(values)}
        missing = {value for value, number in key.items() if number is not None and math.isnan(number)}
        if missing or None in key.values():
            if None not in key.values() and len(missing) < len(key):
                row = next(row for row, value in enumerate(values) if value in missing)
                raise FederatedError(
                    f"{path}, {table.place(row)}: column {self.target!r} has no value ({values[row]!r}), and numbers"
                    " elsewhere. Fill it in, or drop the row."
                )
            key = {value: str(value).strip() for value in key}
        self.classes = sorted(set(key.values()))
        positions = {name: position for position, name in enumerate(self.classes)}
        return torch.tensor([positions[key[value]] for value in values], dtype=torch.int64)

    def _divide(self, path: Path, table: Columns, x: Tensor, y: Tensor) -> list[Parts]:
        """Return the training, validation and test rows of each client."""
        positions: dict[ClientId, int] = {}
        names = (check_client_id(name) for name in table.keys[self.client])
        owners = np.array([positions.setdefault(name, len(positions)) for name in names])
        if self.split is None:
            part = self._draw_val(owners)
        else:
            words = table.keys[self.split]
            if strange := sorted(set(map(str, words)) - set(_PARTS)):
                raise FederatedError(f"{path}: column {self.split!r} must hold {list(_PARTS)}; found {strange[0]!r}.")
            part = np.array([_PARTS.index(word) for word in words])
        return [_group(np.flatnonzero(part == number), owners, list(positions), x, y) for number in range(len(_PARTS))]

    def _draw_val(self, owners: Ints) -> Ints:
        """Return 1 for each client's share of validation rows and 0 for the others; a client keeps one at least."""
        fraction = _VAL_FRACTION if self.val_fraction is None else self.val_fraction
        sizes = np.bincount(owners)
        num_val = np.minimum(np.rint(fraction * sizes), sizes - 1)
        shuffled = random_state(self.seed).permutation(len(owners))
        order = shuffled[np.argsort(owners[shuffled], kind="stable")]
        rank = np.arange(len(owners)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        part = np.zeros(len(owners), dtype=np.int64)
        part[order] = rank < np.repeat(num_val, sizes)
        return part


def _exact(text: str) -> float | None:
    """Return what ``as_number`` does, and a whole number with all its digits, which a float would round."""
    number = as_number(text)
    try:
        return number if number is None else int(text)
    except ValueError:
        return number


def _group(rows: Ints, owners: Ints, names: list[ClientId], x: Tensor, y: Tensor) -> Parts:
    """Return the inputs and targets of ``rows`` by client, as views into one copy."""
    sizes = np.bincount(owners[rows], minlength=len(names)).tolist()
    order = torch.from_numpy(rows[np.argsort(owners[rows], kind="stable")])
    pieces = zip(names, x[order].split(sizes), y[order].split(sizes), strict=True)
    return {name: (inputs, targets) for name, inputs, targets in pieces if len(inputs)}
