"""lightning_fed beside itself: another checkout of it, or this one without one of its mechanisms."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["BASE", "LENGTHS", "Length", "Variant", "compare", "table", "variants"]

Line = dict[str, Any]

BASE = "this checkout"
_OWN = Path(__file__).parents[2]


@dataclass(frozen=True)
class Variant:
    """One way to run lightning_fed.

    Attributes:
        name: What it is called in lines and tables.
        checkout: The folder that the package is taken from.
        without: The mechanisms that are switched off, by their names in ``systems.ablations``.
    """

    name: str
    checkout: Path = _OWN
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class Length:
    """How long a comparison is: short enough to be run often, long enough for ratios to 3 %.

    Attributes:
        warmup: Rounds before the first that counts.
        rounds: Rounds that count.
        turn: Rounds that a variant has before the next one has its own.
    """

    warmup: int
    rounds: int
    turn: int


LENGTHS = {
    "W1": Length(10, 32, 1),
    "W1x10": Length(2, 6, 1),
    "W2": Length(10, 48, 3),
    "W3": Length(1, 2, 1),
    "W4": Length(10, 200, 10),
    "tiny": Length(2, 4, 2),
}
"""By default, for each workload."""


def variants(against: Path | None, without: Sequence[str]) -> list[Variant]:
    """Return the ways that are compared, this checkout as it is first.

    Args:
        against: The folder of another checkout, or None.
        without: Names of mechanisms; several that are switched off together are joined by "+".

    Raises:
        SystemExit: If the folder has no package lightning_fed.
    """
    if against is not None and not (against / "lightning_fed" / "__init__.py").is_file():
        raise SystemExit(f"--against {against}: there is no package lightning_fed in this folder.")
    others = [] if against is None else [Variant("the other checkout", against.resolve())]
    return [
        Variant(BASE),
        *others,
        *(Variant(f"without {names}", without=tuple(names.split("+"))) for names in without),
    ]


def compare(repeats: Sequence[Sequence[Line]]) -> list[Line]:
    """Return one line for each variant but the first, with its ratios to the first.

    Rounds of the same number do the same work, so that each is compared with its own counterpart: ``ratio`` is the
    median of the rounds' ratios in seconds, which what others do on the machine disturbs least. ``cpu_ratio`` is of
    sums of processor time, so that what happens once in many rounds counts too. Both are medians over the repeats.

    Args:
        repeats: For each repeat, the lines of one workload and method for all variants in the same order.
    """
    first, *others = zip(*repeats, strict=True)
    failed = next((line for line in first if "rounds_s" not in line), None)
    return [failed or _compared(first, lines) for lines in others]


def _compared(first: Sequence[Line], lines: Sequence[Line]) -> Line:
    failed = next((line for line in lines if "rounds_s" not in line), None)
    if failed is not None:
        return failed
    pairs = list(zip(lines, first, strict=True))
    ratios = [
        statistics.median(b / a for b, a in zip(line["rounds_s"], base["rounds_s"], strict=True))
        for line, base in pairs
    ]
    cpu_ratios = [sum(line["rounds_cpu_s"]) / sum(base["rounds_cpu_s"]) for line, base in pairs]
    named = {key: lines[-1][key] for key in ("workload", "algorithm", "config", "machine", "date", "rounds", "warmup")}
    return {
        "variant": lines[-1]["system"],
        **named,
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "cpu_ratio": round(statistics.median(cpu_ratios), 4),
        "cpu_ratios": [round(ratio, 4) for ratio in cpu_ratios],
        **_figures(lines),
        "base": _figures(first),
        "loss_differs": max(abs(line["loss_end"] - base["loss_end"]) for line, base in pairs),
        "repeats": len(lines),
    }


def _figures(lines: Sequence[Line]) -> Line:
    medians = ("s_per_round", "cpu_s_per_round", "setup_s", "setup_cpu_s")
    found = {key: statistics.median(line[key] for line in lines) for key in medians}
    return {**found, "peak_rss_mb": max(line["peak_rss_mb"] for line in lines)}


def table(lines: Sequence[Line], is_against: bool) -> str:
    """Return the ratios as a table in Markdown, with their geometric mean for each variant.

    Args:
        lines: As :func:`compare` makes them.
        is_against: Whether ratios are of this checkout to the other, and not of what is changed to this checkout.
    """
    names = ("this", "other") if is_against else ("without", "with")
    header = (
        "workload, method", *([] if is_against else ["without"]), f"s, {' / '.join(names)}", "CPU, the same", "repeats",
        f"CPU ms a round, {names[0]}", names[1], f"set-up CPU s, {names[0]}", names[1], f"peak MB, {names[0]}",
        names[1], "loss",
    )  # fmt: skip
    rows = [header, ("---",) * len(header)]
    timed = [line for line in lines if "ratio" in line]
    rows += [_row(line, is_against) for line in timed]
    for variant in dict.fromkeys(line["variant"] for line in timed):
        its = [line for line in timed if line["variant"] == variant]
        means = [_shown(_geometric_mean([line[key] for line in its]), is_against) for key in ("ratio", "cpu_ratio")]
        label = ["geometric mean", *([] if is_against else [variant.removeprefix("without ")])]
        rows.append((*label, *means, *[""] * (len(header) - len(label) - 2)))
    failed = [
        f"{line['workload']} {line['algorithm']}, {line['system']}: did not finish."
        for line in lines
        if line not in timed
    ]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), *failed])


def _row(line: Line, is_against: bool) -> tuple[str, ...]:
    spread = [_shown(ratio, is_against) for ratio in line["cpu_ratios"]]
    changed, base = line, line["base"]
    sides: Sequence[Mapping[str, Any]] = (base, changed) if is_against else (changed, base)
    return (
        f"{line['workload']} {line['algorithm']}",
        *([] if is_against else [line["variant"].removeprefix("without ")]),
        _shown(line["ratio"], is_against),
        _shown(line["cpu_ratio"], is_against),
        f"{min(spread)} to {max(spread)}" if len(spread) > 1 else "1",
        *(f"{1e3 * side['cpu_s_per_round']:.1f}" for side in sides),
        *(f"{side['setup_cpu_s']:.1f}" for side in sides),
        *(f"{side['peak_rss_mb']:.0f}" for side in sides),
        f"{line['loss_differs']:.0e}" if line["loss_differs"] else "same",
    )


def _shown(ratio: float, is_against: bool) -> str:
    return f"{1 / ratio if is_against else ratio:.3f}"


def _geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))
