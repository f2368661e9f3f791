"""The verdict on an experiment, in Markdown: what holds and what does not, with the numbers, and how it was run."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence

from lightning_fed.experiments.claims import Judgement, judge
from lightning_fed.experiments.experiment import Claim
from lightning_fed.experiments.grid import Point, name_of
from lightning_fed.experiments.records import Record
from lightning_fed.experiments.results import Results
from lightning_fed.experiments.tables import markdown, rows_of

__all__ = ["losses", "means", "overall", "verdict"]

_MARKS = {"holds": "holds", "does not hold": "**does not hold**", "not judged": "not judged"}
_OTHERS = {"does not hold": "not, at least somewhere", "not judged": "could not be judged"}
_SHOWN = 12  # judgements of one claim, or failures, that are listed


def verdict(results: Results, command: str, figures: Sequence[str]) -> str:
    """Return the verdict.

    Args:
        results: The finished cells.
        command: The command line that led to it.
        figures: The names of the figures' files, which lie beside it.
    """
    experiment = results.grid.experiment
    judged = [(claim, judge(claim, results)) for claim in experiment.claims]
    parts = [f"# {experiment.title}", f"{experiment.paper}, {experiment.item}.", *_changes(results)]
    parts += [f"![{name}]({name})" for name in figures]
    if judged:
        parts += ["## Claims", _summary(judged), *(_claim(claim, found) for claim, found in judged)]
    for table in experiment.tables:
        parts += [f"## {table.name.replace('_', ' ').capitalize()}", markdown(*rows_of(table, results))]
    parts += [*_choices(results), *losses(results)]
    parts += ["## How", f"    {command}", *means(results)]
    if experiment.notes:
        parts.append(f"What the paper leaves open: {experiment.notes}")
    return "\n\n".join(parts) + "\n"


def overall(found: Sequence[Judgement]) -> str:
    """Return the verdict on a claim: it holds if it holds wherever it was judged."""
    verdicts = {judgement.verdict for judgement in found}
    if "does not hold" in verdicts:
        return "does not hold"
    return "holds" if "holds" in verdicts else "not judged"


def _changes(results: Results) -> list[str]:
    scale, seeds = results.grid.scale, results.grid.experiment.seeds
    stated = "At full scale." if scale.name == "full" else f"At the scale `{scale.name}`:"
    asked = results.grid.seeds
    fewer = f"{asked} seed{'s' * (asked > 1)} instead of {seeds}." if asked < (scale.seeds or seeds) else ""
    return [" ".join(filter(None, (stated, scale.changed, fewer)))]


def _summary(judged: Sequence[tuple[Claim, Sequence[Judgement]]]) -> str:
    counts = Counter(overall(found) for _, found in judged)
    parts = [f"{counts['holds']} of {len(judged)} hold"]
    parts += [f"{counts[name]} {words}" for name, words in _OTHERS.items() if counts[name]]
    return f"{', '.join(parts)}."


def _claim(claim: Claim, found: Sequence[Judgement]) -> str:
    of = ", ".join([claim.quantity.label, *(f"mean over {axis}" for axis in claim.mean_over)])
    lines = [f"- {claim.says}", f"  `{claim.text}` in {of}: {_MARKS[overall(found)]}."]
    for judgement in found[:_SHOWN]:
        place = f"{judgement.where}: " if judgement.where else ""
        mark = f" ({_MARKS[judgement.verdict]})" if len(found) > 1 else ""
        lines.append(f"  - {place}{judgement.numbers}{mark}")
    if len(found) > _SHOWN:
        lines.append(f"  - and {len(found) - _SHOWN} more")
    if claim.found and overall(found) == "does not hold":
        lines += ["", f"  {claim.found}"]
    return "\n".join(lines)


def _choices(results: Results) -> Iterator[str]:
    """Yield what was chosen where something was tuned, with a warning of choices at an end of their list."""
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
        few = results.grid.choice_seeds < results.grid.seeds
        seeds = f", on {results.grid.choice_seeds} of the {results.grid.seeds} seeds" if few else ""
        yield f"Chosen for each row by the best {tune.by.label}{seeds}."
        yield markdown([*results.grid.axes, "chosen", tune.by.label, "at an end of its list"], rows)


def _at_end(results: Results, point: Point) -> str:
    """Return the tuned names whose chosen value is the first or last of at least three."""
    best = results.chosen(point)
    tried = [dict(candidate.tuned) for candidate in results.candidates(point)]
    ends = []
    for name, label in best or ():
        values = list(dict.fromkeys(tuned[name] for tuned in tried))
        if len(values) > 2 and label in (values[0], values[-1]):
            ends.append(name)
    return ", ".join(ends)


def losses(results: Results) -> Iterator[str]:
    """Yield what diverged and what failed."""
    diverged, failed = [], []
    for cell, job in results.jobs.items():
        record = results.record(cell)
        if record is not None and record.status == "diverged":
            diverged.append(f"- {cell}: after {max((n for c in record.series.values() for n in c), default=0)} rounds")
        elif record is None:
            failed.append(f"- {cell}: {results.store.failure(job.key) or 'not run'}")
    for title, lines in (("Diverged", diverged), ("Failed", failed)):
        if lines:
            more = [f"- and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
            yield f"## {title}"
            yield "\n".join([*lines[:_SHOWN], *more])


def means(results: Results) -> list[str]:
    """Return how many cells there were, what they took, and what they were run with."""
    records = {job.key: r for cell, job in results.jobs.items() if (r := results.record(cell)) is not None}
    if not records:
        return ["No cell is finished."]
    took, seeds = _took(list(records.values())), results.grid.seeds
    return [f"{len(records)} cells, {took}; {seeds} seed{'s' * (seeds > 1)}.", *_made_with(list(records.values()))]


def _took(records: Sequence[Record]) -> str:
    """Return the CPU time of cells, and the wall time of those that were recorded without it."""
    timed = [record.cpu_seconds for record in records if record.cpu_seconds is not None]
    others = [record.seconds for record in records if record.cpu_seconds is None]
    if not others:
        return f"{_duration(sum(timed))} of CPU time in all"
    wall = f"{_duration(sum(others))} of wall time"
    return f"{_duration(sum(timed))} of CPU time, and {wall} for {len(others)} of them" if timed else f"{wall} in all"


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds > 300 else f"{seconds:.0f} seconds"


def _made_with(records: Sequence[Record]) -> list[str]:
    """Return versions, hardware and dates, of every kind that was used."""
    found: dict[str, list[str]] = {}
    for record in records:
        for name, value in record.made_with.items():
            if value not in found.setdefault(name, []):
                found[name].append(value)
    dates = sorted(found.pop("date", []))
    days = dates[0] if len(set(dates)) == 1 else f"{dates[0]} to {dates[-1]}" if dates else ""
    text = ", ".join(f"{name} {' and '.join(values)}" for name, values in found.items())
    return [f"{text}; {os.cpu_count()} cores; {days}."]
