"""The sums of a round: drift, bytes sent, gradients computed, and the reports of clients."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedCallback, FederatedDataModule, FederatedError
from lightning_fed.algorithms import (
    Algorithm,
    FedAvg,
    FedCM,
    FedDane,
    FedDyn,
    FedNova,
    Mime,
    MimeLite,
    MimeMVR,
    Scaffold,
    ScaffoldM,
    ServerOnly,
    SGDm,
)
from lightning_fed.rounds.messages import Reply
from lightning_fed.rounds.totals import RoundTotals
from lightning_fed.server import CoordinateMedian, SystemsHeterogeneity, TopK
from tests.helpers.engines import Ordinary, Record, full_batches, run
from tests.helpers.processes import in_processes
from tests.helpers.selection import covering, few
from tests.helpers.training import Net, data, fit, parameters, seeded, trainer

# ------------------------------------------------------------------ the drift


P, SIZES = 500, (3, 1, 2, 4, 1)
RATIOS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)


class Linear(pl.LightningModule):
    """Its gradient is the mean of the rows of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(P, generator=torch.Generator().manual_seed(5)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (batch[0] @ self.w).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Drifts(FederatedCallback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        self.values.append(round_report.drift)


def directions(ratio: float) -> Tensor:
    """Return each client's change [S, P]: a common part, plus its own part scaled by the ratio."""
    stream = torch.Generator().manual_seed(7)
    return torch.randn(P, generator=stream) + ratio * torch.randn(len(SIZES), P, generator=stream)


def drift(ratio: float, **options: Any) -> float:
    clients = [TensorDataset(row.repeat(n, 1)) for row, n in zip(directions(ratio), SIZES, strict=True)]
    seen = Drifts()
    options = {"clients_per_round": 1.0, "local_steps": 1, "max_rounds": 1, "weighting": "examples", **options}
    trainer(callbacks=seen, **options).fit(Linear(), FederatedDataModule(clients=clients, batch_size=4))
    return seen.values[-1]


def expected(ratio: float, weights: tuple[int, ...] = SIZES) -> float:
    d, w = directions(ratio).double(), torch.tensor(weights).double()[:, None] / sum(weights)
    return float((w * (d - (w * d).sum(0)).square()).sum().sqrt())


@pytest.mark.parametrize("ratio", few(RATIOS, [1e-3, 1e-6]))
@pytest.mark.parametrize("options", [{"engine": "sequential"}, {"engine": "vectorized", "chunk_size": 2}], ids=str)
def test_drift_matches_the_spread_of_changes_at_every_ratio(options: dict[str, Any], ratio: float) -> None:
    assert drift(ratio, **options) == pytest.approx(expected(ratio), rel=1e-2)


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": FedNova()},
        {"algorithm": FedNova(), "weighting": "uniform"},
        {"algorithm": FedAvg(), "aggregator": CoordinateMedian(), "weighting": None},
        {"algorithm": FedAvg(), "compression": TopK(0.5)},
        {"algorithm": FedDyn(0.1), "weighting": None},
    ],
    ids=str,
)
def test_drift_is_independent_of_how_changes_are_aggregated(options: dict[str, Any]) -> None:
    weights = (1,) * len(SIZES) if "weighting" in options else SIZES
    assert drift(1e-4, **options) == pytest.approx(expected(1e-4, weights), rel=1e-2)


def test_drift_is_zero_when_all_clients_change_alike() -> None:
    assert drift(0.0) < 1e-7 * float(torch.linalg.vector_norm(directions(0.0)[0]))  # gradients are rounded


@pytest.mark.parametrize("options", few([{}, {"engine": "vectorized"}, {"compression": TopK(0.5)}], [{}]), ids=str)
def test_two_processes_measure_the_same_drift(options: dict[str, Any], tmp_path: Path) -> None:
    for outcome in in_processes(partial(drift, 1e-5, strategy="clients", devices=2, **options), tmp_path):
        assert outcome.value == pytest.approx(expected(1e-5), rel=1e-2), outcome.trace


def test_process_without_clients_does_not_affect_the_drift(tmp_path: Path) -> None:
    run = partial(drift, 1e-5, strategy="clients", devices=2, sampler=lambda seed, round: [0], clients_per_round=None)
    for outcome in in_processes(run, tmp_path):
        assert outcome.value == 0, outcome.trace


