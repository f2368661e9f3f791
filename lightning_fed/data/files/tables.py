"""Clients from the rows of a CSV or Parquet file with a client column."""

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_fed.compat.private import rank_zero_info, rank_zero_warn
from lightning_fed.core.arguments import check_fraction, check_one_of, check_paths, check_seed, check_texts
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.data.files.stored import StoredDataModule, find, pool, read_rows, read_table
from lightning_fed.data.partitions.partition import check_client_id, random_state

__all__ = ["ClientTable", "Columns", "as_number", "read_columns"]

_INDEX = re.compile(r"\s*|__index_level_\d+__")  # a row index written by pandas: to CSV, to Parquet
_MISSING = {"", "na", "n/a", "nan", "null", "none"}
_MISSING_VALUE = "has no value. Fill it in, or drop the row."
_BLOCK = 1 << 24  # bytes that pyarrow reads at once; a row must fit
_TRUTHS = {"true": 1.0, "false": 0.0}
_WITH_COMMA = re.compile(
    r"[+-]? ( (\d{1,3}(\.\d{3})+|\d*) ,\d+ (e[+-]?\d+)? | \d{1,3}(,\d{3})+ (\.\d+)? )", re.IGNORECASE | re.VERBOSE
)


@dataclass
class Columns:
    """Columns of a table with n rows: unchanged, as finite numbers [n], or left out for a reason."""

    path: Path
    keys: dict[str, list[Any]] = field(default_factory=dict)
    numbers: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def line(self, row: int) -> str:
        """Return a row's position in the file, for messages: its line, if the file has lines."""
        if self.path.suffix == ".parquet":
            return f"row {row + 1}"
        line, _ = next(islice(read_rows(self.path), row + 1, None))
        return f"line {line}"

    def add_key(self, name: str, column: Any) -> None:
        """Add a pyarrow column without missing values, unchanged."""
        if str(column.type).startswith(("list", "large_list", "fixed_size_list", "struct", "map")):
            raise FederatedError(f"{self.path}: column {name!r} must hold texts or numbers; its type is {column.type}.")
        values = column.to_pylist()
        holes = [value is None or value != value or not str(value).strip() for value in values]
        self._refuse(np.array(holes, bool), name, _MISSING_VALUE)
        self.keys[name] = [sys.intern(value) if isinstance(value, str) else value for value in values]

    def add_numbers(self, name: str, column: Any) -> None:
        """Add a pyarrow column without missing values as numbers, or the reason why it is left out."""
        from pyarrow import float64, types

        if self.path.suffix == ".csv":
            values = self._parsed(name, column.combine_chunks().dictionary_encode())
            if values is None:
                return
        else:
            is_exact = types.is_boolean(column.type) or types.is_decimal(column.type)
            if not (types.is_integer(column.type) or types.is_floating(column.type) or is_exact):
                self.left_out[name] = f"its type is {column.type}"
                return
            self._refuse(np.asarray(column.is_null()), name, _MISSING_VALUE)
            values = np.asarray(column.cast(float64()) if is_exact else column)
        self._refuse(np.isnan(values), name, _MISSING_VALUE)
        with np.errstate(over="ignore"):  # too large numbers become infinite, without NumPy's warning
            self.numbers[name] = values.astype(np.float32)
        self._refuse(~np.isfinite(self.numbers[name]), name, "must hold finite numbers that float32 can represent.")

    def _parsed(self, name: str, texts: Any) -> npt.NDArray[np.float64] | None:
        """Return a dictionary-encoded column of texts as numbers, NaN for missing; None for other texts."""
        rows, numbers, held = np.asarray(texts.indices), list[float](), set[bool]()
        for position, text in enumerate(map(str.strip, texts.dictionary.to_pylist())):
            number = as_number(text)
            if number is None or not math.isnan(number):
                held.add(number is None)
            if number is None and _WITH_COMMA.fullmatch(text):
                raise FederatedError(
                    f"{self.path}, {self.line(int(np.argmax(rows == position)))}: column {name!r} holds {text!r}."
                    " Write numbers with a decimal point and without commas, or name the columns to use in features."
                )
            number = _TRUTHS.get(text.lower()) if number is None else number
            if number is None or len(held) > 1:  # truth values are numbers, but not next to others
                self.left_out[name] = f"{self.line(int(np.argmax(rows == position)))} holds {text!r}"
                return None
            numbers.append(number)
        values: npt.NDArray[np.float64] = np.array(numbers, np.float64)[rows]
        return values

    def _refuse(self, rows: npt.NDArray[np.bool_], name: str, problem: str) -> None:
        if rows.any():
            raise FederatedError(f"{self.path}, {self.line(int(rows.argmax()))}: column {name!r} {problem}")


