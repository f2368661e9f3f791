"""The base of data modules that find, read and check their files in ``setup``."""

import csv
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_fed.compat.private import rank_zero_info
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.dataset import FederatedDataset

_END = ["", "\U0010ffff"]  # sentinel row after the last row of a CSV file; no text has this character


class StoredDataModule(FederatedDataModule, ABC):
    """A data module that reads its files once, in ``setup`` or when the clients are first accessed.

    A subclass checks its arguments in ``__init__`` and reads its files in ``_load``.
    """

    _loaded = False

    def setup(self, stage: str | None = None) -> None:
        """Read the files unless they are loaded already; all stages need the same ones."""
        if not self._loaded:
            self._load()
            self._loaded = True

    @property
    def clients(self) -> FederatedDataset | None:
        """The clients' data sets; accessing them reads the files."""
        if self._clients is None:
            self.setup()
        return super().clients

    @abstractmethod
    def _load(self) -> None:
        """Read the files; set ``val``, ``test`` and ``client_val``, and then the clients."""

    def _set_parts(
        self, train: Mapping[ClientId, tuple[Tensor, ...]], test: Mapping[ClientId, tuple[Tensor, ...]]
    ) -> None:
        """Set the clients, their pooled test parts as ``val`` and ``test``, and each test part as ``client_val``."""
        self.val, parts = pool(test)
        self.test = self.val
        self.client_val = {client_id: part for client_id, part in parts.items() if client_id in train}
        self.set_clients({client_id: TensorDataset(*tensors) for client_id, tensors in train.items()})


def pool(parts: Mapping[ClientId, tuple[Tensor, ...]]) -> tuple[TensorDataset | None, dict[ClientId, TensorDataset]]:
    """Return all parts as one data set, or None if empty, and each non-empty part as a view of it."""
    parts = {key: tensors for key, tensors in parts.items() if len(tensors[0])}
    if not parts:
        return None, {}
    sizes = [len(tensors[0]) for tensors in parts.values()]
    whole = [torch.cat(tensors) for tensors in zip(*parts.values(), strict=True)]
    views = zip(*(tensor.split(sizes) for tensor in whole), strict=True)
    return TensorDataset(*whole), {key: TensorDataset(*view) for key, view in zip(parts, views, strict=True)}


def large_enough(owner: str, sizes: Mapping[ClientId, int], nouns: tuple[str, str], **setting: int) -> set[ClientId]:
    """Return the clients with at least as many examples as a setting requires, and log how many are left out."""
    ((name, least),) = setting.items()
    clients, examples = nouns
    kept = {client_id for client_id, size in sizes.items() if size >= least}
    if not kept:
        raise FederatedError(f"{owner}: none of the {len(sizes):,} {clients} has {name}={least} {examples}.")
    if len(kept) < len(sizes):
        lost = sum(size for size in sizes.values() if size < least)
        rank_zero_info(
            f"{owner} leaves out {len(sizes) - len(kept):,} of {len(sizes):,} {clients}, with {lost:,} of"
            f" {sum(sizes.values()):,} {examples}: they have fewer than {name}={least}."
        )
    return kept


def find(owner: str, path: Path, get: str, put: str) -> Path:
    """Return a path that must exist; the error explains how to get the file or where to put it."""
    if not path.exists():
        raise FederatedError(f"{owner}: there is no {path} (looked in {path.parent.absolute()}). {get} {put}")
    return path


def inside(owner: str, root: Path, path: Path) -> Path:
    """Return a path; raise unless it lies in the folder ``root`` after links are resolved."""
    if not path.resolve().is_relative_to(root.resolve()):
        raise FederatedError(
            f"{owner}: {path} leads out of {root}, to {path.resolve()}. Copy its target into the folder."
        )
    return path


def listing(owner: str, folder: Path, suffix: str) -> list[Path]:
    """Return the files in a folder with the given suffix, by name; raise if there are none."""
    if not folder.is_dir():
        raise FederatedError(f"{owner}: {folder} is not a folder.")
    files = sorted(path for path in folder.iterdir() if path.name.endswith(suffix) and path.is_file())
    if not files:
        raise FederatedError(f"{owner}: {folder} has no files named *{suffix}.")
    return files


def read_rows(path: Path, encoding: str = "utf-8-sig", delimiter: str = ",") -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and fields of each non-empty CSV row, with or without a byte order mark."""
    line = 0  # last line of the previous row
    with path.open(encoding=encoding, newline="") as file:
        rows = csv.reader(chain(file, [delimiter.join(_END)]), delimiter=delimiter)
        try:
            for row in rows:
                if row and row[-1].endswith(_END[-1]):
                    if row != _END:  # an unclosed quote has absorbed the rest of the file
                        raise csv.Error("the row that begins there has a quote that is not closed")
                elif row:
                    yield rows.line_num, row
                line = rows.line_num
        except UnicodeDecodeError as error:
            raise FederatedError(f"{path} is not {encoding} text, after line {rows.line_num}: {error}.") from error
        except csv.Error as error:  # in a large file, an unclosed quote makes a field that is too long
            raise FederatedError(
                f"{path}, line {line + 1} is not CSV ({error}). Close its quotes, or download or write the whole file"
                ' again; a quote inside a quoted text is written as "".'
            ) from error


def read_table(path: Path, delimiter: str = ",") -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of :func:`read_rows`; each must have as many fields as the first one, the heading."""
    rows = read_rows(path, delimiter=delimiter)
    line, heading = next(rows, (0, []))
    yield line, heading
    for line, row in rows:
        if len(row) != len(heading):
            raise FederatedError(f"{path}, line {line}: {len(row)} fields under a heading of {len(heading)}.")
        yield line, row