# ------------------------------------------------------------------ bytes of the server state


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("method", "vectors"), [(FedAvg(), 1), (FedCM(alpha=0.1), 2), (ScaffoldM(beta=0.2), 3)], ids=str
)
def test_vector_read_by_corrections_is_sent_with_x(method: Algorithm, vectors: int, engine: str) -> None:
    model = Net()
    run = trainer(algorithm=method, max_rounds=1, clients_per_round=2, local_steps=2, local_epochs=None, engine=engine)
    run.fit(model, data(sizes=(5, 9, 14)))
    x = sum(p.nbytes for p in model.parameters())
    assert run.callback_metrics["comm/bytes_down"] == 2 * vectors * x


# ------------------------------------------------------------------ bytes of buffers


class WithBuffers(Net):
    """Has a constant buffer in float64, and one that clients change if ``moves`` is set."""

    def __init__(self, moves: bool) -> None:
        super().__init__(dropout=0.0)
        self.moves = moves
        self.register_buffer("positions", torch.arange(50, dtype=torch.float64) / 7)
        self.register_buffer("seen", torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.moves:
            self.seen += batch[0].sum()
        return super().training_step(batch, batch_idx)


class Bytes(FederatedCallback):
    def __init__(self) -> None:
        self.rounds: list[tuple[int, int]] = []

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        self.rounds.append((round_report.bytes_up, round_report.bytes_down))


def traffic(model: Net, **options: Any) -> list[tuple[int, int]]:
    vector = 3 * 4 * sum(p.numel() for p in model.parameters())
    fit(model, algorithm=FedAvg(), callbacks=(bytes_ := Bytes()), **options)
    return [(up - vector, down - vector) for up, down in bytes_.rounds]


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_unchanged_buffers_are_not_sent(engine: str) -> None:
    model = seeded(WithBuffers, moves=False)
    before = model.positions.clone()
    assert traffic(model, engine=engine) == [(0, 0)] * 3
    assert torch.equal(model.positions, before)


@pytest.mark.thorough
def test_changed_buffers_are_sent_from_then_on_and_after_a_resume(tmp_path: Path) -> None:
    assert traffic(seeded(WithBuffers, moves=True)) == [(36, 0), (36, 36), (36, 36)]
    saver = ModelCheckpoint(tmp_path, filename="a")
    fit(seeded(WithBuffers, moves=True), callbacks=saver, enable_checkpointing=True, max_rounds=1)
    assert traffic(seeded(WithBuffers, moves=True), max_rounds=2, ckpt_path=tmp_path / "a.ckpt") == [(36, 36)]
    assert traffic(seeded(WithBuffers, moves=True), buffers="local") == [(0, 0)] * 3


class WritesBytes(Bytes):
    """Writes a process's bytes to a file at the end of a run, so that another process can read them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        (self.path / f"{trainer.global_rank}.json").write_text(json.dumps(self.rounds))


@pytest.mark.thorough
@pytest.mark.parametrize("moves", [False, True])
def test_several_processes_count_the_same_buffer_bytes(moves: bool, tmp_path: Path) -> None:
    model = seeded(WithBuffers, moves=moves)
    vector = 3 * 4 * sum(p.numel() for p in model.parameters())
    run = trainer(callbacks=WritesBytes(tmp_path), max_rounds=2, devices=2, strategy="clients_fork")
    run.fit(model, data())
    for rank in range(2):
        rounds = [[up - vector, down - vector] for up, down in json.loads((tmp_path / f"{rank}.json").read_text())]
        assert rounds == ([[36, 0], [36, 36]] if moves else [[0, 0], [0, 0]])


# ------------------------------------------------------------------ messages derived from others


METHODS = [Scaffold(), FedCM(alpha=0.3), FedCM(alpha=0.3, eta_g=0.5, eta_g_mode="paper")]
ENGINES = ["sequential", "vectorized"]
Outcome = tuple[list[torch.Tensor], list[int]]


class Fast(Ordinary):
    """Has two parameter groups with different rates."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        first, *rest = self.parameters()
        return torch.optim.SGD([{"params": [first], "lr": 0.2}, {"params": rest}], lr=0.1)


def outcome(engine: str, algorithm: Algorithm, make: Any = Ordinary, **options: Any) -> Outcome:
    record = Record()
    options = {"algorithm": algorithm, "callbacks": record, "max_rounds": 2, "limit_val_batches": 0, **options}
    t = run(engine, make, full_batches, **options)
    return [parameters(t.lightning_module).clone(), *t.fit_loop.state.state.values()], [
        report.bytes_up for report in record.rounds
    ]


@pytest.mark.parametrize(("algorithm", "engine", "precision"), covering(METHODS, ENGINES[::-1], ["32-true", "64-true"]))
def test_server_derives_omitted_messages_with_identical_bits(
    algorithm: Algorithm, engine: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    average, compared = RoundTotals._averaged, list[str]()

    def without(self: RoundTotals, reply: Reply, state: Any) -> Any:
        left_out = replace(reply, send={k: v for k, v in reply.send.items() if k not in reply.implied})
        sent, derived = average(self, reply, state), average(self, left_out, state)
        assert sent.keys() == derived.keys()
        assert all(torch.equal(sent[name], derived[name]) for name in sent)
        compared.extend(reply.implied)
        return derived

    monkeypatch.setattr(RoundTotals, "_averaged", without)
    outcome(engine, algorithm, precision=precision)
    assert compared


def test_reply_missing_both_alternatives_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    add = RoundTotals.update

    def bare(self: RoundTotals, reply: Reply, *args: Any) -> Any:
        return add(self, replace(reply, send={"delta": reply.send["delta"]}), *args)

    monkeypatch.setattr(RoundTotals, "update", bare)
    with pytest.raises(FederatedError, match=r"leaves out \['delta_c'\], and also 'lr_sum', which Scaffold needs"):
        outcome("sequential", Scaffold())


@pytest.mark.parametrize(("algorithm", "engine"), covering(METHODS[:2], ENGINES))
def test_plain_sgd_sends_one_vector_and_one_number(algorithm: Algorithm, engine: str) -> None:
    (x, *_), sent = outcome(engine, algorithm, clients_per_round=3)
    vector = x.numel() * x.element_size()
    assert sent == [3 * (vector + x.element_size())] * 2
    (x, *_), sent = outcome(engine, algorithm, Fast, clients_per_round=3)
    assert sent == [3 * 2 * vector] * 2, "the sum of the rates is a vector there"


def test_compressed_messages_are_all_sent() -> None:
    """Otherwise, the server's control variate would miss the values that compression drops."""
    (x, *_), sent = outcome("sequential", Scaffold(), compression=TopK(1.0), clients_per_round=3)
    assert min(sent) > 3 * 2 * x.numel() * x.element_size()


# ------------------------------------------------------------------ gradients computed


class Counting(Net):
    """Counts the examples whose gradient is computed."""

    examples = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.examples += len(batch[0])
        return super().training_step(batch, batch_idx)


class Gradients(FederatedCallback):
    """Adds up the gradients that the rounds report."""

    total = 0

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        self.total += round_report.gradients


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "work"),
    covering(
        [
            FedAvg(), Scaffold(), Scaffold(option="i"), Mime(base=SGDm()), MimeLite(base=SGDm()), MimeMVR(a=0.1),
            FedDane(mu=0.1), ServerOnly(),
        ],
        [{"local_epochs": 2}, {"local_steps": 7}],
    ),
)  # fmt: skip
def test_every_example_with_a_computed_gradient_is_counted(method: Any, work: dict[str, int]) -> None:
    model, gradients = Counting(), Gradients()
    local = work if method.local_work else {"local_epochs": None}
    run = trainer(algorithm=method, max_rounds=3, clients_per_round=2, callbacks=gradients, **local)
    run.fit(model, data(sizes=(5, 9, 14)))
    assert gradients.total == model.examples > 0
    assert run.callback_metrics["round/gradients"] > 0


