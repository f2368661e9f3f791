"""The verdict on an experiment, in Markdown: what holds and what does not, with the numbers, and how it was run."""

from collections import Counter
from collections.abc import Iterator, Sequence

from lightning_fed.lab.claims import Judgement, Verdict, judge
from lightning_fed.lab.experiment import Claim, Departure
from lightning_fed.lab.grid import Point, name_of
from lightning_fed.lab.quantities import add_up
from lightning_fed.lab.records import Record
from lightning_fed.lab.results import Results
from lightning_fed.lab.tables import markdown, rows_of

__all__ = ["losses", "means", "overall", "verdict"]

_MARKS = {"does not hold": "**does not hold**", "undecided": "*undecided*"}
_COUNTED: dict[Verdict, str] = {
    "holds": "hold",
    "does not hold": "do not hold, at least somewhere",
    "undecided": "undecided",
    "not judged": "could not be judged",
}
_RULE = (
    "The sides of a claim are compared seed by seed. A difference whose mean over seeds is within two of its standard"
    " errors is undecided."
)
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
    parts = [f"# {experiment.title}", f"{experiment.paper}, {experiment.item}.", *_departures(results)]
    parts += [f"![{name}]({name})" for name in figures]
    if judged:
        parts += ["## Claims", _summary(judged), *([_RULE] if experiment.is_random else [])]
        parts += [_claim(claim, found, results) for claim, found in judged]
    for table in experiment.tables:
        parts += [f"## {table.name.replace('_', ' ').capitalize()}", markdown(*rows_of(table, results))]
    parts += [*_choices(results), *losses(results)]
    parts += ["## How", f"    {command}", *means(results)]
    if experiment.notes:
        parts.append(f"What the paper leaves open: {experiment.notes}")
    return "\n\n".join(parts) + "\n"


def overall(found: Sequence[Judgement]) -> Verdict:
    """Return the verdict on a claim: it holds if it holds wherever it was judged."""
    verdicts = {judgement.verdict for judgement in found}
    order: tuple[Verdict, ...] = ("does not hold", "undecided", "holds")
    return next((verdict for verdict in order if verdict in verdicts), "not judged")


def _departures(results: Results) -> Iterator[str]:
    """Yield the scale, and what is done otherwise than in the paper."""
    grid, experiment = results.grid, results.grid.experiment
    departures = [*experiment.departures, *grid.scale.departures]
    wanted = grid.scale.seeds or experiment.seeds
    if grid.seeds < wanted:
        departures.append(Departure("seeds", "", f"{grid.seeds}, where the file has {wanted}", "the command's --seeds"))
    if not departures and grid.scale.name == "full":
        yield "At full scale."
        return
    yield f"At the scale `{grid.scale.name}`. Departures from the paper:"
    yield markdown(["what", "the paper", "here", "why"], [[d.what, d.paper, d.here, d.why] for d in departures])


def _summary(judged: Sequence[tuple[Claim, Sequence[Judgement]]]) -> str:
    counts = Counter(overall(found) for _, found in judged)
    parts = [f"{counts[name]} {words}" for name, words in _COUNTED.items() if counts[name]]
    return f"Of {len(judged)} claim{'s' * (len(judged) > 1)}: {', '.join(parts)}."


def _claim(claim: Claim, found: Sequence[Judgement], results: Results) -> str:
    lines = [f"- {claim.says} ({claim.source})", *_judged(claim, found)]
    if claim.found and overall(found) != "holds":
        lines += ["", f"  {claim.found}"]
    for control in claim.controls:
        looked = _judged(control, judge(control, results))
        lines += ["", f"  Control: {control.says}", *looked]
    return "\n".join(lines)


def _judged(claim: Claim, found: Sequence[Judgement]) -> list[str]:
    """Return the inequality with its verdict, and below it the numbers."""
    parts = [claim.quantity.label]
    if claim.difference is not None:
        parts.append(f"{claim.difference.of} minus {claim.difference.minus}")
    of = ", ".join([*parts, *(f"mean over {axis}" for axis in claim.mean_over)])
    paper = f" The paper: {claim.paper}." if claim.paper else ""
    lines = [f"  `{claim.text}` in {of}: {_mark(overall(found))}.{paper}"]
    for judgement in found[:_SHOWN]:
        place = f"{judgement.where}: " if judgement.where else ""
        mark = f" ({_mark(judgement.verdict)})" if len(found) > 1 else ""
        lines.append(f"  - {place}{judgement.numbers}{mark}")
    if len(found) > _SHOWN:
        lines.append(f"  - and {len(found) - _SHOWN} more")
    return lines


def _mark(verdict: Verdict) -> str:
    return _MARKS.get(verdict, verdict)


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
        ends = sum(bool(row[-1]) for row in rows)
        few = results.grid.choice_seeds < results.grid.seeds
        seeds = f", on {results.grid.choice_seeds} of the {results.grid.seeds} seeds" if few else ""
        yield f"Chosen for each row by the best {tune.by.label}{seeds}." + (
            f" **{ends} of {len(rows)} have a value at an end of its list**: a better one may lie beyond."
            if ends
            else ""
        )
        yield markdown([*results.grid.axes, "chosen", tune.by.label, "at an end of its list"], rows)


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


def losses(results: Results) -> Iterator[str]:
    """Yield what diverged and what failed."""
    diverged, failed = [], []
    for cell in results.asked():
        record = results.record(cell)
        if record is None:
            failed.append(f"- {cell}: {results.failure(cell) or 'not run'}")
        elif record.status == "diverged":
            diverged.append(f"- {cell}")
    for title, lines in (("Diverged", diverged), ("Failed", failed)):
        if lines:
            more = [f"- and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
            yield f"## {title}"
            yield "\n".join([*lines[:_SHOWN], *more])


def means(results: Results) -> list[str]:
    """Return how many cells there were, what they took, and what they were run with."""
    found = [record for cell in results.asked() if (record := results.record(cell)) is not None]
    records = list({id(record): record for record in found}.values())  # cells with the same settings are one
    if not records:
        return ["No cell is finished."]
    seeds = results.grid.seeds
    drawn = f"{seeds} seed{'s' * (seeds > 1)}" if results.grid.experiment.is_random else "nothing depends on a seed"
    return [f"{len(records)} cells, {_took(records)}; {drawn}.", *_made_with(records)]


def _took(records: Sequence[Record]) -> str:
    """Return the CPU time of cells, and the wall time of those that were recorded without it."""
    timed = [record.cpu_seconds for record in records if record.cpu_seconds is not None]
    others = [record.seconds for record in records if record.cpu_seconds is None]
    if not others:
        return f"{_duration(add_up(timed))} of CPU time in all"
    cpu, wall = f"{_duration(add_up(timed))} of CPU time", f"{_duration(add_up(others))} of wall time"
    return f"{cpu}, and {wall} for {len(others)} of them" if timed else f"{wall} in all"


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
    return [f"{text}; {days}."]
