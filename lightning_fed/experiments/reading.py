"""Experiments read from YAML; whatever is wrong with a file is named before anything runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_fed.core.arguments import check_count
from lightning_fed.core.errors import FederatedError
from lightning_fed.experiments.experiment import METHOD, Axis, Experiment, Label, Scale, Tune
from lightning_fed.experiments.outputs import read_claims, read_figures, read_tables
from lightning_fed.experiments.overrides import Config, overlay
from lightning_fed.experiments.places import read_skip
from lightning_fed.experiments.quantities import Metric, parse_quantity
from lightning_fed.experiments.yaml_files import check_keys, read_yaml, unknown

__all__ = ["PAPERS", "find_experiment", "make_tune_axis", "read_axis", "read_base", "read_experiment", "read_metrics"]

PAPERS = Path(__file__).parent.parent / "papers"
"""The experiments that come with the package."""

_KEYS = (
    "title", "paper", "item", "notes", "base", "methods", "axes", "skip", "tune", "seeds", "metrics", "figures",
    "tables", "claims", "scales",
)  # fmt: skip
_REQUIRED = ("title", "paper", "item", "base", "methods", "metrics", "scales")
_PARTS = ("trainer", "model", "data", "optimizer", "lr_scheduler")
_RUNNERS = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "default_root_dir")


def find_experiment(name: str) -> Path:
    """Return the file of an experiment: one that comes with the package, by its name, or any other, by its path.

    Raises:
        FederatedError: If there is no such experiment; it lists those there are.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return path
    known = {found.stem: found for found in sorted(PAPERS.glob("*.yaml"))}
    if name not in known:
        raise unknown("reproduce", "experiment", name, known)
    return known[name]


def read_experiment(path: Path) -> Experiment:
    """Return the experiment that a file states; docs/reproducing.md describes the format.

    Raises:
        FederatedError: If the file is not of that format; the message names the place and what may stand there.
    """
    where = str(path)
    found = check_keys(where, read_yaml(path), _KEYS, _REQUIRED)
    metrics = read_metrics(f"{where}: metrics", found["metrics"])
    axes = {
        name: read_axis(f"{where}: axes.{name}", name, axis) for name, axis in _mapping(where, found, "axes").items()
    }
    if METHOD in axes:
        raise FederatedError(f"{where}: axes.{METHOD} has the name of the methods' own axis. Give it another one.")
    axes[METHOD] = read_axis(f"{where}: methods", METHOD, found["methods"])
    labels = {name: tuple(axis.choices) for name, axis in axes.items()}
    scales = {str(name): _read_scale(f"{where}: scales.{name}", str(name), scale, axes)
              for name, scale in _mapping(where, found, "scales").items()}  # fmt: skip
    if "full" not in scales:
        raise FederatedError(f"{where}: scales lacks full, the paper's own scale; write `full: {{}}`.")
    outputs = (found.get(name) for name in ("figures", "tables", "claims"))
    figures, tables, claims = outputs
    experiment = Experiment(
        name=path.stem,
        file=path,
        **{name: _text(where, found, name) for name in ("title", "paper", "item", "notes")},
        base=read_base(f"{where}: base", found["base"], path.parent),
        axes=axes,
        skip=read_skip(f"{where}: skip", found.get("skip"), labels),
        tune=_read_tune(f"{where}: tune", found.get("tune"), metrics),
        seeds=check_count(where, "seeds", found.get("seeds", 1)),
        metrics=metrics,
        figures=read_figures(f"{where}: figures", figures, labels, metrics),
        tables=read_tables(f"{where}: tables", tables, labels, metrics),
        claims=read_claims(f"{where}: claims", claims, labels, metrics, tuple(scales)),
        scales=scales,
    )
    _check_tuned(where, experiment)
    return experiment


def read_base(where: str, base: Any, folder: Path) -> Config:
    """Return a configuration: a mapping, the name of a file relative to a folder, or a list of both, stacked.

    Raises:
        FederatedError: If it is none of these, or has keys that no configuration has.
    """
    config: Config = {}
    for part in base if isinstance(base, list) else [base]:
        read = read_yaml(folder / part) if isinstance(part, str) else part
        config = overlay(config, _check_overrides(where, read))
    return config