def read_columns(path: Path, keys: Sequence[str], numeric: Sequence[str], rest: bool) -> Columns:
    """Read unchanged columns, numeric columns and the rest from a ``.csv`` or ``.parquet`` file.

    The rest, if requested, are all other numeric columns except for a row index written by pandas.
    """
    from pyarrow import ArrowException, csv, parquet, string

    columns = Columns(path)
    is_csv = path.suffix == ".csv"
    try:
        heading = next(read_rows(path), (0, []))[1] if is_csv else list(parquet.read_schema(path).names)
        if absent := [name for name in (*keys, *numeric) if name not in heading]:
            raise FederatedError(f"{path} has no column {absent[0]!r}; its columns are {heading}.")
        if twice := sorted({name for name in heading if heading.count(name) > 1}):
            raise FederatedError(f"{path} has more than one column {twice[0]!r}: rename them.")
        others = [name for name in heading if name not in keys and name not in numeric] if rest else []
        if row_indices := [name for name in others if _INDEX.fullmatch(name)]:
            rank_zero_info(f"ClientTable leaves out {row_indices} of {path}: the names are those of a row index.")
        numbers = [*numeric, *(name for name in others if name not in row_indices)]
        names = [*keys, *numbers]
        if is_csv:
            table = csv.read_csv(
                path,
                csv.ReadOptions(block_size=_BLOCK),
                csv.ParseOptions(newlines_in_values=True),
                csv.ConvertOptions(column_types=dict.fromkeys(names, string()), include_columns=names),
            )
        else:
            table = parquet.read_table(path, columns=names)
    except (ArrowException, OSError) as error:
        if is_csv and sum(1 for _ in read_table(path)) < 2:  # a row of another length raises first
            raise FederatedError(f"{path} has no rows.") from error
        kind = "CSV" if is_csv else "Parquet"
        raise FederatedError(f"{path} cannot be read as a {kind} file: {error}.") from error
    for name in keys:
        columns.add_key(name, table.column(name))
    for name in numbers:
        columns.add_numbers(name, table.column(name))
        if name in numeric and name in columns.left_out:
            raise FederatedError(f"{path}: column {name!r} must hold finite numbers; {columns.left_out[name]}.")
    return columns


def as_number(text: str) -> float | None:
    """Return a number with all digits of an integer, NaN for a missing one, or None for other texts."""
    if text.lower() in _MISSING:
        return math.nan
    try:
        number = float(text)
    except ValueError:
        return None
    if "_" in text or math.isinf(number):  # Python accepts 1_000
        return None
    return int(text) if text.lstrip("+-").isdecimal() else number


Parts: TypeAlias = dict[ClientId, tuple[Tensor, Tensor]]
"""Inputs [n_i, features] and targets of each client that has examples."""

_PARTS = ("train", "val", "test")


