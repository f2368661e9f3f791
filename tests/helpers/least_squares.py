"""Linear least squares over dissimilar clients in float64: small, fast, and with optima from a linear solve."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule

WIDTH = 3

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class LeastSquares(pl.LightningModule):
    """Half the mean squared error of a linear map, from zero.

    Args:
        optimizer: Returns the local optimizer of parameters; SGD at rate 0.2 if None.
        lr_lambda: Returns the factor of its rate in a round; None for a constant rate.
    """

    def __init__(self, optimizer: Optimizer | None = None, lr_lambda: Callable[[int], float] | None = None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(WIDTH))
        self.build, self.lr_lambda = optimizer or partial(torch.optim.SGD, lr=0.2), lr_lambda

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return 0.5 * (inputs @ self.w - targets).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = self.build(self.parameters())
        if self.lr_lambda is None:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, self.lr_lambda)]


def clients(sizes: Sequence[int], seed: int = 0) -> list[TensorDataset]:
    """Return clients of these sizes, each with its own optimum and well-conditioned Hessian."""
    stream = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=stream, dtype=torch.float64)
    data = []
    for n in sizes:
        rows = max(n, WIDTH)
        axes, rotation = (torch.linalg.qr(draw(m, WIDTH)).Q for m in (rows, WIDTH))
        inputs = rows**0.5 * axes * torch.tensor([0.8, 1.0, 1.2], dtype=torch.float64) @ rotation
        optimum = 2 * draw(WIDTH)
        data.append(TensorDataset(inputs[:n], inputs[:n] @ optimum + 0.1 * draw(n)))
    return data


def data(sizes: Sequence[int], seed: int = 0, batch_size: int = 1000, **kwargs: Any) -> FederatedDataModule:
    """Return a data module over :func:`clients`. By default, a client is one batch."""
    return FederatedDataModule(clients=clients(sizes, seed), batch_size=batch_size, **kwargs)


def gradient(w: Tensor, data: Sequence[TensorDataset], weights: Sequence[float]) -> Tensor:
    """Return the gradient of the weighted mean of the clients' losses."""
    total = sum(weights)
    parts = [
        wi / total * X.T @ (X @ w - y) / len(y) for wi, (X, y) in zip(weights, (d.tensors for d in data), strict=True)
    ]
    return torch.stack(parts).sum(0)


def optimum(data: Sequence[TensorDataset], weights: Sequence[float]) -> Tensor:
    """Return the minimizer of the weighted mean of the clients' losses."""
    zero = torch.zeros(WIDTH, dtype=torch.float64)
    g0 = gradient(zero, data, weights)
    hessian = torch.stack([gradient(e, data, weights) - g0 for e in torch.eye(WIDTH, dtype=torch.float64)], dim=1)
    return torch.linalg.solve(hessian, -g0)
