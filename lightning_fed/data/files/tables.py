"""Clients from the rows of a CSV or Parquet file with a client column."""

import hashlib
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
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
from lightning_fed.core.arguments import (
    check_count,
    check_number,
    check_one_of,
    check_paths,
    check_seed,
    check_texts,
    finite,
    format_value,
)
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.data.files.stored import StoredDataModule, find, pool, read_rows, read_table
from lightning_fed.data.partitions import check_client_id, random_state

_INDEX = re.compile(r"\s*|__index_level_\d+__")  # names of a row index that pandas writes to CSV or Parquet
_MISSING = {"", "na", "n/a", "nan", "null", "none"}
_MISSING_VALUE = "has no value. Fill it in, or drop the row."
_LARGEST = float(np.finfo(np.float32).max)
_BLOCK = 1 << 24  # bytes that pyarrow reads at once; a row must fit
_TRUTHS = {"true": 1.0, "false": 0.0}
_SWAPPED = str.maketrans(",.", ".,")
_WITH_COMMA = re.compile(
    r"[+-]? ( (\d{1,3}(\.\d{3})+|\d*) ,\d+ (e[+-]?\d+)? | \d{1,3}(,\d{3})+ (\.\d+)? )", re.IGNORECASE | re.VERBOSE
)


@dataclass
class Columns:
    """Columns of a table with n rows: unchanged, as numbers or vocabulary positions [n], or left out with a reason.

    A missing number is NaN, a missing word -1 and an unknown one -2, in columns that may have them.
    """

    path: Path
    delimiter: str = ","
    decimal: str = "."
    keys: dict[str, list[Any]] = field(default_factory=dict)
    numbers: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    words: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    vocabularies: dict[str, Sequence[str]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    heading: list[str] = field(default_factory=list)

    def line(self, row: int) -> str:
        """Return a row's position in the file, for messages: its line, if the file has lines."""
        if self.path.suffix == ".parquet":
            return f"row {row + 1}"
        line, _ = next(islice(read_rows(self.path, delimiter=self.delimiter), row + 1, None))
        return f"line {line}"

    def add_key(self, name: str, column: Any) -> None:
        """Add a pyarrow column unchanged; raise if a value is missing."""
        self._check_plain(name, column)
        values = column.to_pylist()
        holes = [value is None or value != value or not str(value).strip() for value in values]
        self._refuse(np.array(holes, bool), name, _MISSING_VALUE)
        self.keys[name] = [sys.intern(value) if isinstance(value, str) else value for value in values]

    def _check_plain(self, name: str, column: Any) -> None:
        if str(column.type).startswith(("list", "large_list", "fixed_size_list", "struct", "map")):
            raise FederatedError(f"{self.path}: column {name!r} must hold texts or numbers; its type is {column.type}.")

    def add_words(
        self, name: str, column: Any, vocabulary: Sequence[str] | None, may_miss: bool, may_be_unknown: bool
    ) -> None:
        """Add a pyarrow column of words as positions in a vocabulary; None builds the vocabulary from the column."""
        self._check_plain(name, column)
        encoded = column.combine_chunks().dictionary_encode()
        texts = ["" if value is None else str(value).strip() for value in encoded.dictionary.to_pylist()] + [""]
        if vocabulary is None:
            vocabulary = sorted_words(text for text in texts if is_word(text))
        self.vocabularies[name] = vocabulary
        places = {word: place for place, word in enumerate(vocabulary)}
        codes = [places.get(text, -1 if text.lower() in _MISSING else -2) for text in texts]
        of_rows = np.asarray(encoded.indices.fill_null(len(texts) - 1))  # a missing value becomes the empty text
        found = self.words[name] = np.array(codes, np.int64)[of_rows]
        if (found == -2).any() and not may_be_unknown:
            row = int(np.argmax(found == -2))
            words = f"and its words are {list(vocabulary)}. Add it to them, or correct the row."
            raise self.error(row, name, f"holds {texts[of_rows[row]]!r}, {words}")
        if not may_miss:
            self._refuse(found == -1, name, _MISSING_VALUE)

    def add_numbers(self, name: str, column: Any, may_miss: bool = False) -> None:
        """Add a pyarrow column as numbers, or record the reason for leaving it out."""
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
            if not may_miss:
                self._refuse(np.asarray(column.is_null()), name, _MISSING_VALUE)
            values = np.asarray(column.cast(float64(), safe=not may_miss) if is_exact or may_miss else column)
        if not may_miss:
            self._refuse(np.isnan(values), name, _MISSING_VALUE)
        with np.errstate(over="ignore"):  # numbers that overflow become infinite, without NumPy's warning
            self.numbers[name] = values.astype(np.float32)
        self._refuse(np.isinf(self.numbers[name]), name, "must hold finite numbers that float32 can represent.")

    def _parsed(self, name: str, texts: Any) -> npt.NDArray[np.float64] | None:
        """Return a dictionary-encoded column of texts as numbers, NaN if missing; None if a text is not a number."""
        rows, numbers, held = np.asarray(texts.indices), list[float](), set[bool]()
        for position, text in enumerate(map(str.strip, texts.dictionary.to_pylist())):
            number = as_number(text if self.decimal == "." else text.translate(_SWAPPED))
            if number is None or not math.isnan(number):
                held.add(number is None)
            has_point = self.decimal == "," and "." in text and as_number(text) is not None
            if has_point or (number is None and _WITH_COMMA.fullmatch(text)):
                remedy = "a decimal comma and without points"
                if self.decimal == ".":
                    remedy = (
                        "a decimal point and without commas, set decimal=',' if all numbers of the file have a decimal"
                        " comma"
                    )
                problem = f"holds {text!r}. Write numbers with {remedy}, or name the columns to use in features."
                raise self.error(int(np.argmax(rows == position)), name, problem)
            number = _TRUTHS.get(text.lower()) if number is None else number
            if number is None or len(held) > 1:  # true and false count as numbers, but not mixed with others
                beside = "" if number is None or text.lower() in _TRUTHS else " next to true or false"
                self.left_out[name] = f"{self.line(int(np.argmax(rows == position)))} holds {text!r}{beside}"
                return None
            numbers.append(number)
        values: npt.NDArray[np.float64] = np.array(numbers, np.float64)[rows]
        return values

    def error(self, row: int, name: str, problem: str) -> FederatedError:
        """Return the error for a value of a column."""
        return FederatedError(f"{self.path}, {self.line(row)}: column {name!r} {problem}")

    def _refuse(self, rows: npt.NDArray[np.bool_], name: str, problem: str) -> None:
        if rows.any():
            raise self.error(int(rows.argmax()), name, problem)


def _check_quotes(path: Path, delimiter: str) -> None:
    """Raise if a quote is not closed; pyarrow would accept the rest of the file as one field."""
    with path.open("rb") as file:
        is_odd = sum(block.count(b'"') for block in iter(lambda: file.read(_BLOCK), b"")) % 2
    for _ in read_rows(path, delimiter=delimiter) if is_odd else ():
        pass


def is_word(text: str) -> bool:
    """Return whether a text may be a word of a column: not a missing value, and without surrounding spaces."""
    return text == text.strip() and text.lower() not in _MISSING


def sorted_words(words: Iterable[str]) -> list[str]:
    """Return the distinct words, sorted by value if all are numbers, and otherwise as texts."""
    numbers: dict[str, Any] = {word: as_number(word) for word in words}
    if None in numbers.values():
        return sorted(numbers)
    return sorted(numbers, key=lambda word: (numbers[word], word))


def as_number(text: str) -> float | None:
    """Parse a number, with all digits of an integer; return NaN for a missing value and None for other texts."""
    if text.lower() in _MISSING:
        return math.nan
    try:
        number = float(text)
    except ValueError:
        return None
    if "_" in text or math.isinf(number):  # Python accepts 1_000
        return None
    digits = text.lstrip("+-")
    if not digits.isdecimal():
        return number
    integer = int(digits.lstrip("0") or "0")  # int() limits the number of digits, including leading zeros
    return -integer if text.startswith("-") else integer


Parts: TypeAlias = dict[ClientId, tuple[Tensor, Tensor]]
"""Inputs [n_i, features] and targets of each client that has examples."""

_PARTS = ("train", "val", "test")


class ClientTable(StoredDataModule):
    """Clients from a CSV or a Parquet file, with one row per example and a client column.

    pyarrow reads the file (``pip install lightning_fed[tables]``). A CSV file is UTF-8 with a heading and commas, and
    its client ids are texts. Integers in a Parquet file stay integer client ids. Inputs are float32 [n, features], in
    the order of the columns and not standardized. True and false are 1 and 0. Columns of words, missing values and
    decimal commas need a rule: ``categories``, ``ordered``, ``missing`` and ``decimal``. Without one they raise, with
    the line.

    Args:
        path: The file, ``.csv`` or ``.parquet``.
        client: The column of client ids.
        target: The column to predict.
        features: The input columns; None for all other numeric columns, and those with ``categories`` or an order. A
            warning names the columns left out. A row index written by pandas (no name, or ``__index_level_0__``) is
            left out too.
        targets: "classes" for labels int64 [n]: positions among the sorted distinct values of the target, which
            ``setup`` stores in ``classes`` (texts without surrounding spaces). "values" for regression, float32 [n, 1].
        classes: The values of the target in the order of their numbers, as texts. None for the file's sorted distinct
            values, which differ between sites with their own files.
        categories: Columns of words with their vocabularies, such as ``{"sex": ["f", "m"]}``: an input of 1 or 0 per
            word. A number, such as ``{"ward": 20}``, reserves room for that many words instead: the sorted words of the
            file, or the words that the sites of a run agree on. The inputs of unused room are 0.
        unknown: The columns of ``categories`` that may hold other words: an extra input is 1 for these.
        ordered: Columns of words in their order, such as ``{"smoker": ["no", "yes"]}``: one input, 0, 1, 2, ...
        missing: The rule for missing values, by column, or one for all columns of numbers. A number replaces them.
            "client_mean": the mean of the client's own training rows; no client sees another's. "indicator": 0, and an
            extra input that is 1 if the value is missing. "refuse": an error. Words allow only the last two.
        decimal: The decimal mark in a CSV file, "." or ",".
        delimiter: The field separator of a CSV file, such as ";".
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
    feature_names: list[str]
    """The names of the inputs after ``setup``: column names, and names such as "sex=f" and "age missing"."""

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
        classes: Sequence[str] | None = None,
        categories: Mapping[str, Sequence[str] | int] | None = None,
        ordered: Mapping[str, Sequence[str]] | None = None,
        missing: str | float | Mapping[str, str | float] = "refuse",
        decimal: Literal[".", ","] = ".",
        delimiter: str = ",",
        unknown: Sequence[str] = (),
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
            check_number("ClientTable", "val_fraction", val_fraction, "[0, 1)")
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
        self.declared_classes = None if classes is None else _vocabulary("classes", classes)
        if classes is not None and targets != "classes":
            raise FederatedError(f"ClientTable(classes=..., targets={targets!r}): values have no classes.")
        self.categories = _vocabularies("categories", categories)
        self.ordered = _vocabularies("ordered", ordered)
        self.unknown, self._agreed = unknown, dict[str, list[str]]()
        self.missing = missing
        self.decimal = check_one_of("ClientTable", "decimal", decimal, (".", ","))
        self.delimiter = delimiter
        self._check_rules()

    def _check_rules(self) -> None:
        """Raise for rules that contradict each other or the roles of columns."""
        rules = self.missing if isinstance(self.missing, Mapping) else {"": self.missing}
        for name, rule in rules.items():
            where = f"ClientTable(missing={format_value(self.missing)})"
            if not isinstance(name, str):
                raise FederatedError(f"{where}: columns have texts as names, found {format_value(name)}.")
            if not (math.isfinite(finite(rule)) or rule in ("refuse", "client_mean", "indicator")):
                raise FederatedError(
                    f"{where}: a rule is a number, 'client_mean', 'indicator' or 'refuse', found {format_value(rule)}."
                )
            if abs(finite(rule)) > _LARGEST:
                raise FederatedError(f"{where}: inputs are float32, which cannot represent {format_value(rule)}.")
            if name in {*self.categories, *self.ordered} and rule not in ("refuse", "indicator"):
                raise FederatedError(
                    f"{where}: {name!r} holds words, and the rule for words is 'indicator' or 'refuse'."
                )
        words = [*self.categories, *self.ordered]
        roles = {self.client: "client", self.target: "target", **({self.split: "split"} if self.split else {})}
        for name in (*words, *(rules if isinstance(self.missing, Mapping) else ())):
            if name in roles:
                raise FederatedError(f"ClientTable: {name!r} is the {roles[name]} column, and rules are for inputs.")
            if self.features is not None and name not in self.features:
                raise FederatedError(f"ClientTable: {name!r} has a rule, and is not among features={self.features!r}.")
        unknown: Any = self.unknown
        if not isinstance(unknown, list | tuple) or not self.categories.keys() >= set(map(str, unknown)):
            raise FederatedError(f"ClientTable(unknown={unknown!r}): unknown must be a list of columns of categories.")
        if both := sorted(self.categories.keys() & self.ordered.keys()):
            raise FederatedError(f"ClientTable: {both[0]!r} is in categories and in ordered. Leave it in one of them.")
        delimiter: Any = self.delimiter
        is_one = isinstance(delimiter, str) and len(delimiter) == 1 and delimiter.isascii()
        if not is_one or delimiter in '"\r\n\0':
            raise FederatedError(
                f"ClientTable(delimiter={delimiter!r}): delimiter must be one character of ASCII, such as ';'."
            )
        if Path(self.path).suffix == ".parquet" and (self.decimal, self.delimiter) != (".", ","):
            raise FederatedError(
                "ClientTable(decimal=..., delimiter=...): a Parquet file has neither. Leave them unset."
            )

    def _rule(self, name: str) -> str | float:
        """Return the rule for missing values of an input column."""
        if isinstance(self.missing, Mapping):
            return self.missing.get(name, "refuse")
        return "refuse" if name in self.categories or name in self.ordered or name == self.target else self.missing

    def _read(
        self, keys: Sequence[str], numeric: Sequence[str], rest: bool, words: Mapping[str, Sequence[str] | None]
    ) -> Columns:
        """Read columns unchanged (``keys``), as numbers, or as words of a vocabulary; None builds it from the column.

        ``rest`` reads all other numeric columns too, except for a row index written by pandas.
        """
        from pyarrow import ArrowException, parquet, string
        from pyarrow import csv as arrow_csv

        path = find("ClientTable", Path(self.path), "Write the table there.", "Or correct path.")
        if not path.is_file():
            raise FederatedError(f"ClientTable: {path} is not a file. Correct path.")
        columns, is_csv = Columns(path, self.delimiter, self.decimal), path.suffix == ".csv"
        if is_csv:
            _check_quotes(path, self.delimiter)
        try:
            if is_csv:
                _, heading = next(read_rows(path, delimiter=self.delimiter), (0, []))
            else:
                heading = list(parquet.read_schema(path).names)
            taken = [*keys, *numeric, *words]
            if absent := [name for name in taken if name not in heading]:
                other = next((mark for mark in (",", ";", "\t") if len(heading) == 1 and mark in heading[0]), None)
                hint = f" Its fields seem to be separated by {other!r}: set delimiter." if other and is_csv else ""
                raise FederatedError(f"{path} has no column {absent[0]!r}; its columns are {heading}.{hint}")
            if twice := sorted({name for name in heading if heading.count(name) > 1}):
                raise FederatedError(f"{path} has more than one column {twice[0]!r}: rename them.")
            others = [name for name in heading if name not in taken] if rest else []
            if row_indices := [name for name in others if _INDEX.fullmatch(name)]:
                rank_zero_info(f"ClientTable leaves out {row_indices} of {path}: the names are those of a row index.")
            numbers = [*numeric, *(name for name in others if name not in row_indices)]
            names = [*keys, *numbers, *words]
            if is_csv:
                table = arrow_csv.read_csv(
                    path,
                    arrow_csv.ReadOptions(block_size=_BLOCK),
                    arrow_csv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True),
                    arrow_csv.ConvertOptions(column_types=dict.fromkeys(names, string()), include_columns=names),
                )
            else:
                table = parquet.read_table(path, columns=names)
        except (ArrowException, OSError) as error:
            if is_csv and sum(1 for _ in read_table(path, self.delimiter)) < 2:  # a row of another length raises first
                raise FederatedError(f"{path} has no rows.") from error
            kind = "CSV" if is_csv else "Parquet"
            raise FederatedError(f"{path} cannot be read as a {kind} file: {error}.") from error
        for name in keys:
            columns.add_key(name, table.column(name))
        for name in numbers:
            columns.add_numbers(name, table.column(name), self._rule(name) != "refuse")
            if name in numeric and name in columns.left_out:
                raise FederatedError(
                    f"{path}: column {name!r} must hold finite numbers; {columns.left_out[name]}. Correct the row, or"
                    " declare the words of the column."
                )
        for name, vocabulary in words.items():
            may_miss, may_be_unknown = self._rule(name) != "refuse", name in self.unknown
            columns.add_words(name, table.column(name), vocabulary, may_miss, may_be_unknown)
        columns.heading = heading
        return columns

    def _load(self) -> None:
        words = {
            name: self._agreed.get(name) if isinstance(given, int) else given
            for name, given in {**self.categories, **self.ordered}.items()
        }
        if self.declared_classes is not None:
            words[self.target] = self.declared_classes
        keys = [self.client, *([] if self.split is None else [self.split])]
        ruled = self.missing if isinstance(self.missing, Mapping) else ()
        numeric = [name for name in dict.fromkeys((*(self.features or ()), *ruled)) if name not in words]
        if self.target not in words:
            (keys if self.targets == "classes" else numeric).append(self.target)
        table = self._read(keys, numeric, self.features is None, words)
        path = table.path
        order = self.features or sorted({*table.numbers, *words}, key=table.heading.index)
        features = [name for name in order if name != self.target]
        if table.left_out:
            reasons = ", ".join(f"{name!r} ({reason})" for name, reason in table.left_out.items())
            rank_zero_warn(
                f"ClientTable leaves out columns of {path} that do not hold numbers: {reasons}. The features are"
                f" {features}. Declare the words of the others in categories or ordered, or name the columns to use in"
                " features."
            )
        if not features or not len(table.keys[self.client]):
            raise FederatedError(f"{path} has no rows, or no column of numbers that could be a feature.")
        for name, room in self.categories.items():
            if isinstance(room, int) and (found := len(table.vocabularies[name])) > room:
                raise FederatedError(
                    f"{path}: column {name!r} has {found} words, and categories={{{name!r}: {room}}} is room for"
                    f" {room}. Make room for all of them, in the model as well."
                )
        x = self._inputs(table, features)
        y = torch.from_numpy(table.numbers[self.target])[:, None] if self.targets == "values" else self._labels(table)
        train, val, test = parts = self._divide(table, x, y)
        if not train:
            raise FederatedError(f"{path}: column {self.split!r} leaves no row for training.")
        self._fill(path, parts)
        self._set_parts(train, val)
        self.test = pool(test)[0] or self.val

    def describe_columns(self) -> list[str]:
        """Return the names of inputs and classes; for undeclared classes, only their number and a checksum.

        Raises:
            FederatedError: If words come from the rows and the sites have not agreed on them.
        """
        for name, room in self.categories.items():
            if isinstance(room, int) and name not in self._agreed:
                raise FederatedError(
                    f"ClientTable: the words of column {name!r} come from the rows, and each site would number its own."
                    f" Let the sites agree on them, RemoteClients(agree_on=[{name!r}]), or declare them."
                )
        self.setup()
        if self.targets == "values":
            return [*self.feature_names, self.target]
        if self.declared_classes is not None:
            return [*self.feature_names, *(f"{self.target}={name}" for name in self.classes)]
        checksum = hashlib.blake2b(repr(self.classes).encode(), digest_size=8).hexdigest()
        return [*self.feature_names, f"{self.target} of {len(self.classes)} classes with the checksum {checksum}"]

    def column_words(self, columns: Sequence[str]) -> dict[str, list[str]]:
        """Return the distinct words of columns with room for words, for the sites of a run to agree on."""
        for name in columns:
            if not isinstance(self.categories.get(name), int):
                raise FederatedError(
                    f"ClientTable: the run agrees on the words of column {name!r}, and the table has no room for them."
                    f" Declare it, such as categories={{{name!r}: 20}} for 20 words."
                )
        found = self._read([], [], False, dict.fromkeys(columns)).vocabularies
        return {name: list(found[name]) for name in columns}

    def use_words(self, words: Mapping[str, Sequence[str]]) -> None:
        """Number the words of columns in this order from the next ``setup`` on; other columns use the file's words."""
        if words != self._agreed:
            self._agreed = {name: list(own) for name, own in words.items()}
            self._loaded, self._clients = False, None

    def _inputs(self, table: Columns, features: Sequence[str]) -> Tensor:
        """Return the inputs [n, features] and set their names; NaN marks values that a client's mean replaces later."""
        parts: list[npt.NDArray[np.float32]] = []
        self.feature_names = []
        for name in features:
            rule = self._rule(name)
            found = table.words[name] if name in table.words else table.numbers[name]
            holes = found == -1 if name in table.words else np.isnan(found)
            if name in self.categories:
                vocabulary, room = table.vocabularies[name], self.categories[name]
                size = room if isinstance(room, int) else len(vocabulary)
                own = (found[:, None] == np.arange(size)).astype(np.float32)
                self.feature_names += [f"{name}={word}" for word in vocabulary]
                self.feature_names += [f"{name} unused {place + 1}" for place in range(len(vocabulary), size)]
                if name in self.unknown:
                    own = np.concatenate([own, (found[:, None] == -2).astype(np.float32)], axis=1)
                    self.feature_names.append(f"{name} unknown")
            else:
                fill = rule if isinstance(rule, int | float) else np.nan if rule == "client_mean" else 0.0
                own = np.where(holes, fill, found).astype(np.float32)[:, None]
                self.feature_names.append(name)
            parts.append(own)
            if rule == "indicator":
                parts.append(holes.astype(np.float32)[:, None])
                self.feature_names.append(f"{name} missing")
        if twice := sorted({name for name in self.feature_names if self.feature_names.count(name) > 1}):
            raise FederatedError(
                f"{table.path}: two inputs would be called {twice[0]!r}, one of them a column of that name. Rename the"
                " column, or leave it out of features."
            )
        return torch.from_numpy(np.concatenate(parts, axis=1))

    def _fill(self, path: Path, parts: Sequence[Parts]) -> None:
        """Replace missing inputs by the mean of the client's own training rows, in place."""
        train = parts[0]
        for client_id in dict.fromkeys(client_id for part in parts for client_id in part):
            own = [part[client_id][0] for part in parts if client_id in part]
            lacking = torch.stack([x.isnan().any(0) for x in own]).any(0)
            for column in lacking.nonzero().flatten().tolist():
                values = train[client_id][0][:, column].double() if client_id in train else torch.empty(0)
                mean = values.nanmean()
                if mean.isnan():
                    raise FederatedError(
                        f"{path}: client {client_id!r} has no value of column {self.feature_names[column]!r} in its"
                        " training rows, so missing='client_mean' has no mean there. Set a number or 'indicator'."
                    )
                for x in own:
                    x[:, column].nan_to_num_(nan=float(mean))

    def _labels(self, table: Columns) -> Tensor:
        """Return each target's class number; by default, classes are the sorted distinct values, numbers as numbers."""
        if self.declared_classes is not None:
            self.classes = self.declared_classes
            return torch.from_numpy(table.words[self.target])
        values = table.keys[self.target]
        texts: dict[Any, Any] = {value: str(value).strip() for value in dict.fromkeys(values)}
        numbers = {value: as_number(text) for value, text in texts.items()}
        holes = {value for value, number in numbers.items() if number is not None and math.isnan(number)}
        if None in numbers.values() or len(holes) == len(numbers):
            numbers = texts
        elif holes:
            row = next(row for row, value in enumerate(values) if value in holes)
            problem = f"has no value ({values[row]!r}), and numbers elsewhere. Fill it in, or drop the row."
            raise table.error(row, self.target, problem)
        self.classes = sorted(set(numbers.values()))
        spelled: dict[str, str] = {}
        for name in self.classes:
            if (other := spelled.setdefault(str(name).lower(), str(name))) != str(name):
                rank_zero_warn(
                    f"{table.path}: column {self.target!r} holds {other!r} and {str(name)!r}, which are two of its"
                    f" {len(self.classes)} classes. Write one of them, or declare both in classes if they differ."
                )
                break
        positions = {name: position for position, name in enumerate(self.classes)}
        return torch.tensor([positions[numbers[value]] for value in values], dtype=torch.int64)

    def _divide(self, table: Columns, x: Tensor, y: Tensor) -> list[Parts]:
        """Return the training, validation and test rows of each client."""
        rows_of: dict[ClientId, list[int]] = {}
        for row, name in enumerate(table.keys[self.client]):
            rows_of.setdefault(check_client_id(name), []).append(row)
        spelled: dict[str, ClientId] = {}
        for name in rows_of:
            if (other := spelled.setdefault(str(name).strip(), name)) != name:
                rule = "clients must differ by more than spaces around their ids. Write one."
                raise table.error(rows_of[name][0], self.client, f"holds {name!r}, and elsewhere {other!r}: {rule}")
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


def _vocabulary(name: str, found: Any) -> list[str]:
    """Return a checked list of words."""
    is_list = isinstance(found, list | tuple) and bool(found)
    if not is_list or not all(isinstance(word, str) and word == word.strip() and word for word in found):
        raise FederatedError(
            f"ClientTable: {name} must be a list of words without spaces around them, found {found!r}. In YAML, write"
            " words such as yes, no and 1 in quotes."
        )
    if len(set(found)) < len(found):
        raise FederatedError(f"ClientTable: {name} names a word twice, found {list(found)}.")
    return list(found)


def _vocabularies(name: str, found: Any) -> dict[str, Any]:
    """Return a checked mapping from columns to words, or to the number of words to reserve room for."""
    if found is not None and not (isinstance(found, Mapping) and all(isinstance(key, str) for key in found)):
        raise FederatedError(f"ClientTable: {name} must map columns to lists of words, found {found!r}.")
    return {
        key: check_count("ClientTable", f"{name}[{key!r}]", words)
        if name == "categories" and isinstance(words, int)
        else _vocabulary(f"{name}[{key!r}]", words)
        for key, words in (found or {}).items()
    }
