"""What a run's numbers say: exact or not, by which rule they would be, and what a restart loses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from conformance.cases import Array, Case, flat
from conformance.reference import COUNTS, METHODS, buffers_of, rounds_of

__all__ = ["TOLERANCE", "Verdict", "distance", "judge"]

TOLERANCE = 1e-5
"""Numbers that are nearer than this, relative to the way from the start, are those of the same rule in float32."""


@dataclass(frozen=True)
class Verdict:
    """What is found.

    Attributes:
        offered: Whether the framework has the method.
        exact: Whether the numbers are those of the paper, or of a choice that it leaves open.
        off: How far they are from these after the last round, as a share of the way from the start.
        digit: The largest such share over all rounds; of an inexact run, to the rule that it follows.
        choices: What the paper leaves open and is not taken as in ``expected``, in words.
        rule: The rule by which an inexact run is exact, in words; empty if none of those that are known.
        restart: "exact", "loses", "fails", "not measured" or "".
        restart_off: How far the last round is from the uninterrupted run's, as a share of the way from the start.
        lost: What the restart loses, in words, or the error with which it ends.
        buffers: What becomes of buffers, in words.
        failed: The error with which the run ended.
    """

    offered: bool
    exact: bool = False
    off: float = 0.0
    digit: float = 0.0
    choices: tuple[str, ...] = ()
    rule: tuple[str, ...] = ()
    restart: str = ""
    restart_off: float = 0.0
    lost: str = ""
    buffers: str = ""
    failed: str = ""


def distance(found: Array, right: Array, start: Array) -> float:
    """Return how far a vector is from the right one, as a share of the way from the start to that."""
    return float(np.linalg.norm(found - right) / np.linalg.norm(right - start))


def judge(case: Case, line: Mapping[str, Any]) -> Verdict:
    """Return the verdict on a line of :mod:`conformance.runs`."""
    if not line["offered"]:
        return Verdict(offered=False)
    if "failed" in line:
        return Verdict(offered=True, failed=line["failed"])
    start = flat(case.problem.start, case.problem.trained)
    found = [np.array(x) for x in line["rounds"]]
    method = METHODS[case.method]

    def worst(right: Sequence[Array]) -> float:
        if len(found) != len(right):
            return np.inf
        return max(distance(a, b, start) for a, b in zip(found, right, strict=True))

    stored = [flat(values, case.problem.trained) for values in case.expected]
    ways = method.answers()
    readings = [way for way in ways if not method.deviations(way)]
    played = {id(way): stored if way is readings[0] else rounds_of(case, way) for way in ways}
    follows = next((way for way in ways if worst(played[id(way)]) < TOLERANCE), None)
    restart = _restart(case, line, follows, start)
    if follows is not None and not method.deviations(follows):
        right = played[id(follows)]
        exact = Verdict(True, True, distance(found[-1], right[-1], start), worst(right), tuple(method.choices(follows)))
        return _with(exact, **restart, buffers=_buffers(case, line))
    nearest = min((played[id(way)] for way in readings), key=worst)
    rule = () if follows is None else (*method.deviations(follows), *method.choices(follows))
    digit = 0.0 if follows is None else worst(played[id(follows)])
    verdict = Verdict(True, False, distance(found[-1], nearest[-1], start), digit, rule=rule)
    return _with(verdict, **restart, buffers=_buffers(case, line))


def _with(verdict: Verdict, **more: Any) -> Verdict:
    return Verdict(**{**vars(verdict), **more})


def _restart(case: Case, line: Mapping[str, Any], way: Mapping[str, str] | None, start: Array) -> dict[str, Any]:
    """Compare with the framework's own uninterrupted run, and with the reference's runs that lose states."""
    if "resume_failed" in line:
        return {"restart": "fails", "lost": line["resume_failed"]}
    if line["resumed"] is None:
        return {"restart": "not measured"}
    whole, resumed = [np.array(x) for x in line["rounds"]][case.restart :], [np.array(x) for x in line["resumed"]]
    if len(whole) != len(resumed):
        return {"restart": "loses", "lost": "the number of rounds", "restart_off": 1.0}

    def worst(right: Sequence[Array]) -> float:
        return max(distance(a, b, start) for a, b in zip(resumed, right, strict=True))

    if worst(whole) < TOLERANCE:
        return {"restart": "exact", "restart_off": worst(whole)}
    off = {"restart": "loses", "restart_off": distance(resumed[-1], whole[-1], start)}
    states = METHODS[case.method].states
    for count in range(1, len(states) + 1):
        for lost in combinations(states, count):
            if way is not None and worst(rounds_of(case, way, " ".join(lost))[case.restart :]) < TOLERANCE:
                return {**off, "lost": " and ".join(states[name] for name in lost)}
    return off


def _buffers(case: Case, line: Mapping[str, Any]) -> str:
    """Say what the server does with buffers."""
    if "buffers" not in line:
        return ""
    names = ["norm.running_mean", "norm.running_var"]
    start = flat(case.problem.start, names)
    found = {name: np.array(value) for name, value in line["buffers"].items()}
    stays = "stay as at the start" if np.allclose(flat(found, names), start) else "follow no rule known here"
    for weights, words in {"examples": "averaged by examples", "uniform": "averaged uniformly", "steps": "by steps"}.items():
        if distance(flat(found, names), flat(buffers_of(case, weights, "start"), names), start) < TOLERANCE:
            stays = words
    seen = float(found["norm.num_batches_tracked"])
    count = f"is {seen:g}"
    for rule, words in COUNTS.items():
        if abs(seen - float(buffers_of(case, "start", rule)["norm.num_batches_tracked"])) < 1e-4:
            count = words.format(f"{seen:g}")
            break
    return f"running means and variances {stays}; num_batches_tracked {count}"
