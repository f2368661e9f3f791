"""The command ``lightning-fed reproduce``: run an experiment of a paper, draw its figures and judge its claims."""

from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser

from lightning_fed.core.errors import FederatedError
from lightning_fed.experiments.checking import check_outputs
from lightning_fed.experiments.figures import draw, new_figure, save
from lightning_fed.experiments.grid import Grid
from lightning_fed.experiments.options import add_run_options, command_line
from lightning_fed.experiments.paths import draw_paths
from lightning_fed.experiments.reading import PAPERS, find_experiment, read_experiment
from lightning_fed.experiments.results import Results
from lightning_fed.experiments.run_grid import run_grid
from lightning_fed.experiments.store import Store
from lightning_fed.experiments.tables import write_choices, write_series
from lightning_fed.experiments.verdict import verdict
from lightning_fed.experiments.workers import make_workers

__all__ = ["draw_figures", "reproduce"]


def reproduce(args: Sequence[str]) -> None:
    """Run an experiment, and write its verdict.

    Args:
        args: What follows ``lightning-fed reproduce`` on the command line.

    Raises:
        FederatedError: If the experiment, a configuration or a data set is not as it must be; before the first cell.
        SystemExit: If the arguments are not understood, or on Ctrl-C.
    """
    options = _parser().parse_args(list(args))
    if options.list:
        print(_listing())
        return
    if options.name is None:
        raise FederatedError("reproduce: name an experiment; `lightning-fed reproduce --list` shows those there are.")
    experiment = read_experiment(find_experiment(options.name))
    grid = Grid(experiment, options.scale, options.seeds, options.accelerator)
    check_outputs(grid)
    if experiment.figures:
        new_figure(1, 1)  # refused without matplotlib, and better now than after hours
    out = Path(options.out or Path("reproduced") / experiment.name / options.scale)
    with Store(out) as store:
        results = run_grid(grid, store, make_workers(options.jobs), options.data_root)
        write_series(out / f"{experiment.name}_rounds.csv", results)
        write_choices(out / f"{experiment.name}_choices.csv", results)
        text = verdict(results, command_line("reproduce", args), draw_figures(results, out))
        (out / f"{experiment.name}.md").write_text(text, encoding="utf-8")
    print(f"{text}\nwritten to {out}")


def draw_figures(results: Results, out: Path) -> list[str]:
    """Draw the figures of an experiment, and return the names of their files.

    Args:
        results: The finished cells.
        out: Where they go.
    """
    names = []
    for plan in results.grid.experiment.figures:
        names.append(f"{results.grid.experiment.name}_{plan.name}.png")
        save(draw_paths(plan, results) if plan.kind == "paths" else draw(plan, results), out / names[-1])
    return names


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="lightning-fed reproduce",
        description="Run an experiment of a paper, draw its figures, and say which of its claims hold.",
        allow_abbrev=False,
    )
    parser.add_argument("name", type=str, nargs="?", help="An experiment of --list, or the path of a YAML file.")
    parser.add_argument("--scale", type=str, default="full", help="full, small, or another one of the file's.")
    add_run_options(parser, "reproduced/NAME/SCALE")
    parser.add_argument("--list", action="store_true", help="Show the experiments that there are.")
    return parser


def _listing() -> str:
    rows = [(path.stem, read_experiment(path)) for path in sorted(PAPERS.glob("*.yaml"))]
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{width}}  {e.title} ({e.paper}, {e.item})" for name, e in rows) or "There are none."
