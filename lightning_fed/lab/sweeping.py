"""The command ``lightning-fed sweep``: a grid over any keys of a user's own configuration."""

import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from lightning_fed.compat.package import pl
from lightning_fed.core.arguments import check_count
from lightning_fed.core.errors import FederatedError
from lightning_fed.lab.axes import read_axis
from lightning_fed.lab.checking import check_outputs
from lightning_fed.lab.experiment import Experiment, Scale
from lightning_fed.lab.figures import draw_best, new_figure, save
from lightning_fed.lab.grid import Cell, Grid, Point
from lightning_fed.lab.how import losses, means
from lightning_fed.lab.options import add_run_options, command_line
from lightning_fed.lab.outputs import read_figures, read_tables
from lightning_fed.lab.overlays import Config, overlay
from lightning_fed.lab.quantities import Quantity, parse_quantity
from lightning_fed.lab.reading import read_metrics
from lightning_fed.lab.records import Record
from lightning_fed.lab.reproducing import draw_figures
from lightning_fed.lab.results import Results
from lightning_fed.lab.run_grid import run_grid
from lightning_fed.lab.selections import read_skip
from lightning_fed.lab.store import Store, writing_to
from lightning_fed.lab.tables import markdown, rows_of, write_series
from lightning_fed.lab.workers import make_workers
from lightning_fed.lab.yaml_files import check_keys, read_yaml, unknown

_KEYS = ("metrics", "axes", "skip", "seeds", "by", "figures", "tables")
_GRID = (
    "The grid, a YAML file, such as {metrics: {val_acc: {mode: max}}, axes: {lr: {key: model.init_args.lr, values:"
    " [0.1, 0.3]}}}."
)
_LEFT_OUT = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "default_root_dir")
_PARTS = ("seed_everything", "trainer", "model", "data", "optimizer", "lr_scheduler")


def sweep(args: Sequence[str]) -> None:
    """Run a grid over a configuration, and write a table, a figure and TensorBoard's hyper-parameters.

    Args:
        args: The arguments after ``lightning-fed sweep`` on the command line.

    Raises:
        FederatedError: If a file, a configuration or a data set is invalid. It is raised before the first cell.
        SystemExit: If the arguments are invalid, or on Ctrl-C.
    """
    options = make_parser().parse_args(list(args))
    entry = check_keys(options.grid, read_yaml(Path(options.grid)), _KEYS, ("metrics", "axes"))
    experiment = _read(options.grid, entry, _base(options.config))
    by = parse_quantity(f"{options.grid}: by", entry.get("by", "best"), experiment.metrics)
    grid = Grid(experiment, seeds=options.seeds, accelerator=options.accelerator)
    check_outputs(grid)
    new_figure(1, 1)  # fails without matplotlib now, not after hours
    out = Path(options.out or "swept")
    with Store(out) as store:
        results = run_grid(grid, store, make_workers(options.jobs), options.data_root)
        with writing_to(out):
            text = _page(results, by, command_line("sweep", args), out)
            (out / "sweep.md").write_text(text, encoding="utf-8")
            write_series(out / "sweep_rounds.csv", results)
            _log_hyper_parameters(results, out / "tensorboard")
    print(f"{text}\nwritten to {out}; compare the cells with `tensorboard --logdir {out / 'tensorboard'}`")


def _base(paths: Sequence[str]) -> Config:
    """Return the stacked configurations, without the settings that the runner replaces."""
    config: Config = {}
    for path in paths:
        found = read_yaml(Path(path))
        for name, part in found.items():
            if name not in _PARTS and part is not None:  # --print_config writes None, for example for ckpt_path
                raise unknown(path, "key for the cells of a sweep", name, _PARTS)
        config = overlay(config, found)
    trainer = config.get("trainer") or {}
    if not isinstance(trainer, dict):
        raise FederatedError(
            f"{' '.join(paths)}: trainer must be a mapping of keys to values, found {trainer!r}. A sweep reads no file"
            " inside a configuration: write its keys here."
        )
    left_out = [f"trainer.{name}" for name in _LEFT_OUT if trainer.pop(name, None) is not None]
    callbacks = trainer.get("callbacks") or []
    savers = [c for c in callbacks if isinstance(c, dict) and "Checkpoint" in str(c.get("class_path"))]
    if savers:
        trainer["callbacks"] = [callback for callback in callbacks if callback not in savers]
        left_out += [str(callback["class_path"]) for callback in savers]
    if config.get("seed_everything") not in (None, True, False, 0):
        print(f"seed_everything {config['seed_everything']} is left out: the seeds of the cells are 0 to `seeds` - 1.")
    if left_out:
        print(f"The cells keep their logs in the store and no checkpoints; left out: {', '.join(left_out)}.")
    return {name: part for name, part in config.items() if name in _PARTS}


def _read(where: str, entry: Mapping[str, Any], base: Config) -> Experiment:
    """Return the experiment for a grid over a configuration."""
    found = entry["axes"]
    if not isinstance(found, Mapping) or not found:
        raise FederatedError(f"{where}: axes must name what is varied, such as lr: {{key: ..., values: [...]}}.")
    metrics = read_metrics(f"{where}: metrics", entry["metrics"])
    axes = {str(name): read_axis(f"{where}: axes.{name}", str(name), axis) for name, axis in found.items()}
    for name, axis in axes.items():
        if any(axis.tune.values()):
            raise FederatedError(
                f"{where}: axes.{name}: a sweep shows every value and tunes none. Make what is tuned an axis."
            )
    labels = {name: tuple(axis.choices) for name, axis in axes.items()}
    return Experiment(
        name="sweep",
        file=Path(where),
        title="Sweep",
        paper="",
        item="",
        notes="",
        departures=(),
        base=base,
        axes=axes,
        skip=read_skip(f"{where}: skip", entry.get("skip"), labels),
        tune=None,
        seeds=check_count(where, "seeds", entry.get("seeds", 1)),
        is_random=True,
        is_own=True,
        metrics=metrics,
        cases={},
        figures=read_figures(f"{where}: figures", entry.get("figures"), labels, metrics),
        tables=read_tables(f"{where}: tables", entry.get("tables"), labels, metrics),
        claims=(),
        scales={"full": Scale("full")},
    )


