"""How much of the package one round enters: files, functions and calls, by folder; and how large the engine room is.

    python benchmarks/reach.py                    # a vectorized and a sequential round of three methods
    python benchmarks/reach.py --algorithm FedAvg --engine vectorized --list
    PYTHONPATH=CHECKOUT python benchmarks/reach.py --json     # the same of another checkout

The run is a toy: an MLP of three layers, 6 clients, 5 local steps each. ``sys.setprofile`` watches round 3, when all
that is made once has been made, from ``on_round_start`` to ``on_round_end``; with ``--whole`` from the end of round 2,
so that drawing the cohort and the loop around the round are seen as well. "Functions" are qualified names: Python 3.11
and older run comprehensions as functions of their own, which count; "defined" are those that have a ``def`` or a
``lambda``, which is the same in every Python.
"""

import argparse
import ast
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

__all__ = ["TARGETS", "main", "reach", "sizes"]

PACKAGE = Path(lightning_fed.__file__).parent
FOLDERS = ("engines", "rounds", "tracing")
ENGINES = ("vectorized", "sequential")
METHODS = ("FedAvg", "Scaffold", "Mime")
CLIENTS, STEPS, BATCH, ROUND = 6, 5, 4, 3

TARGETS = {"files": 34, "functions": 220, "room_files": 42, "room_lines": 8000}
"""The most that a vectorized FedAvg round may enter, and the most that the engine room may hold."""

_LONG_FILE, _LONG_FUNCTION = 300, 40

Calls: TypeAlias = Counter[tuple[str, str]]  # (file below the package, qualified name) -> how often it was entered


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
    """Count the calls of one round.

    Args:
        is_whole: Whether to begin at the end of the round before.
    """

    def __init__(self, is_whole: bool) -> None:
        self.is_whole = is_whole
        self.calls: Counter[CodeType] = Counter()

    def on_round_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round: int) -> None:
        """Begin."""
        if round == ROUND:
            sys.setprofile(self._count)

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round_report: RoundReport) -> None:
        """End, or begin a round early."""
        sys.setprofile(self._count if self.is_whole and round_report.round == ROUND - 1 else None)

    def _count(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self.calls[frame.f_code] += 1


def reach(engine: str, method: str, is_whole: bool = False) -> Calls:
    """Run the toy and return the calls of one round into functions of the package.

    Args:
        engine: "vectorized" or "sequential".
        method: The name of a method.
        is_whole: Whether what lies between two rounds is watched too.
    """
    torch.manual_seed(0)
    clients = [TensorDataset(torch.randn(STEPS * BATCH, 8), torch.arange(STEPS * BATCH) % 4) for _ in range(CLIENTS)]
    watch = Watch(is_whole)
    trainer = lightning_fed.FederatedTrainer(
        algorithm=make_method(method), max_rounds=ROUND + 1, local_epochs=1, seed=0, engine=engine, callbacks=watch,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accelerator="cpu",
    )  # fmt: skip
    trainer.fit(Model(), lightning_fed.FederatedDataModule(clients=clients, batch_size=BATCH))
    found: Calls = Counter()
    for code, count in watch.calls.items():
        path = Path(code.co_filename)
        if path.is_relative_to(PACKAGE):
            name = getattr(code, "co_qualname", f"{code.co_name}:{code.co_firstlineno}")  # it is new in Python 3.11
            found[str(path.relative_to(PACKAGE)), name] += count
    return found


def sizes() -> dict[str, Any]:
    """Return files and lines of the engine room, by folder, and which of its files and functions are long."""
    folders, files, functions = {}, {}, {}
    for folder in FOLDERS:
        paths = sorted((PACKAGE / folder).rglob("*.py"))
        lines = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in paths}
        folders[folder] = {"files": len(lines), "lines": sum(lines.values())}
        files |= {name: count for name, count in lines.items() if count > _LONG_FILE}
        for path in paths:
            for name, node in _functions(path):
                count = (node.end_lineno or 0) - node.lineno + 1
                if count > _LONG_FUNCTION:
                    functions[f"{path.relative_to(PACKAGE)}:{name}"] = count
    total = {key: sum(folder[key] for folder in folders.values()) for key in ("files", "lines")}
    return {"total": total, "folders": folders, "long_files": files, "long_functions": functions}


