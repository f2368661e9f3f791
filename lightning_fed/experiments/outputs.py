"""What an experiment draws, tables and claims, read from its file."""

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from lightning_fed.core.arguments import check_count, check_numbers, finite
from lightning_fed.core.errors import FederatedError
from lightning_fed.experiments.experiment import METHOD, Claim, Figure, Label, Table
from lightning_fed.experiments.places import read_place
from lightning_fed.experiments.quantities import COSTS, Metric, parse_quantity
from lightning_fed.experiments.yaml_files import check_keys, unknown

__all__ = ["check_label", "read_claims", "read_figures", "read_tables"]

Labels: TypeAlias = Mapping[str, tuple[Label, ...]]

_FIGURE = ("kind", "y", "x", "lines", "rows", "columns", "band", "log", "xlim", "ylim", "at", "rounds")
_SIGNS = re.compile(r"\s+(<=|>=|<|>|~)\s+")


def check_label(where: str, label: Label) -> Label:
    """Return a label that a claim can name: one that is read there as itself.

    Raises:
        FederatedError: If it is another one.
    """
    if _SIGNS.split(f"{label} < {label}".strip()) != [label, "<", label] or re.search(r"\s\*\s", label):
        raise FederatedError(
            f"{where}: a claim cannot name the label {label!r}. A label has no <, <=, >, >=, ~ or * between spaces, and"
            " no spaces at its ends."
        )
    return label


def read_figures(where: str, found: Any, labels: Labels, metrics: Mapping[str, Metric]) -> tuple[Figure, ...]:
    """Return the figures of a file.

    Raises:
        FederatedError: If an axis, a metric or a setting is unknown.
    """
    return tuple(_read_figure(f"{where}.{n}", _name(where, n), f, labels, metrics) for n, f in _items(where, found))


def _read_figure(where: str, name: str, found: Any, labels: Labels, metrics: Mapping[str, Metric]) -> Figure:
    entry = check_keys(where, found, _FIGURE)
    kind, x = entry.get("kind"), entry.get("x", "rounds")
    if kind not in (None, "paths"):
        raise FederatedError(f"{where}: kind can only be paths; found {kind!r}.")
    if x not in COSTS and x not in labels:
        raise unknown(where, "x", x, (*COSTS, *labels))
    lines = "" if kind else entry.get("lines", METHOD)
    for part in ("rows", "columns"):
        allowed = (*labels, "metric")
        if entry.get(part) is not None and entry[part] not in allowed:
            raise unknown(f"{where}.{part}", "axis", entry[part], allowed)
    if kind is None and lines not in labels:
        raise unknown(f"{where}.lines", "axis", lines, labels)
    wanted = _list(entry.get("y", next(iter(metrics))))
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
        at=read_place(f"{where}.at", entry.get("at"), labels),
        rounds=check_count(where, "rounds", entry.get("rounds", 1)),
    )


def read_tables(where: str, found: Any, labels: Labels, metrics: Mapping[str, Metric]) -> tuple[Table, ...]:
    """Return the tables of a file.

    Raises:
        FederatedError: If an axis or a quantity is unknown.
    """
    tables = []
    for name, entry in _items(where, found):
        place = f"{where}.{name}"
        checked = check_keys(place, entry, ("rows", "columns", "value", "at"), ("value",))
        rows = tuple(_list(checked.get("rows", METHOD)))
        columns = checked.get("columns")
        for axis in (*rows, *([columns] if columns is not None else ())):
            if axis not in labels:
                raise unknown(place, "axis", axis, labels)
        values = tuple(parse_quantity(f"{place}.value", text, metrics) for text in _list(checked["value"]))
        at = read_place(f"{place}.at", checked.get("at"), labels)
        tables.append(Table(_name(where, name), rows, columns, values, at))
    return tuple(tables)


def read_claims(
    where: str, found: Any, labels: Labels, metrics: Mapping[str, Metric], scales: tuple[str, ...]
) -> tuple[Claim, ...]:
    """Return the claims of a file.

    Raises:
        FederatedError: If one is not understood, or names something unknown.
    """
    if not isinstance(found or [], list):
        raise FederatedError(f"{where} must be a list, found {found!r}.")
    return tuple(
        _read_claim(f"{where}[{i}]", claim, labels, metrics, scales) for i, claim in enumerate(found or [], start=1)
    )


