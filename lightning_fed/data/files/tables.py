"""A table whose rows say which client they belong to, from a CSV or a Parquet file."""

import math
import re
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from lightning_fed.data.files.stored import StoredDataModule, find, pool, read_rows
from lightning_fed.data.partitions.draws import Ints, random_state
from lightning_fed.data.partitions.partition import check_client_id

__all__ = ["ClientTable", "Columns", "as_number", "read_columns"]

_INDEX = re.compile(r"\s*|__index_level_\d+__")  # how pandas writes a row index: to CSV, to Parquet
_MISSING = {"", "na", "n/a", "nan", "null", "none"}
_TRUTHS = {"true": 1.0, "false": 0.0}
_WITH_COMMA = re.compile(
    r"[+-]? ( (\d{1,3}(\.\d{3})+|\d*) ,\d+ (e[+-]?\d+)? | \d{1,3}(,\d{3})+ (\.\d+)? )", re.IGNORECASE | re.VERBOSE
)


@dataclass
class Columns:
    """Columns of a table with n rows.

    Attributes:
        keys: Columns as they are: strings from CSV, strings or numbers from Parquet.
        numbers: Columns of finite numbers [n], float32; truth values are 0 and 1.
        row_indices: Columns that are left out because their names are those of a row index.
        left_out: Columns that are left out because they do not hold numbers, each with the reason.
        lines: The line of each row in the file [n]; None for a file without lines.
    """

    keys: dict[str, list[Any]]
    numbers: dict[str, npt.NDArray[np.float32]]
    row_indices: list[str]
    left_out: dict[str, str]
    lines: Sequence[int] | None = None

    def place(self, row: int) -> str:
        """Return where a row is in the file, for messages."""
        return f"row {row + 1}" if self.lines is None else f"line {self.lines[row]}"


def read_columns(path: Path, keys: Sequence[str], numeric: Sequence[str], rest: bool) -> Columns:
    """Read the columns that are asked for.

    Args:
        path: A ``.csv`` file (UTF-8, commas, a heading) or a ``.parquet`` file.
        keys: Columns to be read as they are.
        numeric: Columns that must hold numbers.
        rest: Whether all other columns are read too, as numbers if they are; not a row index that pandas wrote.

    Raises:
        FederatedError: If a column is missing, ``numeric`` are not all numbers, a value is missing, rows are ragged, or
            numbers have commas.
    """
    read = _read_parquet if path.suffix == ".parquet" else _read_csv
    return read(path, keys, numeric, rest)


def _read_csv(path: Path, keys: Sequence[str], numeric: Sequence[str], rest: bool) -> Columns:
    rows = read_rows(path)
    _, heading = next(rows, (0, []))
    optional, row_indices = _rest(path, heading, keys, numeric, rest)
    left_out: dict[str, str] = {}
    truths: dict[str, bool] = {}  # whether a column holds truth values, once a value has shown it
    place = {name: heading.index(name) for name in (*keys, *numeric, *optional)}
    texts: dict[str, list[Any]] = {name: [] for name in keys}
    numbers = {name: array("d") for name in (*numeric, *optional)}
    lines = array("q")
    for line, row in rows:
        if len(row) != len(heading):
            raise FederatedError(f"{path}, line {line}: {len(row)} fields under a heading of {len(heading)}.")
        lines.append(line)
        for name, values in texts.items():
            if not row[place[name]].strip():
                raise _missing(path, f"line {line}", name)
            values.append(sys.intern(row[place[name]]))
        for name in list(numbers):
            text = row[place[name]].strip()
            number = as_number(text)
            if number is None and _WITH_COMMA.fullmatch(text):
                raise FederatedError(
                    f"{path}, line {line}: column {name!r} holds {text!r}. Write numbers with a decimal point and"
                    " without commas, or name the columns to use in features."
                )
            is_truth = number is None and text.lower() in _TRUTHS
            if is_truth:
                number = _TRUTHS[text.lower()]
            if number is None or (not math.isnan(number) and truths.setdefault(name, is_truth) != is_truth):
                left_out[name] = f"line {line} holds {text!r}"
                del numbers[name]
            else:
                numbers[name].append(number)
    for name in numeric:
        if name in left_out:
            raise FederatedError(f"{path}: column {name!r} must hold finite numbers; {left_out[name]}.")
    found: dict[str, npt.NDArray[np.float32]] = {}
    for name, read in numbers.items():
        column = np.frombuffer(read, dtype=np.float64)
        if (empty := np.isnan(column)).any():
            raise _missing(path, f"line {lines[int(empty.argmax())]}", name)
        found[name] = _float32(column)
        if (large := ~np.isfinite(found[name])).any():
            raise _too_large(path, f"line {lines[int(large.argmax())]}", name)
    return Columns(texts, found, row_indices, left_out, lines)


