"""Evaluate one model on every client, before and after a few local steps: ``python examples/per_client.py``.

Each client keeps a fifth of its examples for evaluation. Its personalization gap is the accuracy after a few local
steps from the server's model, minus the accuracy of the server's model itself.
"""

import argparse
from statistics import fmean

import lightning_fed  # noqa: F401 - before anything that imports Lightning
from pytorch_lightning import seed_everything
from torch.utils.data import Subset

from lightning_fed import FederatedDataModule, FederatedTrainer
from lightning_fed.algorithms import Scaffold
from lightning_fed.callbacks import ClientAccuracy, PersonalizedAccuracy
from lightning_fed.data import Digits
from lightning_fed.models import MLPClassifier


def main(max_rounds: int = 30) -> float:
    """Train, print a table of clients, and return the mean accuracy over them."""
    seed_everything(0)
    digits = Digits(num_clients=20, alpha=0.3)
    whole = {i: digits.client_dataset(i) for i in digits.client_ids}
    cuts = {i: max(1, len(part) // 5) for i, part in whole.items()}
    data = FederatedDataModule(
        clients={i: Subset(part, range(cuts[i], len(part))) for i, part in whole.items()},
        client_val={i: Subset(part, range(cuts[i])) for i, part in whole.items()},
        val=digits.val,
        batch_size=16,
    )
    as_it_is = ClientAccuracy(monitor="val_acc", every_n_rounds=max_rounds)
    after_steps = PersonalizedAccuracy(monitor="val_acc", every_n_rounds=max_rounds, local_steps=5)
    trainer = FederatedTrainer(
        algorithm=Scaffold(),
        max_rounds=max_rounds,
        clients_per_round=10,
        local_epochs=2,
        callbacks=[as_it_is, after_steps],  # both also log summaries and write tables
    )
    trainer.fit(MLPClassifier(lr=0.2), data)

    print(f"\n{'client':>6} {'examples':>9} {'server model':>13} {'5 steps later':>14} {'gap':>6}")
    for i in sorted(as_it_is.table, key=lambda i: as_it_is.table[i]["val_acc"]):
        before, after = as_it_is.table[i]["val_acc"], after_steps.table[i]["val_acc"]
        print(f"{i:>6} {cuts[i]:>9} {before:>13.3f} {after:>14.3f} {after - before:>+6.3f}")
    shown = trainer.callback_metrics
    print(f"worst tenth of the clients: {shown['clients/val_acc/worst_10']:.3f} as it is,", end=" ")
    print(f"{shown['personalized/val_acc/worst_10']:.3f} after 5 steps")
    return fmean(row["val_acc"] for row in as_it_is.table.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-rounds", type=int, default=30)
    main(parser.parse_args().max_rounds)