def _read_claim(
    where: str, found: Any, labels: Labels, metrics: Mapping[str, Metric], scales: tuple[str, ...]
) -> Claim:
    keys = ("says", "claim", "quantity", "compare", "mean_over", "at", "within", "scales", "found")
    entry = check_keys(where, found, keys, ("says", "claim", "quantity"))
    compare = entry.get("compare", METHOD)
    if compare not in labels:
        raise unknown(f"{where}.compare", "axis", compare, labels)
    terms, signs = _read_terms(where, entry["claim"], labels[compare])
    at = read_place(f"{where}.at", entry.get("at"), labels)
    if compare in at:
        raise FederatedError(f"{where}: at names {compare}, the axis that the claim compares. Leave it out.")
    mean_over = _read_mean_over(where, entry.get("mean_over"), compare, labels)
    within = finite(entry.get("within", 0.1))
    if not 0 < within < 1:
        raise FederatedError(f"{where}: within must lie between 0 and 1, found {entry['within']!r}.")
    judged = tuple(map(str, _list(entry.get("scales") or [])))
    for scale in judged:
        if scale not in scales:
            raise unknown(f"{where}.scales", "scale", scale, scales)
    for key, what in (("says", "the paper's sentence"), ("found", "what you found out")):
        if not isinstance(entry.get(key, ""), str):
            raise FederatedError(f"{where}: {key} must be {what}, a text; found {entry[key]!r}.")
    quantity = parse_quantity(f"{where}.quantity", entry["quantity"], metrics)
    says, remark = (" ".join(entry.get(key, "").split()) for key in ("says", "found"))
    return Claim(says, terms, signs, quantity, compare, mean_over, at, within, judged, remark)


def _read_mean_over(where: str, found: Any, compare: str, labels: Labels) -> tuple[str, ...]:
    axes = tuple(_list([] if found is None else found))
    for axis in axes:
        if axis not in tuple(labels):
            raise unknown(f"{where}.mean_over", "axis", axis, labels)
        if axis == compare:
            raise FederatedError(f"{where}: mean_over names {axis}, the axis that the claim compares. Leave it out.")
    return tuple(dict.fromkeys(axes))


def _read_terms(
    where: str, text: Any, labels: tuple[Label, ...]
) -> tuple[tuple[tuple[float, Label | None], ...], tuple[str, ...]]:
    """Return the sides of a chain of inequalities, and the signs between them."""
    parts = _SIGNS.split(text.strip()) if isinstance(text, str) else []
    if len(parts) < 3:
        raise FederatedError(
            f"{where}: claim must be labels and numbers with <, <=, >, >= or ~ between them, each with spaces around"
            f" it, such as '{' < '.join(labels[:2])}'; found {text!r}."
        )
    return tuple(_read_term(where, part, labels) for part in parts[::2]), tuple(parts[1::2])


def _read_term(where: str, text: str, labels: tuple[Label, ...]) -> tuple[float, Label | None]:
    """Return a side of an inequality: a label, a number, or a number times a label."""
    if text in labels:
        return 1.0, text
    factor, times, label = text.partition("*")
    try:
        number = float(factor)
    except ValueError:
        raise unknown(f"{where}.claim", "label", text, labels) from None
    if not times:
        return number, None
    if label.strip() not in labels:
        raise unknown(f"{where}.claim", "label", label.strip(), labels)
    return number, label.strip()


def _items(where: str, found: Any) -> list[tuple[Any, Any]]:
    if not isinstance(found or {}, Mapping):
        raise FederatedError(f"{where} must be a mapping of names, found {found!r}.")
    return list((found or {}).items())


def _name(where: str, name: Any) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"\w+", name):
        raise FederatedError(f"{where}: {name!r} becomes a part of a file's name; use letters, digits and _.")
    return name


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _one_of(where: str, entry: Mapping[str, Any], name: str, allowed: tuple[str, ...]) -> Any:
    value = entry.get(name, allowed[0])
    if value not in allowed:
        raise unknown(where, name, value, allowed)
    return value


def _log(where: str, value: Any) -> tuple[str, ...]:
    sides = tuple(_list([] if value is None else value))
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