def _functions(path: Path) -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Return the functions of a file with their qualified names, those inside others included."""
    found: list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = f"{prefix}{child.name}."
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.append((f"{prefix}{child.name}", child))
            visit(child, inner)

    visit(ast.parse(path.read_text()), "")
    return found


def figures(calls: Calls) -> dict[str, Any]:
    """Return files, functions and calls of a round, and the same by folder."""
    folders: dict[str, Calls] = {}
    for (file, name), count in calls.items():
        folders.setdefault(str(Path(file).parent), Counter())[file, name] = count
    return {**_counted(calls), "folders": {name: _counted(folders[name]) for name in sorted(folders)}}


def _counted(calls: Calls) -> dict[str, int]:
    defined = [name for _, name in calls if not name.endswith(("comp>", "<genexpr>"))]
    files = {file for file, _ in calls}
    return {"files": len(files), "functions": len(calls), "defined": len(defined), "calls": sum(calls.values())}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the counts; the exit status is 1 if a target is missed and ``--check`` was given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", nargs="+", default=list(METHODS), help=f"methods; by default {METHODS}")
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=list(ENGINES), help="both by default")
    parser.add_argument("--whole", action="store_true", help="begin at the end of the round before")
    parser.add_argument("--list", action="store_true", help="name every function that was entered")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--check", action="store_true", help="fail where a target is missed")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    called = {
        (engine, method): reach(engine, method, args.whole) for engine in args.engine for method in args.algorithm
    }
    rounds = [{"engine": e, "algorithm": m, **figures(calls)} for (e, m), calls in called.items()]
    room = sizes()
    missed = _missed(rounds, room["total"])
    if args.json:
        lists = [{"entered": [[*key, n] for key, n in sorted(c.items())]} if args.list else {} for c in called.values()]
        print(
            json.dumps({"rounds": [a | b for a, b in zip(rounds, lists, strict=True)], "room": room, "missed": missed})
        )
    else:
        print(_text(rounds, room))
        for (engine, method), calls in called.items() if args.list else ():
            print(f"\n{engine} {method}")
            print("\n".join(f"{count:6} {file}: {name}" for (file, name), count in sorted(calls.items())))
        print("\n".join(["", *(missed or ["all targets are met"])]))
    return int(args.check and bool(missed))


def _missed(rounds: Sequence[dict[str, Any]], total: dict[str, int]) -> list[str]:
    """Return a line for each target that is missed."""
    found = {f"room_{key}": value for key, value in total.items()}
    for line in rounds:
        if (line["engine"], line["algorithm"]) == ("vectorized", "FedAvg"):
            found |= {key: line[key] for key in ("files", "functions")}
    return [f"{key}: {found[key]}, at most {most}" for key, most in TARGETS.items() if found.get(key, 0) > most]


def _text(rounds: Sequence[dict[str, Any]], room: dict[str, Any]) -> str:
    """Return the counts as tables in Markdown."""
    columns = ("files", "functions", "defined", "calls")
    rows = [("engine, method", *columns), ("---",) * 5]
    rows += [(f"{line['engine']} {line['algorithm']}", *(str(line[key]) for key in columns)) for line in rounds]
    folders = sorted({name for line in rounds for name in line["folders"]})
    by_folder = [("functions by folder", *(row[0] for row in rows[2:])), ("---",) * (len(rounds) + 1)]
    by_folder += [
        (name, *(str(line["folders"].get(name, {}).get("functions", "")) for line in rounds)) for name in folders
    ]
    static = [("engine room", "files", "lines"), ("---",) * 3]
    for name, counts in [*room["folders"].items(), ("together", room["total"])]:
        static.append((name, str(counts["files"]), str(counts["lines"])))
    long = [
        f"Files over {_LONG_FILE} lines: {_named(room['long_files'])}.",
        f"Functions over {_LONG_FUNCTION} lines: {_named(room['long_functions'])}.",
    ]
    tables = ["\n".join(f"| {' | '.join(row)} |" for row in table) for table in (rows, by_folder, static)]
    return "\n\n".join([*tables, "\n".join(long)])


def _named(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


if __name__ == "__main__":
    sys.exit(main())
