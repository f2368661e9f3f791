"""Read the axes of a grid, and its tuned values, from a file."""

from collections.abc import Mapping
from typing import Any

from lightning_fed.core.errors import FederatedError
from lightning_fed.lab.experiment import Axis, Label
from lightning_fed.lab.overlays import Config, overlay
from lightning_fed.lab.reading_claims import check_label
from lightning_fed.lab.yaml_files import check_keys, unknown

_PARTS = ("trainer", "model", "data", "optimizer", "lr_scheduler")
_RUNNERS = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "default_root_dir")
_TAKEN = ("seed", "metric", "tuned", "chosen")  # in the names of cells, in figures, and as columns of files


def read_axis(where: str, name: str, found: Any) -> Axis:
    """Return an axis: labels with overrides, a key with values, or several keys with one list of values per choice.

    Raises:
        FederatedError: If it has another form, or results already use its name.
    """
    if isinstance(found, Mapping) and "key" in found:
        choices = _values(where, check_keys(where, found, ("key", "values"), ("key", "values")))
        for label in choices:
            check_label(where, label)
        axis = Axis(name, choices)
    elif not isinstance(found, Mapping) or not found:
        raise FederatedError(
            f"{where} must be labels with overrides, such as {{small: {{trainer.max_rounds: 5}}}}, or a key with"
            f" values, such as {{key: trainer.max_rounds, values: [5, 10]}}; found {found!r}."
        )
    else:
        axis = read_labels(where, name, found)
    if name in _TAKEN:
        raise FederatedError(f"{where}: figures or files of results use the name {name!r}. Give the axis another one.")
    return axis


def read_labels(where: str, name: str, found: Mapping[Any, Any]) -> Axis:
    """Return an axis of labels with overrides. A label's key ``tune`` has its tuned values.

    Raises:
        FederatedError: If a label or its content is invalid.
    """
    choices, tune = {}, {}
    for label, overrides in found.items():
        place, read = f"{where}.{label}", _label(where, label)
        entries = dict(overrides) if isinstance(overrides, Mapping) else overrides
        if isinstance(entries, dict):
            tune[read] = read_tuned(f"{place}.tune", entries.pop("tune", None))
        choices[read] = check_overrides(place, entries)
    return Axis(name, choices, tune)


def read_tuned(where: str, found: Any) -> dict[str, Any]:
    """Check and return tuned values by name: a key with values, or a list that replaces the values of such an entry.

    Raises:
        FederatedError: If an entry is neither.
    """
    entries = {} if found is None else found
    if not isinstance(entries, Mapping):
        raise FederatedError(f"{where} must be a mapping such as {{lr: [0.1, 1.0]}}, found {found!r}.")
    for name, entry in entries.items():
        if not isinstance(entry, list) or not entry:
            make_tune_axis(f"{where}.{name}", str(name), entry)
    return {str(name): entry for name, entry in entries.items()}


def make_tune_axis(where: str, name: str, found: Any) -> Axis:
    """Return an axis of tuned values from a key and its values.

    Raises:
        FederatedError: If either is missing, or there are other keys.
    """
    return Axis(name, _values(where, check_keys(where, found, ("key", "values"), ("key", "values"))))


def revise(tuned: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return tuned values with changes applied. A list replaces an entry's values, anything else the whole entry.

    Args:
        tuned: The tuned values, as :func:`read_tuned` returns them.
        changes: The changes, of the same form.

    Example:
        >>> revise({"lr": {"key": "model.init_args.lr", "values": [0.1]}}, {"lr": [1.0]})
        {'lr': {'key': 'model.init_args.lr', 'values': [1.0]}}
    """
    revised = dict(tuned)
    for name, entry in changes.items():
        old = revised.get(name)
        revised[name] = {**old, "values": entry} if isinstance(entry, list) and isinstance(old, Mapping) else entry
    return revised


def check_overrides(where: str, found: Any) -> Config:
    """Return overrides, after checking that a configuration may have their keys and the runner does not set them.

    Raises:
        FederatedError: If a key is not allowed.
    """
    if not isinstance(found, Mapping):
        raise FederatedError(f"{where} must be a mapping of keys of a configuration to values, found {found!r}.")
    for key in found:
        first = str(key).split(".")[0].rstrip("+")
        if first == "seed_everything":
            raise FederatedError(
                f"{where}: seed_everything is the seed of the cell, which would replace this value. Write seeds: N for"
                " the seeds 0 to N - 1."
            )
        if first not in _PARTS:
            raise unknown(where, "key", key, _PARTS)
    config = overlay({}, found)
    for name in _RUNNERS:
        if isinstance(config.get("trainer"), dict) and name in config["trainer"]:
            raise FederatedError(f"{where}: trainer.{name} is the runner's to set. Leave it out.")
    return dict(found)


def _values(where: str, axis: Mapping[str, Any]) -> dict[Label, Mapping[str, Any]]:
    key, values = axis["key"], axis["values"]
    if not isinstance(values, list) or not values:
        raise FederatedError(f"{where}: values must be a list of at least one value, found {values!r}.")
    if isinstance(key, list):
        if len(set(map(str, key))) < len(key):
            raise FederatedError(f"{where}: a key comes twice in {key!r}.")
        if any(not isinstance(value, list) or len(value) != len(key) for value in values):
            raise FederatedError(f"{where}: each of the values must be a list of {len(key)}, one for each key.")
        rows = {", ".join(map(str, value)): dict(zip(map(str, key), value, strict=True)) for value in values}
    else:
        rows = {str(value): {str(key): value} for value in values}
    if len(rows) != len(values):
        raise FederatedError(f"{where}: a value comes twice in {values!r}.")
    return {label: check_overrides(f"{where}: {label}", overrides) for label, overrides in rows.items()}


def _label(where: str, label: Any) -> Label:
    if isinstance(label, bool) or label is None:
        raise FederatedError(f"{where}: YAML reads this label as {label!r}; put it in quotes.")
    return check_label(where, str(label))
