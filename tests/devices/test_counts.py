"""Limits on a warm round's kernels, host reads and transfers on a device, with the same results."""

import importlib
import logging
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fed import FederatedCallback, FederatedDataModule
from lightning_fed.algorithms import FedAvg, Mime, Scaffold, SGDm
from lightning_fed.core.errors import ClientError
from lightning_fed.engines import device_data
from tests.devices.conftest import Place
from tests.helpers.training import Net, classification, fit, seeded


@pytest.fixture
def counts(mini: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The benchmark that counts kernels."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    logger = logging.getLogger("pytorch_lightning")
    level = logger.level
    yield importlib.import_module("device_counts")
    logger.setLevel(level)
    del sys.modules["device_counts"]


def steps_of(counts: Any, method: str) -> tuple[float, float]:
    """Return the kernels and host reads of a local step, from one client with ten batches in the sequential engine."""
    one, two = (
        counts.count(method, "sequential", counts.CASES["shared"], clients_per_round=1, local_epochs=epochs)
        for epochs in (1, 2)
    )
    return (two["kernels"] - one["kernels"]) / 10, two["host reads"] - one["host reads"]


@pytest.mark.parametrize(("method", "most"), [("FedAvg", 27.2), ("Scaffold", 30.2), ("Mime", 56.2)])
def test_local_step_uses_few_kernels_and_no_host_reads(counts: Any, method: str, most: float) -> None:
    kernels, reads = steps_of(counts, method)
    assert kernels <= most
    assert reads == 0


@pytest.mark.parametrize(("method", "most"), [("FedAvg", 7), ("Scaffold", 9), ("Mime", 8)])
def test_sequential_round_host_reads_do_not_grow_with_clients(counts: Any, method: str, most: int) -> None:
    work = {"local_steps": 2, "local_epochs": None}
    few, many = (
        counts.count(method, "sequential", counts.CASES["shared"], clients_per_round=clients, **work)
        for clients in (2, 10)
    )
    assert few["host reads"] == many["host reads"] <= most


def test_sequential_round_host_reads_do_not_grow_with_model_size(counts: Any) -> None:
    work = {"local_steps": 1, "local_epochs": None, "clients_per_round": 1}
    assert counts.count("FedAvg", "sequential", counts.CASES["deep"], **work)["host reads"] <= 7


@pytest.mark.parametrize(
    ("case", "method", "reads", "kernels"),
    [("shared", "FedAvg", 9, 362), ("unequal", "FedAvg", 13, 737)],
)
def test_vectorized_round_uses_few_kernels_and_host_reads(
    counts: Any, case: str, method: str, reads: int, kernels: int
) -> None:
    found = counts.count(method, "vectorized", counts.CASES[case])
    assert found["host reads"] <= reads
    assert found["kernels"] <= kernels


@pytest.mark.parametrize("case", ["shared", "own", "pinned"])
@pytest.mark.parametrize(("engine", "most"), [("sequential", 10), ("vectorized", 4)])
def test_data_that_fit_are_transferred_once(counts: Any, engine: str, most: int, case: str) -> None:
    found = counts.count("FedAvg", engine, counts.CASES[case])
    assert found["to device"] <= most
    assert found["bytes to device"] <= 16_160, "the order of the examples of ten clients, and small numbers"


def test_data_that_do_not_fit_are_transferred_per_batch(counts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_data, "_SHARE", 10**9)
    found = counts.count("FedAvg", "sequential", counts.CASES["pinned"])
    assert (found["to device"], found["bytes to device"]) == (200, 144_000)


SEEN: list[tuple[str, bool]] = []


class Hooked(Net):
    """Records each batch's memory outside the module, since the vectorized engine watches a module's attributes."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            SEEN.append((batch[0].device.type, batch[0].is_pinned()))
        return batch


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_hooks_see_every_batch_before_its_transfer(place: Place, engine: str) -> None:
    SEEN.clear()
    own = [classification(n, seed=n) for n in (8, 12)]
    options = {"engine": engine, "clients_per_round": 2, "max_rounds": 2, **place.options()}
    fit(seeded(Hooked, dropout=0.0), FederatedDataModule(own, batch_size=4, pin_memory=True), **options)
    assert len(SEEN) >= 2 * (2 + 3)
    assert set(SEEN) == {("cpu", True)}


class Writes(FederatedCallback):
    """Doubles a client's inputs after every round."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        self.x.mul_(2)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_data_changed_between_rounds_are_used_in_training(place: Place, engine: str) -> None:
    ends = []
    for options in ({}, place.options()):
        own = [classification(n, seed=n) for n in (8, 12)]
        callbacks, data = Writes(own[0].tensors[0]), FederatedDataModule(own, batch_size=4)
        options = {"engine": engine, "clients_per_round": 2, "callbacks": callbacks, **options}
        ends.append(fit(seeded(dropout=0.0), data, **options).cpu())
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=place.tolerance or 1e-6)


class Reports(FederatedCallback):
    """Keeps the report of each round."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        self.seen.append(round_report)


class Heard(FederatedCallback):
    """Keeps the loss in each client's report as soon as it ends."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
        self.losses.append(client_report.loss)


def test_hook_that_reads_a_report_gets_its_numbers(place: Place) -> None:
    heard = Heard()
    fit(seeded(dropout=0.0), callbacks=[heard], max_rounds=1, **place.options())
    assert len(heard.losses) == 3
    assert all(map(math.isfinite, heard.losses))


def test_progress_bar_causes_no_additional_host_reads(counts: Any) -> None:
    shown = {"enable_progress_bar": True, "local_steps": 1, "local_epochs": None, "max_rounds": 3}
    assert counts.count("FedAvg", "sequential", counts.CASES["shared"], **shown)["host reads"] <= 7


@pytest.mark.parametrize("method", [FedAvg(), Scaffold("i")], ids=repr)
def test_deferred_reports_match_the_cpu(place: Place, method: Any) -> None:
    found = []
    for options in ({}, place.options()):
        reports = Reports()
        fit(seeded(dropout=0.0), algorithm=method, callbacks=reports, **options)
        found.append(
            [(r.loss, r.drift, [(c.loss, c.update_norm, c.metrics) for c in r.clients.values()]) for r in reports.seen]
        )
    if place.tolerance == 0:
        assert found[0] == found[1]
    assert all(math.isfinite(loss) and drift > 0 for loss, drift, _ in found[1])


@pytest.mark.parametrize("method", [FedAvg(), Mime(SGDm())], ids=repr)
def test_non_finite_client_is_named_as_on_the_cpu(place: Place, method: Any) -> None:
    messages = []
    for options in ({}, place.options()):
        own = [classification(n, seed=n) for n in (8, 12, 4)]
        own[1].tensors[0][3] = math.nan
        data = FederatedDataModule(own, batch_size=4)
        with pytest.raises(ClientError, match="Client 1 returned") as raised:
            fit(seeded(dropout=0.0), data, algorithm=method, **options)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_benchmark_prints_a_round_next_to_a_plain_loop(counts: Any, capsys: pytest.CaptureFixture[str]) -> None:
    counts.main(["--case", "shared", "--method", "FedAvg", "--engine", "vectorized"])
    plain, vectorized = capsys.readouterr().out.splitlines()[-2:]
    assert plain.startswith("| shared | FedAvg | plain loop | ")
    assert vectorized.startswith("| shared | FedAvg | vectorized | ")
