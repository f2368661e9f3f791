"""The parts of an experiment: a grid of configurations, tuning, figures, tables and claims."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from lightning_fed.lab.overlays import Config
from lightning_fed.lab.quantities import Metric, Quantity

METHOD = "method"
"""The axis that every experiment has."""

Label: TypeAlias = str
"""One choice of an axis, by its name in figures and tables."""

Selection: TypeAlias = Mapping[str, tuple[Label, ...]]
"""A part of a grid: for each axis named, the labels that belong to it."""


Cases: TypeAlias = tuple[tuple[Selection, int], ...]
"""The number of test cases behind a metric, for parts of a grid."""


@dataclass(frozen=True)
class Axis:
    """A dimension of a grid.

    Args:
        name: Its name.
        choices: Overrides by label, in order.
        tune: The values tuned with a label, by label and name: a key with values, or a list that replaces values.
    """

    name: str
    choices: Mapping[Label, Mapping[str, Any]]
    tune: Mapping[Label, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Tune:
    """The tuning of each method at each combination of the axes.

    Args:
        by: The quantity whose best value decides.
        seeds: The number of seeds that decide; None for all.
        grid: Keys with values, by name. All combinations are tried.
    """

    by: Quantity
    seeds: int | None
    grid: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Departure:
    """A departure of an experiment from its paper.

    Args:
        what: Its subject.
        paper: The paper's version.
        here: The version here.
        why: The reason.
    """

    what: str
    paper: str
    here: str
    why: str


@dataclass(frozen=True)
class Mark:
    """A number from the paper, drawn as a faint line across a figure.

    Args:
        at: Its part of the grid.
        y: The number.
        label: Its name in the legend.
    """

    at: Selection
    y: float
    label: str


@dataclass(frozen=True)
class Figure:
    """A figure: panels in rows and columns, with lines in them.

    Args:
        name: Its name, a part of the file's.
        kind: "curves" over the rounds, a "quantity" against an axis, or the "paths" of clients.
        y: The metrics or quantities to draw. Each of several has its own panels.
        x: The cost of runs, one of :data:`COSTS`, or the name of an axis.
        lines: The axis whose labels are the lines.
        rows: The axis whose labels are the rows of panels, "metric" for :attr:`y`, None for one row.
        columns: The same for columns.
        band: The band around a line over several seeds.
        log: The axes of the picture with a logarithmic scale.
        xlim: The limits of the horizontal axis.
        ylim: The limits of the vertical axis.
        at: The part of the grid to draw.
        rounds: The number of first rounds to draw paths of.
        marks: Numbers from the paper.
    """

    name: str
    kind: Literal["curves", "quantity", "paths"]
    y: tuple[Metric, ...] | tuple[Quantity, ...]
    x: str
    lines: str
    rows: str | None
    columns: str | None
    band: Literal["std", "range", "none"]
    log: tuple[str, ...]
    xlim: tuple[float, float] | None
    ylim: tuple[float, float] | None
    at: Selection
    rounds: int = 1
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True)
class Table:
    """A table: quantities by the labels of axes.

    Args:
        name: Its name.
        rows: The axes whose combinations are its rows.
        columns: The axis whose labels are its columns, if any.
        values: The quantities. Each column has one subcolumn per quantity.
        at: The part of the grid to show.
        paper: The paper's numbers for the first quantity, by the labels of the rows and then of the column.
    """

    name: str
    rows: tuple[str, ...]
    columns: str | None
    values: tuple[Quantity, ...]
    at: Selection
    paper: Mapping[tuple[Label, ...], float] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """The difference of a quantity between two labels of an axis.

    Args:
        axis: The axis.
        of: The label to subtract from.
        minus: The label to subtract.
    """

    axis: str
    of: Label
    minus: Label


@dataclass(frozen=True)
class Claim:
    """An inequality that a paper states.

    Args:
        says: The paper's statement, in our words.
        source: The place of the statement; empty for a control.
        paper: The paper's numbers, if it gives any.
        terms: Factor and label of each side. The label is None for a number alone.
        signs: The signs between the sides: "<", "<=", ">", ">=" or "~".
        quantity: The compared quantity.
        compare: The axis of the labels.
        mean_over: The axes to average the quantity over before it is compared.
        difference: The axis along which to take the quantity's difference. If given, the difference is compared.
        at: The part of the grid that the claim covers.
        within: The allowed difference between sides joined by "~", as a share of the larger.
        scales: The scales at which it is judged; all if empty.
        found: The explanation if it does not hold; empty if there is none.
        controls: Inequalities that help to explain it, judged but not counted.
    """

    says: str
    source: str
    paper: str
    terms: tuple[tuple[float, Label | None], ...]
    signs: tuple[str, ...]
    quantity: Quantity
    compare: str
    mean_over: tuple[str, ...]
    difference: Difference | None
    at: Selection
    within: float
    scales: tuple[str, ...]
    found: str
    controls: tuple["Claim", ...]

    @property
    def text(self) -> str:
        """The inequality as it is written."""
        sides = [term_text(factor, label) for factor, label in self.terms]
        return " ".join([sides[0], *(f"{sign} {side}" for sign, side in zip(self.signs, sides[1:], strict=True))])


@dataclass(frozen=True)
class Scale:
    """A scale of an experiment.

    Args:
        name: Its name.
        departures: The departures from the paper at this scale only.
        overrides: Overrides for every cell.
        seeds: The number of seeds; None for the experiment's.
        axes: The labels to keep, by axis, each with its overrides.
        tune: Lists that replace tuned values, by tuned name.
        cases: The test cases behind each metric, by part of the grid. They replace the experiment's.
        also_by: Another quantity that chooses tuned values, for a second set of results; None for one set.
    """

    name: str
    departures: tuple[Departure, ...] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)
    seeds: int | None = None
    axes: Mapping[str, Axis] = field(default_factory=dict)
    tune: Mapping[str, list[Any]] = field(default_factory=dict)
    cases: Mapping[str, Cases] = field(default_factory=dict)
    also_by: Quantity | None = None


@dataclass(frozen=True)
class Experiment:
    """An experiment, as read from its file.

    Args:
        name: The name of the experiment and its file.
        file: The file's path.
        title: Its title.
        paper: The paper that makes the claims.
        item: The figure or table of the paper.
        notes: The points that the paper leaves open, and the choices here.
        departures: The departures from the paper, at every scale.
        base: The configuration that every cell starts from.
        axes: The dimensions of its grid, the methods last.
        skip: Parts of the grid to leave out.
        tune: The tuning, or None.
        seeds: The number of seeds.
        is_random: Whether anything is drawn at random, so that seeds differ.
        is_own: Whether it is our own comparison, not a paper's.
        metrics: The metrics by name.
        cases: The test cases behind each metric, by the parts of the grid.
        figures: Its figures.
        tables: Its tables.
        claims: Its claims.
        scales: The scales by name.
        added: The file of added methods, or empty.
    """

    name: str
    file: Path
    title: str
    paper: str
    item: str
    notes: str
    departures: tuple[Departure, ...]
    base: Config
    axes: Mapping[str, Axis]
    skip: tuple[Selection, ...]
    tune: Tune | None
    seeds: int
    is_random: bool
    is_own: bool
    metrics: Mapping[str, Metric]
    cases: Mapping[str, Cases]
    figures: tuple[Figure, ...]
    tables: tuple[Table, ...]
    claims: tuple[Claim, ...]
    scales: Mapping[str, Scale]
    added: str = ""

    @property
    def quantities(self) -> list[Quantity]:
        """All quantities that its tables, claims, figures and tuning use."""
        claims = [part for claim in self.claims for part in (claim, *claim.controls)]
        found = [quantity for table in self.tables for quantity in table.values]
        found += [claim.quantity for claim in claims]
        found += [y for figure in self.figures for y in figure.y if isinstance(y, Quantity)]
        found += [] if self.tune is None else [self.tune.by]
        found += [scale.also_by for scale in self.scales.values() if scale.also_by is not None]
        return list(dict.fromkeys(found))


def term_text(factor: float, label: Label | None) -> str:
    """Return a side of an inequality as it is written."""
    if label is None:
        return f"{factor:g}"
    return label if factor == 1 else f"{factor:g} * {label}"
