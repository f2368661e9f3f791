"""Read experiments from YAML. Any error in a file is reported before anything runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_fed.core.arguments import check_count, check_flags
from lightning_fed.core.errors import FederatedError
from lightning_fed.lab.axes import check_overrides, make_tune_axis, read_axis, read_labels, read_tuned
from lightning_fed.lab.experiment import METHOD, Axis, Cases, Experiment, Label, Scale, Tune
from lightning_fed.lab.outputs import read_figures, read_tables
from lightning_fed.lab.overlays import Config, overlay
from lightning_fed.lab.quantities import Metric, parse_quantity
from lightning_fed.lab.reading_claims import ClaimReader, read_departures
from lightning_fed.lab.selections import read_selection, read_skip
from lightning_fed.lab.yaml_files import as_list, check_keys, read_text, read_yaml, unknown

PAPERS = Path(__file__).parent / "papers"
"""The experiments that come with the package."""

_KEYS = (
    "title", "paper", "item", "own", "notes", "departures", "random", "base", "methods", "axes", "skip", "tune",
    "seeds", "metrics", "figures", "tables", "claims", "scales",
)  # fmt: skip
_SCALE = ("departures", "overrides", "seeds", "methods", "axes", "tune", "cases", "also_by")
_REQUIRED = ("title", "paper", "item", "base", "methods", "metrics", "scales")


def find_experiment(name: str) -> Path:
    """Return the file of an experiment, given the name of one in the package or the path of any other.

    Raises:
        FederatedError: If there is no such experiment. The message lists the known ones.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return path
    known = {found.stem: found for found in sorted(PAPERS.glob("*.yaml"))}
    if name not in known:
        raise unknown("reproduce", "experiment", name, known)
    return known[name]


def read_experiment(path: Path) -> Experiment:
    """Read an experiment from a file. docs/reproducing.md describes the format.

    Raises:
        FederatedError: If the file has another format. The message names the place and the allowed content.
    """
    where = str(path)
    found = check_keys(where, read_yaml(path), _KEYS, _REQUIRED)
    metrics = read_metrics(f"{where}: metrics", found["metrics"], cases=True)
    axes = {
        name: read_axis(f"{where}: axes.{name}", name, axis) for name, axis in _mapping(where, found, "axes").items()
    }
    if METHOD in axes:
        raise FederatedError(f"{where}: axes.{METHOD} has the name of the methods' own axis. Give it another one.")
    axes[METHOD] = read_axis(f"{where}: methods", METHOD, found["methods"])
    labels = {name: tuple(axis.choices) for name, axis in axes.items()}
    scales = {str(name): _read_scale(f"{where}: scales.{name}", str(name), scale, axes, metrics)
              for name, scale in _mapping(where, found, "scales").items()}  # fmt: skip
    if "full" not in scales:
        raise FederatedError(f"{where}: scales lacks full, the paper's own scale; write `full: {{}}`.")
    check_flags(where, random=found.get("random", True), own=found.get("own", False))
    experiment = Experiment(
        name=path.stem,
        file=path,
        **{name: _text(where, found, name) for name in ("title", "paper", "item", "notes")},
        departures=read_departures(f"{where}: departures", found.get("departures")),
        base=read_base(f"{where}: base", found["base"], path.parent),
        axes=axes,
        skip=read_skip(f"{where}: skip", found.get("skip"), labels),
        tune=_read_tune(f"{where}: tune", found.get("tune"), metrics),
        seeds=check_count(where, "seeds", found.get("seeds", 1)),
        is_random=found.get("random", True),
        is_own=found.get("own", False),
        metrics=metrics,
        cases=_read_cases(
            f"{where}: metrics",
            {name: entry["cases"] for name, entry in found["metrics"].items() if "cases" in entry},
            metrics,
            labels,
        ),
        figures=read_figures(f"{where}: figures", found.get("figures"), labels, metrics),
        tables=read_tables(f"{where}: tables", found.get("tables"), labels, metrics),
        claims=ClaimReader(labels, metrics, tuple(scales)).read(f"{where}: claims", found.get("claims")),
        scales=scales,
    )
    _check_tuned(where, experiment)
    return experiment


