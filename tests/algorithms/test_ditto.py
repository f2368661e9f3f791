"""Ditto by hand, and a failing client. The given cases are in tests/oracle."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fed import FederatedDataModule, FederatedError
from lightning_fed.algorithms import Ditto
from tests.helpers.engines import Ordinary
from tests.helpers.personal import close, kept, one_client, run
from tests.helpers.training import Net, clients, data, parameters, seeded


def test_personal_model_continues_from_its_previous_state() -> None:
    cohorts = [[0, 1], [2, 3], [0, 2]]
    fitted = run(Ditto(0.0), sampler=lambda seed, round: cohorts[round])
    model = seeded(dropout=0.0)
    start = parameters(model).double()
    states = kept(fitted)
    assert set(states) == {0, 1, 2, 3}
    assert not any(torch.equal(state["v"], start) for state in states.values())
    assert torch.equal(fitted.fit_loop.state.client_state(4)["v"], start), "a new client begins at x^0, not at x"


def test_personal_model_converges_to_balance_of_loss_and_pull() -> None:
    (dataset,) = clients((8,))
    x, y = dataset.tensors[0].double(), dataset.tensors[1]
    fitted = run(Ditto(2.0, 2.5, personal_epochs=150), data((8,), batch_size=8), clients_per_round=1, max_rounds=2)
    model = seeded(dropout=0.0).double()
    F.cross_entropy(model(x), y).backward()  # the server's first step: the second round pulls to its model
    for part, rate in ((model.head, 0.05), (model.body, 0.1)):
        for p in part.parameters():
            p.data -= rate * p.grad
    start, v = parameters(model).clone(), kept(fitted)[0]["v"]
    torch.nn.utils.vector_to_parameters(v, model.parameters())
    g = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    close(torch.cat([part.flatten() for part in g]), 2.0 * (start - v))


def test_single_client_without_pull_matches_server_model() -> None:
    fitted = run(Ditto(0.0), one_client(), clients_per_round=1)
    close(kept(fitted)[0]["v"], fitted.fit_loop.state.x)


class Fails(Net):
    """Fails on the batches of a client with huge features."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if float(batch[0].abs().max()) > 100:
            raise ValueError("too large")
        return super().training_step(batch, batch_idx)


def test_client_failing_in_personal_solve_leaves_the_round() -> None:
    own = clients((8, 9, 7))
    own[1].tensors[0].mul_(1000)
    fitted = run(
        Ditto(0.3),
        FederatedDataModule(clients=own, batch_size=4),
        seeded(Fails, dropout=0.0),
        on_client_error="drop",
    )
    assert set(kept(fitted)) == {0, 2}
    with pytest.raises(FederatedError, match="Client 1 failed in its local work in round 0, local step 1"):
        run(Ditto(0.3), FederatedDataModule(clients=own, batch_size=4), seeded(Fails, dropout=0.0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ditto(-1), r"lam must be a finite number in \[0, inf\)"),
        (lambda: Ditto(1, personal_rate=0), "personal_rate=0"),
        (
            lambda: run(Ditto(1, personal_rate=0.1), model=seeded(partial(Ordinary, torch.optim.AdamW))),
            r"Ditto\(personal_rate=0.1\).*returned AdamW.*Return torch.optim.SGD, or leave personal_rate at 1",
        ),
        (lambda: Ditto(1, personal_epochs=-1), "personal_epochs"),
        (lambda: Ditto(1, personal_epochs=0), "personal_epochs"),
        (lambda: Ditto(1, batches="other"), "batches must be 'same' or 'own'"),
        (lambda: run(Ditto(0.5), personal=["head.*"]), "cannot be combined with Ditto.*own whole model"),
    ],
)
def test_invalid_hyperparameters_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        make()
