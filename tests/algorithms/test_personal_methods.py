"""FedRep, Ditto, APFL and pFedMe: by hand, as special cases, in every engine; the given cases are in tests/oracle."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fed import FederatedDataModule, FederatedError
from lightning_fed.algorithms import APFL, Algorithm, Ditto, FedAvg, FedPer, FedRep, PFedMe
from tests.helpers.engines import Ordinary, Record
from tests.helpers.training import Net, clients, data, parameters, seeded, trainer

HEAD = ["head.*"]


def run(algorithm: Algorithm, datamodule: Any = None, model: Any = None, **options: Any) -> Any:
    """Return the trainer after a fit in float64."""
    fitted = trainer(algorithm=algorithm, **{"precision": "64-true", "limit_val_batches": 0, **options})
    fitted.fit(seeded(dropout=0.0) if model is None else model, data() if datamodule is None else datamodule)
    return fitted


def kept(fitted: Any) -> dict[int, dict[str, Tensor]]:
    return fitted.fit_loop.state.clients.state_dict()


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def one_client(batch_size: int = 4) -> FederatedDataModule:
    return data((13,), batch_size=batch_size)


# ---------------------------------------------------------------------- engines

WAYS: dict[str, dict[str, Any]] = {
    "FedRep": {"algorithm": FedRep(HEAD, head_epochs=2)},
    "FedRep of steps": {"algorithm": FedRep(HEAD, head_epochs=1), "local_steps": 3},
    "Ditto": {"algorithm": Ditto(0.5)},
    "Ditto of its own": {"algorithm": Ditto(0.5, 0.7, personal_epochs=2, batches="own"), "weight_decay": 0.01},
    "APFL": {"algorithm": APFL(0.4), "weight_decay": 0.01},
    "pFedMe": {"algorithm": PFedMe(2.0, inner_steps=3, personal_rate=0.5), "limit_train_batches": 2},
}


@pytest.mark.parametrize("way", list(WAYS))
def test_engines_agree(way: str) -> None:
    def fit(**options: Any) -> Any:
        chosen = {**WAYS[way], **options}
        algorithm, decay = chosen.pop("algorithm"), chosen.pop("weight_decay", 0.0)
        return run(algorithm, model=seeded(dropout=0.0, momentum=0.5, weight_decay=decay), **chosen)

    one, other = fit(), fit(engine="vectorized", chunk_size=2)
    close(one.fit_loop.state.x, other.fit_loop.state.x)
    ours, theirs = kept(one), kept(other)
    assert ours.keys() == theirs.keys()
    for i, state in ours.items():
        assert state.keys() == theirs[i].keys()
        for name, value in state.items():
            close(value, theirs[i][name])


# ---------------------------------------------------------------------- special cases


@pytest.mark.parametrize("algorithm", [Ditto(0.0), Ditto(3.0, batches="own"), APFL(0.0), APFL(0.6)], ids=repr)
def test_the_averaged_model_is_fedavgs(algorithm: Algorithm) -> None:
    one, other = (run(a, weighting="uniform").fit_loop.state.x for a in (algorithm, FedAvg()))
    assert torch.equal(one, other)


@pytest.mark.parametrize("algorithm", [Ditto(0.0), APFL(1.0)], ids=repr)
def test_one_client_without_a_pull_trains_alone_on_the_same_path(algorithm: Algorithm) -> None:
    fitted = run(algorithm, one_client(), clients_per_round=1)
    close(kept(fitted)[0]["v"], fitted.fit_loop.state.x)


def test_a_client_of_its_own_goes_on_from_where_it_was_whatever_the_server_has() -> None:
    cohorts = [[0, 1], [2, 3], [0, 2]]
    fitted = run(Ditto(0.0), sampler=lambda seed, round: cohorts[round])
    model = seeded(dropout=0.0)
    start = parameters(model).double()
    states = kept(fitted)
    assert set(states) == {0, 1, 2, 3}
    assert not any(torch.equal(state["v"], start) for state in states.values())
    assert torch.equal(fitted.fit_loop.state.client_state(4)["v"], start), "a new client begins at x^0, not at x"


def test_ditto_ends_where_loss_and_pull_balance() -> None:
    (dataset,) = clients((8,))
    x, y = dataset.tensors[0].double(), dataset.tensors[1]
    fitted = run(Ditto(2.0, 2.5, personal_epochs=150), data((8,), batch_size=8), clients_per_round=1, max_rounds=1)
    model = seeded(dropout=0.0).double()
    start, v = parameters(model), kept(fitted)[0]["v"]
    torch.nn.utils.vector_to_parameters(v, model.parameters())
    g = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    close(torch.cat([part.flatten() for part in g]), 2.0 * (start - v))


def test_pfedme_of_one_step_a_round_is_sgd_of_another_rate() -> None:
    lam, rate = 3.0, 0.1
    model = partial(Ordinary, partial(torch.optim.SGD, lr=rate))
    fitted = run(PFedMe(lam, inner_steps=1), one_client(13), seeded(model), clients_per_round=1)
    other = seeded(partial(Ordinary, partial(torch.optim.SGD, lr=lam * rate**2)))
    close(fitted.fit_loop.state.x, run(FedAvg(), one_client(13), other, clients_per_round=1).fit_loop.state.x)


def test_pfedme_by_hand() -> None:
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


def test_fedrep_trains_the_head_and_then_the_body_under_it() -> None:
    (dataset,) = clients((8,))
    x, y = dataset.tensors[0].double(), dataset.tensors[1]
    model = seeded(dropout=0.0).double()
    fitted = run(FedRep(HEAD, head_epochs=3), data((8,), batch_size=8), clients_per_round=1, max_rounds=1)
    for part, rate, times in ((model.head, 0.05, 3), (model.body, 0.1, 1)):
        for _ in range(times):
            loss = F.cross_entropy(model(x), y)
            for p, g in zip(part.parameters(), torch.autograd.grad(loss, list(part.parameters())), strict=True):
                p.data -= rate * g
    close(fitted.fit_loop.state.x, parameters(model.body))
    close(kept(fitted)[0]["personal.parameters"], parameters(model.head))


def test_fedrep_leaves_what_rests_to_no_optimizer() -> None:
    def make(**options: Any) -> Any:
        model = seeded(partial(Ordinary, partial(torch.optim.AdamW, lr=0.01, weight_decay=0.5)))
        return run(FedRep(HEAD, head_epochs=1), model=model, clients_per_round=6, max_rounds=1, **options)

    start = parameters(seeded(Ordinary).head).double()
    heads = [state["personal.parameters"] for state in kept(make()).values()]
    # decay of 0.005 a step would show as a shrunken head after the body's steps; the head's own steps are Adam's
    steps = [-(-size // 4) for size in (13, 8, 21, 5, 16, 9)]
    for head, taken in zip(heads, steps, strict=True):
        assert float((head - start * 0.995**taken).abs().max()) <= 0.01 * taken * 1.01
    with pytest.raises(FederatedError, match="FedRep lets parameters rest that the weight decay of AdamW would move"):
        make(engine="vectorized")


# ---------------------------------------------------------------------- traces, and what is counted


def test_what_an_own_solve_logs_is_forgotten_and_what_it_computes_is_counted() -> None:
    def fit(algorithm: Algorithm, **options: Any) -> tuple[float, list[int]]:
        record = Record()
        fitted = run(algorithm, callbacks=[record], clients_per_round=6, weighting="uniform", **options)
        return float(fitted.callback_metrics["train_loss"]), [report.gradients for report in record.rounds]

    loss, gradients = fit(FedAvg())
    for engine in ("sequential", "vectorized"):
        other, counted = fit(Ditto(0.3, batches="own"), engine=engine)
        assert other == pytest.approx(loss, rel=1e-12)
        assert counted == [2 * n for n in gradients]
    assert fit(Ditto(0.3, personal_epochs=3))[1] == [4 * n for n in gradients]
    assert fit(APFL(0.3))[1] == [2 * n for n in gradients]
    assert fit(PFedMe(2.0, inner_steps=3))[1] == [3 * n for n in gradients]
    assert fit(FedRep(HEAD, head_epochs=2))[1] == [3 * n for n in gradients]
    assert fit(FedPer(HEAD))[1] == gradients
    few = fit(FedRep(HEAD, head_epochs=2), local_steps=1)[1]
    assert few == [2 * 72 + 6 * 4] * 3, "an epoch of the head is one, however few steps follow"


class Fails(Net):
    """Fails on the batches of a client whose features are huge."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if float(batch[0].abs().max()) > 100:
            raise ValueError("too large")
        return super().training_step(batch, batch_idx)


