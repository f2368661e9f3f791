"""How memory and time depend on the number of clients, where clients are built when they take part and not before.

    python benchmarks/population_memory.py            # a table
    python benchmarks/population_memory.py --json     # one line of JSON per run

Each population is trained in a process of its own, whose peak resident memory is read at the end. Workload: 100 clients
a round, each with 16 examples of 20 features made on demand; a linear classifier, batches of 8, one local epoch. FedAvg
keeps nothing of a client; SCAFFOLD keeps a control variate for every client that has taken part, and for no other.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
import warnings
from typing import Any

STATELESS, STATEFUL = "FedAvg", "Scaffold"
COHORT, EXAMPLES, FEATURES, CLASSES = 100, 16, 20, 10


def measure(method: str, num_clients: int, rounds: int) -> dict[str, Any]:
    """Train in this process and return the figures; imports are on the clock and in the memory, as in any script."""
    started = time.perf_counter()
    import lightning_fed
    import torch
    from torch import Tensor
    from torch.utils.data import TensorDataset

    from lightning_fed import algorithms
    from lightning_fed.core.rounds import RoundReport
    from lightning_fed.models import MLPClassifier

    class Population(lightning_fed.FederatedDataModule):
        """Clients made when they are asked for."""

        def client_dataset(self, client_id: int | str) -> TensorDataset:
            """Return a client's examples, a function of its id."""
            stream = torch.Generator().manual_seed(int(client_id))
            x: Tensor = torch.randn(EXAMPLES, FEATURES, generator=stream)
            return TensorDataset(x, x[:, :CLASSES].argmax(1))

        def client_size(self, client_id: int | str) -> int:
            """Return a client's number of examples without making it."""
            return EXAMPLES

    class Clock(lightning_fed.FederatedCallback):
        """Keep when the rounds ended."""

        def __init__(self) -> None:
            self.starts = 0.0
            self.ends: list[float] = []

        def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
            """Note when the first round starts."""
            self.starts = self.starts or time.perf_counter()

        def on_round_end(self, trainer: Any, pl_module: Any, round_report: RoundReport) -> None:
            """Note when a round ends."""
            self.ends.append(time.perf_counter())

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    before = _peak_memory()
    data = Population(batch_size=8)
    data.num_clients = num_clients
    clock = Clock()
    trainer = lightning_fed.FederatedTrainer(
        algorithm=getattr(algorithms, method)(), max_rounds=rounds, clients_per_round=COHORT, local_epochs=1, seed=0,
        callbacks=clock, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(MLPClassifier(in_features=FEATURES, num_classes=CLASSES, hidden=[]), data)
    return {
        "method": method,
        "clients": num_clients,
        "rounds": rounds,
        "clients_seen": trainer.fit_loop.state.seen,
        "kept_states": len(trainer.fit_loop.state.clients),
        "peak_mb": round(_peak_memory(), 1),
        "growth_mb": round(_peak_memory() - before, 1),
        "seconds_to_first_round": round(clock.starts - started, 2),
        "seconds_per_round": round((clock.ends[-1] - clock.starts) / rounds, 3),
    }


def _peak_memory() -> float:
    """Return the process's largest resident memory so far in MB; the system counts it in KiB, macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def measure_apart(method: str, num_clients: int, rounds: int) -> dict[str, Any]:
    """Return the figures of one run in a fresh process."""
    command = [sys.executable, __file__, "--rounds", str(rounds), "--one", method, str(num_clients)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[10**4, 10**5, 10**6], help="numbers of clients")
    parser.add_argument("--methods", nargs="+", default=[STATELESS, STATEFUL], help="names of methods")
    parser.add_argument("--rounds", type=int, default=10, help="rounds to train")
    parser.add_argument("--json", action="store_true", help="print one line of JSON per run")
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "CLIENTS"), help="one run, in this process, as JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], int(args.one[1]), args.rounds)))
        return
    if not args.json:
        print(
            _row("method", "clients", "peak MB", "MB since the imports", "states kept", "s to round one", "s a round")
        )
        print(_row(*["---"] * 7))
    for method in args.methods:
        for num_clients in args.clients:
            row = measure_apart(method, num_clients, args.rounds)
            if args.json:
                print(json.dumps(row), flush=True)
                continue
            memory = [f"{row[name]:.0f}" for name in ("peak_mb", "growth_mb")]
            seconds = [f"{row['seconds_to_first_round']:.1f}", f"{row['seconds_per_round']:.2f}"]
            print(_row(method, f"{num_clients:,}", *memory, f"{row['kept_states']:,}", *seconds), flush=True)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
