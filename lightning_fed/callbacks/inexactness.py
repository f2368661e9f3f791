"""How exactly clients solve their local problems."""

import math

import torch

from lightning_fed.callbacks.base import FederatedCallback
from lightning_fed.compat.package import pl
from lightning_fed.core.rounds import ClientReport, RoundReport
from lightning_fed.core.types import ClientId

__all__ = ["Inexactness"]


class Inexactness(FederatedCallback):
    r"""Measure the inexactness gamma of every client's local solution.

    Definition 2 of Li et al., *Federated Optimization in Heterogeneous Networks* (FedProx), MLSys 2020
    (https://arxiv.org/abs/1812.06127): the smallest :math:`\gamma` with

    .. math::
        \|\nabla F_i(y_i) + \mu (y_i - x)\| \le \gamma\, \|\nabla F_i(x)\|

    0 is an exact solution of the proximal problem, 1 no progress. It takes two full-batch gradients a client and round,
    in train mode. :math:`\mu` is FedProx's, also when it adapts, and 0 for other methods. The mean over the cohort is
    logged as ``client/gamma``, the largest value as ``client/gamma_max``.

    Attributes:
        gamma: The values of the last round by client id.
    """

    def __init__(self) -> None:
        self.gamma: dict[ClientId, float] = {}

    def on_round_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round: int) -> None:
        """Start a new round."""
        self.gamma = {}

    def on_round_restart(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round: int) -> None:
        """Start anew."""
        self.on_round_start(trainer, pl_module, round)

    def on_client_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, client_report: ClientReport) -> None:
        """Measure one client."""
        loop = trainer.fit_loop
        held = loop.client_model
        if held is None or client_report.steps == 0:
            return
        x, (y, _), i = loop.state.x, held, client_report.client_id
        mu = loop.round_state.get("mu", torch.zeros((), device=x.device))
        residual = torch.linalg.vector_norm(loop.full_gradient(i, y) + mu * (y - x))
        self.gamma[i] = float(residual / torch.linalg.vector_norm(loop.full_gradient(i, x)))

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round_report: RoundReport) -> None:
        """Log the cohort's values."""
        self.gamma = {i: value for part in trainer.fit_loop.gather(self.gamma) for i, value in part.items()}
        values = [value for value in self.gamma.values() if math.isfinite(value)]
        if values:
            trainer.fit_loop.log_round({"client/gamma": sum(values) / len(values), "client/gamma_max": max(values)})