def test_stragglers_compute_less() -> None:
    model, gradients = Counting(), Gradients()
    slow = SystemsHeterogeneity(stragglers=0.9, policy="keep")
    run = trainer(max_rounds=3, clients_per_round=3, callbacks=gradients, local_epochs=4, heterogeneity=slow)
    run.fit(model, data(sizes=(5, 9, 14)))
    assert 0 < gradients.total == model.examples < 3 * 4 * (5 + 9 + 14)


# ------------------------------------------------------------------ reports


CHUNKS: list[dict[str, Any]] = [
    {"engine": "sequential"},
    {"engine": "auto"},
    {"engine": "vectorized"},
    {"engine": "vectorized", "chunk_size": 2},
]


@pytest.mark.thorough
@pytest.mark.parametrize("options", CHUNKS, ids=str)
def test_clients_are_listed_in_the_order_drawn(options: dict[str, Any]) -> None:
    drawn, record = [4, 1, 3, 0, 2], Record()
    run(clients_per_round=None, sampler=lambda seed, round: drawn, max_rounds=1, callbacks=record, **options)
    (report,) = record.rounds
    assert report.cohort == tuple(drawn)
    assert all(list(part) == drawn for part in (report.sizes, report.steps, report.weights, report.clients))


def test_weights_match_the_messages_when_no_change_is_sent() -> None:
    record = Record()
    run("sequential", algorithm=FedNova(), weighting="uniform", max_rounds=1, callbacks=[record])
    assert list(record.rounds[0].weights.values()) == [0.25] * 4
