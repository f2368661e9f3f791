"""The columns of a CSV or a Parquet file: some as they are, to tell rows apart, and others as numbers."""

import math
import re
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_fed.core.errors import FederatedError
from lightning_fed.data.files.stored import read_rows

__all__ = ["Columns", "as_number", "read_columns"]

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
