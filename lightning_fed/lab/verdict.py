"""The verdict on an experiment's claims: a row for each, then every place and control, and a file of all of them."""

import csv
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from lightning_fed.core.errors import FederatedError
from lightning_fed.lab.claims import Judgement, judge, overall
from lightning_fed.lab.experiment import Claim
from lightning_fed.lab.numbers import aligned, format_number, format_p
from lightning_fed.lab.paired import Comparison, Verdict
from lightning_fed.lab.results import Results
from lightning_fed.lab.tables import markdown

_MARKS: dict[Verdict, str] = {"does not hold": "**does not hold**", "undecided": "*undecided*"}
_COUNTED: dict[Verdict, tuple[str, str]] = {
    "holds": ("holds", "hold"),
    "does not hold": ("does not hold", "do not hold"),
    "undecided": ("is undecided", "are undecided"),
    "not judged": ("could not be judged", "could not be judged"),
}
_COLUMNS = (
    "experiment", "scale", "kind", "number", "paper", "place", "claim", "inequality", "quantity", "at",
    "the paper's number", "ours", "n", "difference", "standard error", "binomial error", "p", "p (Holm)",
    "verdict here", "verdict",
)  # fmt: skip


def counted(results: Results, judged: Sequence[Sequence[Judgement]]) -> str:
    """Return the number of claims with each verdict, in words."""
    counts = Counter(overall(found) for found in judged)
    parts = [f"{counts[name]} {words[counts[name] > 1]}" for name, words in _COUNTED.items() if counts[name]]
    kind = "comparison" if results.grid.experiment.is_own else "claim"
    own = " of our own" if results.grid.experiment.is_own else ""
    return f"Of {len(judged)} {kind}{'s' * (len(judged) > 1)}{own}: {', '.join(parts)}."


def claim_table(results: Results, judged: Sequence[Sequence[Judgement]], details: str) -> str:
    """Return the table of claims. Each row has a claim's numbers at the place that decides it.

    Args:
        results: The finished cells.
        judged: The judgements of each claim.
        details: The name of the page that has every place.
    """
    is_random = results.grid.experiment.is_random
    errors = ["difference [95 % interval]", "standard error", "p"] if is_random else ["difference"]
    if has_binomial := any(c.binomial is not None for found in judged for j in found for c in j.comparisons):
        errors.insert(2, "binomial error")
    rows = []
    for number, (claim, found) in enumerate(zip(results.grid.experiment.claims, judged, strict=True), start=1):
        place = _decisive(found)
        ours = f"{place.where}: {place.numbers}" if place.where else place.numbers
        cells = [
            _each(_difference(c, claim.quantity.is_percent) for c in place.comparisons),
            *([_each(_error(c, claim.quantity.is_percent) for c in place.comparisons)] if is_random else []),
            *([_each(_share(c.binomial) for c in place.comparisons)] if has_binomial else []),
            *([_each(map(format_p, place.corrected))] if is_random else []),
        ]
        asks = f"{claim.says} `{claim.text}` in {_of(claim)}"
        link = f"[{number}]({details}#claim-{number})"
        rows.append([link, asks, claim.paper or "-", ours, *cells, _verdict_with_count(found)])
    return markdown(["", "claim", "the paper", "ours", *errors, "verdict"], rows)


def _decisive(found: Sequence[Judgement]) -> Judgement:
    """Return the deciding place of those with the claim's verdict: the surest failure or the least sure success."""
    verdict = overall(found)
    places = [judgement for judgement in found if judgement.verdict == verdict]
    sign = -1 if verdict == "does not hold" else 1

    def certainty(judgement: Judgement) -> float:
        return sign * max((p for p in judgement.corrected if p is not None), default=0.0)

    return max(places, key=certainty)


def _verdict_with_count(found: Sequence[Judgement]) -> str:
    """Return the verdict and, if there are several places, the number of places with it."""
    verdict = overall(found)
    count = sum(judgement.verdict == verdict for judgement in found)
    return _mark(verdict) + (f" at {count} of {len(found)}" if len(found) > 1 else "")


def claim_details(results: Results, judged: Sequence[Sequence[Judgement]]) -> Iterator[str]:
    """Yield every claim with all places where it was checked, its explanation, and its controls."""
    for number, (claim, found) in enumerate(zip(results.grid.experiment.claims, judged, strict=True), start=1):
        yield f"### Claim {number}"
        yield f"{claim.says} ({claim.source})"
        yield from _table_of_points(claim, found, results)
        if claim.found and overall(found) != "holds":
            yield claim.found
        for control in claim.controls:
            yield f"Control: {control.says}"
            yield from _table_of_points(control, judge(control, results), results)


