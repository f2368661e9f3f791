"""SCAFFOLD on the handwritten digits of scikit-learn, from Python: ``python examples/quickstart.py``."""

import argparse

import lightning_fed  # before anything that imports Lightning
from pytorch_lightning import seed_everything
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_fed.algorithms import Scaffold
from lightning_fed.data import Digits
from lightning_fed.models import MLPClassifier


def main(max_rounds: int = 50) -> float:
    """Train, test the best checkpoint, and return its test accuracy."""
    seed_everything(0)
    data = Digits(num_clients=30, alpha=0.3, batch_size=16)
    trainer = lightning_fed.FederatedTrainer(
        algorithm=Scaffold(),
        max_rounds=max_rounds,
        clients_per_round=10,
        local_epochs=2,
        callbacks=ModelCheckpoint(monitor="val_acc", mode="max", save_last=True),
    )
    trainer.fit(MLPClassifier(lr=0.2), data)
    (metrics,) = trainer.test(datamodule=data, ckpt_path="best")
    return metrics["test_acc"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-rounds", type=int, default=50)
    main(parser.parse_args().max_rounds)
