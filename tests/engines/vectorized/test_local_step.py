"""Second gradients at a point that a method computes in every step: the point, the batch, and the count."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fed.algorithms import Algorithm, FedAvg, FedSAM
from lightning_fed.core.rounds import Run, Update
from lightning_fed.engines.vectorized.local_steps import LocalSteps
from tests.helpers.engines import Ordinary, Record, assert_agree, full_batches, run, state_of
from tests.helpers.selection import few
from tests.helpers.training import clients, data

RHO, LR = 0.2, 0.1


class Everything(Algorithm):
    """Reads all available values: states of server, client and round, the rate, and norms of whole vectors."""

    uses_path_gradient = False

    def init_server(self, x: Tensor) -> Any:
        return {"m": torch.zeros_like(x)}

    def init_client(self, x: Tensor) -> Any:
        return {"v": x.clone()}

    def init_local(self, x: Tensor, server: Any, client: Any) -> Any:
        return {"before": x.clone(), "v": client["v"], "k": torch.zeros((), dtype=x.dtype)}

    def second_gradient_at(self, g: Tensor, y: Tensor, step: Any) -> Tensor:
        away = y + RHO * g / torch.linalg.vector_norm(g) + step.lr * step.server["m"]
        return away + 0.1 * (step.local["before"] - step.local["v"]) / (1 + step.local["k"])

    def correct(self, g: Tensor, y: Tensor, step: Any) -> Tensor:
        return 0.5 * g + step.anchor_grad + 0.1 * (y - step.local["before"])

    def advance(self, g: Tensor, y: Tensor, step: Any) -> Any:
        v = step.local["v"] - step.lr * (step.anchor_grad + 0.1 * (step.local["v"] - step.x))
        return {"before": y.clone(), "v": v, "k": step.local["k"] + 1}

    def finish(self, y: Tensor, run: Run) -> Update:
        return Update({"delta": run.delta}, {"v": run.local["v"]})

    def update_server(self, x: Tensor, server: Any, mean: Any, cohort: Any) -> Any:
        return mean["delta"], {"m": 0.5 * server["m"] + mean["delta"]}


class TwoRates(Ordinary):
    def configure_optimizers(self) -> Any:
        groups = [{"params": self.body.parameters()}, {"params": self.head.parameters(), "lr": 0.5 * LR}]
        return torch.optim.SGD(groups, lr=LR, weight_decay=0.01)


ADAM = partial(Ordinary, partial(torch.optim.Adam, lr=0.01, weight_decay=0.01))
RUNS: dict[str, tuple[Algorithm, Any, dict[str, Any]]] = {
    "everything": (Everything(), Ordinary, {}),
    "everything, two rates": (Everything(), TwoRates, {}),
    "everything, Adam": (Everything(), ADAM, {}),
    "FedSAM": (FedSAM(RHO), Ordinary, {"local_epochs": 2}),
    "FedSAM, two rates": (FedSAM(RHO), TwoRates, {}),
    "FedSAM, Adam": (FedSAM(RHO), ADAM, {}),
    "FedSAM, clipped": (FedSAM(RHO), Ordinary, {"gradient_clip_val": 0.2, "gradient_clip_on": "corrected"}),
}


@pytest.mark.parametrize(
    ("name", "chunk_size"),
    few(
        [pytest.param(name, n, id=f"{name}-{n}") for name in RUNS for n in (1, 2, 4)],
        ["everything, two rates-4"],
    ),
)
def test_engines_agree(name: str, chunk_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, make, options = RUNS[name]
    traced, take = [], LocalSteps._run_traced

    def note(*args: Any) -> bool:
        traced.append(take(*args))
        return traced[-1]

    monkeypatch.setattr(LocalSteps, "_run_traced", note)
    records = Record(), Record()
    options = {"datamodule": full_batches, "algorithm": algorithm, **options}
    one = run("sequential", make, callbacks=records[0], **options)
    assert not traced
    many = run("vectorized", make, chunk_size=chunk_size, callbacks=records[1], **options)
    assert_agree(one, many)
    assert traced
    assert all(traced)
    assert [r.bytes_down for r in records[0].rounds] == [r.bytes_down for r in records[1].rounds]


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("groups", few(["one", "two"], ["two"]))
def test_steps_match_the_formula(engine: str, groups: str) -> None:
    """A hand-written loop gives the same: the norm covers all parameters, and both gradients include weight decay."""
    make = Ordinary if groups == "one" else TwoRates
    algorithm = FedSAM(RHO, eps=0.05)
    t = run(engine, make, partial(data, (6,), 6), algorithm=algorithm, clients_per_round=1, local_steps=3, max_rounds=1)
    torch.manual_seed(3)
    model = make().double()
    inputs, labels = (v.double() if v.is_floating_point() else v for v in clients((6,))[0].tensors)
    parameters = list(model.parameters())
    rates = [LR if groups == "one" or name.startswith("body") else LR / 2 for name, _ in model.named_parameters()]

    def gradients() -> list[Tensor]:
        loss = F.cross_entropy(model(inputs), labels)
        return [g + 0.01 * p for g, p in zip(torch.autograd.grad(loss, parameters), parameters, strict=True)]

    for _ in range(3):
        first = gradients()
        norm = torch.cat([g.flatten() for g in first]).norm()
        with torch.no_grad():
            kept = [p.clone() for p in parameters]
            for p, g in zip(parameters, first, strict=True):
                p += RHO * g / (norm + 0.05)
        second = gradients()
        with torch.no_grad():
            for p, before, g, rate in zip(parameters, kept, second, rates, strict=True):
                p.copy_(before - rate * g)
    want = torch.cat([p.detach().flatten() for p in parameters])
    torch.testing.assert_close(t.fit_loop.state.x, want, rtol=1e-12, atol=1e-14)


class Twice(Algorithm):
    """Takes the second gradient at the same point. Both are equal, so the step is ``keep`` times the gradient."""

    def __init__(self, keep: float) -> None:
        self.keep = keep

    def second_gradient_at(self, g: Tensor, y: Tensor, step: Any) -> Tensor:
        return y

    def correct(self, g: Tensor, y: Tensor, step: Any) -> Tensor:
        return self.keep * g + (1 - self.keep) * (g - step.anchor_grad)


class Noisy(Ordinary):
    """Draws dropout masks and noise, and moves running statistics."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.norm = nn.BatchNorm1d(6)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        noise = torch.randn(x.shape, dtype=x.dtype)
        loss = F.cross_entropy(self(self.norm(x + noise)), y)
        self.log("train_loss", loss)
        return loss


