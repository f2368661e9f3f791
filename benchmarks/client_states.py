"""Measure the memory and disk use of client states: SCAFFOLD with clients that take part in turn.

    python benchmarks/client_states.py --clients 100000 --params 2000 --store memory disk

It prints a line of JSON per store. Memory is the peak resident size of the process, and its growth since the imports.
Times are the median seconds of a round, and the seconds to save a checkpoint and to resume from it. Disk sizes are of
the checkpoint and of the files next to it, in MB. Each client takes one local step on 8 examples made on demand.
"""

import argparse
import json
import logging
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

CLASSES, EXAMPLES = 10, 8


def measure(store: str, clients: int, params: int, per_round: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Train in this process and return the figures."""
    import lightning_fed
    import torch
    from torch.utils.data import TensorDataset

    from lightning_fed.algorithms import Scaffold
    from lightning_fed.core.rounds import RoundReport
    from lightning_fed.models import MLPClassifier
    from lightning_fed.server import RoundRobinSampler

    features = max(1, params // CLASSES - 1)

    class Population(lightning_fed.FederatedDataModule):
        """Clients created on demand."""

        def client_dataset(self, client_id: int | str) -> TensorDataset:
            """Return a client's examples, a function of its id."""
            stream = torch.Generator().manual_seed(int(client_id))
            x = torch.randn(EXAMPLES, features, generator=stream)
            return TensorDataset(x, torch.arange(EXAMPLES) % CLASSES)

        def client_size(self, client_id: int | str) -> int:
            """Return a client's number of examples without making it."""
            return EXAMPLES

    class Clock(lightning_fed.FederatedCallback):
        """Record the start and end of each round."""

        def __init__(self) -> None:
            self.starts: list[float] = []
            self.ends: list[float] = []

        def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
            """Record the start of a round."""
            self.starts.append(time.perf_counter())

        def on_round_end(self, trainer: Any, pl_module: Any, round_report: RoundReport) -> None:
            """Record the end of a round."""
            self.ends.append(time.perf_counter())

    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)  # keep the output pure JSON
    torch.set_num_threads(1)

    def trainer(rounds: int) -> tuple[Any, Any, Any, Clock]:
        data, clock = Population(batch_size=EXAMPLES), Clock()
        data.num_clients = clients
        made = lightning_fed.FederatedTrainer(
            algorithm=Scaffold(), max_rounds=rounds, sampler=RoundRobinSampler(per_round), local_steps=1, seed=0,
            engine="vectorized", client_states=store, callbacks=clock, default_root_dir=folder, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
        )  # fmt: skip
        return made, MLPClassifier(in_features=features, num_classes=CLASSES, hidden=[]), data, clock

    before = _peak_memory()
    fitted, module, data, clock = trainer(rounds)
    fitted.fit(module, data)
    peak, saving = _peak_memory(), time.perf_counter()
    fitted.save_checkpoint(folder / "a.ckpt")
    saved = time.perf_counter()
    kept = len(fitted.fit_loop.state.clients)
    on_disk = sum(file.stat().st_size for file in folder.rglob("*.*") if file.suffix != ".ckpt")
    peak_saved = _peak_memory()
    del fitted
    again, module, data, resumed = trainer(rounds + 1)
    resuming = time.perf_counter()
    again.fit(module, data, ckpt_path=folder / "a.ckpt")
    seconds = sorted(end - start for start, end in zip(clock.starts, clock.ends, strict=True))
    return {
        "store": store,
        "clients": clients,
        "params": features * CLASSES + CLASSES,
        "per_round": per_round,
        "rounds": rounds,
        "kept_states": kept,
        "states_mb": round(kept * (features * CLASSES + CLASSES) * 4 / 1e6, 1),
        "peak_mb": round(peak, 1),
        "growth_mb": round(peak - before, 1),
        "growth_with_checkpoint_mb": round(peak_saved - before, 1),
        "seconds_per_round": round(seconds[len(seconds) // 2], 4),
        "seconds_to_save": round(saved - saving, 3),
        "seconds_to_resume": round(resumed.starts[0] - resuming, 3),
        "checkpoint_mb": round((folder / "a.ckpt").stat().st_size / 1e6, 3),
        "store_mb": round(on_disk / 1e6, 1),
    }


def _peak_memory() -> float:
    """Return the process's peak resident memory so far in MB. The system reports KiB, or bytes on macOS."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def main() -> None:
    """Measure each store in its own process, and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100_000, help="number of clients")
    parser.add_argument("--params", type=int, default=2000, help="number of parameters, about")
    parser.add_argument("--per-round", type=int, default=1000, help="clients in a round")
    parser.add_argument("--rounds", type=int, help="rounds; by default until every client has had its turn")
    parser.add_argument("--store", nargs="+", choices=["memory", "disk"], default=["memory", "disk"])
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    rounds = args.rounds or -(-args.clients // args.per_round)
    for store in args.store:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            if args.one:
                row = measure(store, args.clients, args.params, args.per_round, rounds, Path(folder))
                print(json.dumps(row), flush=True)
                continue
            command = [sys.executable, __file__, *sys.argv[1:], "--store", store, "--one"]
            done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
            print(done.stdout.splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
