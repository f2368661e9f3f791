"""What data modules that read files have in common: files are found, read and checked in ``setup``."""

import csv
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.dataset import FederatedDataset

__all__ = [
    "StoredDataModule",
    "find",
    "inside",
    "listing",
    "pool",
    "read_rows",
]

Key = TypeVar("Key", bound=ClientId)


class StoredDataModule(FederatedDataModule, ABC):
    """A data module whose files are read once, in ``setup`` or when the clients are first asked for.

    A subclass checks its arguments when it is made and reads its files in ``_load``.
    """

    _loaded = False

    def setup(self, stage: str | None = None) -> None:
        """Read the files, unless that is done already; Lightning calls it before it trains or evaluates.

        Args:
            stage: What Lightning is about to do; all stages need the same.

        Raises:
            FederatedError: If a file is missing or damaged.
        """
        if not self._loaded:
            self._load()
            self._loaded = True

    @property
    def clients(self) -> FederatedDataset | None:
        """The clients' data sets; asking for them reads the files."""
        if self._clients is None:
            self.setup()
        return super().clients

    @property
    def known_sizes(self) -> list[int] | None:
        """Each client's number of examples; asking for them reads the files."""
        return self._need_clients().known_sizes

    @abstractmethod
    def _load(self) -> None:
        """Read the files; set ``val``, ``test`` and ``client_val``, and then the clients."""


def pool(parts: Mapping[Key, tuple[Tensor, ...]]) -> tuple[TensorDataset | None, dict[Key, TensorDataset]]:
    """Return all parts as one data set, None if they hold no example, and each part as a view into it.

    Args:
        parts: By client, tensors that agree in their first dimension n_i, and from client to client in the others.
    """
    sizes = [len(tensors[0]) for tensors in parts.values()]
    if not sum(sizes):
        return None, {}
    whole = [torch.cat(tensors) for tensors in zip(*parts.values(), strict=True)]
    views = zip(*(tensor.split(sizes) for tensor in whole), strict=True)
    return TensorDataset(*whole), {key: TensorDataset(*view) for key, view in zip(parts, views, strict=True)}


def find(owner: str, path: Path, get: str, put: str) -> Path:
    """Return a path that must exist.

    Args:
        owner: The data module, for the message.
        path: Where a file or a folder should be.
        get: How to get it: where to download it, or how to make it.
        put: What to do with a copy that lies elsewhere.

    Raises:
        FederatedError: If there is nothing; the message names the path and both ways to change that.
    """
    if not path.exists():
        raise FederatedError(f"{owner}: there is no {path} (looked in {path.parent.absolute()}). {get} {put}")
    return path


def inside(owner: str, root: Path, path: Path) -> Path:
    """Return a path that must lie in a folder, wherever links lead.

    Raises:
        FederatedError: If it leads out of the folder; the message names both.
    """
    if not path.resolve().is_relative_to(root.resolve()):
        raise FederatedError(
            f"{owner}: {path} leads out of {root}, to {path.resolve()}. Copy what it leads to into the folder."
        )
    return path


def listing(owner: str, folder: Path, suffix: str) -> list[Path]:
    """Return the files in a folder whose names end in ``suffix``, by name.

    Raises:
        FederatedError: If there are none.
    """
    if not folder.is_dir():
        raise FederatedError(f"{owner}: {folder} is no folder.")
    files = sorted(path for path in folder.iterdir() if path.name.endswith(suffix) and path.is_file())
    if not files:
        raise FederatedError(f"{owner}: {folder} has no files named *{suffix}.")
    return files


def read_rows(path: Path, encoding: str = "utf-8-sig") -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the fields of each row of a CSV file; empty lines are passed over.

    Args:
        path: The file.
        encoding: Its encoding; the default understands a byte order mark.

    Raises:
        FederatedError: If it is no text, or no CSV.
    """
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
