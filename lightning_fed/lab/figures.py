"""Figures in a paper's layout: panels in rows and columns, a line per method, a band over seeds."""

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_fed.core.errors import FederatedError
from lightning_fed.lab.experiment import METHOD, Label, Mark
from lightning_fed.lab.experiment import Figure as Plan
from lightning_fed.lab.grid import Point
from lightning_fed.lab.quantities import Curve, Metric, Quantity, cost
from lightning_fed.lab.records import Record
from lightning_fed.lab.results import Results
from lightning_fed.lab.selections import is_within

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6B4C9A", "#8C6D31", "#444444", "#882255",
)  # fmt: skip
"""Colors that most people can distinguish (Okabe and Ito, and a few more)."""

_STYLES = ("-", "--", "-.", ":")
_WIDTH, _HEIGHT = 3.3, 2.5  # inches per panel
_LEGEND_ROW = 0.19  # inches per row of the legend
_ALIKE = (1.5, 6.0)  # points (1/72 inch): lines overlap if 90 % of distances are below the first, all below the second
_LARGEST = 180_000  # bytes of a picture with full color
_UNITS = {"rounds": "rounds", "gradients": "gradients computed", "bytes": "bytes sent"}


@dataclass(frozen=True)
class Panel:
    """A part of a figure with its own axes.

    Args:
        row: Its row, from 0.
        column: Its column, from 0.
        row_label: The label of its row.
        column_label: The label of its column.
        points: Its points of the grid.
        y: The metric or quantity to draw.
    """

    row: int
    column: int
    row_label: str
    column_label: str
    points: tuple[Point, ...]
    y: Metric | Quantity


def draw(plan: Plan, results: Results) -> "Figure":
    """Return the figure of an experiment.

    Args:
        plan: The figure's description.
        results: The finished cells.

    Raises:
        FederatedError: If matplotlib is not installed.
    """
    panels = list(panels_of(plan, results))
    figure, grid = new_figure(max(p.row for p in panels) + 1, max(p.column for p in panels) + 1)
    styles = {label: i for i, label in enumerate(results.grid.labels[plan.lines])}
    for panel in panels:
        axes = grid[panel.row][panel.column]
        diverged = []
        for label, style in styles.items():
            points = [point for point in panel.points if point.by_axis[plan.lines] == label]
            if points and plan.kind == "quantity":
                _draw_quantity(axes, plan, panel, results, points, label, style)
            elif points:
                _draw_curve(axes, plan, panel, results, points[0], label, style)
                diverged += [label] if _has_diverged(results, points[0]) else []
        for mark in plan.marks:
            _draw_mark(axes, plan, panel, mark, styles)
        _set_up(axes, plan, panel, panels)
        notes = [f"diverged: {', '.join(diverged)}"] if diverged else []
        notes += [f"one line: {', '.join(group)}" for group in _alike(axes)]
        if notes:  # an improving curve leaves room on this side
            y, side = (0.02, "bottom") if panel.y.mode == "max" else (0.97, "top")
            axes.text(
                0.98, y, "\n".join(notes), transform=axes.transAxes, ha="right", va=side, fontsize=6.5,
                bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1},
            )  # fmt: skip
    add_legend(figure, [axes for row in grid for axes in row], title=_legend_title(plan.band, results))
    return figure


def _legend_title(kind: str, results: Results) -> str | None:
    """Return the meaning of a figure's lines and bands, or None without several random seeds."""
    seeds = results.grid.seeds
    if not results.grid.experiment.is_random or seeds < 2:
        return None
    bands = {"std": "± one sample standard deviation", "range": "from the lowest to the highest", "none": ""}
    band = f", bands {bands[kind]}" if bands[kind] else ""
    return f"lines: mean of {seeds} seeds{band}"


def _alike(axes: "Axes") -> list[list[str]]:
    """Return the labels of lines that overlap along their whole length, in groups."""
    groups: list[tuple[Any, list[str]]] = []
    for line in axes.get_lines():
        label, points = str(line.get_label()), np.asarray(line.get_xydata())
        if label.startswith("_") or len(points) < 2 or line.get_linestyle() not in _STYLES:
            continue
        on_paper = axes.transData.transform(points) * 72 / axes.get_figure().dpi  # type: ignore[union-attr]
        for other, labels in groups:
            if other.shape == on_paper.shape:
                apart = np.abs(other - on_paper).max(axis=1)
                if np.quantile(apart, 0.9) < _ALIKE[0] and apart.max() < _ALIKE[1]:
                    labels.append(label)
                    break
        else:
            groups.append((on_paper, [label]))
    return [labels for _, labels in groups if len(labels) > 1]


def draw_best(results: Results, by: Quantity, ranked: Sequence[Point]) -> "Figure":
    """Return a figure with the curves of a grid's best points.

    Args:
        results: The finished cells.
        by: The quantity that ranks the points. Its metric is drawn.
        ranked: The points, best first.

    Raises:
        FederatedError: If matplotlib is not installed.
    """
    figure, ((axes,),) = new_figure(1, 1)
    for style, point in enumerate(ranked[: len(COLORS)]):
        x, rows = _aligned(results.records(point), by.metric, "rounds")
        if x:
            axes.plot(x, [fmean(row) for row in rows], label=_counted(str(point), results, point), **_look(style))
    axes.set(xlabel="rounds", ylabel=_with_unit(by.metric))
    axes.grid(alpha=0.25, linewidth=0.6)
    add_legend(figure, [axes], columns=1, title=_legend_title("none", results))
    return figure