def _read_parquet(path: Path, keys: Sequence[str], numeric: Sequence[str], rest: bool) -> Columns:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise FederatedError(
            f"{path}: reading Parquet takes pyarrow, which is missing: pip install 'lightning_fed[tables]'."
        ) from error
    try:
        heading = list(parquet.read_schema(path).names)
        optional, row_indices = _rest(path, heading, keys, numeric, rest)
        table = parquet.read_table(path, columns=[*keys, *numeric, *optional])
    except (pyarrow.ArrowException, OSError) as error:
        raise FederatedError(f"{path} is no Parquet file that can be read: {error}.") from error
    left_out: dict[str, str] = {}
    texts: dict[str, list[Any]] = {}
    numbers: dict[str, npt.NDArray[np.float32]] = {}
    for name in (*keys, *numeric, *optional):
        column = table.column(name)
        types = pyarrow.types
        is_exact = types.is_boolean(column.type) or types.is_decimal(column.type)
        is_number = types.is_integer(column.type) or types.is_floating(column.type) or is_exact
        if name not in keys and not is_number:
            left_out[name] = f"its type is {column.type}"
            continue
        if name in keys and pyarrow.types.is_nested(column.type):
            raise FederatedError(f"{path}: column {name!r} must hold texts or numbers; its type is {column.type}.")
        empty = np.asarray(column.is_null(nan_is_null=True))
        if empty.any():
            raise _missing(path, f"row {int(empty.argmax()) + 1}", name)
        if name in keys:
            texts[name] = column.to_pylist()
            for row, value in enumerate(texts[name], start=1):
                if isinstance(value, str) and not value.strip():
                    raise _missing(path, f"row {row}", name)
        else:
            numbers[name] = _float32(np.asarray(column.cast(pyarrow.float64()) if is_exact else column))
            if (large := ~np.isfinite(numbers[name])).any():
                raise _too_large(path, f"row {int(large.argmax()) + 1}", name)
    for name in numeric:
        if name in left_out:
            raise FederatedError(f"{path}: column {name!r} must hold finite numbers; {left_out[name]}.")
    return Columns(texts, numbers, row_indices, left_out)


def _rest(
    path: Path, heading: list[str], keys: Sequence[str], numeric: Sequence[str], rest: bool
) -> tuple[list[str], list[str]]:
    """Return the columns that nobody named, apart from row indices, and the row indices.

    Raises:
        FederatedError: If the heading lacks a column or has one twice.
    """
    if absent := [name for name in (*keys, *numeric) if name not in heading]:
        raise FederatedError(f"{path} has no column {absent[0]!r}; its columns are {heading}.")
    if twice := sorted({name for name in heading if heading.count(name) > 1}):
        raise FederatedError(f"{path} has more than one column {twice[0]!r}: rename them.")
    others = [name for name in heading if name not in keys and name not in numeric] if rest else []
    row_indices = [name for name in others if _INDEX.fullmatch(name)]
    return [name for name in others if name not in row_indices], row_indices


def as_number(text: str) -> float | None:
    """Return a number, NaN for a missing one, or None for what is neither."""
    if text.lower() in _MISSING:
        return math.nan
    try:
        number = float(text)
    except ValueError:
        return None
    return None if "_" in text or math.isinf(number) else number  # Python reads 1_000


def _missing(path: Path, place: str, name: str) -> FederatedError:
    return FederatedError(f"{path}, {place}: column {name!r} has no value. Fill it in, or drop the row.")


def _too_large(path: Path, place: str, name: str) -> FederatedError:
    return FederatedError(f"{path}, {place}: column {name!r} must hold finite numbers that float32 can represent.")


def _float32(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return numbers as float32; those too large for it become infinite, without numpy's warning."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


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
