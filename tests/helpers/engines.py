"""Runs of the same federation under two engines, and checks that they agree."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fed import FederatedCallback, FederatedDataModule, FederatedError, FederatedTrainer
from tests.helpers.training import Net, data, parameters, trainer

SIZES = (13, 8, 21, 5, 16, 9)
FULL = (12, 8, 20, 4, 16, 8)
"""Sizes of clients without a smaller last batch, for each size of which a trace would be made."""


def full_batches() -> FederatedDataModule:
    """Return clients of several sizes without a smaller last batch."""
    return data(FULL)


class Ordinary(Net):
    """A network without random layers, with a given optimizer."""

    def __init__(self, optimizer: Any = None, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)
        self.make = optimizer or partial(torch.optim.SGD, lr=0.1, weight_decay=0.01)

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


class RandomAlways(Ordinary):
    """Draws dropout masks in eval mode too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.3, training=True))


class Record(FederatedCallback):
    """Keeps the order of hooks, the clients' reports and models, and the rounds' traffic."""

    def __init__(self) -> None:
        self.order: list[tuple[str, Any]] = []
        self.reports: list[Any] = []
        self.models: list[Tensor] = []
        self.rounds: list[Any] = []
        self.x: list[Tensor] = []

    def on_client_start(self, trainer: Any, pl_module: Any, round: int, client_id: Any) -> None:
        self.order.append(("start", client_id))

    def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
        self.order.append(("end", client_report.client_id))
        self.reports.append(client_report)
        self.models.append(trainer.fit_loop.client_model[0])

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        self.rounds.append(round_report)
        self.x.append(parameters(pl_module).clone())


def run(
    engine: str,
    make: Callable[[], pl.LightningModule] = Ordinary,
    datamodule: Callable[[], FederatedDataModule] | None = None,
    ckpt_path: Any = None,
    **options: Any,
) -> FederatedTrainer:
    """Run some rounds from the same start, and return the trainer."""
    torch.manual_seed(3)
    options = {"clients_per_round": 4, "max_rounds": 3, "precision": "64-true", **options}
    t = trainer(engine=engine, **options)
    t.fit(make(), data(SIZES) if datamodule is None else datamodule(), ckpt_path=ckpt_path)
    return t


def refused(
    make: Callable[[], pl.LightningModule], reason: str, datamodule: FederatedDataModule | None = None, **options: Any
) -> None:
    """Check that engine="vectorized" refuses a run with a reason and a remedy, and does not change the module."""
    model, seen = make(), Record()
    before, random_state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    t = trainer(engine="vectorized", **{"callbacks": [], **options})
    t.callbacks.append(seen)
    with pytest.raises(FederatedError, match=reason) as caught:
        t.fit(model, datamodule or data())
    assert "engine='sequential'" in str(caught.value)
    assert seen.order == []
    assert t.fit_loop.round == 0
    assert {k: torch.equal(v, before[k]) for k, v in model.state_dict().items()} == dict.fromkeys(before, True)
    assert "log" not in vars(model)
    assert model.training
    assert torch.equal(random_state, torch.get_rng_state())


def state_of(t: FederatedTrainer) -> dict[str, Any]:
    """Return the server parameters, buffers, server state and client states."""
    state = t.fit_loop.state
    return {
        "x": state.x,
        **{f"buffer.{k}": v for k, v in state.buffers.items()},
        **{f"server.{k}": v for k, v in state.state.items()},
        **{f"client.{i}.{k}": v for i, own in state.clients.state_dict().items() for k, v in own.items()},
    }


def assert_close(a: dict[str, Any], b: dict[str, Any], rtol: float = 1e-12) -> None:
    """Compare named tensors, each by its own scale."""
    assert a.keys() == b.keys()
    for name in a:
        scale = max(1e-3, float(a[name].double().abs().max()))
        torch.testing.assert_close(
            a[name], b[name], rtol=rtol, atol=rtol * scale, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_agree(one: FederatedTrainer, other: FederatedTrainer, rtol: float = 1e-12, metrics: float = 1e-6) -> None:
    """Compare all results of two runs."""
    assert_close(state_of(one), state_of(other), rtol)
    assert one.callback_metrics.keys() == other.callback_metrics.keys()
    for name, value in one.callback_metrics.items():
        if name != "round/seconds":
            assert float(other.callback_metrics[name]) == pytest.approx(float(value), rel=metrics, abs=1e-9), name


def results_of(t: FederatedTrainer, record: Record | None = None) -> dict[str, Any]:
    """Return a run's whole state, metrics and reports as plain values, for any number of processes."""
    loop = t.fit_loop
    kept = {i: own for part in loop.gather(loop.state.clients.state_dict()) for i, own in part.items()}
    state = {k: v for k, v in state_of(t).items() if not k.startswith("client.")}
    state |= {f"client.{i}.{k}": v for i in sorted(kept) for k, v in kept[i].items()}
    metrics = {k: float(v) for k, v in t.callback_metrics.items() if "seconds" not in k}
    return {
        "state": state,
        "metrics": metrics,
        "rounds": [plain(r) for r in record.rounds] if record else [],
        "trained": [client for what, client in record.order if what == "end"] if record else [],
    }


def plain(report: Any) -> dict[str, Any]:
    """Return a report without its times, as plain dictionaries."""
    found = {f.name: getattr(report, f.name) for f in dataclasses.fields(report) if f.name != "seconds"}
    found = {name: dict(v) if isinstance(v, Mapping) else v for name, v in found.items()}
    if "clients" in found:
        found["clients"] = {i: plain(client) for i, client in found["clients"].items()}
    return found


def assert_plain_agree(one: Any, other: Any, rel: float = 1e-6) -> None:
    """Compare nested dictionaries and sequences, numbers up to rounding."""
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_plain_agree(one[key], other[key], rel)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_plain_agree(a, b, rel)
    elif isinstance(one, float):
        assert other == pytest.approx(one, rel=rel, abs=1e-9, nan_ok=True)
    else:
        assert one == other
