"""One number per client: proportional to its examples, from a mapping, or from a file."""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lightning_fed.core.arguments import finite
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId


class ClientWeights:
    """Weights of the clients of a population.

    Args:
        source: "examples", a mapping from id to weight, or the path of a JSON object or a CSV file with the columns
            ``client`` and ``weight``. In files, ids are compared as text.
        most: The largest weight allowed.
        name: The argument's name for errors.
        column: The column's name in CSV files, and the term for one number in errors.

    Raises:
        FederatedError: If the file is missing or has another form, or a weight is negative, too large or not finite.
    """

    def __init__(
        self,
        source: str | Mapping[ClientId, float],
        most: float = math.inf,
        name: str = "weights",
        column: str = "weight",
    ) -> None:
        self.source = source
        self._most = most
        self._column = column
        self._weights: dict[ClientId, float] | None = None
        self._from_file = isinstance(source, str) and source != "examples"
        if isinstance(source, str):
            self._weights = None if source == "examples" else _read(Path(source), name, column)
        elif isinstance(source, Mapping):
            self._weights = dict(source)
        else:
            raise FederatedError(f"{name} must be 'examples', a mapping or a path, found {source!r}.")
        for client_id, weight in (self._weights or {}).items():
            if isinstance(client_id, bool) or not isinstance(client_id, int | str):
                raise FederatedError(f"{name}: a client id must be an int or a str, found {client_id!r}.")
            if not 0 <= finite(weight) <= most:
                allowed = f"in [0, {most:g}]" if most < math.inf else "finite and at least 0"
                raise FederatedError(
                    f"{name}: the {column} of client {client_id!r} must be a number {allowed}, found {weight!r}."
                )
        self._cache: tuple[Sequence[ClientId], Tensor] | None = None

    def of(self, population: Sequence[ClientId]) -> Tensor:
        """Return the weights [N] of a population, float64.

        Raises:
            FederatedError: If a client has no weight, or all are zero.
        """
        if self._cache is None or self._cache[0] is not population:
            self._cache = (population, self._look_up(population))
        return self._cache[1]

    def _look_up(self, population: Sequence[ClientId]) -> Tensor:
        if self._weights is None:
            sizes = getattr(population, "sizes", None)
            if sizes is None:
                raise FederatedError("weights='examples' needs a population with its clients' sizes.")
            return torch.tensor(sizes, dtype=torch.float64)
        names = [str(i) if self._from_file else i for i in population]
        if missing := [name for name in names if name not in self._weights]:
            raise FederatedError(f"{len(missing)} clients have no {self._column} in {self!r}, such as {missing[0]!r}.")
        weights = torch.tensor([self._weights[name] for name in names], dtype=torch.float64)
        if not bool(weights.any()):
            raise FederatedError(f"All clients have {self._column} zero in {self!r}: no client could take part.")
        return weights

    def __repr__(self) -> str:
        """Return the source as text, shortened if it is long."""
        text = repr(self.source)
        return text if len(text) <= 60 or isinstance(self.source, str) else f"{text[:57]}..."


def _read(path: Path, name: str, column: str) -> dict[ClientId, float]:
    if not path.is_file():
        raise FederatedError(f"There is no file {str(path)!r} with a {column} for every client, which {name} needs.")
    try:
        if path.suffix.lower() == ".json":
            pairs = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=list)
        else:
            with path.open(encoding="utf-8-sig", newline="") as file:
                pairs = [(row["client"], float(row[column])) for row in csv.DictReader(file)]
        weights: dict[ClientId, float] = {str(name): weight for name, weight in pairs}
    except (ValueError, KeyError, AttributeError, TypeError, csv.Error) as error:
        raise FederatedError(
            f"{str(path)!r} must be a JSON object from client to {column}, or a CSV file with the columns 'client' and"
            f" {column!r}: {type(error).__name__}: {error}."
        ) from error
    if len(weights) < len(pairs):
        raise FederatedError(f"{str(path)!r} names {len(pairs) - len(weights)} clients more than once.")
    return weights
