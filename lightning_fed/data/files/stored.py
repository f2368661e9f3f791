"""What data modules that read files have in common: files are found, read and checked in ``setup``."""

import csv
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_fed.compat.private import rank_zero_info
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.dataset import FederatedDataset

__all__ = ["StoredDataModule", "find", "inside", "large_enough", "listing", "pool", "read_rows", "read_table"]


class StoredDataModule(FederatedDataModule, ABC):
    """A data module whose files are read once, in ``setup`` or when the clients are first asked for.

    A subclass checks its arguments when it is made and reads its files in ``_load``.
    """

    _loaded = False

    def setup(self, stage: str | None = None) -> None:
        """Read the files, unless that is done already; all stages need the same."""
        if not self._loaded:
            self._load()
            self._loaded = True

    @property
    def clients(self) -> FederatedDataset | None:
        """The clients' data sets; asking for them reads the files."""
        if self._clients is None:
            self.setup()
        return super().clients

    @abstractmethod
    def _load(self) -> None:
        """Read the files; set ``val``, ``test`` and ``client_val``, and then the clients."""

    def _set_parts(
        self, train: Mapping[ClientId, tuple[Tensor, ...]], test: Mapping[ClientId, tuple[Tensor, ...]]
    ) -> None:
        """Set the clients, their test parts together as ``val`` and ``test``, and each client's as ``client_val``."""
        self.val, parts = pool(test)
        self.test = self.val
        self.client_val = {client_id: part for client_id, part in parts.items() if client_id in train}
        self.set_clients({client_id: TensorDataset(*tensors) for client_id, tensors in train.items()})


def pool(parts: Mapping[ClientId, tuple[Tensor, ...]]) -> tuple[TensorDataset | None, dict[ClientId, TensorDataset]]:
    """Return all parts as one data set, None if there are no examples, and each part that has any as a view into it."""
    parts = {key: tensors for key, tensors in parts.items() if len(tensors[0])}
    if not parts:
        return None, {}
    sizes = [len(tensors[0]) for tensors in parts.values()]
    whole = [torch.cat(tensors) for tensors in zip(*parts.values(), strict=True)]
    views = zip(*(tensor.split(sizes) for tensor in whole), strict=True)
    return TensorDataset(*whole), {key: TensorDataset(*view) for key, view in zip(parts, views, strict=True)}


def large_enough(owner: str, sizes: Mapping[ClientId, int], nouns: tuple[str, str], **setting: int) -> set[ClientId]:
    """Return the clients that have as many examples as a setting asks for, and announce how many have not."""
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
    """Return a path that must exist; the message says how to get it, and what to do with a copy that lies elsewhere."""
    if not path.exists():
        raise FederatedError(f"{owner}: there is no {path} (looked in {path.parent.absolute()}). {get} {put}")
    return path


def inside(owner: str, root: Path, path: Path) -> Path:
    """Return a path that must lie in a folder, wherever links lead."""
    if not path.resolve().is_relative_to(root.resolve()):
        raise FederatedError(
            f"{owner}: {path} leads out of {root}, to {path.resolve()}. Copy what it leads to into the folder."
        )
    return path


def listing(owner: str, folder: Path, suffix: str) -> list[Path]:
    """Return the files in a folder whose names end in ``suffix``, by name; there must be some."""
    if not folder.is_dir():
        raise FederatedError(f"{owner}: {folder} is no folder.")
    files = sorted(path for path in folder.iterdir() if path.name.endswith(suffix) and path.is_file())
    if not files:
        raise FederatedError(f"{owner}: {folder} has no files named *{suffix}.")
    return files


def read_rows(path: Path, encoding: str = "utf-8-sig") -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the fields of each row that is not empty, of CSV with a byte order mark or not."""
    with path.open(encoding=encoding, newline="") as file:
        rows = csv.reader(file)
        try:
            for row in rows:
                if row:
                    yield rows.line_num, row
        except UnicodeDecodeError as error:
            raise FederatedError(f"{path} is no {encoding} text, after line {rows.line_num}: {error}.") from error
        except csv.Error as error:
            raise FederatedError(f"{path}, line {rows.line_num}: this is no CSV ({error}).") from error


def read_table(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield what :func:`read_rows` does, where each row must have as many fields as the first one, the heading."""
    rows = read_rows(path)
    line, heading = next(rows, (0, []))
    yield line, heading
    for line, row in rows:
        if len(row) != len(heading):
            raise FederatedError(f"{path}, line {line}: {len(row)} fields under a heading of {len(heading)}.")
        yield line, row
