"""Describe the run of a grid: tuning, diverged and failed cells, times and versions."""

from collections.abc import Iterator, Sequence

from lightning_fed.lab.grid import Point, name_of
from lightning_fed.lab.quantities import add_up
from lightning_fed.lab.records import Record
from lightning_fed.lab.results import Results
from lightning_fed.lab.tables import markdown


def choices(results: Results) -> Iterator[str]:
    """Yield the section of chosen tuned values, with a warning if a choice is at an end of its list."""
    tune = results.grid.experiment.tune
    rows = []
    for point in results.grid.points:
        if candidates := results.candidates(point):
            best = results.chosen(point)
            score = next((str(c.estimate) for c in candidates if c.tuned == best), "-")
            chosen = "all diverged or failed" if best is None else name_of(best)
            rows.append([*point.by_axis.values(), chosen, score, _at_end(results, point)])
    if tune is not None and rows:
        yield "## Tuned values"
        ends = sum(bool(row[-1]) for row in rows)
        few = results.grid.choice_seeds < results.grid.seeds
        seeds = f", on {results.grid.choice_seeds} of the {results.grid.seeds} seeds" if few else ""
        yield f"Chosen for each row by the best {tune.by.label}{seeds}." + (
            f" **{ends} of {len(rows)} have a value at an end of its list**: a better one may lie beyond."
            if ends
            else ""
        )
        yield markdown([*results.grid.axes, "chosen", tune.by.label, "at an end of its list"], rows)


def other_choices(results: Results) -> Iterator[str]:
    """Yield the section of values that the scale's ``also_by`` chooses differently, and their effect on the results."""
    other, by = results.beside, results.by
    if other is None or other.by is None or by is None:
        return
    points = [point for point in results.grid.points if results.candidates(point)]
    rows = [
        [*point.by_axis.values(), *(name_of(found.chosen(point) or ()) or "-" for found in (results, other)),
         *(str(found.estimate(point, by)) for found in (results, other))]
        for point in points
        if results.chosen(point) != other.chosen(point)
    ]  # fmt: skip
    yield f"## Values chosen by the {other.by.label}"
    where = (
        f"other values at {len(rows)} of {len(points)} rows" if rows else f"the same values at all {len(points)} rows"
    )
    yield f"The {other.by.label}, in place of the {by.label}, chooses {where}."
    if rows:
        heads = [f"by {quantity.label}" for quantity in (by, other.by)]
        yield markdown([*results.grid.axes, *heads, *(f"{by.label}, {head}" for head in heads)], rows)


def _at_end(results: Results, point: Point) -> str:
    """Return the tuned names whose chosen value is the first or last of several."""
    best = results.chosen(point)
    tried = [dict(candidate.tuned) for candidate in results.candidates(point)]
    ends = []
    for name, label in best or ():
        values = list(dict.fromkeys(tuned[name] for tuned in tried))
        if len(values) > 1 and label in (values[0], values[-1]):
            ends.append(name)
    return ", ".join(ends)


def losses(results: Results, most: int | None = None) -> Iterator[str]:
    """Yield a section of diverged cells and one of failed cells, each with a limited number of lines."""
    diverged, failed = [], []
    for cell in results.asked():
        record = results.record(cell)
        if record is None:
            failed.append(f"- {cell}: {results.failure(cell) or 'not run'}")
        elif record.status == "diverged":
            diverged.append(f"- {cell}")
    for title, lines in (("Diverged", diverged), ("Failed", failed)):
        if lines:
            yield f"## {title}"
            left = [] if most is None or len(lines) <= most else [f"- and {len(lines) - most} more"]
            yield "\n".join([*lines[:most], *left])


def records_of(results: Results) -> list[Record]:
    """Return the records of finished cells. Cells with the same settings share one record."""
    found = [record for cell in results.asked() if (record := results.record(cell)) is not None]
    return list({id(record): record for record in found}.values())


def means(results: Results) -> list[str]:
    """Return the number of cells, their cost, and their versions."""
    records = records_of(results)
    if not records:
        return ["No cell is finished."]
    seeds = results.grid.seeds
    drawn = f"{seeds} seed{'s' * (seeds > 1)}" if results.grid.experiment.is_random else "nothing depends on a seed"
    return [f"{len(records)} cells, {_took(records)}; {drawn}.", *_made_with(records)]


def _took(records: Sequence[Record]) -> str:
    """Return the total CPU time of cells, and the wall time of cells that have no CPU time on record."""
    timed = [record.cpu_seconds for record in records if record.cpu_seconds is not None]
    others = [record.seconds for record in records if record.cpu_seconds is None]
    if not others:
        return f"{_duration(add_up(timed))} of CPU time in all"
    cpu, wall = f"{_duration(add_up(timed))} of CPU time", f"{_duration(add_up(others))} of wall time"
    return f"{cpu}, and {wall} for {len(others)} of them" if timed else f"{wall} in all"


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds > 300 else f"{seconds:.0f} seconds"


def _made_with(records: Sequence[Record]) -> list[str]:
    """Return all versions and hardware that were used, and the dates."""
    found: dict[str, list[str]] = {}
    for record in records:
        for name, value in record.made_with.items():
            if value not in found.setdefault(name, []):
                found[name].append(value)
    found.pop("date", None)
    text = ", ".join(f"{name} {' and '.join(values)}" for name, values in found.items())
    return [f"{text}; {dates(records)}."]


def dates(records: Sequence[Record]) -> str:
    """Return the day of the runs, or the first and last one; empty if unknown."""
    days = sorted({day for record in records if (day := record.made_with.get("date"))})
    return " to ".join(dict.fromkeys([days[0], days[-1]])) if days else ""
