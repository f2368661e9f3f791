"""Count the package's files, functions and calls that a round or the start of a fit enters, by folder.

    python benchmarks/reach.py                    # a vectorized and a sequential round of three methods
    python benchmarks/reach.py --algorithm FedAvg --engine vectorized --list
    python benchmarks/reach.py --fit              # the start of a fit, until its first round starts
    PYTHONPATH=CHECKOUT python benchmarks/reach.py --json     # the same of another checkout

The run is a toy: an MLP of three layers, and 6 clients with 5 local steps each. ``sys.setprofile`` watches round 3,
after all one-time work, from ``on_round_start`` to ``on_round_end``. ``--whole`` starts at the end of round 2, to
include the draw of the cohort and the loop around the round. ``--fit`` watches from the call of ``fit`` to the first
``on_round_start``. "Functions" are qualified names, including comprehensions, which are functions in Python 3.11 and
older. "Defined" are functions with a ``def`` or a ``lambda``. They are the same in every Python.

There are targets for FedAvg: for a round in each engine, and for the start of a fit in the sequential one.
"""

import argparse
import json
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeAlias

import lightning_fed  # first: see lightning_fed.compat.torchvision
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed.core.rounds import RoundReport
from systems.with_lightning_fed import make_method

__all__ = ["TARGETS", "main", "reach"]

PACKAGE = Path(lightning_fed.__file__).parent
ENGINES = ("vectorized", "sequential")
METHODS = ("FedAvg", "Scaffold", "Mime")
CLIENTS, STEPS, BATCH, ROUND = 6, 5, 4, 3

TARGETS = {
    ("round", "vectorized"): ("functions", 300),
    ("round", "sequential"): ("functions", 250),
    ("fit", "sequential"): ("defined", 170),
}
"""The most that FedAvg may enter, by watched part and engine."""

Calls: TypeAlias = Counter[tuple[str, str]]  # (file below the package, qualified name) -> number of calls


class Model(pl.LightningModule):
    """An MLP of three layers with one ``self.log``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Watch(lightning_fed.FederatedCallback):
    """Count calls.

    Args:
        what: "round", "whole" for a round and the loop around it, or "fit" for the start of a fit.
    """

    __module__ = "lightning_fed.reach"  # not a user's: seeding for a user's hooks would be counted

    def __init__(self, what: str) -> None:
        self.what = what
        self.calls: Counter[CodeType] = Counter()

    def begin(self) -> None:
        """Start counting."""
        sys.setprofile(self._count)

    def on_round_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round: int) -> None:
        """Start counting at a round, or stop at the first round of a fit."""
        if self.what == "fit":
            sys.setprofile(None)
        elif self.what == "round" and round == ROUND:
            self.begin()

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round_report: RoundReport) -> None:
        """Stop counting, or start at the end of the previous round."""
        sys.setprofile(None)
        if self.what == "whole" and round_report.round == ROUND - 1:
            self.begin()

    def _count(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self.calls[frame.f_code] += 1


def reach(engine: str, method: str, what: str = "round") -> Calls:
    """Run the toy and return the calls into functions of the package.

    Args:
        engine: "vectorized" or "sequential".
        method: The name of a method.
        what: The watched part, see :class:`Watch`.
    """
    torch.manual_seed(0)
    clients = [TensorDataset(torch.randn(STEPS * BATCH, 8), torch.arange(STEPS * BATCH) % 4) for _ in range(CLIENTS)]
    watch = Watch(what)
    trainer = lightning_fed.FederatedTrainer(
        algorithm=make_method(method), max_rounds=1 if what == "fit" else ROUND + 1, local_epochs=1, seed=0,
        engine=engine, callbacks=watch, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu",
    )  # fmt: skip
    model, data = Model(), lightning_fed.FederatedDataModule(clients=clients, batch_size=BATCH)
    if what == "fit":
        watch.begin()
    trainer.fit(model, data)
    found: Calls = Counter()
    for code, count in watch.calls.items():
        path = Path(code.co_filename)
        if path.is_relative_to(PACKAGE):
            name = getattr(code, "co_qualname", f"{code.co_name}:{code.co_firstlineno}")  # new in Python 3.11
            found[str(path.relative_to(PACKAGE)), name] += count
    return found


def figures(calls: Calls) -> dict[str, Any]:
    """Return files, functions and calls, and the same by folder."""
    folders: dict[str, Calls] = {}
    for (file, name), count in calls.items():
        folders.setdefault(str(Path(file).parent), Counter())[file, name] = count
    return {**_counted(calls), "folders": {name: _counted(folders[name]) for name in sorted(folders)}}


def _counted(calls: Calls) -> dict[str, int]:
    defined = [name for _, name in calls if not name.endswith(("comp>", "<genexpr>"))]
    files = {file for file, _ in calls}
    return {"files": len(files), "functions": len(calls), "defined": len(defined), "calls": sum(calls.values())}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the counts, and return 1 if a target is missed and ``--check`` is given, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", nargs="+", default=list(METHODS), help=f"methods; by default {METHODS}")
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=list(ENGINES), help="both by default")
    parser.add_argument("--list", action="store_true", help="name every function that was entered")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--check", action="store_true", help="fail where a target is missed")
    watched = parser.add_mutually_exclusive_group()
    watched.add_argument("--whole", action="store_true", help="begin at the end of the round before")
    watched.add_argument("--fit", action="store_true", help="watch the start of a fit instead of a round")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    what = "whole" if args.whole else "fit" if args.fit else "round"
    called = {(engine, method): reach(engine, method, what) for engine in args.engine for method in args.algorithm}
    runs = [{"what": what, "engine": e, "algorithm": m, **figures(calls)} for (e, m), calls in called.items()]
    missed = _missed(runs)
    if args.json:
        lists = [{"entered": [[*key, n] for key, n in sorted(c.items())]} if args.list else {} for c in called.values()]
        print(json.dumps({"runs": [a | b for a, b in zip(runs, lists, strict=True)], "missed": missed}))
    else:
        print(_text(runs))
        for (engine, method), calls in called.items() if args.list else ():
            print(f"\n{engine} {method}")
            print("\n".join(f"{count:6} {file}: {name}" for (file, name), count in sorted(calls.items())))
        print("\n".join(["", *(missed or ["all targets are met"])]))
    return int(args.check and bool(missed))


def _missed(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each target that is missed."""
    missed = []
    for run in runs:
        key, most = TARGETS.get((run["what"], run["engine"]), ("functions", None))
        if run["algorithm"] == "FedAvg" and most is not None and run[key] > most:
            missed.append(f"{run['engine']} {run['what']}: {run[key]} {key}, at most {most}")
    return missed


def _text(runs: Sequence[dict[str, Any]]) -> str:
    """Return the counts as tables in Markdown."""
    columns = ("files", "functions", "defined", "calls")
    rows = [("engine, method", *columns), ("---",) * 5]
    rows += [(f"{run['engine']} {run['algorithm']}", *(str(run[key]) for key in columns)) for run in runs]
    folders = sorted({name for run in runs for name in run["folders"]})
    by_folder = [("functions by folder", *(row[0] for row in rows[2:])), ("---",) * (len(runs) + 1)]
    by_folder += [(name, *(str(run["folders"].get(name, {}).get("functions", "")) for run in runs)) for name in folders]
    return "\n\n".join("\n".join(f"| {' | '.join(row)} |" for row in table) for table in (rows, by_folder))


if __name__ == "__main__":
    sys.exit(main())
