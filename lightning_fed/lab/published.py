"""The published part of a grid: the values of every cell that its page needs, small enough for a repository.

``NAME_cells.csv`` has a row for every configuration that was run. ``NAME_rounds.csv.gz`` has its curves, thinned such
that every quantity of the experiment keeps its value. ``NAME_configurations.json.gz`` has the complete configuration
of each row, and ``NAME_data.sha256`` the checksums of the data files that were read.
"""

import csv
import gzip
import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_fed.core.errors import FederatedError
from lightning_fed.lab.configurations import with_root
from lightning_fed.lab.grid import Cell, Grid
from lightning_fed.lab.overlays import Config
from lightning_fed.lab.quantities import COSTS, TOTALS, Curve, Metric, Quantity, Series, add_up
from lightning_fed.lab.records import Record, number_text
from lightning_fed.lab.results import Results

_DRAWN = 100  # points of a curve that a figure shows
_ABOUT = ("cell", "name", "settings", "status", "cause", "seconds", "cpu_seconds")


def publish(results: Results, folder: Path) -> None:
    """Write the files.

    Args:
        results: The finished cells.
        folder: The folder to write to.
    """
    grid, experiment = results.grid, results.grid.experiment
    both = [results] if results.beside is None else [results, results.beside]
    chosen = {cell for each in both for point in grid.points for cell in each.cells(point)}
    cells: dict[str, tuple[Cell, Record]] = {}
    drawn = set[str]()
    for cell in results.asked():
        if (record := results.record(cell)) is not None:
            settings = _settings(grid.config(cell))
            cells.setdefault(settings, (cell, record))
            drawn |= {settings} if cell in chosen else set()
    tune = [each.by for each in both if each.by is not None]
    costs = [figure.x for figure in experiment.figures if figure.x in COSTS]
    curves = [
        thinned(record.series, experiment.metrics, experiment.quantities, True, costs)
        if settings in drawn
        else thinned(record.series, experiment.metrics, tune, False)
        for settings, (_, record) in cells.items()
    ]
    _write_cells(folder / f"{experiment.name}_cells.csv", cells)
    _write_rounds(folder / f"{experiment.name}_rounds.csv.gz", curves)
    records = [record for _, record in cells.values()]
    configs = {settings: record.config for settings, (_, record) in cells.items() if record.config}
    write_configurations(folder / f"{experiment.name}_configurations.json.gz", configs)
    sums = sorted({(path, value) for record in records for path, value in record.data.items()})
    if sums:
        text = "".join(f"{value}  {path}\n" for path, value in sums)  # the format of sha256sum -c
        (folder / f"{experiment.name}_data.sha256").write_text(text, encoding="utf-8")


