"""Short runs of methods with personal models."""

from typing import Any

import torch
from torch import Tensor

from lightning_fed import FederatedDataModule
from lightning_fed.algorithms import Algorithm
from tests.helpers.training import data, seeded, trainer

__all__ = ["close", "kept", "one_client", "run"]


def run(algorithm: Algorithm, datamodule: Any = None, model: Any = None, **options: Any) -> Any:
    """Return the trainer after a fit in float64."""
    fitted = trainer(algorithm=algorithm, **{"precision": "64-true", "limit_val_batches": 0, **options})
    fitted.fit(seeded(dropout=0.0) if model is None else model, data() if datamodule is None else datamodule)
    return fitted


def kept(fitted: Any) -> dict[int, dict[str, Tensor]]:
    """Return the states of the clients."""
    return fitted.fit_loop.state.clients.state_dict()


def close(a: Tensor, b: Tensor) -> None:
    """Check that vectors agree up to rounding."""
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def one_client(batch_size: int = 4) -> FederatedDataModule:
    """Return the data of one client."""
    return data((13,), batch_size=batch_size)