def test_a_client_that_fails_in_its_own_solve_leaves_the_round() -> None:
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


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ditto(-1), r"lam must be a finite number in \[0, inf\)"),
        (lambda: Ditto(1, personal_rate=0), "personal_rate=0"),
        (lambda: Ditto(1, personal_epochs=-1), "personal_epochs"),
        (lambda: Ditto(1, personal_epochs=0), "personal_epochs"),
        (lambda: Ditto(1, batches="other"), "batches must be 'same' or 'own'"),
        (lambda: APFL(1.5), r"alpha must be a finite number in \[0, 1\]"),
        (lambda: PFedMe(0), r"lam must be a finite number in \(0, inf\)"),
        (lambda: PFedMe(1, inner_steps=0), "inner_steps"),
        (lambda: PFedMe(1, personal_rate=-1), "personal_rate=-1"),
        (lambda: FedRep(HEAD, head_epochs=0), "head_epochs"),
        (lambda: FedRep([]), "must be a list of names"),
        (lambda: run(PFedMe(1), accumulate_grad_batches=2), "accumulate_grad_batches=2 does not go with PFedMe"),
        (lambda: run(APFL(0.5), accumulate_grad_batches=2), "accumulate_grad_batches=2 does not go with APFL"),
        (lambda: run(Ditto(0.5), personal=HEAD), "do not go with Ditto.*whole model of its own"),
        (lambda: run(APFL(0.5), personal=HEAD), "do not go with APFL.*whole model of its own"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        make()
