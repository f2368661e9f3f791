"""Options shared by the commands, and the command line as quoted on pages."""

import os
import shlex
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser

from lightning_fed.lab.grid import Grid
from lightning_fed.lab.reading import PAPERS

_MACHINES = ("--out", "--jobs")
_PLACES = ("--data_root",)


class Count:
    """The type of an option: an integer of at least ``least``. The help shows it as "int"."""

    def __init__(self, least: int) -> None:
        self.least = least

    def __call__(self, value: str) -> int:
        """Parse a word."""
        if int(value) < self.least:
            raise ArgumentTypeError(f"expected an integer of at least {self.least}, found {value}")
        return int(value)

    def __repr__(self) -> str:
        """Return the text for the help."""
        return "int"


def add_run_options(parser: ArgumentParser, out: str) -> None:
    """Add the options of a command that runs a grid.

    Args:
        parser: The parser.
        out: The default folder of results, in words.
    """
    parser.add_argument("--seeds", type=Count(1), help="The number of seeds, in place of the file's.")
    workers = "Worker processes; 0 runs in this process."
    parser.add_argument("--jobs", type=Count(0), default=default_jobs(), help=workers)
    parser.add_argument("--out", type=str, help=f"The folder of the results; {out} by default.")
    parser.add_argument("--data_root", type=str, help="The folder of data sets.")
    parser.add_argument("--accelerator", type=str, help="Where to train: cpu, gpu, as for a Trainer.")


def command_line(command: str, args: Sequence[str]) -> str:
    """Return the command line without machine-specific parts: folders and the number of jobs.

    Example:
        >>> command_line("reproduce", ["mime_fig1", "--data_root", "/mnt/data", "--jobs=4"])
        'lightning-fed reproduce mime_fig1 --data_root DATA'
        >>> command_line("sweep", ["--config=configs/quickstart.yaml", "--grid", "/home/ann/grid.yaml"])
        'lightning-fed sweep --config=configs/quickstart.yaml --grid grid.yaml'
    """
    kept, words = [], iter(args)
    for word in words:
        name, has_value, _ = word.partition("=")
        if name in (*_MACHINES, *_PLACES):
            if not has_value:
                next(words, None)
            kept += ["--data_root DATA"] if name in _PLACES else []
        else:
            option = f"{name}=" if has_value and name.startswith("--") else ""
            value = word.removeprefix(option)
            is_elsewhere = value.endswith((".yaml", ".yml")) and Path(value).is_absolute()
            kept.append(option + shlex.quote(Path(value).name if is_elsewhere else value))
    return " ".join([f"lightning-fed {command}", *kept])


def reproduce_command(grid: Grid) -> str:
    """Return the command that makes a grid's page, without machine-specific parts.

    Args:
        grid: The grid.
    """
    experiment = grid.experiment
    name = experiment.name if experiment.file.parent == PAPERS else experiment.file.name
    options = [] if grid.scale.name == "full" else [f"--scale {grid.scale.name}"]
    options += [f"--seeds {grid.seeds}"] if grid.seeds != (grid.scale.seeds or experiment.seeds) else []
    options += [f"--add {shlex.quote(experiment.added)} --published PUBLISHED"] if experiment.added else []
    options += ["--data_root DATA"] if grid.data_sets else []
    return " ".join(["lightning-fed reproduce", name, *options])


def default_jobs() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