def _page(results: Results, by: Quantity, command: str, out: Path) -> str:
    """Draw the figures, and return the page that shows them with the tables."""
    experiment = results.grid.experiment
    if experiment.figures:
        figures = draw_figures(results, out)
    else:
        figures = ["sweep_curves.png"]
        save(draw_best(results, by, ranked(results, by)), out / figures[0])
    parts = ["# Sweep", *(f"![{name}]({name})" for name in figures)]
    if experiment.tables:
        for table in experiment.tables:
            parts += [f"## {table.name.replace('_', ' ').capitalize()}", markdown(*rows_of(table, results))]
    else:
        parts += [f"All grid points, by {by.label}:", markdown(*_table(results, by))]
    if results.grid.seeds > 1:
        parts.append(f"± is the sample standard deviation over {results.grid.seeds} seeds.")
    parts += [*losses(results, most=12), *_not_logged(results), "## How", f"    {command}", *means(results)]
    return "\n\n".join(parts) + "\n"


def _not_logged(results: Results) -> Iterator[str]:
    """Yield the metrics that some finished cells did not log. The rows of these cells show "-" or lack the metric."""
    found = {cell: record for cell in results.asked() if (record := results.record(cell)) is not None}
    finished = {cell: record.series for cell, record in found.items() if record.status == "finished"}
    lacking = {
        name: [cell for cell, series in finished.items() if not metric.of(series)]
        for name, metric in results.grid.experiment.metrics.items()
    }
    lines = [
        f"- {name}, by {len(cells)} of {len(finished)} finished cells, the first of them {cells[0]}"
        for name, cells in lacking.items()
        if cells
    ]
    if lines:
        yield "## Not logged"
        yield "\n".join(lines)


def ranked(results: Results, by: Quantity) -> list[Point]:
    """Return the points, best first and those without a value last. The final value decides between equal costs."""
    ranks = [by, Quantity("final", "final", by.metric)] if by.is_cost else [by]

    def rank(point: Point) -> list[tuple[bool, float]]:
        means = [results.estimate(point, quantity).mean for quantity in ranks]
        return [(math.isnan(m), m if q.mode == "min" else -m) for q, m in zip(ranks, means, strict=True)]

    return sorted(results.grid.points, key=rank)


def _table(results: Results, by: Quantity) -> tuple[list[str], list[list[str]]]:
    quantities = [by]
    for metric in results.grid.experiment.metrics.values():
        quantities += [
            Quantity(kind, kind, metric) for kind in ("final", "best") if (kind, metric) != (by.kind, by.metric)
        ]
    rows = [
        [*point.by_axis.values(), *(str(results.estimate(point, quantity)) for quantity in quantities)]
        for point in ranked(results, by)
    ]
    return [*results.grid.axes, *(quantity.label for quantity in quantities)], rows


def _log_hyper_parameters(results: Results, folder: Path) -> None:
    """Write a TensorBoard run for every cell that has none yet, with its labels, final metrics and curves.

    Runs of other grids in this folder are deleted, since TensorBoard would mix them with this grid's.
    """
    found = [(cell, record) for cell in results.asked() if (record := results.record(cell)) is not None]
    names = {
        "_".join([re.sub(r"[^\w.-]+", "_", str(cell)), record.folder.name[:6]]): (cell, record)
        for cell, record in found
    }
    for left in folder.glob("*_seed_*_??????"):
        if left.name not in names:
            shutil.rmtree(left)
    for name, (cell, record) in names.items():
        if (folder / name).is_dir():
            continue
        logger = pl.loggers.TensorBoardLogger(folder, name=name, version="", default_hp_metric=False)
        logger.log_hyperparams(_hyper_parameters(cell), _final(results, record))
        for tag, curve in record.series.items():
            for number, value in curve.items():
                logger.log_metrics({tag: value}, step=number)
        logger.finalize("success")


def _hyper_parameters(cell: Cell) -> dict[str, Any]:
    return {**{axis: _number(label) for axis, label in cell.point.labels}, "seed": cell.seed}


def _final(results: Results, record: Record) -> dict[str, float]:
    metrics = {}
    for name, metric in results.grid.experiment.metrics.items():
        if record.series.get(name):
            for kind in ("final", "best"):
                quantity = Quantity(kind, kind, metric)
                has_ended = record.status == "finished"  # a curve up to a divergence may have a good best value
                metrics[f"hp/{kind}_{name}"] = quantity.of(record.series) if has_ended else quantity.worst
    return metrics


def _number(label: str) -> float | str:
    try:
        return float(label)
    except ValueError:
        return label


def make_parser() -> ArgumentParser:
    """Return the parser of the command."""
    parser = ArgumentParser(
        prog="lightning-fed sweep",
        description="Run a grid over any keys of a configuration.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        "-c",
        type=str,
        action="append",
        required=True,
        help="A configuration of `lightning-fed fit`. Give several to combine them.",
    )
    parser.add_argument("--grid", type=str, required=True, help=_GRID)
    add_run_options(parser, "swept")
    return parser