class ClientTable(StoredDataModule):
    """Clients from a CSV or a Parquet file, with one row per example and a client column.

    pyarrow reads the file (``pip install lightning_fed[tables]``). A CSV file is UTF-8 with a heading and commas, and
    its client ids are texts. Integers in a Parquet file stay integer client ids. Inputs are float32 [n, features], in
    the order of the columns and not standardized. True and false are 1 and 0. A CSV file needs decimal points; a
    numeric column with decimal commas raises.

    Args:
        path: The file, ``.csv`` or ``.parquet``.
        client: The column of client ids.
        target: The column to predict.
        features: The input columns; None for all other numeric columns. A warning names the columns left out. A row
            index written by pandas (no name, or ``__index_level_0__``) is left out too.
        targets: "classes" for labels int64 [n], the sorted distinct values of the target numbered 0, 1, ..., which
            ``classes`` lists after ``setup`` (texts without spaces around them). "values" for regression, float32 [n,
            1].
        split: A column with the words "train", "val" and "test". None to use ``val_fraction``. Without test rows, the
            test set is the validation set.
        val_fraction: The share of each client's rows, drawn at random, in the validation set; None for 0.2. Not with
            ``split``.
        batch_size: Examples in a client's training batch.
        seed: The seed of the validation rows.

    Raises:
        FederatedError: If an argument is not allowed, or pyarrow is missing; in ``setup``, if the file, a column or a
            value is missing, or a feature is not a number.
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
        if Path(path).suffix not in (".csv", ".parquet"):
            raise FederatedError(f"ClientTable(path={path!r}): path must end in .csv or .parquet.")
        if find_spec("pyarrow") is None:
            raise FederatedError(
                f"{path}: reading tables takes pyarrow, which is missing: pip install 'lightning_fed[tables]'."
            )
        named = isinstance(features, list | tuple) and features and all(isinstance(name, str) for name in features)
        if features is not None and not named:
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
            raise FederatedError(f"ClientTable: {path} is not a file. Correct path.")
        keys, numeric = [self.client, *([] if self.split is None else [self.split])], list(self.features or [])
        (keys if self.targets == "classes" else numeric).append(self.target)
        table = read_columns(path, keys, numeric, rest=self.features is None)
        features = {name: column for name, column in table.numbers.items() if name != self.target}
        if table.left_out:
            reasons = ", ".join(f"{name!r} ({reason})" for name, reason in table.left_out.items())
            rank_zero_warn(
                f"ClientTable leaves out columns of {path} that do not hold numbers: {reasons}. The features are"
                f" {list(features)}. Encode the others as numbers, or name the columns to use in features."
            )
        if not features or not len(table.keys[self.client]):
            raise FederatedError(f"{path} has no rows, or no column of numbers that could be a feature.")
        x = torch.from_numpy(np.stack(list(features.values()), axis=1))
        y = self._labels(table) if self.targets == "classes" else torch.from_numpy(table.numbers[self.target])[:, None]
        train, val, test = self._divide(table, x, y)
        if not train:
            raise FederatedError(f"{path}: column {self.split!r} leaves no row for training.")
        self._set_parts(train, val)
        self.test = pool(test)[0] or self.val

    def _labels(self, table: Columns) -> Tensor:
        """Return each value's position among the sorted distinct values; numbers sort as numbers."""
        values = table.keys[self.target]
        texts: dict[Any, Any] = {value: str(value).strip() for value in dict.fromkeys(values)}
        numbers = {value: as_number(text) for value, text in texts.items()}
        holes = {value for value, number in numbers.items() if number is not None and math.isnan(number)}
        if None in numbers.values() or len(holes) == len(numbers):
            numbers = texts
        elif holes:
            row = next(row for row, value in enumerate(values) if value in holes)
            raise FederatedError(
                f"{table.path}, {table.line(row)}: column {self.target!r} has no value ({values[row]!r}), and numbers"
                " elsewhere. Fill it in, or drop the row."
            )
        self.classes = sorted(set(numbers.values()))
        positions = {name: position for position, name in enumerate(self.classes)}
        return torch.tensor([positions[numbers[value]] for value in values], dtype=torch.int64)

    def _divide(self, table: Columns, x: Tensor, y: Tensor) -> list[Parts]:
        """Return the training, validation and test rows of each client."""
        rows_of: dict[ClientId, list[int]] = {}
        for row, name in enumerate(table.keys[self.client]):
            rows_of.setdefault(check_client_id(name), []).append(row)
        words = [] if self.split is None else table.keys[self.split]
        if unexpected := sorted(set(map(str, words)) - set(_PARTS)):
            raise FederatedError(
                f"{table.path}: column {self.split!r} must hold {list(_PARTS)}; found {unexpected[0]!r}."
            )
        fraction = 0.2 if self.val_fraction is None else self.val_fraction
        drawn = random_state(self.seed).permutation(len(x)).argsort().tolist()  # each row's random rank
        parts: list[Parts] = [{} for _ in _PARTS]
        for name, rows in rows_of.items():
            if self.split is None:
                num_val = min(round(fraction * len(rows)), len(rows) - 1)  # keep at least one training row
                rows.sort(key=drawn.__getitem__)
                cut = [sorted(rows[num_val:]), sorted(rows[:num_val]), []]
            else:
                cut = [[row for row in rows if words[row] == word] for word in _PARTS]
            for part, own in zip(parts, cut, strict=True):
                if own:
                    part[name] = (x[own], y[own])
        return parts
