"""pFedMe by hand; the given cases are in tests/oracle."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_fed import FederatedDataModule, FederatedError
from lightning_fed.algorithms import FedAvg, PFedMe
from tests.helpers.engines import Ordinary
from tests.helpers.personal import close, kept, one_client, run
from tests.helpers.training import clients, parameters, seeded


def test_one_inner_step_matches_sgd_with_rescaled_rate() -> None:
    lam, rate = 3.0, 0.1
    model = partial(Ordinary, partial(torch.optim.SGD, lr=rate))
    fitted = run(PFedMe(lam, inner_steps=1), one_client(13), seeded(model), clients_per_round=1)
    other = seeded(partial(Ordinary, partial(torch.optim.SGD, lr=lam * rate**2)))
    close(fitted.fit_loop.state.x, run(FedAvg(), one_client(13), other, clients_per_round=1).fit_loop.state.x)


def test_two_inner_steps_match_hand_computed_values() -> None:
    (dataset,) = clients((8,))
    x, y = dataset.tensors[0].double(), dataset.tensors[1]
    model, lam = seeded(Ordinary).double(), 2.0
    fitted = run(
        PFedMe(lam, inner_steps=2, personal_rate=0.5),
        FederatedDataModule(clients=[dataset], batch_size=4, shuffle=False),
        seeded(partial(Ordinary, partial(torch.optim.SGD, lr=0.1))),
        clients_per_round=1,
        max_rounds=1,
    )
    w = theta = parameters(model)
    for rows in (slice(0, 4), slice(4, 8)):
        for _ in range(2):
            torch.nn.utils.vector_to_parameters(theta, model.parameters())
            g = torch.autograd.grad(F.cross_entropy(model(x[rows]), y[rows]), list(model.parameters()))
            theta = theta - 0.05 * (torch.cat([part.flatten() for part in g]) + lam * (theta - w))
        w = w - 0.1 * lam * (w - theta)
    close(fitted.fit_loop.state.x, w)
    close(kept(fitted)[0]["theta"], theta)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_w_update_uses_learning_rate_of_last_inner_step(engine: str) -> None:
    lam, rate, factor = 2.0, 0.2, 0.7  # the schedule's factor of every local step

    class Decays(Ordinary):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=rate)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, factor)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    (dataset,) = clients((8,))
    x, y = dataset.tensors[0].double(), dataset.tensors[1]
    model = seeded(Ordinary).double()
    fitted = run(
        PFedMe(lam, inner_steps=2),
        FederatedDataModule(clients=[dataset], batch_size=4, shuffle=False),
        seeded(Decays),
        clients_per_round=1,
        max_rounds=1,
        local_schedule="restart",
        engine=engine,
    )
    w, theta, steps = parameters(model), parameters(model), 0
    for rows in (slice(0, 4), slice(4, 8)):
        for _ in range(2):
            torch.nn.utils.vector_to_parameters(theta, model.parameters())
            g = torch.autograd.grad(F.cross_entropy(model(x[rows]), y[rows]), list(model.parameters()))
            last = rate * factor**steps
            theta = theta - last * (torch.cat([part.flatten() for part in g]) + lam * (theta - w))
            steps += 1
        w = w - last * lam * (w - theta)
    close(fitted.fit_loop.state.x, w)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PFedMe(0), r"lam must be a finite number in \(0, inf\)"),
        (lambda: PFedMe(1, inner_steps=0), "inner_steps"),
        (lambda: PFedMe(1, personal_rate=-1), "personal_rate=-1"),
        (
            lambda: run(PFedMe(1, personal_rate=0.5), gradient_clip_val=1.0, gradient_clip_on="corrected"),
            r"PFedMe\(personal_rate=0.5\).*Leave gradient_clip_val unset, or personal_rate at 1",
        ),
        (lambda: run(PFedMe(1), accumulate_grad_batches=2), "accumulate_grad_batches=2 cannot be combined with PFedMe"),
    ],
)
def test_invalid_hyperparameters_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        make()
