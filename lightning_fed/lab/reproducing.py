"""The command ``lightning-fed reproduce``: run an experiment of a paper, draw its figures and judge its claims."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from jsonargparse import ArgumentParser

from lightning_fed.core.errors import FederatedError
from lightning_fed.lab.adding import add_methods
from lightning_fed.lab.catalogue import listing
from lightning_fed.lab.checking import check_outputs
from lightning_fed.lab.experiment import Figure
from lightning_fed.lab.figures import draw, new_figure, save
from lightning_fed.lab.grid import Grid
from lightning_fed.lab.latex import latex
from lightning_fed.lab.options import add_run_options, reproduce_command
from lightning_fed.lab.page import pages
from lightning_fed.lab.paths import draw_paths
from lightning_fed.lab.published import PublishedCells, publish
from lightning_fed.lab.reading import find_experiment, read_experiment
from lightning_fed.lab.results import Results
from lightning_fed.lab.run_grid import run_grid
from lightning_fed.lab.store import Store, writing_to
from lightning_fed.lab.tables import write_choices
from lightning_fed.lab.verdict import write_claims
from lightning_fed.lab.workers import make_workers


def reproduce(args: Sequence[str]) -> None:
    """Run an experiment, and write its verdict.

    Args:
        args: The arguments after ``lightning-fed reproduce`` on the command line.

    Raises:
        FederatedError: If the experiment, a configuration or a data set is invalid. It is raised before the first cell.
        SystemExit: If the arguments are invalid, or on Ctrl-C.
    """
    options = make_parser().parse_args(list(args))
    if options.list:
        print(listing())
        return
    if options.name is None:
        raise FederatedError("reproduce: name an experiment; `lightning-fed reproduce --list` shows those there are.")
    experiment = read_experiment(find_experiment(options.name))
    if options.add is not None:
        experiment = add_methods(experiment, Path(options.add))
    grid = Grid(experiment, options.scale, options.seeds, options.accelerator)
    check_outputs(grid)
    if experiment.figures:
        new_figure(1, 1)  # fails without matplotlib now, not after hours
    out = Path(options.out or Path("reproduced") / experiment.name / options.scale)
    published = out if options.published is None else Path(options.published)
    if options.published is None or options.add is not None:
        if options.published is not None and published.resolve() == out.resolve():
            raise FederatedError(f"reproduce: --add would replace what is published in {out}. Give another --out.")
        finished = None if options.published is None else PublishedCells(grid, published)
        with Store(out) as store:
            results = run_grid(grid, store, make_workers(options.jobs), options.data_root, finished)
            with writing_to(out):
                publish(results, out)
                write_choices(out / f"{experiment.name}_choices.csv", results)
                if finished is None:
                    draw_paths_of(results, out)
        published = out
    with writing_to(out):
        text = write_page(grid, published, out, options.figures, options.tex)
    print(f"{text}\nwritten to {out}")


def write_page(grid: Grid, published: Path, out: Path, suffix: str = "png", tex: bool = False) -> str:
    """Write an experiment's pages and figures, except path figures, from published cells, and return the main page.

    Args:
        grid: The grid.
        published: The folder of the published cells.
        out: The folder for pages, figures and the table of claims.
        suffix: A second format of figures, "pdf" or "svg"; "png" for PNG only.
        tex: Whether to write tables in LaTeX, too.

    Raises:
        FederatedError: If nothing was published there.
    """
    results = Results(grid, PublishedCells(grid, published))
    out.mkdir(parents=True, exist_ok=True)
    draw_figures(results, out, suffix)
    for table in grid.experiment.tables if tex else ():
        (out / f"{grid.experiment.name}_{table.name}.tex").write_text(latex(table, results), encoding="utf-8")
    text, details = page(results)
    (out / f"{grid.experiment.name}.md").write_text(text, encoding="utf-8")
    (out / f"{grid.experiment.name}_details.md").write_text(details, encoding="utf-8")
    write_claims(out / "claims.csv", results)
    return text


def page(results: Results) -> tuple[str, str]:
    """Return an experiment's page and its details page.

    Args:
        results: The finished cells.
    """
    figures = [_picture(results, plan) for plan in results.grid.experiment.figures]
    return pages(results, reproduce_command(results.grid), figures)


def draw_figures(results: Results, out: Path, suffix: str = "png") -> list[str]:
    """Draw the figures of an experiment, except path figures, and return the names of their PNG files.

    Args:
        results: The finished cells.
        out: The folder for the figures.
        suffix: A second format; "png" for PNG only.
    """
    plans = [plan for plan in results.grid.experiment.figures if plan.kind != "paths"]
    for plan in plans:
        figure, path = draw(plan, results), out / _picture(results, plan)
        for name in dict.fromkeys((path, path.with_suffix(f".{suffix}"))):
            save(figure, name)
    return [_picture(results, plan) for plan in plans]


def draw_paths_of(results: Results, out: Path) -> None:
    """Draw the figures of clients' paths. They need iterates that a store keeps and that are not published."""
    for plan in results.grid.experiment.figures:
        if plan.kind == "paths":
            save(draw_paths(plan, results), out / _picture(results, plan))


def _picture(results: Results, plan: Figure) -> str:
    return f"{results.grid.experiment.name}_{plan.name}.png"


def make_parser() -> ArgumentParser:
    """Return the parser of the command."""
    parser = ArgumentParser(
        prog="lightning-fed reproduce",
        description="Run an experiment of a paper, draw its figures, and check its claims.",
        allow_abbrev=False,
    )
    parser.add_argument("name", type=str, nargs="?", help="An experiment of --list, or the path of a YAML file.")
    parser.add_argument("--scale", type=str, default="full", help="full, or another one of the file's, such as part.")
    add_run_options(parser, "reproduced/NAME/SCALE")
    parser.add_argument("--published", type=str, help="Run nothing: write the page of the results in this folder.")
    parser.add_argument("--add", type=str, help="A YAML file of methods to add; with --published, those alone are run.")
    parser.add_argument(
        "--figures", type=Literal["png", "pdf", "svg"], default="png", help="Draw figures in this format, too."
    )
    parser.add_argument("--tex", action="store_true", help="Write tables in LaTeX, too.")
    parser.add_argument("--list", action="store_true", help="List the experiments.")
    return parser
