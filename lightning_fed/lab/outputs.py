"""Read the figures and tables of an experiment from its file."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from lightning_fed.core.arguments import check_count, check_number, check_numbers
from lightning_fed.core.errors import FederatedError
from lightning_fed.lab.experiment import METHOD, Figure, Label, Mark, Table
from lightning_fed.lab.quantities import COSTS, Metric, parse_quantity
from lightning_fed.lab.selections import read_selection
from lightning_fed.lab.yaml_files import as_list, check_keys, unknown

Labels: TypeAlias = Mapping[str, tuple[Label, ...]]

_ANY = ("kind", "rows", "columns", "xlim", "ylim", "at")
_LINES = (*_ANY, "y", "x", "lines", "band", "log", "marks")
_PATHS = (*_ANY, "rounds")


def read_figures(where: str, found: Any, labels: Labels, metrics: Mapping[str, Metric]) -> tuple[Figure, ...]:
    """Return the figures of a file.

    Raises:
        FederatedError: If an axis, a metric or a setting is unknown.
    """
    return tuple(_read_figure(f"{where}.{n}", _name(where, n), f, labels, metrics) for n, f in _items(where, found))


def _read_figure(where: str, name: str, found: Any, labels: Labels, metrics: Mapping[str, Metric]) -> Figure:
    kind = found.get("kind") if isinstance(found, Mapping) else None
    if kind not in (None, "paths"):
        raise FederatedError(f"{where}: kind can only be paths; found {kind!r}.")
    entry = check_keys(f"{where} (kind: paths)", found, _PATHS) if kind else check_keys(where, found, _LINES)
    x = entry.get("x", "rounds")
    if x not in COSTS and x not in labels:
        raise unknown(where, "x", x, (*COSTS, *labels))
    lines = "" if kind else entry.get("lines", METHOD)
    for part in ("rows", "columns"):
        allowed = (*labels, "metric")
        if entry.get(part) is not None and entry[part] not in allowed:
            raise unknown(f"{where}.{part}", "axis", entry[part], allowed)
    if kind is None and lines not in labels:
        raise unknown(f"{where}.lines", "axis", lines, labels)
    wanted = _several(f"{where}.y", entry.get("y", next(iter(metrics))))
    y: Any = tuple(parse_quantity(f"{where}.y", text, metrics) for text in wanted) if x in labels else ()
    for metric in wanted if x not in labels else ():
        if metric not in metrics:
            raise unknown(f"{where}.y", "metric", metric, metrics)
    used = [axis for axis in (entry.get("rows"), entry.get("columns"), lines, x if x in labels else None) if axis]
    if len(set(used)) < len(used):
        raise FederatedError(f"{where}: rows, columns, lines and x must be different axes; found {used}.")
    if len(wanted) > 1 and "metric" not in used:
        raise FederatedError(f"{where}: several metrics in y need `rows: metric` or `columns: metric`.")
    return Figure(
        name=name,
        kind=kind or ("quantity" if x in labels else "curves"),
        y=y or tuple(metrics[metric] for metric in wanted),
        x=x,
        lines=lines,
        rows=entry.get("rows"),
        columns=entry.get("columns"),
        band=_one_of(where, entry, "band", ("std", "range", "none")),
        log=_log(where, entry.get("log")),
        xlim=_limits(where, entry, "xlim"),
        ylim=_limits(where, entry, "ylim"),
        at=read_selection(f"{where}.at", entry.get("at"), labels),
        rounds=check_count(where, "rounds", entry.get("rounds", 1)),
        marks=_read_marks(f"{where}.marks", entry.get("marks"), labels),
    )


def _read_marks(where: str, found: Any, labels: Labels) -> tuple[Mark, ...]:
    if not isinstance(found or [], list):
        raise FederatedError(f"{where} must be a list of {{at, y, label}}, found {found!r}.")
    marks = []
    for i, entry in enumerate(found or [], start=1):
        part = f"{where}[{i}]"
        checked = check_keys(part, entry, ("at", "y", "label"), ("y",))
        check_number(part, "y", checked["y"])
        marks.append(
            Mark(
                read_selection(f"{part}.at", checked.get("at"), labels),
                checked["y"],
                str(checked.get("label", "paper")),
            )
        )
    return tuple(marks)


def read_tables(where: str, found: Any, labels: Labels, metrics: Mapping[str, Metric]) -> tuple[Table, ...]:
    """Return the tables of a file.

    Raises:
        FederatedError: If an axis or a quantity is unknown.
    """
    tables = []
    for name, entry in _items(where, found):
        part = f"{where}.{name}"
        checked = check_keys(part, entry, ("rows", "columns", "value", "at", "paper"), ("value",))
        rows = tuple(as_list(checked.get("rows", METHOD)))
        columns = checked.get("columns")
        axes = (*rows, *([columns] if columns is not None else ()))
        for axis in axes:
            if axis not in tuple(labels):
                raise unknown(part, "axis", axis, labels)
        if len(set(axes)) < len(axes):
            raise FederatedError(f"{part}: rows and columns must be different axes; found {list(axes)}.")
        values = tuple(
            parse_quantity(f"{part}.value", text, metrics) for text in _several(f"{part}.value", checked["value"])
        )
        at = read_selection(f"{part}.at", checked.get("at"), labels)
        paper = dict(_read_paper(f"{part}.paper", checked.get("paper"), [(axis, labels[axis]) for axis in axes]))
        tables.append(Table(_name(where, name), rows, columns, values, at, paper))
    return tuple(tables)


def _read_paper(
    where: str, found: Any, axes: Sequence[tuple[str, tuple[Label, ...]]]
) -> Iterator[tuple[tuple[Label, ...], float]]:
    """Yield the paper's numbers with their labels, from a mapping of labels within a mapping of labels."""
    if found is None:
        return
    if not axes:
        check_number(where, "the paper's number", found)
        yield (), found
        return
    (axis, labels), *inner = axes
    if not isinstance(found, Mapping):
        raise FederatedError(f"{where} must have the labels of {axis}, found {found!r}.")
    for label, part in found.items():
        if str(label) not in labels:
            raise unknown(where, f"label of {axis}", label, labels)
        for others, number in _read_paper(f"{where}.{label}", part, inner):
            yield (str(label), *others), number


