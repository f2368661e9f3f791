"""The command ``lightning-fed diagnose``: find why a run does not converge, and settings that suit its clients."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from lightning_fed.core.errors import FederatedError
from lightning_fed.data.batches.examples import targets_of
from lightning_fed.data.skew_report import SkewTable, skew_table
from lightning_fed.lab.diagnosis.report import as_json, as_markdown, as_text, sections
from lightning_fed.lab.diagnosis.self_check import self_check
from lightning_fed.lab.diagnosis.theory import suggest
from lightning_fed.lab.diagnosis.trials import PARTS, Trials, read_config
from lightning_fed.lab.diagnosis.verdicts import Findings, verdicts
from lightning_fed.lab.options import Count
from lightning_fed.lab.workers import quietly

_LABELLED = 1000  # the most clients whose labels are read
_FORMATS = (".md", ".json")


def diagnose(args: Sequence[str]) -> None:
    """Measure the clients of a configuration, try five step sizes, check the method, and report the problems.

    Args:
        args: The arguments after ``lightning-fed diagnose``.

    Raises:
        FederatedError: If the configuration cannot be run, or the report cannot be written.
        SystemExit: If the arguments are invalid.
    """
    own, overrides = _split(args)
    options = make_parser().parse_args(own)
    out = None if options.out is None else Path(options.out)
    if out is not None and out.suffix not in _FORMATS:
        raise FederatedError(f"--out {out}: the report is written as Markdown or JSON. Use a name such as report.md.")
    config, left_out = read_config(options.config, overrides)
    print("Measuring the clients, and trying five step sizes.", file=sys.stderr)
    trials = Trials(config, options.ckpt_path, options.rounds, options.clients, options.hessian_clients)
    findings, notes = _findings(trials, options.best_loss)
    if left_out:
        notes.append(f"left out, since they only monitor or stop a run: {', '.join(left_out)}")
    found, reasons = sections(findings, notes), verdicts(findings)
    check = findings.check.text
    print(as_text(found, check, reasons))
    if out is not None:
        _write(out, as_json(findings, reasons) if out.suffix == ".json" else as_markdown(found, check, reasons))


def _split(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into the command's own and those that override the configuration."""
    own, overrides = list[str](), list[str]()
    current = own
    for arg in args:
        if arg.startswith(("--", "-c", "-h")):  # any other argument, such as -1, belongs to the last option
            current = overrides if re.split(r"[.=+]", arg[2:])[0] in PARTS else own
        current.append(arg)
    return own, overrides


def _findings(trials: Trials, best_loss: float) -> tuple[Findings, list[str]]:
    """Return the findings, and notes on the method of measurement."""
    algorithm, measured = trials.settings.algorithm, trials.measured
    steps = [value for trial in trials.trials for value in trial.steps] or [measured.steps[1]]
    cohorts = [value for trial in trials.trials for value in trial.cohorts] or [measured.population]
    K = max(1.0, sum(steps) / len(steps))  # noqa: N806  # without local steps, the server takes one
    S = sum(cohorts) / len(cohorts)  # noqa: N806
    skew, why = _skew(trials.data)
    notes = [] if skew is not None else [f"labels are not looked at: {why}"]
    with quietly():
        check = self_check(algorithm, trials.settings.engine)
    theory = suggest(measured, K, S, trials.rounds_left, best_loss)
    return Findings(algorithm, measured, theory, trials.trials, skew, check), notes


def _skew(data: Any) -> tuple[SkewTable | None, str]:
    """Return the differences between clients' data, or the reason that they are unknown."""
    try:
        ids = data.client_ids
        if len(ids) <= _LABELLED:
            return skew_table(data), ""
        some = ids[:: -(-len(ids) // _LABELLED)]
        return skew_table(dict(zip(some, targets_of([data.client_dataset(i) for i in some]), strict=True))), ""
    except FederatedError as error:
        return None, str(error)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FederatedError(f"--out {path} cannot be written: {error.strerror}. Name another place.") from error
    print(f"\nwritten to {path}")


def make_parser() -> ArgumentParser:
    """Return the parser of the command."""
    parser = ArgumentParser(
        prog="lightning-fed diagnose",
        description="Find what limits a run, and which method and step size suit its clients.",
        epilog="On top of the configuration go options of `lightning-fed fit` for trainer, model, data, optimizer and"
        " lr_scheduler, such as --model.lr 0.1, and seed_everything.",
        allow_abbrev=False,
    )
    configuration = "A configuration of `lightning-fed fit`. Give several to combine them."
    parser.add_argument("--config", "-c", type=str, action="append", required=True, help=configuration)
    checkpoint = 'Where to start: a path, "last" or "best" of the newest run; by default the model as it is made.'
    parser.add_argument("--ckpt_path", type=str, help=checkpoint)
    parser.add_argument("--rounds", type=Count(1), default=5, help="The rounds to run at each step size.")
    parser.add_argument("--clients", type=Count(1), default=30, help="How many clients to measure at most.")
    few = "How many of them to compare the Hessians of; the work grows with the square."
    parser.add_argument("--hessian_clients", type=Count(1), default=8, help=few)
    best = "The least loss there can be, f*, for MimeMVR's step size."
    parser.add_argument("--best_loss", type=float, default=0.0, help=best)
    parser.add_argument("--out", type=str, help="Where to write the report too: a name in .md or .json.")
    return parser