def read_base(where: str, base: Any, folder: Path) -> Config:
    """Return a configuration: a mapping, the name of a file relative to a folder, or a list of both, stacked.

    Raises:
        FederatedError: If it has another form, or a key that is not allowed.
    """
    config: Config = {}
    for part in base if isinstance(base, list) else [base]:
        read = read_yaml(folder / part) if isinstance(part, str) else part
        config = overlay(config, check_overrides(where, read))
    return config


def read_metrics(where: str, found: Any, cases: bool = False) -> dict[str, Metric]:
    """Return the metrics by name.

    Args:
        where: The place in the file, for messages.
        found: The file's value.
        cases: Whether each may have its number of test cases.

    Raises:
        FederatedError: If there are none, or one has no mode.
    """
    if not isinstance(found, Mapping) or not found:
        raise FederatedError(f"{where}: name at least one metric, such as val_acc: {{mode: max}}; found {found!r}.")
    metrics = {}
    for name, entry in found.items():
        place = f"{where}.{name}"
        keys = ("mode", "label", "percent", *(["cases"] if cases else []))
        checked = check_keys(place, entry, keys, ("mode",))
        if checked["mode"] not in ("max", "min"):
            raise FederatedError(f"{place}: mode must be max or min, found {checked['mode']!r}.")
        check_flags(place, percent=checked.get("percent", False))
        label = str(checked.get("label", name))
        metrics[str(name)] = Metric(str(name), checked["mode"], label, 100.0 if checked.get("percent") else 1.0)
    return metrics


def _read_tune(where: str, found: Any, metrics: Mapping[str, Metric]) -> Tune | None:
    if found is None:
        return None
    checked = check_keys(where, found, ("by", "seeds", "grid"), ("by",))
    seeds = checked.get("seeds")
    grid = checked.get("grid", {})
    if not isinstance(grid, Mapping):
        raise FederatedError(f"{where}.grid must name what is tuned, such as lr: {{key: ..., values: [...]}}.")
    for name, entry in grid.items():
        make_tune_axis(f"{where}.grid.{name}", str(name), entry)
    return Tune(
        by=parse_quantity(f"{where}.by", checked["by"], metrics),
        seeds=None if seeds is None else check_count(where, "seeds", seeds),
        grid={str(name): entry for name, entry in grid.items()},
    )


def _read_scale(where: str, name: str, found: Any, axes: Mapping[str, Axis], metrics: Mapping[str, Metric]) -> Scale:
    checked = check_keys(where, found or {}, _SCALE)
    departures = read_departures(f"{where}.departures", checked.get("departures"))
    if name != "full" and not departures:
        raise FederatedError(f"{where}: say in `departures` what differs from the paper: {{what, paper, here, why}}.")
    kept = dict(_mapping(where, checked, "axes"))
    if "methods" in checked:
        kept[METHOD] = checked["methods"]
    for axis in kept:
        if axis not in axes:
            raise unknown(f"{where}.axes", "axis", axis, axes)
    seeds = checked.get("seeds")
    return Scale(
        name=name,
        departures=departures,
        overrides=check_overrides(f"{where}.overrides", checked.get("overrides") or {}),
        seeds=None if seeds is None else check_count(where, "seeds", seeds),
        axes={str(axis): _read_kept(f"{where}.{axis}", entry, axes[axis]) for axis, entry in kept.items()},
        tune=_read_lists(f"{where}.tune", checked.get("tune")),
        cases=_read_cases(
            f"{where}.cases", checked.get("cases"), metrics, {name: tuple(axis.choices) for name, axis in axes.items()}
        ),
        also_by=parse_quantity(f"{where}.also_by", checked["also_by"], metrics) if "also_by" in checked else None,
    )


