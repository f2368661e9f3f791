"""A method written outside the package, trained on the digits of scikit-learn: ``python examples/new_algorithm.py``.

The method is FedACG: Kim et al., *Communication-Efficient Federated Learning with Accelerated Client Gradient*, CVPR
2024 (https://arxiv.org/abs/2201.03172). The server's model theta has a momentum m, and clients start at the point
that the momentum leads to, x = theta + lam m::

    y     <- y - eta (g_i(y) + beta (y - x))
    m     <- lam m + mean of (y_i - x)
    theta <- theta + m

The server holds x here. The new theta is the mean of the clients' models, so x moves to that mean plus lam m.
``evaluate_at`` returns theta for validation, checkpoints and the final model. The server optimizer stays SGD(lr=1).
"""

import argparse

import lightning_fed  # noqa: F401 - before anything that imports Lightning
import torch
from pytorch_lightning import seed_everything

from lightning_fed import FederatedTrainer
from lightning_fed.algorithms import Algorithm
from lightning_fed.core.rounds import Cohort, Step
from lightning_fed.core.types import State, Vector
from lightning_fed.data import Digits
from lightning_fed.models import MLPClassifier


class FedACG(Algorithm):
    """FedACG with momentum ``lam`` in [0, 1) and proximal coefficient ``beta`` >= 0; both zero give FedAvg."""

    default_weighting = "uniform"

    def __init__(self, lam: float = 0.85, beta: float = 0.01) -> None:
        self.lam, self.beta = lam, beta

    def init_server(self, x: Vector) -> State:
        """Return m = 0."""
        return {"m": torch.zeros_like(x)}

    def correct(self, g: Vector, y: Vector, step: Step) -> Vector:
        """Return g + beta (y - x)."""
        return g + self.beta * (y - step.x)

    def update_server(self, x: Vector, server: State, mean: State, cohort: Cohort) -> tuple[Vector, State]:
        """Update m, and step to the mean of the clients' models plus lam m."""
        m = self.lam * server["m"] + mean["delta"]
        return mean["delta"] + self.lam * m, {"m": m}

    def evaluate_at(self, x: Vector, server: State) -> Vector:
        """Return theta."""
        return x - self.lam * server["m"]


def main(max_rounds: int = 10) -> float:
    """Train, and return the test accuracy of the final server model."""
    seed_everything(0)
    data = Digits(num_clients=30, alpha=0.3, batch_size=16)
    trainer = FederatedTrainer(algorithm=FedACG(), max_rounds=max_rounds, clients_per_round=10, local_epochs=2)
    model = MLPClassifier(lr=0.1)
    trainer.fit(model, data)
    (metrics,) = trainer.test(model, data, verbose=False)
    print(f"test accuracy after {max_rounds} rounds: {metrics['test_acc']:.3f}")
    return metrics["test_acc"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-rounds", type=int, default=10)
    main(parser.parse_args().max_rounds)
