"""The record of a finished cell: its configuration, its status, and every value that it logged."""

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning_fed.core.errors import FederatedError
from lightning_fed.lab.overlays import Config
from lightning_fed.lab.quantities import Series

_ABOUT, _ROUNDS = "cell.json", "rounds.csv"


@dataclass(frozen=True)
class Record:
    """A finished cell.

    Args:
        config: Its complete configuration.
        status: "finished", or "diverged" if its loss or its models stopped being finite.
        cause: The cause of the divergence; empty if it finished.
        seconds: Wall time.
        cpu_seconds: CPU time of the process and its child processes; None in old records without it.
        made_with: Versions, hardware and date.
        series: Its logged values, by tag and completed rounds.
        folder: The folder of its other files.
        data: The SHA-256 of the data files that were read, by their paths in the folder of data sets.
    """

    config: Config
    status: Literal["finished", "diverged"]
    cause: str
    seconds: float
    cpu_seconds: float | None
    made_with: Mapping[str, str]
    series: Series
    folder: Path
    data: Mapping[str, str] = field(default_factory=dict)


def write_record(folder: Path, record: Record) -> None:
    """Write a record into an existing folder."""
    write_rounds(folder / _ROUNDS, record.series)
    about = {
        "status": record.status,
        "cause": record.cause,
        "seconds": round(record.seconds, 3),
        "cpu_seconds": None if record.cpu_seconds is None else round(record.cpu_seconds, 3),
        "made_with": dict(record.made_with),
        "data": dict(record.data),
        "config": record.config,
    }
    (folder / _ABOUT).write_text(json.dumps(about, indent=1, default=str), encoding="utf-8")


def read_record(folder: Path) -> Record | None:
    """Return the record in a folder; None if there is none.

    Raises:
        FederatedError: If the files are damaged.
    """
    path = folder / _ABOUT
    if not path.is_file():
        return None
    try:
        about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        series = read_series(folder / _ROUNDS)
        kept = {name: about[name] for name in ("config", "status", "cause", "seconds", "made_with")}
        later = {"cpu_seconds": about.get("cpu_seconds"), "data": about.get("data", {})}  # missing in old records
        return Record(**kept, **later, series=series, folder=folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FederatedError(f"{folder} is damaged ({error}). Delete it; the cell is then run again.") from error


def write_rounds(path: Path, series: Series) -> None:
    """Write a run's logged values as a CSV file, with a row per round and a column per tag."""
    tags = sorted(series)
    rounds = sorted({number for curve in series.values() for number in curve})
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["round", *tags])
        writer.writerows([n, *(number_text(series[tag].get(n)) for tag in tags)] for n in rounds)


def read_series(path: Path) -> dict[str, dict[int, float]]:
    """Read a file written by :func:`write_rounds`."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        _, *tags = next(rows, [])
        series: dict[str, dict[int, float]] = {tag: {} for tag in tags}
        for number, *values in rows:
            for tag, value in zip(tags, values, strict=True):
                if value:
                    series[tag][int(number)] = float(value)
    return series


def number_text(value: float | None) -> str:
    """Format a number for storage: integers whole, others with seven digits, the precision of float32."""
    if value is None:
        return ""
    return str(int(value)) if math.isfinite(value) and value == int(value) and abs(value) < 2**53 else f"{value:.7g}"
