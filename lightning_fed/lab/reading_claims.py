"""Read an experiment's claims, and its departures from its paper, from its file."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

from lightning_fed.core.arguments import finite
from lightning_fed.core.errors import FederatedError
from lightning_fed.lab.experiment import METHOD, Claim, Departure, Difference, Label
from lightning_fed.lab.quantities import Metric, parse_quantity
from lightning_fed.lab.selections import read_selection
from lightning_fed.lab.yaml_files import as_list, check_keys, read_text, unknown

Labels: TypeAlias = Mapping[str, tuple[Label, ...]]

_SIGNS = re.compile(r"\s+(<=|>=|<|>|~)\s+")
_CONTROL = (
    "says",
    "paper",
    "claim",
    "quantity",
    "compare",
    "mean_over",
    "difference",
    "at",
    "within",
    "scales",
    "found",
)
_REQUIRED = ("says", "claim", "quantity")


def check_label(where: str, label: Label) -> Label:
    """Return a label, after checking that a claim can name it without being split.

    Raises:
        FederatedError: If a claim cannot name it.
    """
    if _SIGNS.split(f"{label} < {label}".strip()) != [label, "<", label] or re.search(r"\s\*\s", label):
        raise FederatedError(
            f"{where}: a claim cannot name the label {label!r}. A label has no <, <=, >, >=, ~ or * between spaces, and"
            " no spaces at its ends."
        )
    return label


def read_departures(where: str, found: Any) -> tuple[Departure, ...]:
    """Return the departures of a file, or of one of its scales, from the paper.

    Raises:
        FederatedError: If it is not a list of ``{what, paper, here, why}``.
    """
    if not isinstance(found or [], list):
        raise FederatedError(f"{where} must be a list of {{what, paper, here, why}}, found {found!r}.")
    departures = []
    for i, entry in enumerate(found or [], start=1):
        keys = ("what", "paper", "here", "why")
        checked = check_keys(f"{where}[{i}]", entry, keys, keys)
        departures.append(Departure(**{key: read_text(f"{where}[{i}].{key}", checked[key]) for key in keys}))
    return tuple(departures)


@dataclass(frozen=True)
class ClaimReader:
    """The names that a claim may use.

    Args:
        labels: The labels of every axis.
        metrics: The metrics by name.
        scales: The names of the scales.
    """

    labels: Labels
    metrics: Mapping[str, Metric]
    scales: tuple[str, ...]

    def read(self, where: str, found: Any) -> tuple[Claim, ...]:
        """Return the claims of a file.

        Raises:
            FederatedError: If one is not understood, or names something unknown.
        """
        return tuple(
            self._claim(where, check_keys(where, entry, (*_CONTROL, "source", "controls"), (*_REQUIRED, "source")))
            for where, entry in _numbered(where, found)
        )

    def _claim(self, where: str, entry: Mapping[str, Any]) -> Claim:
        compare = entry.get("compare", METHOD)
        if compare not in self.labels:
            raise unknown(f"{where}.compare", "axis", compare, self.labels)
        terms, signs = _read_terms(where, entry["claim"], self.labels[compare])
        difference = self._difference(f"{where}.difference", entry.get("difference"))
        at = read_selection(f"{where}.at", entry.get("at"), self.labels)
        mean_over = self._mean_over(f"{where}.mean_over", entry.get("mean_over"))
        taken = [compare, *([difference.axis] if difference else [])]
        for axis in taken:
            if axis in at or axis in mean_over or taken.count(axis) > 1:
                raise FederatedError(
                    f"{where}: {axis} is compared, or is the axis of the difference, and is named once more in at,"
                    " mean_over or difference. Name it once."
                )
        texts = {key: read_text(f"{where}.{key}", entry.get(key, "")) for key in ("says", "source", "paper", "found")}
        controls = [
            self._claim(where, check_keys(where, control, _CONTROL, _REQUIRED))
            for where, control in _numbered(f"{where}.controls", entry.get("controls"))
        ]
        return Claim(
            **texts,
            terms=terms,
            signs=signs,
            quantity=parse_quantity(f"{where}.quantity", entry["quantity"], self.metrics),
            compare=compare,
            mean_over=mean_over,
            difference=difference,
            at=at,
            within=_within(where, entry.get("within", 0.1)),
            scales=self._scales(f"{where}.scales", entry.get("scales")),
            controls=tuple(controls),
        )

    def _difference(self, where: str, found: Any) -> Difference | None:
        """Return the difference that ``{axis: [label, label]}`` states."""
        if found is None:
            return None
        selection = read_selection(where, found, self.labels)
        if len(selection) != 1 or len(labels := next(iter(selection.values()))) != 2 or labels[0] == labels[1]:
            raise FederatedError(
                f"{where} must name an axis and two of its labels, such as {{method: [Mime, FedAvg]}}, for the value at"
                f" the first minus that at the second, which is another one; found {found!r}."
            )
        return Difference(next(iter(selection)), *labels)

    def _mean_over(self, where: str, found: Any) -> tuple[str, ...]:
        axes = as_list([] if found is None else found)
        for axis in axes:
            if axis not in tuple(self.labels):
                raise unknown(where, "axis", axis, self.labels)
        return tuple(dict.fromkeys(axes))

    def _scales(self, where: str, found: Any) -> tuple[str, ...]:
        named = tuple(map(str, as_list(found or [])))
        for scale in named:
            if scale not in self.scales:
                raise unknown(where, "scale", scale, self.scales)
        return named


def _numbered(where: str, found: Any) -> list[tuple[str, Any]]:
    if not isinstance(found or [], list):
        raise FederatedError(f"{where} must be a list, found {found!r}.")
    return [(f"{where}[{i}]", entry) for i, entry in enumerate(found or [], start=1)]


def _within(where: str, found: Any) -> float:
    within = finite(found)
    if not 0 < within < 1:
        raise FederatedError(f"{where}: within must lie between 0 and 1, found {found!r}.")
    return within


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
    terms = tuple(_read_term(where, part, labels) for part in parts[::2])
    for (_, left), (_, right) in pairwise(terms):
        if left == right:
            both = "two numbers" if left is None else f"{left} with itself"
            raise FederatedError(f"{where}: claim compares {both}, which says nothing about the runs; found {text!r}.")
    return terms, tuple(parts[1::2])


def _read_term(where: str, text: str, labels: tuple[Label, ...]) -> tuple[float, Label | None]:
    """Return a side of an inequality: a label, a number, or a number times a label."""
    if text in labels:
        return 1.0, text
    factor, times, label = text.partition("*")
    try:
        number = float(factor)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise unknown(f"{where}.claim", "label", text, labels)
    if not times:
        return number, None
    if label.strip() not in labels:
        raise unknown(f"{where}.claim", "label", label.strip(), labels)
    return number, label.strip()