def read_metrics(where: str, found: Any) -> dict[str, Metric]:
    """Return the metrics by name.

    Raises:
        FederatedError: If there are none, or one has no mode.
    """
    metrics = {}
    for name, entry in check_keys(where, found, list(found) if isinstance(found, Mapping) else ()).items():
        place = f"{where}.{name}"
        checked = check_keys(place, entry, ("mode", "label"), ("mode",))
        if checked["mode"] not in ("max", "min"):
            raise FederatedError(f"{place}: mode must be max or min, found {checked['mode']!r}.")
        metrics[str(name)] = Metric(str(name), checked["mode"], str(checked.get("label", name)))
    if not metrics:
        raise FederatedError(f"{where}: name at least one metric, such as val_acc: {{mode: max}}.")
    return metrics


def read_axis(where: str, name: str, found: Any) -> Axis:
    """Return an axis: labels with overrides, or a key with values, or several keys in step with lists of values.

    Raises:
        FederatedError: If it is none of these.
    """
    if isinstance(found, Mapping) and "key" in found:
        return Axis(name, _values(where, check_keys(where, found, ("key", "values"), ("key", "values"))))
    if not isinstance(found, Mapping) or not found:
        raise FederatedError(
            f"{where} must be labels with overrides, such as {{small: {{trainer.max_rounds: 5}}}}, or a key with"
            f" values, such as {{key: trainer.max_rounds, values: [5, 10]}}; found {found!r}."
        )
    choices, tune = {}, {}
    for label, overrides in found.items():
        place = f"{where}.{label}"
        entries = dict(overrides) if isinstance(overrides, Mapping) else overrides
        if isinstance(entries, dict):
            tune[_label(place, label)] = make_tune(f"{place}.tune", entries.pop("tune", None))
        choices[_label(place, label)] = _check_overrides(place, entries)
    return Axis(name, choices, tune)


def make_tune(where: str, found: Any) -> dict[str, Any]:
    """Return what a label tunes, checked: lists of values in place of others, or axes of its own.

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
    """Return an axis of tuned values, which has a key and values.

    Raises:
        FederatedError: If it has not.
    """
    return Axis(name, _values(where, check_keys(where, found, ("key", "values"), ("key", "values"))))


def _values(where: str, axis: Mapping[str, Any]) -> dict[Label, Mapping[str, Any]]:
    key, values = axis["key"], axis["values"]
    if not isinstance(values, list) or not values:
        raise FederatedError(f"{where}: values must be a list, found {values!r}.")
    if isinstance(key, list):
        if any(not isinstance(value, list) or len(value) != len(key) for value in values):
            raise FederatedError(f"{where}: each of the values must be a list of {len(key)}, one for each key.")
        rows = {", ".join(map(str, value)): dict(zip(map(str, key), value, strict=True)) for value in values}
    else:
        rows = {str(value): {str(key): value} for value in values}
    if len(rows) != len(values):
        raise FederatedError(f"{where}: a value comes twice in {values!r}.")
    return {label: _check_overrides(f"{where}: {label}", overrides) for label, overrides in rows.items()}


def _label(where: str, label: Any) -> Label:
    if isinstance(label, bool) or label is None:
        raise FederatedError(f"{where}: YAML reads this label as {label!r}; put it in quotes.")
    return str(label)


def _check_overrides(where: str, found: Any) -> Config:
    """Return overrides whose keys can be those of a configuration, and are not the runner's."""
    if not isinstance(found, Mapping):
        raise FederatedError(f"{where} must be a mapping of keys of a configuration to values, found {found!r}.")
    for key in found:
        first = str(key).split(".")[0].rstrip("+")
        if first not in _PARTS and first != "seed_everything":
            raise unknown(where, "key", key, (*_PARTS, "seed_everything"))
    config = overlay({}, found)
    for name in _RUNNERS:
        if isinstance(config.get("trainer"), dict) and name in config["trainer"]:
            raise FederatedError(f"{where}: trainer.{name} is the runner's to set. Leave it out.")
    return dict(found)