def panels_of(plan: Plan, results: Results) -> Iterator[Panel]:
    """Yield the panels of a figure, row by row."""
    points = [point for point in results.grid.points if is_within(point.by_axis, plan.at)]
    rows, columns = (_divisions(plan, axis, points) for axis in (plan.rows, plan.columns))
    for i, (row_label, in_row, row_y) in enumerate(rows):
        for j, (column_label, in_column, column_y) in enumerate(columns):
            kept = tuple(point for point in points if in_row(point) and in_column(point))
            yield Panel(i, j, row_label, column_label, kept, row_y or column_y or plan.y[0])


def _divisions(
    plan: Plan, axis: str | None, points: Sequence[Point]
) -> list[tuple[str, Callable[[Point], bool], Metric | Quantity | None]]:
    """Return the label of each row or column, its members, and its metric or quantity if it has its own."""
    if axis is None:
        return [("", lambda _: True, None)]
    if axis == "metric":
        return [(y.label, lambda _: True, y) for y in plan.y]
    labels = dict.fromkeys(point.by_axis[axis] for point in points)
    return [(_titled(axis, label), _has(axis, label), None) for label in labels]


def _has(axis: str, label: Label) -> Callable[[Point], bool]:
    return lambda point: point.by_axis[axis] == label


def _titled(axis: str, label: Label) -> str:
    """Return a label's title, such as "similarity 10 %" or "G = 10". A method's title is its label alone."""
    if axis == METHOD:
        return label
    is_number = label.replace(".", "", 1).replace("-", "", 1).replace("e", "", 1).isdigit()
    return f"{axis} = {label}" if is_number else f"{axis} {label}"


def _draw_curve(
    axes: "Axes", plan: Plan, panel: Panel, results: Results, point: Point, label: Label, style: int
) -> None:
    """Draw a metric against rounds or another cost."""
    assert isinstance(panel.y, Metric)
    x, rows = _aligned(results.records(point), panel.y, plan.x)
    middle = [fmean(row) for row in rows]
    marker = "o" if len(x) == 1 else None
    axes.plot(x, middle, label=_counted(_titled(plan.lines, label), results, point), marker=marker, **_look(style))
    low, high = _band(rows, plan.band)
    if low != high:
        axes.fill_between(x, low, high, color=COLORS[style % len(COLORS)], alpha=0.18, linewidth=0)


def _counted(label: str, results: Results, point: Point) -> str:
    """Return a line's label. If cells are missing, add its number of seeds, since the legend has the planned one."""
    found, asked = len(results.records(point)), len(results.cells(point))
    return label if found == asked else f"{label} ({found} of {asked} seeds)"


def _draw_mark(axes: "Axes", plan: Plan, panel: Panel, mark: Mark, styles: Mapping[Label, int]) -> None:
    """Draw a number from the paper across a panel that has its part of the grid, in the color of its line."""
    if not any(is_within(point.by_axis, mark.at) for point in panel.points):
        return
    labels = mark.at.get(plan.lines, ())
    colour = COLORS[styles[labels[0]] % len(COLORS)] if len(labels) == 1 and labels[0] in styles else "0.4"
    axes.axhline(mark.y, color=colour, linewidth=0.9, linestyle=(0, (1, 3)), alpha=0.7, label=mark.label)


def _has_diverged(results: Results, point: Point) -> bool:
    """Return whether any of a point's runs or all of its tuned values diverged."""
    candidates = results.candidates(point)
    lost = bool(candidates) and all(candidate.estimate.is_diverged for candidate in candidates)
    return lost or any(record.status == "diverged" for record in results.records(point))


def _draw_quantity(
    axes: "Axes", plan: Plan, panel: Panel, results: Results, points: Sequence[Point], label: Label, style: int
) -> None:
    """Draw a quantity against an axis of the grid; infinite values leave a gap."""
    assert isinstance(panel.y, Quantity)
    labels = [point.by_axis[plan.x] for point in points]
    shown = [label for label in results.grid.labels[plan.x] if label in plan.at.get(plan.x, (label,))]
    x = _positions(labels, shown)
    estimates = [results.estimate(point, panel.y) for point in points]
    middle = [e.mean if math.isfinite(e.mean) else math.nan for e in estimates]
    axes.plot(x, middle, label=_titled(plan.lines, label), marker="o", markersize=4, **_look(style))
    low, high = _band([e.values if math.isfinite(e.mean) else (math.nan,) for e in estimates], plan.band)
    if low != high:
        axes.fill_between(x, low, high, color=COLORS[style % len(COLORS)], alpha=0.18, linewidth=0)
    if not _are_numbers(shown):
        axes.set_xticks(range(len(shown)), shown)


