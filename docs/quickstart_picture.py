"""Draw the README's picture: four methods on the quickstart's digits, from their TensorBoard logs.

    python docs/quickstart_picture.py          # about two minutes on two cores; needs the dev extra

Writes docs/images/quickstart.png.
"""

import argparse
import tempfile
import warnings
from pathlib import Path

import lightning_fed  # isort: skip  # before anything that imports Lightning
import matplotlib.pyplot as plt
import torch
from pytorch_lightning.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_fed.algorithms import Algorithm, FedAvg, FedCM, Mime, Scaffold, SGDm
from lightning_fed.data import Digits
from lightning_fed.models import MLPClassifier

METHODS: dict[str, Algorithm] = {
    "FedAvg": FedAvg(),
    "SCAFFOLD": Scaffold(),
    "Mime (SGDm)": Mime(base=SGDm(beta=0.9)),
    "FedCM": FedCM(alpha=0.1),
}
TAGS = {"val_acc": "validation accuracy", "client/drift": "spread of the client models"}


def run(method: Algorithm, rounds: int, folder: Path) -> EventAccumulator:
    """Train with one method, and return its log."""
    torch.manual_seed(0)
    logger = TensorBoardLogger(folder)
    trainer = lightning_fed.FederatedTrainer(
        algorithm=method,
        max_rounds=rounds,
        clients_per_round=10,
        local_epochs=5,
        seed=0,
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    trainer.fit(MLPClassifier(lr=0.1), Digits(num_clients=30, alpha=0.1, batch_size=16))
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    return events


def main() -> None:
    """Run the methods and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    figure, axes = plt.subplots(1, len(TAGS), figsize=(9, 3.2), layout="constrained")
    with tempfile.TemporaryDirectory() as folder:
        for name, method in METHODS.items():
            events = run(method, args.rounds, Path(folder) / type(method).__name__)
            for axis, tag in zip(axes, TAGS, strict=True):
                scalars = events.Scalars(tag)
                axis.plot([s.step for s in scalars], [s.value for s in scalars], label=name, linewidth=1.4)
    for axis, title in zip(axes, TAGS.values(), strict=True):
        axis.set(title=title, xlabel="round")
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    path = Path(__file__).parent / "images" / "quickstart.png"
    figure.savefig(path, dpi=110)
    print(f"wrote {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


if __name__ == "__main__":
    main()
