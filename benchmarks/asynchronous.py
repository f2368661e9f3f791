"""The simulated time until FedBuff and synchronous FedAvg reach an accuracy, with 0, 50 and 90 % slow clients.

    python benchmarks/asynchronous.py

Workload: the handwritten digits of scikit-learn on 100 clients with classes from Dir(0.3), an MLP 64-64-10, two local
epochs in batches of 8 with SGD at rate 0.1. Ten clients work at a time. The synchronous server waits for all ten;
FedBuff steps for every four answers. A client takes a second, a slow one ten. The time is that at which the mean of the
last three validations, one a round, first reaches the target; means and standard deviations over the seeds.
"""

import argparse
import json
import logging
import statistics
import warnings
from collections import deque
from typing import Any

import lightning_fed  # first: see lightning_fed._torchvision
import pytorch_lightning as pl
from lightning_fed.algorithms import FedAvg
from lightning_fed.callbacks import SimulatedTime
from lightning_fed.data import Digits
from lightning_fed.models import MLPClassifier
from lightning_fed.server import ClientClock, FedBuff

SHARES = (0.0, 0.5, 0.9)
AT_WORK, BUFFER, SLOW = 10, 4, 10.0


class UntilTarget(lightning_fed.FederatedCallback):
    """End the run when the mean of three validations reaches a target, and keep the simulated time."""

    def __init__(self, target: float, time: SimulatedTime) -> None:
        self.target, self.time = target, time
        self.last: deque[float] = deque(maxlen=3)
        self.reached: float | None = None

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at the accuracy."""
        if trainer.sanity_checking:
            return
        self.last.append(float(trainer.callback_metrics["val_acc"]))
        if len(self.last) == 3 and statistics.mean(self.last) >= self.target:
            self.reached = self.time.seconds
            trainer.should_stop = True


def reach(is_asynchronous: bool, slow_share: float, seed: int, target: float, max_rounds: int) -> float | None:
    """Return the simulated seconds to the target, None if it was not reached."""
    pl.seed_everything(seed, verbose=False)
    clock = ClientClock(slow_share=slow_share, slow_factor=SLOW)
    time = SimulatedTime(None if is_asynchronous else clock)
    until = UntilTarget(target, time)
    who: dict[str, Any] = {"clients_per_round": AT_WORK, "weighting": "uniform"}
    if is_asynchronous:
        who = {"asynchronous": FedBuff(BUFFER, AT_WORK, clock=clock)}
    trainer = lightning_fed.FederatedTrainer(
        algorithm=FedAvg(), max_rounds=max_rounds, local_epochs=2, callbacks=[time, until], engine="vectorized",
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accelerator="cpu", num_sanity_val_steps=0, **who,
    )  # fmt: skip
    trainer.fit(MLPClassifier(64, 10, [64], lr=0.1), Digits(num_clients=100, alpha=0.3, batch_size=8, seed=seed))
    return until.reached


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--target", type=float, default=0.9)
    parser.add_argument("--max-rounds", type=int, default=600)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    found = {
        f"{'FedBuff' if is_asynchronous else 'FedAvg'} {share:.0%}": [
            reach(is_asynchronous, share, seed, args.target, args.max_rounds) for seed in range(args.seeds)
        ]
        for share in SHARES
        for is_asynchronous in (False, True)
    }
    if args.json:
        print(json.dumps(found))
        return
    print("| slow clients | FedAvg, synchronous | FedBuff |\n| --- | --- | --- |")
    for share in SHARES:
        cells = [_cell(found[f"{name} {share:.0%}"]) for name in ("FedAvg", "FedBuff")]
        print(f"| {share:.0%} | {cells[0]} | {cells[1]} |")


def _cell(seconds: list[float | None]) -> str:
    reached = [value for value in seconds if value is not None]
    if len(reached) < len(seconds):
        return f"reached by {len(reached)} of {len(seconds)} seeds"
    return f"{statistics.mean(reached):.0f} ± {statistics.stdev(reached) if len(reached) > 1 else 0:.0f}"


if __name__ == "__main__":
    main()