def _read_cases(
    where: str, found: Any, metrics: Mapping[str, Metric], labels: Mapping[str, tuple[Label, ...]]
) -> dict[str, Cases]:
    """Return the number of test cases behind metrics: one number, or one for each label of an axis."""
    cases: dict[str, Cases] = {}
    for metric, entry in check_keys(where, found or {}, metrics).items():
        place = f"{where}.{metric}"
        if not isinstance(entry, Mapping):
            cases[metric] = (({}, check_count(place, "cases", entry)),)
            continue
        if len(entry) != 1 or not isinstance(of := next(iter(entry.values())), Mapping):
            raise FederatedError(
                f"{place}: cases must be a number, or a number for each label of an axis, such as"
                f" {{data: {{MNIST: 10000}}}}; found {entry!r}."
            )
        axis = next(iter(entry))
        cases[metric] = tuple(
            (read_selection(place, {axis: label}, labels), check_count(place, "cases", number))
            for label, number in of.items()
        )
    return cases


def _read_kept(where: str, found: Any, axis: Axis) -> Axis:
    """Return the labels of an axis that a scale keeps, each with the scale's overrides."""
    if not isinstance(found, list | Mapping) or not found:
        raise FederatedError(f"{where} must be a list of labels, or labels with overrides; found {found!r}.")
    entries = found if isinstance(found, Mapping) else dict.fromkeys(map(str, found))
    for label in entries:
        if str(label) not in axis.choices:
            raise unknown(where, "label", label, axis.choices)
    return read_labels(where, axis.name, {label: entry or {} for label, entry in entries.items()})


def _read_lists(where: str, found: Any) -> dict[str, list[Any]]:
    """Return lists of values by tuned name."""
    tuned = read_tuned(where, found)
    for name, entry in tuned.items():
        if not isinstance(entry, list):
            raise FederatedError(f"{where}.{name} must be a list of values: its key is that of the experiment's.")
    return tuned


def _check_tuned(where: str, experiment: Experiment) -> None:
    """Refuse values for an unknown tuned name, tuning without a rule, and a rule without tuned values.

    Also refuse tuned values that would replace an axis, since they override its labels.
    """
    parts = {"": experiment.axes, **{f"scales.{scale.name}.": scale.axes for scale in experiment.scales.values()}}
    own = {
        f"{where}: {part}{axis.name}.{label}.tune": tuned
        for part, axes in parts.items()
        for axis in axes.values()
        for label, tuned in axis.tune.items()
    }
    own |= {f"{where}: scales.{scale.name}.tune": scale.tune for scale in experiment.scales.values()}
    grid = {} if experiment.tune is None else experiment.tune.grid
    names = {name for tuned in (grid, *own.values()) for name, entry in tuned.items() if isinstance(entry, Mapping)}
    ruled = own | {f"{where}: scales.{scale.name}.also_by": scale.also_by for scale in experiment.scales.values()}
    for place, given in ruled.items():
        if given and experiment.tune is None:
            raise FederatedError(f"{place}: the file has no tune.by, the rule that chooses a value.")
    for place, tuned in own.items():
        for name in tuned:
            if name not in names:
                raise unknown(place, "tuned value", name, sorted(names))
    if experiment.tune is not None and not names:
        raise FederatedError(
            f"{where}: tune.by chooses among values, and nothing is tuned. Add tune.grid, or leave tune out."
        )
    for name, entry in grid.items():
        for key in map(str, as_list(entry["key"])):
            for axis in experiment.axes.values():
                if all(key in overrides for overrides in axis.choices.values()):
                    raise FederatedError(
                        f"{where}: tune.grid.{name} would replace {key}, which every label of the axis {axis.name}"
                        " sets. Either tune it, or make it an axis."
                    )


def _mapping(where: str, found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = found.get(name) or {}
    if not isinstance(value, Mapping):
        raise FederatedError(f"{where}: {name} must be a mapping, found {value!r}.")
    return value


def _text(where: str, found: Mapping[str, Any], name: str) -> str:
    value = read_text(f"{where}: {name}", found.get(name, ""))
    if name in _REQUIRED and not value:
        raise FederatedError(f"{where}: {name} must not be empty.")
    return value
