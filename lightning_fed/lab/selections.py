"""Parts of a grid, by the labels of its axes."""

from collections.abc import Mapping
from typing import Any

from lightning_fed.core.errors import FederatedError
from lightning_fed.lab.experiment import Label, Selection
from lightning_fed.lab.yaml_files import unknown


def read_selection(where: str, found: Any, labels: Mapping[str, tuple[Label, ...]]) -> Selection:
    """Return a part of a grid, given as a label or a list of labels for each axis that it names.

    Args:
        where: The place in the file, for messages.
        found: The file's value; None is the whole grid.
        labels: The labels of every axis.

    Raises:
        FederatedError: If there is no such axis or label.
    """
    if not isinstance(found or {}, Mapping):
        raise FederatedError(f"{where} must name axes and labels, such as {{method: FedAvg}}; found {found!r}.")
    selection = {}
    for axis, entry in (found or {}).items():
        if axis not in labels:
            raise unknown(where, "axis", axis, labels)
        named = tuple(str(label) for label in (entry if isinstance(entry, list) else [entry]))
        for label in named:
            if label not in labels[axis]:
                raise unknown(f"{where}.{axis}", "label", label, labels[axis])
        selection[str(axis)] = named
    return selection


def read_skip(where: str, found: Any, labels: Mapping[str, tuple[Label, ...]]) -> tuple[Selection, ...]:
    """Return the parts of a grid to leave out.

    Raises:
        FederatedError: If it is not a list, or there is no such axis or label.
    """
    if not isinstance(found or [], list):
        raise FederatedError(
            f"{where} must be a list of parts of the grid, such as [{{method: FedAvg}}]; found {found!r}."
        )
    if not all(found or []):
        raise FederatedError(f"{where}: a part that names nothing is all of the grid.")
    return tuple(read_selection(where, selection, labels) for selection in found or [])


def is_within(point: Mapping[str, Label], selection: Selection) -> bool:
    """Return whether a point lies in a part of a grid. Only axes that both name are compared.

    Example:
        >>> is_within({"method": "FedAvg", "K": "10"}, {"K": ("1", "10")})
        True
    """
    return all(point[axis] in named for axis, named in selection.items() if axis in point)
