"""How well control variates stand for the gradients they were made from."""

import torch

from lightning_fed.callbacks.measure import ClientMeasure
from lightning_fed.compat.package import pl
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import RoundReport
from lightning_fed.core.types import ClientId

__all__ = ["ControlVariateError"]


class ControlVariateError(ClientMeasure):
    r"""Measure how far the clients' control variates are from their true gradients at the new server model.

    SCAFFOLD (Karimireddy et al., 2020, https://arxiv.org/abs/1910.06378) corrects a client's steps by :math:`c - c_i`,
    which would be exact with :math:`c_i = \nabla f_i(x)` and :math:`c = \nabla f(x)`. It logs ``control/error``, the
    mean over the clients of :math:`\|c_i - \nabla f_i(x)\|`; ``control/relative_error``,
    :math:`\sqrt{\sum_i \|c_i - \nabla f_i(x)\|^2 / \sum_i \|\nabla f_i(x)\|^2}`, which is 1 while every c_i is 0;
    and, if all clients are measured, ``control/server_error``, :math:`\|c - \nabla f(x)\|` where f is the mean of the
    clients' losses. It costs one pass over the data of each client measured.

    It goes with every method whose clients keep a ``c_i``; ``control/server_error`` needs a server state ``c``.

    Args:
        every_n_rounds: Measure after every so many rounds.
        clients: How many clients to measure, a fixed sample; all by default.

    Attributes:
        errors: The distance by client id in the last measurement.

    Raises:
        FederatedError: If an argument is not allowed, or the method keeps no ``c_i``.
    """

    def __init__(self, every_n_rounds: int = 1, clients: int | None = None) -> None:
        super().__init__(every_n_rounds, clients)
        self.errors: dict[ClientId, float] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse a method without control variates, and settle which clients are measured."""
        state = trainer.fit_loop.state
        if "c_i" not in state.algorithm.init_client(state.x):
            raise FederatedError(
                f"ControlVariateError needs a method whose clients keep a control variate c_i, such as Scaffold; found"
                f" {state.algorithm!r}. Remove the callback."
            )
        super().on_train_start(trainer, pl_module)

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round_report: RoundReport) -> None:
        """Measure and log."""
        loop = trainer.fit_loop
        if not self.is_due(loop.round):
            return
        x, mean, squares = loop.state.x, torch.zeros_like(loop.state.x), 0.0
        errors = {}
        for i in self.measured:
            g = loop.full_gradient(i, x)
            mean.add_(g, alpha=1 / len(self.measured))
            squares += float(g.dot(g))
            if (kept := loop.client_state(i)) is not None:
                errors[i] = float(torch.linalg.vector_norm(kept["c_i"] - g))
        parts = loop.gather(errors)
        self.errors = {i: part[i] for i in self.measured for part in parts if i in part}
        missed = sum(error**2 for error in self.errors.values())
        values = {"control/error": sum(self.errors.values()) / len(self.errors)}
        if squares:
            values["control/relative_error"] = (missed / squares) ** 0.5
        if self.clients is None and "c" in loop.server:
            values["control/server_error"] = float(torch.linalg.vector_norm(loop.server["c"] - mean))
        loop.log_round(values)
