"""A case's losses as LightningModules, and its clients as a data module that returns the stored minibatches."""

from collections.abc import Iterator
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fed import FederatedDataModule
from lightning_fed.data.batches.batches import ClientBatches

from .cases import ASYNCHRONOUS, Case

UNUSED_LR = 1.0
"""The local rate of a method without local work: large, so that a local step taken by mistake shows."""


class OracleModule(pl.LightningModule):
    """A case's model and loss, in a user's style: automatic optimization, one SGD, one scheduler a round.

    Args:
        case: The case.
        decay_in_optimizer: Whether the l2 term is the optimizer's ``weight_decay`` instead of a part of the loss.
    """

    def __init__(self, case: Case, decay_in_optimizer: bool = False) -> None:
        super().__init__()
        self.hp = case.hp
        self.loss_l2, self.weight_decay = (0.0, case.l2) if decay_in_optimizer else (case.l2, 0.0)
        self.weight_decay += case.hp.get("weight_decay", 0.0)  # for pFedMe's inner steps

    def loss(self, batch: Any) -> Tensor:
        """Return the mean loss of a batch without the l2 term."""
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean loss of a batch."""
        return self.loss(batch) + 0.5 * self.loss_l2 * sum(p.square().sum() for p in self.parameters())

    def configure_optimizers(self) -> Any:
        """Return SGD, and a per-round decay of its rate if the case has one."""
        lr = self.hp.get("client_lr", UNUSED_LR)
        optimizer = torch.optim.SGD(self.groups(), lr=lr, weight_decay=self.weight_decay)
        if "client_lr_decay" not in self.hp:
            return optimizer
        decay = self.hp["client_lr_decay"]
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda r: decay**r)]

    def groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups. Personal parameters have their own rate from the case."""
        if "shared" not in self.hp:
            return [{"params": list(self.parameters())}]
        named = {name.rpartition(".")[2]: parameter for name, parameter in self.named_parameters()}
        shared = [parameter for name, parameter in named.items() if name in self.hp["shared"]]
        personal = [parameter for name, parameter in named.items() if name not in self.hp["shared"]]
        rate = self.hp.get("personal_lr", self.hp["client_lr"])
        return [{"params": shared}, {"params": personal, "lr": rate}]


class LinearModule(OracleModule):
    """``nn.Linear`` under cross-entropy ("softmax") or half the mean squared error ("least_squares")."""

    def __init__(self, case: Case, decay_in_optimizer: bool = False) -> None:
        super().__init__(case, decay_in_optimizer)
        n_out, n_in = case.shape
        self.linear = nn.Linear(n_in, n_out)
        self.softmax = case.kind == "softmax"

    def loss(self, batch: Any) -> Tensor:
        """Return the mean loss of the rows ``(X, y)``."""
        inputs, targets = batch
        outputs = self.linear(inputs)
        return F.cross_entropy(outputs, targets) if self.softmax else 0.5 * F.mse_loss(outputs, targets)


class QuadraticModule(OracleModule):
    """One scalar parameter x with loss ``0.5 a x^2 + b x``."""

    def __init__(self, case: Case, decay_in_optimizer: bool = False) -> None:
        super().__init__(case, decay_in_optimizer)
        self.x = nn.Parameter(torch.zeros(1))

    def loss(self, batch: Any) -> Tensor:
        """Return the mean loss of the rows ``(a, b)``."""
        a, b = batch
        return (0.5 * a * self.x**2 + b * self.x).mean()


def build_module(case: Case, decay_in_optimizer: bool = False, at_start: bool = True) -> OracleModule:
    """Return a case's module, at its initial parameters or (for a resume) at values that do not occur in it."""
    kind = QuadraticModule if case.kind == "quadratic" else LinearModule
    module = kind(case, decay_in_optimizer)
    initial = case.initial()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(initial[name.removeprefix("linear.")]) if at_start else parameter.fill_(1234.5)
    return module