def _read_tune(where: str, found: Any, metrics: Mapping[str, Metric]) -> Tune | None:
    if found is None:
        return None
    checked = check_keys(where, found, ("by", "seeds", "grid"), ("by", "grid"))
    seeds = checked.get("seeds")
    grid = checked["grid"]
    if not isinstance(grid, Mapping):
        raise FederatedError(f"{where}.grid must name what is tuned, such as lr: {{key: ..., values: [...]}}.")
    return Tune(
        by=parse_quantity(f"{where}.by", checked["by"], metrics),
        seeds=None if seeds is None else check_count(where, "seeds", seeds),
        grid={str(name): make_tune_axis(f"{where}.grid.{name}", str(name), axis) for name, axis in grid.items()},
    )


def _read_scale(where: str, name: str, found: Any, axes: Mapping[str, Axis]) -> Scale:
    checked = check_keys(where, found or {}, ("changed", "overrides", "seeds", "methods", "axes", "tune"))
    changed = checked.get("changed", "")
    if not isinstance(changed, str) or (name != "full" and not changed):
        raise FederatedError(f"{where}: say in `changed` what differs from the paper.")
    kept = dict(_mapping(where, checked, "axes"))
    if "methods" in checked:
        kept[METHOD] = checked["methods"]
    labels = {}
    for axis, entry in kept.items():
        if axis not in axes:
            raise unknown(f"{where}.axes", "axis", axis, axes)
        labels[str(axis)] = _kept_labels(f"{where}.{axis}", entry, axes[axis])
    seeds = checked.get("seeds")
    return Scale(
        name=name,
        changed=changed.strip(),
        overrides=_check_overrides(f"{where}.overrides", checked.get("overrides") or {}),
        seeds=None if seeds is None else check_count(where, "seeds", seeds),
        labels=labels,
        tune=make_tune(f"{where}.tune", checked.get("tune")),
    )


def _kept_labels(where: str, found: Any, axis: Axis) -> dict[Label, Mapping[str, Any]]:
    if not isinstance(found, list | Mapping) or not found:
        raise FederatedError(f"{where} must be a list of labels, or labels with overrides; found {found!r}.")
    entries = found if isinstance(found, Mapping) else dict.fromkeys(found)
    kept: dict[Label, Mapping[str, Any]] = {
        str(label): _check_overrides(f"{where}.{label}", entry or {}) for label, entry in entries.items()
    }
    for label in kept:
        if label not in axis.choices:
            raise unknown(where, "label", label, axis.choices)
    return kept


def _check_tuned(where: str, experiment: Experiment) -> None:
    """Refuse lists of values for something that is not tuned, and tuning without a rule."""
    named = {} if experiment.tune is None else dict(experiment.tune.grid)
    own = [
        (f"{where}: {axis.name}.{label}", tune)
        for axis in experiment.axes.values()
        for label, tune in axis.tune.items()
    ]
    own += [(f"{where}: scales.{scale.name}", scale.tune) for scale in experiment.scales.values()]
    anywhere = {name for _, tune in own for name, entry in tune.items() if isinstance(entry, Mapping)} | set(named)
    for place, tune in own:
        if tune and experiment.tune is None:
            raise FederatedError(f"{place}.tune: the file has no tune.by, the rule by which a value is chosen.")
        for name, entry in tune.items():
            if isinstance(entry, list) and name not in anywhere:
                raise unknown(f"{place}.tune", "tuned value", name, anywhere)


def _mapping(where: str, found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = found.get(name) or {}
    if not isinstance(value, Mapping):
        raise FederatedError(f"{where}: {name} must be a mapping, found {value!r}.")
    return value


def _text(where: str, found: Mapping[str, Any], name: str) -> str:
    value = found.get(name, "")
    if not isinstance(value, str) or (name in _REQUIRED and not value.strip()):
        raise FederatedError(f"{where}: {name} must be a text, found {value!r}.")
    return " ".join(value.split())
