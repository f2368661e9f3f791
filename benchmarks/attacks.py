"""Measure the effect of attacks on a model under every aggregation rule, and the cost of each rule.

    python benchmarks/attacks.py            # the accuracies of docs/aggregation.md, about three minutes
    python benchmarks/attacks.py --cost     # CPU seconds to combine the messages of 100 clients, a million entries each

The digits are split IID among 20 clients. Four are bad. A logistic regression trains for 12 rounds of one epoch.
"""

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Sequence

import lightning_fed
import torch

from lightning_fed.data import Digits, Iid
from lightning_fed.models import MLPClassifier
from lightning_fed.server import (
    Aggregator,
    Attack,
    Bulyan,
    CoordinateMedian,
    GeometricMedian,
    Krum,
    LabelFlipAttack,
    MultiKrum,
    NoiseAttack,
    NormClipping,
    RobustAggregator,
    SignFlipAttack,
    TrimmedMean,
)

__all__ = ["accuracy", "main", "seconds"]

CLIENTS, BAD, ROUNDS = 20, 0.2, 12
ATTACKS: dict[str, Attack | None] = {
    "none": None,
    "sign flip": SignFlipAttack(BAD),
    "sign flip, times 10": SignFlipAttack(BAD, scale=10.0),
    "noise of deviation 10": NoiseAttack(BAD, std=10.0),
    "label flip": LabelFlipAttack(BAD, num_classes=Digits.num_classes),
}
RULES: dict[str, Aggregator | None] = {
    "mean": None,
    "clipped at 1": NormClipping(1.0),
    "median": CoordinateMedian(),
    "trimmed, 0.25": TrimmedMean(0.25),
    "geometric, 10 iterations": GeometricMedian(iterations=10),
    "Krum": Krum(num_bad=4),
    "Multi-Krum": MultiKrum(num_bad=4),
    "Bulyan": Bulyan(num_bad=4),
}


def accuracy(attack: Attack | None, rule: Aggregator | None, rounds: int = ROUNDS) -> float:
    """Return the accuracy on the digits' test set after a run."""
    torch.manual_seed(0)
    model = MLPClassifier(hidden=(), lr=0.5)
    data = Digits(partition=Iid(num_clients=CLIENTS, seed=0), batch_size=10)
    trainer = lightning_fed.FederatedTrainer(
        aggregator=rule, attack=attack, weighting="uniform", max_rounds=rounds, local_epochs=1, seed=0, logger=False,
        engine="vectorized", enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accelerator="cpu", limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(model, data)
    inputs, labels = data.test.tensors
    with torch.no_grad():
        return float((model(inputs).argmax(1) == labels).float().mean())


def seconds(rule: RobustAggregator, messages: torch.Tensor) -> float:
    """Return the CPU seconds to combine messages [S, P] of equal weight, the median of three."""
    weights, taken = torch.full((len(messages),), 1 / len(messages), dtype=torch.float64), []
    for _ in range(3):
        start = time.process_time()
        rule.combine(messages, weights, lambda part: part)
        taken.append(time.process_time() - start)
    return sorted(taken)[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cost", action="store_true", help="measure seconds in place of accuracies")
    parser.add_argument("--clients", type=int, default=100, help="messages combined, with --cost")
    parser.add_argument("--entries", type=int, default=10**6, help="entries of a message, with --cost")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of a run, without --cost")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.cost:
        messages = torch.randn(given.clients, given.entries, generator=torch.Generator().manual_seed(0))
        print("| rule | seconds |\n| --- | --- |")
        for name, rule in RULES.items():
            if isinstance(rule, RobustAggregator):
                print(f"| {name} | {seconds(rule, messages):.1f} |", flush=True)
        return 0
    warnings.filterwarnings("ignore")
    for name in ("pytorch_lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    print(f"| attack | {' | '.join(RULES)} |\n|{' --- |' * (len(RULES) + 1)}")
    for name, attack in ATTACKS.items():
        print(f"| {name} | {' | '.join(f'{accuracy(attack, rule, given.rounds):.2f}' for rule in RULES.values())} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
