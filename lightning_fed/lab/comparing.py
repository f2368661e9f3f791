"""The command ``lightning-fed compare``: compare a metric over rounds and other costs, from any runs' logs."""

import csv
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import yaml
from jsonargparse import ArgumentParser

from lightning_fed.core.errors import FederatedError
from lightning_fed.lab.figures import COLORS, add_legend, new_figure, save
from lightning_fed.lab.numbers import format_number
from lightning_fed.lab.quantities import COSTS, Curve, Metric, Quantity, Series, cost, first_round
from lightning_fed.lab.tables import markdown
from lightning_fed.lab.yaml_files import unknown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_METHOD = "method/text_summary"  # TensorBoard's tag of the text "method"
_LABELS = {
    "rounds": "rounds",
    "gradients": "gradients computed",
    "bytes": "bytes sent, up and down",
    "simulated seconds": "simulated seconds",
}


def compare(args: Sequence[str]) -> None:
    """Draw runs side by side, and print and write a table of them.

    Args:
        args: The arguments after ``lightning-fed compare`` on the command line.

    Raises:
        FederatedError: If a folder has no log, or a run did not log the metric.
        SystemExit: If the arguments are invalid.
    """
    options = make_parser().parse_args(list(args))
    if options.mode is None and options.metric != "val_acc":
        raise FederatedError(f"compare: pass --mode max if high values of {options.metric} are good, or --mode min.")
    metric = Metric(options.metric, options.mode or "max", options.metric)
    runs = {}
    for name, folder in _named(options.runs).items():
        series, method = _read(Path(folder))
        runs[f"{name}, {method}" if method else name] = series  # `version_0` alone says nothing
    for name, series in runs.items():
        if not series.get(metric.name):
            raise unknown(name, "metric", metric.name, sorted(series))
    head, rows = _table(runs, metric, options.target)
    print(markdown(head, rows))  # first, since the figure needs matplotlib
    figure = _figure(runs, metric, options.target)
    out = Path(options.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FederatedError(f"--out {out} cannot be made a folder: {error.strerror}. Name another one.") from error
    save(figure, out / "compare.png")
    text = f"# {metric.label} of {len(runs)} runs\n\n![compare.png](compare.png)\n\n{markdown(head, rows)}\n"
    (out / "compare.md").write_text(text, encoding="utf-8")
    with (out / "compare.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([head, *rows])
    print(f"\nwritten to {out}: compare.md, compare.csv and compare.png")


def read_log(folder: Path) -> Series:
    """Return a run's logged values, from its TensorBoard events, its ``metrics.csv`` or its ``rounds.csv``.

    Args:
        folder: The folder with the files, such as ``lightning_logs/version_0_Scaffold``.

    Raises:
        FederatedError: If there are no such files, or they have no values.
    """
    return _read(folder)[0]


def _read(folder: Path) -> tuple[Series, str]:
    """Return what a run logged, and its method; empty if the log does not name it."""
    if not folder.is_dir():
        raise FederatedError(f"compare: {folder} is not a folder. Name one such as lightning_logs/version_0_Scaffold.")
    if list(folder.glob("events.out.tfevents*")):
        series, method = _read_events(folder)
    elif tables := [folder / name for name in ("metrics.csv", "rounds.csv") if (folder / name).is_file()]:
        series, method = _read_table(tables[0]), _method(folder)
    else:
        inside = sorted({path.parent.name for path in folder.glob("*/events.out.tfevents*")})
        hint = f" There are logs in {', '.join(inside)} inside it." if inside else ""
        raise FederatedError(f"compare: {folder} has neither events.out.tfevents* nor metrics.csv.{hint}")
    if not any(series.values()):
        raise FederatedError(f"compare: the log in {folder} holds no values.")
    return series, method


def _read_events(folder: Path) -> tuple[dict[str, dict[int, float]], str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag not in ("epoch", "hp_metric")]
    # of several runs in this folder the events are the last one's, and hparams.yaml is the first one's
    texts = events.Tensors(_METHOD) if _METHOD in events.Tags()["tensors"] else []
    method = texts[-1].tensor_proto.string_val[0].decode() if texts else _method(folder)
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in tags}, method


def _read_table(path: Path) -> dict[str, dict[int, float]]:
    """Read a CSV log. Its steps are rounds."""
    series: dict[str, dict[int, float]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                step = int(row.get("step") or row.get("round") or "")
                values = {tag: float(value) for tag, value in row.items() if value and tag not in ("epoch", "step")}
            except (TypeError, ValueError, AttributeError) as error:
                raise FederatedError(f"compare: {path}, line {number}, is not a line of a log: {error}.") from error
            for tag, value in values.items():
                series.setdefault(tag, {})[step] = value
    return series


def _named(folders: Sequence[str]) -> dict[str, str]:
    """Return the folders by name: the path without the prefix common to all."""
    whole = {folder: Path(os.path.abspath(folder)) for folder in folders}
    if len(set(whole.values())) < len(folders):
        raise FederatedError("compare: a run is named twice.")
    common = Path(os.path.commonpath([path.parent for path in whole.values()]))
    return {str(path.relative_to(common)): folder for folder, path in whole.items()}


def _method(folder: Path) -> str:
    """Return the method that a log's hyper-parameters name; empty if they name none."""
    try:
        settings = yaml.safe_load((folder / "hparams.yaml").read_text(encoding="utf-8"))
        return str(settings["algorithm"])
    except (OSError, UnicodeError, yaml.YAMLError, KeyError, TypeError):
        return ""  # another logger's file, or hyperparameters that are not plain values


def _table(runs: Mapping[str, Series], metric: Metric, target: float | None) -> tuple[list[str], list[list[str]]]:
    quantities = [Quantity(kind, kind, metric) for kind in ("final", "best")]
    if target is not None:
        quantities += [Quantity(kind, kind, metric, target) for kind in _measured(runs)]
    rows = []
    for name, series in runs.items():
        first, last = first_round(series), max(series[metric.name])
        rounds = f"{first} to {last}" if first > 1 else str(last)  # the best of a resumed run may precede its log
        rows.append([name, rounds, *(_value(quantity, series) for quantity in quantities)])
    return ["run", "rounds", *(quantity.label for quantity in quantities)], rows


def _measured(runs: Mapping[str, Series]) -> list[str]:
    """Return the costs that at least one run logged."""
    return [kind for kind, tags in COSTS.items() if any(all(map(series.get, tags)) for series in runs.values())]


def _value(quantity: Quantity, series: Series) -> str:
    try:
        value = quantity.of(series)
    except FederatedError:  # it was not logged
        return "-"
    if math.isfinite(value):
        return format_number(value)
    return "not reached" if quantity.is_cost else "not finite"


def _figure(runs: Mapping[str, Series], metric: Metric, target: float | None) -> "Figure":
    measured = _measured(runs)
    figure, (panels,) = new_figure(1, len(measured))
    for axes, kind in zip(panels, measured, strict=True):
        for i, (name, series) in enumerate(runs.items()):
            curve = _finite(series[metric.name])
            try:
                spent = cost(series, kind)
            except FederatedError:
                continue
            x, y = [spent[n] for n in curve], list(curve.values())
            axes.plot(
                x,
                y,
                label=name,
                color=COLORS[i % len(COLORS)],
                linewidth=1.5,
                linestyle=("-", "--", ":")[i // len(COLORS) % 3],
            )
        if target is not None:
            axes.axhline(target, color="0.5", linewidth=0.8, linestyle=":")
        axes.set_xlabel(_LABELS[kind])
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(metric.label)
    add_legend(figure, list(panels))
    return figure


def _finite(curve: Curve) -> dict[int, float]:
    return {number: value for number, value in curve.items() if math.isfinite(value)}


def make_parser() -> ArgumentParser:
    """Return the parser of the command."""
    parser = ArgumentParser(
        prog="lightning-fed compare",
        description="Print a table of runs, and draw a metric over rounds, gradients, bytes and simulated seconds.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", type=str, nargs="+", metavar="RUN", help="The folder of a TensorBoard or CSV log.")
    parser.add_argument("--metric", type=str, default="val_acc", help="The metric, by its name in the log.")
    parser.add_argument("--mode", type=Literal["max", "min"], help="max if high values are good, min if low ones are.")
    parser.add_argument(
        "--target", type=float, help="A value of the metric. The table then has the cost of reaching it."
    )
    parser.add_argument("--out", type=str, default="compared", help="The folder of the results.")
    return parser
