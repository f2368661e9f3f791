"""Whether the inequalities that a paper states hold, with the numbers."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Literal

from lightning_fed.experiments.experiment import Claim, Label
from lightning_fed.experiments.grid import Point, name_of
from lightning_fed.experiments.places import is_within
from lightning_fed.experiments.results import Estimate, Results, shown

__all__ = ["Judgement", "Verdict", "judge"]

Verdict = Literal["holds", "does not hold", "not judged"]


@dataclass(frozen=True)
class Judgement:
    """What became of a claim at one combination of the axes that it leaves open.

    Args:
        where: The combination, in words.
        verdict: Whether it holds.
        numbers: The inequality with its numbers, or why it was not judged.
    """

    where: str
    verdict: Verdict
    numbers: str


def judge(claim: Claim, results: Results) -> list[Judgement]:
    """Return a judgement of a claim at every combination of the axes that it leaves open.

    Args:
        claim: The claim.
        results: The finished cells.
    """
    scale = results.grid.scale.name
    if claim.scales and scale not in claim.scales:
        return [
            Judgement("", "not judged", f"it is stated for the scale {' and '.join(claim.scales)}, this is {scale}")
        ]
    known = results.grid.labels[claim.compare]
    if missing := [label for _, label in claim.terms if label is not None and label not in known]:
        return [Judgement("", "not judged", f"the scale {scale} has no {claim.compare} {' and '.join(missing)}")]
    judgements = [_judge_at(claim, results, points) for points in _combinations(claim, results)]
    return judgements or [Judgement("", "not judged", f"the scale {scale} has nothing of that part of the grid")]


def _combinations(claim: Claim, results: Results) -> Iterator[dict[Label, list[Point]]]:
    """Yield the points that a claim compares, by label, for each combination of the other axes.

    A label has several points where the claim is about a mean.
    """
    groups: dict[tuple[tuple[str, Label], ...], dict[Label, list[Point]]] = {}
    for point in results.grid.points:
        if is_within(point.by_axis, claim.at):
            others = tuple(pair for pair in point.labels if pair[0] not in (claim.compare, *claim.mean_over))
            groups.setdefault(others, {}).setdefault(point.by_axis[claim.compare], []).append(point)
    yield from groups.values()


def _judge_at(claim: Claim, results: Results, points: dict[Label, list[Point]]) -> Judgement:
    where = _where(claim, results, points)
    if gap := _gap(claim, points):
        return Judgement(where, "not judged", gap)
    sides = [None if label is None else _mean(points[label], claim, results) for _, label in claim.terms]
    for side in sides:
        if side is not None and not side.values:
            return Judgement(where, "not judged", side.missing)
    values = [f if side is None else f * side.mean for (f, _), side in zip(claim.terms, sides, strict=True)]
    texts = [_text(f, side) for (f, _), side in zip(claim.terms, sides, strict=True)]
    numbers = " ".join([texts[0], *(f"{sign} {text}" for sign, text in zip(claim.signs, texts[1:], strict=True))])
    for left, right in pairwise(values):
        if left == right and math.isinf(left):
            return Judgement(where, "not judged", f"two sides are alike without a number: {numbers}")
    sides_of = zip(pairwise(values), claim.signs, strict=True)
    holds = all(_holds(left, sign, right, claim.within) for (left, right), sign in sides_of)
    return Judgement(where, "holds" if holds else "does not hold", numbers)


def _gap(claim: Claim, points: dict[Label, list[Point]]) -> str:
    """Return which label the grid leaves out where it has others, empty if none: all means are over the same."""
    places = {label: [_averaged(claim, point) for point in of] for label, of in points.items()}
    everywhere = dict.fromkeys(place for of in places.values() for place in of)
    for label in [label for _, label in claim.terms if label is not None]:
        for place in everywhere:
            if place not in places.get(label, ()):
                return f"the grid leaves {claim.compare} {label} out {f'at {name_of(place)}' if place else 'there'}"
    return ""


def _mean(points: list[Point], claim: Claim, results: Results) -> Estimate:
    """Return the mean of a quantity over points, or what stands in its way at one of them."""
    estimates = [results.estimate(point, claim.quantity) for point in points]
    if len(estimates) == 1:
        return estimates[0]
    for estimate in estimates:
        if not estimate.values:
            return estimate
    return Estimate(
        claim.quantity,
        values=(fmean(estimate.mean for estimate in estimates),),
        limit=fmean(e.mean if math.isfinite(e.mean) else e.limit for e in estimates),
        is_diverged=any(estimate.is_diverged for estimate in estimates),
    )


def _averaged(claim: Claim, point: Point) -> tuple[tuple[str, Label], ...]:
    return tuple(pair for pair in point.labels if pair[0] in claim.mean_over)


def _where(claim: Claim, results: Results, points: dict[Label, list[Point]]) -> str:
    """Return what tells a combination from the others that a claim is judged at, and what it is a mean of."""
    found = [point for of in points.values() for point in of]
    several = {axis for axis, labels in results.grid.labels.items() if len(labels) > 1}
    several -= {claim.compare, *claim.mean_over}
    labels = {axis: dict.fromkeys(point.by_axis[axis] for point in found) for axis in claim.mean_over}
    parts = [name_of(tuple(pair for pair in found[0].labels if pair[0] in several))]
    parts += [f"mean over {axis} {' and '.join(of)}" for axis, of in labels.items()]
    return ", ".join(filter(None, parts))


def _holds(left: float, sign: str, right: float, within: float) -> bool:
    if sign == "~":
        return math.isfinite(left) and math.isfinite(right) and abs(left - right) <= within * max(abs(left), abs(right))
    return {"<": left < right, "<=": left <= right, ">": left > right, ">=": left >= right}[sign]


def _text(factor: float, side: Estimate | None) -> str:
    """Return a side with its number."""
    if side is None:
        return shown(factor)
    number = shown(side.mean) if math.isfinite(side.mean) else str(side)
    return number if factor == 1 else f"{factor:g} * {number}"