EVEN = partial(data, (14, 8, 20, 6, 16, 10))  # no batch has a single example, which has no statistics
UNNORMED = partial(Ordinary, dropout=0.5)
ENGINES = [("sequential", None), ("vectorized", 1), ("vectorized", 4)]


@pytest.mark.parametrize(("engine", "chunk_size"), ENGINES)
def test_both_gradients_of_a_batch_use_the_same_masks(engine: str, chunk_size: int | None) -> None:
    make: Any = Noisy if engine == "sequential" else UNNORMED
    torch.manual_seed(3)
    before = torch.cat([p.detach().flatten() for p in make().double().parameters()])
    options = {"algorithm": Twice(0.0), "chunk_size": chunk_size, "local_epochs": 2}
    undecayed = partial(torch.optim.SGD, lr=LR)
    t = run(engine, lambda: _with(make(), undecayed), EVEN, **options)
    torch.testing.assert_close(t.fit_loop.state.x, before, rtol=0, atol=1e-15)  # the mean of equal models rounds


def _with(model: Any, build: Any) -> Any:
    model.make = build
    return model


@pytest.mark.thorough
@pytest.mark.parametrize(("engine", "chunk_size"), ENGINES)
def test_second_gradient_has_no_side_effects(engine: str, chunk_size: int | None) -> None:
    make: Any = Noisy if engine == "sequential" else UNNORMED
    options = {"chunk_size": chunk_size, "buffers": "average"}
    plain, twice = (run(engine, make, EVEN, algorithm=a, **options) for a in (FedAvg(), Twice(1.0)))
    twice.callback_metrics["round/gradients"] /= 2
    assert_agree(plain, twice, rtol=0 if engine == "sequential" else 1e-12, metrics=1e-12)
    assert (len(state_of(plain)) > 1) == (engine == "sequential")  # only the sequential engine's module has buffers


def test_second_gradient_is_counted() -> None:
    records = Record(), Record()
    for record, algorithm in zip(records, (FedAvg(), FedSAM(RHO)), strict=True):
        run("sequential", algorithm=algorithm, callbacks=record)
    once, twice = ([r.gradients for r in record.rounds] for record in records)
    assert twice == [2 * n for n in once]