def _table_of_points(claim: Claim, found: Sequence[Judgement], results: Results) -> Iterator[str]:
    """Yield the inequality with its verdict, and a table of the places with their numbers."""
    paper = f" The paper: {claim.paper}." if claim.paper else ""
    yield f"`{claim.text}` in {_of(claim)}: {_mark(overall(found))}.{paper}"
    judged = [judgement for judgement in found if judgement.comparisons]
    if missing := [j for j in found if not j.comparisons]:
        yield "\n".join(f"- {j.where}: {j.missing}" if j.where else f"- {j.missing}" for j in missing)
    if not judged:
        return
    is_random = results.grid.experiment.is_random
    binomial = any(c.binomial is not None for j in judged for c in j.comparisons)
    corrects = sum(len(j.comparisons) for j in judged) > 1
    rows = []
    for judgement in judged:
        exact = [_exact(c) for c in judgement.comparisons]
        cells = [_each(difference for difference, _ in exact)]
        if is_random:
            cells += [_each(interval for _, interval in exact)]
        if binomial:
            cells += [_each(_share(c.binomial) for c in judgement.comparisons)]
        if is_random:
            cells += [_each(format_p(c.p) for c in judgement.comparisons)]
        if is_random and corrects:
            cells += [_each(map(format_p, judgement.corrected))]
        rows.append([judgement.where or "-", judgement.numbers, *cells, _mark(judgement.verdict)])
    heads = ["difference ± standard error" if is_random else "difference"]
    heads += ["95 % interval"] * is_random + ["binomial error"] * binomial
    heads += ["p"] * is_random + ["p (Holm)"] * (is_random and corrects)
    yield markdown(["at", "ours", *heads, "verdict"], rows)


def _of(claim: Claim) -> str:
    parts = [claim.quantity.label]
    if claim.difference is not None:
        parts.append(f"{claim.difference.of} minus {claim.difference.minus}")
    return ", ".join([*parts, *(f"mean over {axis}" for axis in claim.mean_over)])


def _mark(verdict: Verdict) -> str:
    return _MARKS.get(verdict, verdict)


def _each(texts: Iterable[str]) -> str:
    """Join the texts on each pair of adjacent sides."""
    return "; ".join(texts) or "-"


def _difference(comparison: Comparison, is_percent: bool) -> str:
    """Return the mean difference and its interval, if they are defined."""
    if comparison.error is None or comparison.interval is None:
        return format_number(comparison.mean, is_percent) if comparison.is_finite else "-"
    mean, low, high = aligned([comparison.mean, *comparison.interval], comparison.error, is_percent)
    return f"{mean} [{low}, {high}]"


def _error(comparison: Comparison, is_percent: bool) -> str:
    if comparison.error is None:
        return "-"
    return aligned([comparison.mean, comparison.error], comparison.error, is_percent)[1]


def _exact(comparison: Comparison) -> list[str]:
    """Return the mean difference with its standard error to three digits, and the interval."""
    if comparison.error is None or comparison.interval is None:
        return [format_number(comparison.mean) if comparison.is_finite else "-", "-"]
    numbers = [comparison.mean, comparison.error, *comparison.interval]
    mean, error, low, high = aligned(numbers, comparison.error, digits=3)
    return [f"{mean} ± {error}", f"{low} to {high}"]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def write_claims(path: Path, results: Results) -> None:
    """Write the claims of an experiment to a table of claims, in place of its old rows.

    Args:
        path: The table, a CSV file; rows of other experiments are kept.
        results: The finished cells.
    """
    name = results.grid.experiment.name
    others = [row for row in read_claims(path) if row["experiment"] != name]
    rows = sorted([*others, *_rows(results)], key=lambda row: row["experiment"])  # stable: keeps the order in each
    work = path.with_name(f".{path.name}")
    with work.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(work, path)


def read_claims(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table of claims, none if there is no such file.

    Raises:
        FederatedError: If the file is not such a table.
    """
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = csv.DictReader(file)
        if tuple(rows.fieldnames or ()) != _COLUMNS:
            raise FederatedError(f"{path} is not a table of claims. Move it away, or give another --out.")
        return list(rows)


def _rows(results: Results) -> Iterator[dict[str, str]]:
    """Yield a row for each comparison of each claim, and one for a place that was not judged."""
    experiment = results.grid.experiment
    for number, claim in enumerate(experiment.claims, start=1):
        found = judge(claim, results)
        about = {
            "experiment": experiment.name,
            "scale": results.grid.scale.name,
            "kind": "own" if experiment.is_own else "paper",
            "number": str(number),
            "paper": "" if experiment.is_own else experiment.paper.partition(" (")[0],
            "place": claim.source,
            "claim": claim.says,
            "inequality": claim.text,
            "quantity": _of(claim),
            "the paper's number": claim.paper,
            "verdict": overall(found),
        }
        for judgement in found:
            here = about | {"at": judgement.where, "ours": judgement.numbers, "verdict here": judgement.verdict}
            pairs = list(zip(judgement.comparisons, judgement.corrected, strict=True))
            yield from (here | _measured(comparison, p) for comparison, p in pairs)
            if not pairs:
                yield here


def _measured(comparison: Comparison, corrected: float | None) -> dict[str, str]:
    numbers = {
        "difference": comparison.mean if comparison.is_finite else None,
        "standard error": comparison.error,
        "binomial error": comparison.binomial,
        "p": comparison.p,
        "p (Holm)": corrected,
    }
    cells = {name: "" if value is None else f"{value:.5g}" for name, value in numbers.items()}
    return {"n": str(len(comparison.differences)) if comparison.is_random else "", **cells}
