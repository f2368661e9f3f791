"""Judge the inequalities that a paper states, using the measured numbers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from lightning_fed.lab.experiment import Claim, Label, term_text
from lightning_fed.lab.grid import Point, name_of
from lightning_fed.lab.paired import Comparison, Verdict, holm
from lightning_fed.lab.quantities import add_up
from lightning_fed.lab.results import Estimate, Results
from lightning_fed.lab.selections import is_within


@dataclass(frozen=True)
class Judgement:
    """The result of a claim at one combination of its open axes.

    Args:
        where: The combination, in words.
        verdict: Whether it holds.
        sides: Each side with its number, or empty if the claim was not judged.
        comparisons: Each side against the next.
        corrected: The p of each comparison, corrected for the number of places.
        missing: The reason if the claim was not judged.
    """

    where: str
    verdict: Verdict
    sides: tuple[str, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    corrected: tuple[float | None, ...] = ()
    missing: str = ""

    @property
    def numbers(self) -> str:
        """The sides with their numbers, or the reason that the claim was not judged."""
        return "; ".join(self.sides) or self.missing


def judge(claim: Claim, results: Results) -> list[Judgement]:
    """Return a judgement of a claim at every combination of its open axes.

    Args:
        claim: The claim.
        results: The finished cells.
    """
    scale, known = results.grid.scale.name, results.grid.labels
    if claim.scales and scale not in claim.scales:
        return [_missing("", f"it is stated for the scale {' and '.join(claim.scales)}, this is {scale}")]
    named = [(claim.compare, label) for _, label in claim.terms if label is not None]
    if claim.difference is not None:
        named += [(claim.difference.axis, label) for label in (claim.difference.of, claim.difference.minus)]
    if missing := [f"{axis} {label}" for axis, label in named if label not in known[axis]]:
        return [_missing("", f"the scale {scale} has no {' and '.join(missing)}")]
    found = [_judge_at(claim, results, points) for points in _combinations(claim, results)]
    return _corrected(found) or [_missing("", f"the scale {scale} has nothing of that part of the grid")]


def overall(found: Sequence[Judgement]) -> Verdict:
    """Return the verdict on a claim. It holds if it holds at every judged place."""
    return _joined([judgement.verdict for judgement in found])


def _missing(where: str, why: str) -> Judgement:
    return Judgement(where, "not judged", missing=why)


def _corrected(found: Sequence[Judgement]) -> list[Judgement]:
    """Return judgements with verdicts from p values that are corrected for the number of all comparisons."""
    values = iter(holm([comparison.p for judgement in found for comparison in judgement.comparisons]))
    judged = []
    for judgement in found:
        corrected = tuple(next(values) for _ in judgement.comparisons)
        verdicts = [c.verdict(p) for c, p in zip(judgement.comparisons, corrected, strict=True)]
        if "not judged" in verdicts:
            judged.append(_missing(judgement.where, f"two sides are alike without a number: {judgement.numbers}"))
        else:
            verdict = _joined(verdicts) if verdicts else judgement.verdict
            judged.append(replace(judgement, verdict=verdict, corrected=corrected))
    return judged


def _combinations(claim: Claim, results: Results) -> Iterator[dict[Label, list[Point]]]:
    """Yield the points that a claim compares, by label, for each combination of the other axes.

    A label has several points if the claim is about a mean or a difference.
    """
    groups: dict[tuple[tuple[str, Label], ...], dict[Label, list[Point]]] = {}
    within = (claim.compare, *_inner_axes(claim))
    for point in results.grid.points:
        if is_within(point.by_axis, claim.at):
            others = tuple(pair for pair in point.labels if pair[0] not in within)
            groups.setdefault(others, {}).setdefault(point.by_axis[claim.compare], []).append(point)
    yield from groups.values()


def _inner_axes(claim: Claim) -> tuple[str, ...]:
    """Return the axes over which each side is reduced to one number per seed."""
    return (*claim.mean_over, *([] if claim.difference is None else [claim.difference.axis]))


def _judge_at(claim: Claim, results: Results, points: dict[Label, list[Point]]) -> Judgement:
    where = _where(claim, results, points)
    if claim.difference is not None:
        ends = (claim.difference.of, claim.difference.minus)
        points = {label: [p for p in of if p.by_axis[claim.difference.axis] in ends] for label, of in points.items()}
    if gap := _gap(claim, points):
        return _missing(where, gap)
    values, sides = list[tuple[float, ...]](), list[str]()
    errors = list[float | None]()
    for factor, label in claim.terms:
        if label is None:
            values.append((factor,) * results.grid.seeds)
            sides.append(f"{factor:g}")
            errors.append(0.0)
            continue
        estimate = _reduced(points[label], claim, results)
        if not estimate.values:
            return _missing(where, estimate.missing)
        values.append(tuple(factor * value for value in estimate.values))
        sides.append(f"{term_text(factor, label)}: {replace(estimate, values=values[-1]).mean_text}")
        errors.append(None if estimate.binomial is None else factor * estimate.binomial)
    is_random = results.grid.experiment.is_random
    comparisons = tuple(
        Comparison(values[i], sign, values[i + 1], claim.within, is_random, _hypot(errors[i : i + 2]))
        for i, sign in enumerate(claim.signs)
    )
    return Judgement(where, "undecided", tuple(sides), comparisons)


def _joined(verdicts: Sequence[Verdict]) -> Verdict:
    order: tuple[Verdict, ...] = ("does not hold", "undecided", "holds")
    return next((verdict for verdict in order if verdict in verdicts), "not judged")


def _hypot(errors: Sequence[float | None]) -> float | None:
    known = [error for error in errors if error is not None]
    return math.hypot(*known) if len(known) == len(errors) and any(known) else None


def _gap(claim: Claim, points: dict[Label, list[Point]]) -> str:
    """Describe a compared label that lacks a point of another one, or return "" if all labels have the same points."""
    axes = _inner_axes(claim)
    places = {
        label: [tuple(pair for pair in point.labels if pair[0] in axes) for point in of] for label, of in points.items()
    }
    everywhere = dict.fromkeys(place for of in places.values() for place in of)
    for label in [label for _, label in claim.terms if label is not None]:
        for place in everywhere:
            if place not in places.get(label, ()):
                return f"the grid leaves {claim.compare} {label} out {f'at {name_of(place)}' if place else 'there'}"
    return ""


def _reduced(points: list[Point], claim: Claim, results: Results) -> Estimate:
    """Return a quantity's mean, or the mean of its difference, over points for each seed.

    If a point has no number, the result has none either, for the same reason.
    """
    estimates = [results.estimate(point, claim.quantity) for point in points]
    for estimate in estimates:
        if not estimate.values:
            return estimate
    if len(estimates) == 1:
        return estimates[0]
    signs = [1.0] * len(points)
    if claim.difference is not None:
        signs = [1.0 if p.by_axis[claim.difference.axis] == claim.difference.of else -1.0 for p in points]
    count = len(points) if claim.difference is None else len(points) / 2
    rows = zip(*(estimate.values for estimate in estimates), strict=True)
    values = tuple(add_up(s * v for s, v in zip(signs, of_seed, strict=True)) / count for of_seed in rows)
    return Estimate(
        claim.quantity,
        values=values,
        limit=fmean(e.mean if math.isfinite(e.mean) else e.limit for e in estimates),
        is_diverged=any(estimate.is_diverged for estimate in estimates),
        binomial=None if (spread := _hypot([e.binomial for e in estimates])) is None else spread / count,
    )


def _where(claim: Claim, results: Results, points: dict[Label, list[Point]]) -> str:
    """Return the labels that set a combination apart from a claim's others, and the labels that it averages over."""
    found = [point for of in points.values() for point in of]
    several = {axis for axis, labels in results.grid.labels.items() if len(labels) > 1}
    several -= {claim.compare, *_inner_axes(claim)}
    labels = {axis: dict.fromkeys(point.by_axis[axis] for point in found) for axis in claim.mean_over}
    parts = [name_of(tuple(pair for pair in found[0].labels if pair[0] in several))]
    parts += [f"mean over {axis} {' and '.join(of)}" for axis, of in labels.items()]
    return ", ".join(filter(None, parts))
