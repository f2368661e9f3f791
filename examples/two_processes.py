"""Share the clients of a round among processes, on CPUs or GPUs: ``python examples/two_processes.py --devices 2``.

Lightning starts this script again for each additional process, so all code except the functions is below
``if __name__``. ``torchrun --nproc-per-node 2 examples/two_processes.py`` starts the processes itself. On several
machines, ``--num-nodes`` gives their number. The rounds equal those of a single process up to rounding.
"""

import argparse

import lightning_fed  # noqa: F401 - before anything that imports Lightning
from pytorch_lightning import seed_everything

from lightning_fed import FederatedTrainer
from lightning_fed.algorithms import Scaffold
from lightning_fed.data import Digits
from lightning_fed.models import MLPClassifier


def main(max_rounds: int = 30, devices: int = 2, num_nodes: int = 1, accelerator: str = "cpu") -> float:
    """Train, and return the validation accuracy of the last round. Every process has it."""
    seed_everything(0)  # the same in every process
    trainer = FederatedTrainer(
        algorithm=Scaffold(),
        max_rounds=max_rounds,
        clients_per_round=10,
        local_epochs=2,
        engine="auto",
        strategy="clients",
        accelerator=accelerator,
        devices=devices,
        num_nodes=num_nodes,
    )
    trainer.fit(MLPClassifier(lr=0.2), Digits(num_clients=30, alpha=0.3, batch_size=16))
    accuracy = float(trainer.callback_metrics["val_acc"])
    trainer.print(f"val_acc {accuracy:.4f} after {max_rounds} rounds in {trainer.world_size} processes")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-rounds", type=int, default=30)
    parser.add_argument("--devices", type=int, default=2, help="processes on each machine")
    parser.add_argument("--num-nodes", type=int, default=1, help="machines")
    parser.add_argument("--accelerator", default="cpu", choices=["cpu", "gpu"])
    main(**vars(parser.parse_args()))