def _positions(labels: Sequence[Label], known: Sequence[Label]) -> list[float]:
    """Return the horizontal positions of labels: their values if all are numbers, otherwise evenly spaced."""
    return (
        [float(label) for label in labels] if _are_numbers(known) else [float(known.index(label)) for label in labels]
    )


def _are_numbers(labels: Sequence[Label]) -> bool:
    try:
        return all(math.isfinite(float(label)) for label in labels)
    except ValueError:
        return False


def _aligned(records: Sequence[Record], metric: Metric, x: str) -> tuple[list[float], list[list[float]]]:
    """Return horizontal positions and their values for all seeds, at the rounds where every seed's value is finite."""
    curves: list[Curve] = [metric.of(record.series) for record in records]
    if not curves:
        return [], []
    rounds = [n for n in curves[0] if all(math.isfinite(curve.get(n, math.nan)) for curve in curves)]
    spent = [cost(record.series, x) for record in records]
    return [fmean(of[n] for of in spent) for n in rounds], [[curve[n] for curve in curves] for n in rounds]


def _band(rows: Sequence[Sequence[float]], kind: str) -> tuple[list[float], list[float]]:
    if kind == "range":
        return [min(row) for row in rows], [max(row) for row in rows]
    spread = [stdev(row) if kind == "std" and len(row) > 1 else 0.0 for row in rows]
    middle = [fmean(row) for row in rows]
    pairs = list(zip(middle, spread, strict=True))
    return [m - s for m, s in pairs], [m + s for m, s in pairs]


def _look(style: int) -> dict[str, Any]:
    return {
        "color": COLORS[style % len(COLORS)],
        "linestyle": _STYLES[style % len(_STYLES)],
        "linewidth": 1.5,
    }


def _set_up(axes: "Axes", plan: Plan, panel: Panel, panels: Sequence[Panel]) -> None:
    """Set scales, limits, labels and titles of a panel."""
    if "x" in plan.log:
        axes.set_xscale("log")
    if "y" in plan.log:
        axes.set_yscale("log")
    if plan.xlim is not None:
        axes.set_xlim(plan.xlim)
    if plan.ylim is not None:
        axes.set_ylim(plan.ylim)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if panel.row == 0:
        axes.set_title(panel.column_label, fontsize=10)
    if panel.row == max(p.row for p in panels):
        axes.set_xlabel(_UNITS.get(plan.x, plan.x))
    if panel.column == 0:
        above = f"{panel.row_label}\n" if panel.row_label and panel.row_label != panel.y.label else ""
        axes.set_ylabel(f"{above}{_with_unit(panel.y)}")
    elif plan.columns == "metric":
        axes.set_ylabel(_with_unit(panel.y))
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        if name in plan.log:
            _plain_ticks(axis)


def _with_unit(y: Metric | Quantity) -> str:
    """Return an axis label with its unit."""
    is_percent = y.factor == 100 if isinstance(y, Metric) else y.is_percent
    return f"{y.label} (%)" if is_percent else y.label


def _plain_ticks(axis: Any) -> None:
    """Use plain numbers as ticks of a logarithmic axis that spans few powers of ten."""
    low, high = axis.get_view_interval()
    if low >= 1e-3 and high < 1e5 and high / low < 100:
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def add_legend(figure: "Figure", grid: Sequence["Axes"], columns: int | None = None, title: str | None = None) -> None:
    """Add one legend below all panels. The figure grows by the height of the title and each row after the first."""
    handles: dict[str, Artist] = {}
    for axes in grid:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        widest = 0.55 + 0.08 * max(map(len, handles))  # inches, at this font size
        columns = columns or min(len(handles), max(1, int(figure.get_figwidth() / widest)))
        figure.set_figheight(figure.get_figheight() + _LEGEND_ROW * (math.ceil(len(handles) / columns) - 1))
        if title is not None:
            figure.set_figheight(figure.get_figheight() + _LEGEND_ROW)
        figure.legend(
            list(handles.values()), list(handles), loc="outside lower center", ncols=columns, frameon=False, fontsize=9,
            title=title, title_fontsize=8,
        )  # fmt: skip


def new_figure(rows: int, columns: int) -> tuple["Figure", Any]:
    """Return an empty figure with panels [rows][columns].

    Raises:
        FederatedError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FederatedError('Figures need matplotlib: pip install "lightning_fed[plots]".') from error
    width = max(4.2, _WIDTH * columns + 0.6)
    figure = Figure(figsize=(width, _HEIGHT * rows + 0.7), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def save(figure: "Figure", path: Path) -> None:
    """Write a figure without a date. Reduce a large PNG to 256 colors, a third of its size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".png":
        from matplotlib import rc_context

        with rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none", "pdf.fonttype": 42}):
            figure.savefig(path, metadata={"CreationDate" if path.suffix == ".pdf" else "Date": None})
        return
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=130, format="png")
    image = Image.open(drawn).convert("RGB")
    image.save(path, optimize=True)
    if path.stat().st_size > _LARGEST:
        # The pale bands have similar colors. These settings keep them distinct.
        image.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=2, dither=Image.Dither.NONE).save(path, optimize=True)
