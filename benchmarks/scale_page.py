"""Tables and a figure of the curves of ``scale.py``."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from systems import summary

__all__ = ["render"]

Line = dict[str, Any]

_VALUE = {
    "cohort": ("cohort", "clients a round"),
    "large": ("cohort", "clients a round"),
    "population": ("population", "clients there are"),
    "model": ("parameters", "parameters"),
    "processes": ("processes", "processes"),
    "kept": ("kept_clients", "clients that keep a state"),
}
"""The key of a line that an axis varies, and its name."""

_DRAWN = ("cohort", "population", "model")
_GROWS = ("cohort", "large", "population", "model")


def render(page: Path, lines: Sequence[Line]) -> None:
    """Write a table for each measured axis to a page, and a figure of the curves to the folder ``images`` next to it.

    Raises:
        SystemExit: If the page lacks a marker.
    """
    for axis in _VALUE:
        found = [line for line in lines if line["axis"] == axis]
        if found:
            text = "\n\n".join([_table(axis, found), *([_exponents(axis, found)] if axis in _GROWS else [])])
            summary.insert(page, text, f"scale-{axis}")
    curves = [line for line in lines if line["axis"] in _DRAWN]
    if curves:
        picture = page.parent / "images" / "scale.png"
        picture.parent.mkdir(exist_ok=True)
        _draw(picture, curves)
        text = "![Seconds and megabytes of a round against cohort, population and model](images/scale.png)"
        rounds = sorted({f"{line['rounds']} rounds after {line['warmup']} to warm up" for line in lines})
        summary.insert(page, f"{text}\n\n{summary.where(lines)} Medians of {' or '.join(rounds)}.", "scale")


def _table(axis: str, lines: Sequence[Line]) -> str:
    """Return an axis as a table in Markdown. The memory of several processes is the sum of their peaks."""
    key, name = _VALUE[axis]
    rows = [("method", name, "s a round", "ms a client", *_HEADS[axis])]
    rows.append(("---",) * len(rows[0]))
    for line in lines:
        seconds = line["s_per_round"]
        row = [line["algorithm"], f"{line[key]:,}", f"{seconds:.4f}", f"{1e3 * seconds / line['cohort']:.2f}"]
        if axis == "processes":
            alone = next(o for o in lines if o["algorithm"] == line["algorithm"] and o["processes"] == 1)
            row += [f"{line['peak_rss_mb']:,.0f}", f"{alone['s_per_round'] / seconds:.2f}"]
        else:
            row.append(f"{line['peak_above_mb']:,.1f}")
            row += [f"{line['kept_mb']:,.1f}", line["states"]] if line["kept_mb"] else ["0", ""]
            row += [f"{line['peak_above_mb'] / line['model_mb']:,.1f}"] if axis == "model" else []
        rows.append(tuple(row))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _exponents(axis: str, lines: Sequence[Line]) -> str:
    """Return the growth exponents of time and memory along an axis: slopes of lines through the logarithms."""
    key, name = _VALUE[axis]
    rows = [("method", f"s a round, as a power of {name}", "MB without client states in memory, the same")]
    rows.append(("---",) * 3)
    for method in dict.fromkeys(line["algorithm"] for line in lines):
        found = [line for line in lines if line["algorithm"] == method]
        slopes = [_slope([(line[key], of(line)) for line in found]) for of in (_seconds, _own_mb)]
        rows.append((method, *(f"{slope:.2f}" for slope in slopes)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the least-squares slope through the logarithms of points; nan for a single value."""
    logs = [(math.log(x), math.log(y)) for x, y in points]
    if len({x for x, _ in logs}) < 2:
        return math.nan
    return statistics.linear_regression(*zip(*logs, strict=True)).slope


def _seconds(line: Line) -> float:
    seconds: float = line["s_per_round"]
    return seconds


_KEPT = ("MB", "MB of client states", "kept in")
_HEADS = {
    "cohort": _KEPT,
    "large": _KEPT,
    "population": _KEPT,
    "model": (*_KEPT, "MB / MB of the model"),
    "processes": ("peak MB, imports included", "speed-up"),
    "kept": _KEPT,
}


def _draw(path: Path, lines: Sequence[Line]) -> None:
    """Draw time and memory along each axis. The vertical scale is logarithmic if values differ by a factor above 5."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    names = [axis for axis in _DRAWN if any(line["axis"] == axis for line in lines)]
    figure, panels = plt.subplots(2, len(names), figsize=(3.1 * len(names), 4.6), layout="constrained", squeeze=False)
    for column, axis in enumerate(names):
        key, name = _VALUE[axis]
        found = [line for line in lines if line["axis"] == axis]
        for method in dict.fromkeys(line["algorithm"] for line in found):
            of_method = [line for line in found if line["algorithm"] == method]
            values = [line[key] for line in of_method]
            panels[0, column].plot(values, [line["s_per_round"] for line in of_method], "o-", ms=3, label=method)
            panels[1, column].plot(values, [_own_mb(line) for line in of_method], "o-", ms=3, label=method)
        for panel in panels[:, column]:
            low, high = panel.dataLim.intervaly
            panel.set(xscale="log", **({"yscale": "log"} if high > 5 * low else {"ylim": (0, 1.1 * high)}))
            panel.grid(alpha=0.3)
        panels[1, column].set(xlabel=name)
    panels[0, 0].set(ylabel="s a round")
    panels[1, 0].set(ylabel="MB without client states")
    panels[0, 0].legend(frameon=False)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _own_mb(line: Line) -> float:
    """Return a round's memory in MB without the client states in memory."""
    own: float = line["peak_above_mb"] - (line["kept_mb"] if line["states"] == "memory" else 0.0)
    return max(own, 0.1)