class OracleBatches(ClientBatches):
    """A client whose local epoch is the stored list of minibatches of one round.

    Args:
        rows: All rows of the client, as the tensors of one batch.
        batches: The row numbers of every local minibatch.
        uneven_chunks: Whether full passes come in batches of 1, 2, 3, ... rows instead of in one piece.
        own: The row numbers of every minibatch of the personal solve, if any.
    """

    def __init__(
        self,
        rows: tuple[Tensor, Tensor],
        batches: list[list[int]],
        uneven_chunks: bool,
        own: list[list[int]] | None = None,
    ) -> None:
        self.size, self._own = len(rows[0]), own
        self._rows, self._batches, self._uneven_chunks = rows, batches, uneven_chunks

    def num_batches(self) -> int:
        """Return the local steps of this round."""
        return len(self._batches)

    def epoch(self, generator: torch.Generator, shuffle: bool = True) -> Iterator[tuple[Any, int]]:
        """Yield the stored minibatches in the stored order."""
        for rows in self._batches:
            yield self._take(rows), len(rows)

    def full(self, generator: torch.Generator) -> Iterator[tuple[Any, int]]:
        """Yield every row once, in stored order."""
        start, length = 0, 1 if self._uneven_chunks else self.size
        while start < self.size:
            rows = list(range(start, min(start + length, self.size)))
            yield self._take(rows), len(rows)
            start, length = start + length, length + 1

    def for_own_solve(self) -> "OracleBatches":
        """Return the minibatches of the personal solve."""
        assert self._own is not None
        return OracleBatches(self._rows, self._own, self._uneven_chunks)

    def _take(self, rows: list[int]) -> tuple[Tensor, ...]:
        return tuple(tensor[rows] for tensor in self._rows)


class OracleData(FederatedDataModule):
    """The clients of a case. Their minibatches depend on the trainer's round."""

    def __init__(self, case: Case, uneven_chunks: bool = False) -> None:
        super().__init__()
        self.case, self.uneven_chunks = case, uneven_chunks

    @property
    def client_ids(self) -> list[int]:
        """The numbers of the clients, as the case counts them."""
        return list(range(self.num_clients))

    @property
    def num_clients(self) -> int:
        """N."""
        return len(self.case.sizes)

    def client_size(self, client_id: int) -> int:
        """Return the number of rows of a client."""
        return self.case.sizes[client_id]

    def client_batches(self, client_id: int) -> OracleBatches:
        """Return a client with its minibatches of the current round."""
        place = self._round(), client_id
        own = self.case.own_batches(*place)
        return OracleBatches(self.case.rows(client_id), self.case.batches(*place), self.uneven_chunks, own)

    def _round(self) -> int:
        assert self.trainer is not None
        # The population loss may be computed again after the last round. It needs rows, not minibatches.
        return min(self.trainer.current_epoch, self.case.n_rounds - 1)


class ArrivalData(FederatedDataModule):
    """A client for every arrival of an asynchronous case, with the rows of the arriving client."""

    def __init__(self, case: Case, uneven_chunks: bool = False) -> None:
        super().__init__()
        self.case, self.uneven_chunks = case, uneven_chunks
        self.places = [
            (r, place, client) for r in range(case.n_rounds) for place, (client, _) in enumerate(case.arrivals(r))
        ]

    @property
    def client_ids(self) -> list[int]:
        """The numbers of the arrivals, in order."""
        return list(range(self.num_clients))

    @property
    def num_clients(self) -> int:
        """The arrivals of all rounds."""
        return len(self.places)

    def client_size(self, client_id: int) -> int:
        """Return the number of rows of the client whose update arrives."""
        return self.case.sizes[self.places[client_id][-1]]

    def client_batches(self, client_id: int) -> OracleBatches:
        """Return that client with the minibatches of this arrival."""
        r, place, client = self.places[client_id]
        return OracleBatches(self.case.rows(client), self.case.arrival_batches(r, place), self.uneven_chunks)


def data_of(case: Case, uneven_chunks: bool) -> FederatedDataModule:
    """Return the clients of a case."""
    return (ArrivalData if case.algorithm in ASYNCHRONOUS else OracleData)(case, uneven_chunks)
