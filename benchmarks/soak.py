"""Check that a long run does not grow: memory, open files and time over thousands of rounds.

    python benchmarks/soak.py --rounds 20000 --json
    python benchmarks/soak.py --rounds 300 --cohort 1000 --population 1000000 --algorithm FedAvg --json

A linear classifier of 210 parameters, clients of two local steps, a TensorBoard log, and every hundred rounds a
checkpoint and a validation. The growth of the resident memory is the median over twentieths of the last 80 % of the
rounds. The first rounds fill one-time memory, such as kept client states, traces and the allocator's pools. A single
later step of the allocator is not a leak.
``docs/benchmarks.md`` has figures.
"""

import argparse
import gc
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning_fed  # first: see lightning_fed.compat.torchvision
import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import TensorBoardLogger

from lightning_fed.core.rounds import RoundReport
from on_demand import Network, Population
from systems import summary
from systems.measure import machine, positive
from systems.with_lightning_fed import make_method

__all__ = ["main", "soak"]

_IDENTITY = ("algorithm", "engine", "client_states", "processes", "rounds", "cohort", "population")
_SETTLED = 0.2  # the share of the rounds after which nothing may grow
_PARTS = 20  # parts of the later rounds, to compare their median memory


def main(argv: Sequence[str] | None = None) -> int:
    """Run or render, and return the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.render is not None:
        if args.results is None:
            parser.error("--render makes a table of the lines in --results: give it, too")
        summary.insert(args.render, table(summary.read(args.results, _IDENTITY)), "soak")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        line = soak(args, Path(folder))
    if line is None:  # a process that is not the first
        return 0
    print(json.dumps(line) if args.json else "\n".join(f"{name:26} {value}" for name, value in line.items()))
    if args.results is not None:
        with args.results.open("a") as file:
            file.write(f"{json.dumps(line)}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=positive, default=20_000, help="rounds to train (%(default)s)")
    add("--cohort", type=positive, default=10, help="clients a round (%(default)s)")
    add("--population", type=positive, default=1000, help="clients there are (%(default)s)")
    add("--algorithm", default="Scaffold", help="the method (%(default)s, whose clients keep a state)")
    add("--engine", choices=("auto", "sequential", "vectorized"), default="auto", help="%(default)s by default")
    add("--client-states", choices=("memory", "disk"), default="memory", help="where they are kept (%(default)s)")
    add("--devices", type=positive, default=1, help="processes that share the clients (%(default)s)")
    add("--every", type=positive, default=100, help="rounds from a checkpoint and validation to the next (%(default)s)")
    add("--json", action="store_true", help="print one line of JSON")
    add("--results", type=Path, help="file of JSON lines to add the figures to, and to render from")
    add("--render", type=Path, metavar="PAGE", help="run nothing: write the table of --results to a page")
    return parser


def soak(args: argparse.Namespace, folder: Path) -> dict[str, Any] | None:
    """Train in this process, and return the figures, or None in a process that is not the first.

    Args:
        args: The options of the command line.
        folder: The folder of logs and checkpoints.
    """
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    watch = Watch(args.rounds)
    logger = TensorBoardLogger(folder, name="", version="")
    checkpoints = ModelCheckpoint(folder / "checkpoints", every_n_epochs=args.every, save_top_k=1, save_last=True)
    trainer = lightning_fed.FederatedTrainer(
        algorithm=make_method(args.algorithm), max_rounds=args.rounds, clients_per_round=args.cohort, local_epochs=1,
        seed=0, engine=args.engine, accelerator="cpu", devices=args.devices, logger=logger,
        strategy="clients" if args.devices > 1 else "auto", callbacks=[watch, checkpoints], enable_progress_bar=False,
        enable_model_summary=False, check_val_every_n_epoch=args.every,
        client_states=args.client_states,
    )  # fmt: skip
    trainer.fit(Network(), Population(args.population))
    if not trainer.is_global_zero:
        return None
    written = sum(path.stat().st_size for path in folder.glob("events.out.tfevents.*"))
    return {
        "algorithm": args.algorithm,
        "engine": trainer.fit_loop.clients.engine.name,
        "client_states": args.client_states,
        "processes": args.devices,
        "rounds": args.rounds,
        "cohort": args.cohort,
        "population": args.population,
        "clients_seen": trainer.fit_loop.state.seen,
        **watch.figures(),
        "tensorboard_bytes_per_round": round(written / args.rounds, 1),
        **machine(),
    }


class Watch(lightning_fed.FederatedCallback):
    """Record time and memory after every round, in arrays that do not grow, on rank zero.

    Args:
        rounds: The number of rounds.
    """

    def __init__(self, rounds: int) -> None:
        self.seconds, self.resident = array("d", bytes(8 * rounds)), array("q", bytes(8 * rounds))
        self.settled = int(_SETTLED * rounds)
        self.counts: list[tuple[int, int]] = []  # open files and Python objects when settled, and at the end
        self._last = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._last = time.perf_counter()

    def on_round_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round: int) -> None:
        """Count files and objects once the run has settled."""
        if round == self.settled:
            self._count()
            self._last = time.perf_counter()

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round_report: RoundReport) -> None:
        """Record the time and the memory."""
        now = time.perf_counter()
        self.seconds[round_report.round], self._last = now - self._last, now
        self.resident[round_report.round] = _resident_bytes()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count files and objects again."""
        self._count()

    def _count(self) -> None:
        gc.collect()
        self.counts.append((_open_files(), len(gc.get_objects())))

    def figures(self) -> dict[str, float]:
        """Return times in seconds, memory in MB, its growth in bytes per round, and counts."""
        tenth = max(1, len(self.seconds) // 10)
        first, last = statistics.median(self.seconds[:tenth]), statistics.median(self.seconds[-tenth:])
        resident = np.frombuffer(self.resident, dtype=np.int64)[self.settled :].astype(float)
        parts = np.array_split(resident, min(len(resident), _PARTS))
        growth = np.diff([np.median(part) for part in parts])
        slope = float(np.median(growth)) * len(parts) / len(resident)
        (files, objects), (files_end, objects_end) = self.counts
        return {
            "s_per_round": round(statistics.median(self.seconds), 6),
            "time_last_to_first_tenth": round(last / first, 3),
            "rss_mb_settled": round(resident[0] / 1e6, 1),
            "rss_mb_end": round(resident[-1] / 1e6, 1),
            "rss_bytes_per_round": round(slope, 1),
            "objects_settled": objects,
            "objects_end": objects_end,
            "open_files_settled": files,
            "open_files_end": files_end,
        }


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return the figures as a table in Markdown, one row per run, with hardware and date."""
    rows: list[tuple[str, ...]] = [
        ("run", "rounds", "clients a round", "of", "ms a round", "last / first tenth", "MB at 20 %", "MB at the end",
         "bytes a round", "objects", "open files", "TensorBoard bytes a round"),
        ("---",) * 12,
    ]  # fmt: skip
    for line in lines:
        count = line["processes"]
        rows.append(
            (
                f"{line['algorithm']}, {line['engine']}, states in {line['client_states']}"
                + (f", {count} processes" if count > 1 else ""),
                *(f"{line[name]:,}" for name in ("rounds", "cohort", "population")),
                f"{1e3 * line['s_per_round']:.1f}",
                f"{line['time_last_to_first_tenth']:.2f}",
                *(f"{line[name]:.1f}" for name in ("rss_mb_settled", "rss_mb_end")),
                f"{line['rss_bytes_per_round']:.0f}",
                f"{line['objects_end'] - line['objects_settled']:+,}",
                f"{line['open_files_end'] - line['open_files_settled']:+}",
                f"{line['tensorboard_bytes_per_round']:.0f}",
            )
        )
    return f"{summary.where(lines)}\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