def write_configurations(path: Path, configs: Mapping[str, Config]) -> None:
    """Write the complete configuration of each cell by its settings, without the folder of data sets."""
    text = json.dumps({settings: with_root(config, "") for settings, config in configs.items()}, default=str)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def thinned(
    series: Series,
    metrics: Mapping[str, Metric],
    quantities: Sequence[Quantity],
    is_drawn: bool,
    costs: Iterable[str] = (),
) -> dict[str, dict[int, float]]:
    """Return a run's metrics at the rounds that quantities depend on, and the cost between these rounds.

    Args:
        series: The run's logged values.
        metrics: The metrics to keep.
        quantities: The quantities.
        is_drawn: Whether a figure shows the run. If so, evenly spaced rounds are kept, too.
        costs: The costs that figures use, in addition to the quantities' costs.
    """
    kept: dict[str, dict[int, float]] = {}
    for name in metrics:
        own = sorted(series.get(name, {}))
        rounds = {n for quantity in quantities if name in quantity.tags for n in quantity.rounds_needed(series)}
        if is_drawn:
            shown = range(min(len(own), _DRAWN))
            rounds |= {own[i * (len(own) - 1) // max(len(shown) - 1, 1)] for i in shown}
        if own:
            kept[name] = {n: series[name][n] for n in own if n in rounds or n == own[-1]}
    kinds = {quantity.kind for quantity in quantities} | set(costs)
    rounds = {1}.union(*kept.values())
    tags = [tag for kind in COSTS if kind in kinds for tag in COSTS[kind] if tag in series]
    return kept | {tag: _spent(series[tag], rounds, tag in TOTALS) for tag in tags}


def _spent(values: Curve, rounds: Iterable[int], are_totals: bool) -> dict[int, float]:
    """Return, for each given round, the sum of values since the previous given round. Totals are not summed."""
    if are_totals:
        return {n: values[n] for n in sorted(rounds) if n in values}
    spent, start = {}, 0
    for end in sorted(rounds):
        spent[end] = add_up(value for n, value in values.items() if start < n <= end)
        start = end
    return spent


class PublishedCells:
    """The published cells of a grid.

    Args:
        grid: The grid.
        folder: The folder of the files.

    Raises:
        FederatedError: If the cells or the curves are missing, or a file is damaged.
    """

    def __init__(self, grid: Grid, folder: Path) -> None:
        self._grid = grid
        name = grid.experiment.name
        try:
            curves = _read_rounds(folder / f"{name}_rounds.csv.gz")
            configs = _read_configurations(folder / f"{name}_configurations.json.gz")
            data = _read_sums(folder / f"{name}_data.sha256")
            self._records = _read_cells(folder / f"{name}_cells.csv", curves, configs, data)
        except gzip.BadGzipFile as error:
            raise FederatedError(f"The published cells of {name} in {folder} are damaged: {error}.") from error
        except OSError as error:
            raise FederatedError(
                f"Nothing of {name} is published in {folder}: {error.strerror or error}. Name the folder of"
                f" {name}_cells.csv and {name}_rounds.csv.gz."
            ) from error
        except (ValueError, KeyError, EOFError) as error:
            raise FederatedError(f"The published cells of {name} in {folder} are damaged: {error}.") from error

    def record(self, cell: Cell) -> Record | None:
        """Return the published record of a cell, or None if there is none with its settings."""
        return self._records.get(_settings(self._grid.config(cell)))

    def failure(self, cell: Cell) -> str | None:
        """Return None: cells that failed are not published."""


def _settings(config: Config) -> str:
    """Return a hash of an experiment's settings of a cell. It does not depend on the defaults."""
    text = json.dumps(config, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _write_cells(path: Path, cells: Mapping[str, tuple[Cell, Record]]) -> None:
    names = list(dict.fromkeys(name for _, record in cells.values() for name in record.made_with))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*_ABOUT, *names])
        for number, (settings, (cell, record)) in enumerate(cells.items()):
            cpu = "" if record.cpu_seconds is None else f"{record.cpu_seconds:.1f}"
            about = [number, cell, settings, record.status, record.cause, f"{record.seconds:.1f}", cpu]
            writer.writerow([*about, *(record.made_with.get(name, "") for name in names)])


def _write_rounds(path: Path, curves: Sequence[Series]) -> None:
    """Write a row for each cell and round."""
    tags = list(dict.fromkeys(tag for series in curves for tag in series))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["cell", "round", *tags])
    for number, series in enumerate(curves):
        for n in sorted({n for curve in series.values() for n in curve}):
            writer.writerow([number, n, *(number_text(series.get(tag, {}).get(n)) for tag in tags)])
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def _read_rounds(path: Path) -> dict[str, dict[str, dict[int, float]]]:
    """Return the curves of each cell by tag."""
    curves: dict[str, dict[str, dict[int, float]]] = {}
    with gzip.open(path, "rt", newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        _, _, *tags = next(rows, [])
        for number, n, *values in rows:
            series = curves.setdefault(number, {})
            for tag, value in zip(tags, values, strict=True):
                if value:
                    series.setdefault(tag, {})[int(n)] = float(value)
    return curves


def _read_configurations(path: Path) -> dict[str, Config]:
    """Return the configurations of the cells by their settings, or none if the file is missing."""
    if not path.is_file():
        return {}
    found: dict[str, Config] = json.loads(gzip.decompress(path.read_bytes()))
    return found


def _read_sums(path: Path) -> dict[str, str]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return {name: value for value, _, name in (line.partition("  ") for line in lines)}


def _read_cells(
    path: Path, curves: Mapping[str, Series], configs: Mapping[str, Config], data: Mapping[str, str]
) -> dict[str, Record]:
    """Return the record of each cell by its settings."""
    records, without = {}, dict.fromkeys(curves)
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            about = [row.pop(name) for name in _ABOUT]
            number, _, settings, status, cause, seconds, cpu = about
            if status not in ("finished", "diverged"):
                raise ValueError(f"the status {status!r} of cell {number}")
            if status == "finished" and number not in curves:
                raise ValueError(f"cell {number} is finished and has no curves")
            without.pop(number, None)
            known: Any = status
            records[settings] = Record(
                config=configs.get(settings, {}),
                status=known,
                cause=cause,
                seconds=float(seconds),
                cpu_seconds=float(cpu) if cpu else None,
                made_with={name: value for name, value in row.items() if value},
                series=curves.get(number, {}),
                folder=path.parent,
                data=data,
            )
    if without:
        raise ValueError(f"{path.name} lacks cell {next(iter(without))}, which has curves")
    return records