def _items(where: str, found: Any) -> list[tuple[Any, Any]]:
    if not isinstance(found or {}, Mapping):
        raise FederatedError(f"{where} must be a mapping of names, found {found!r}.")
    return list((found or {}).items())


def _several(where: str, found: Any) -> list[Any]:
    if not (wanted := as_list(found)):
        raise FederatedError(f"{where} must name at least one; found {found!r}.")
    return wanted


def _name(where: str, name: Any) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"\w+", name):
        raise FederatedError(f"{where}: {name!r} becomes a part of a file's name; use letters, digits and _.")
    return name


def _one_of(where: str, entry: Mapping[str, Any], name: str, allowed: tuple[str, ...]) -> Any:
    value = entry.get(name, allowed[0])
    if value not in allowed:
        raise unknown(where, name, value, allowed)
    return value


def _log(where: str, value: Any) -> tuple[str, ...]:
    sides = tuple(as_list([] if value is None else value))
    if not set(sides) <= {"x", "y"}:
        raise FederatedError(f"{where}: log must be [x], [y] or [x, y]; found {value!r}.")
    return sides


def _limits(where: str, entry: Mapping[str, Any], name: str) -> tuple[float, float] | None:
    if entry.get(name) is None:
        return None
    numbers = check_numbers(where, name, entry[name])
    if len(numbers) != 2 or numbers[0] >= numbers[1]:
        raise FederatedError(f"{where}: {name} must be two rising numbers, found {entry[name]!r}.")
    return numbers[0], numbers[1]
