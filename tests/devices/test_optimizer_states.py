"""Optimizer states are on the device where torch.optim keeps them, from any source. Client states are on the host."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn

from lightning_fed.algorithms import FedAvg, Mime, Scaffold
from lightning_fed.core.torch_optimizers import device_of
from lightning_fed.engines.vectorized.chunk_work import ELEMENTWISE
from tests.devices.conftest import Place
from tests.helpers.training import Net, Trajectory, data, fit, seeded


class WithAdam(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Counts(pl.Callback):
    """Counts the device's work in one round."""

    def __init__(self, mini: Any, round: int) -> None:
        self.mini, self.round = mini, round
        self.found: dict[str, int] = {}

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == self.round:
            self.mini.core.start_counting()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == self.round:
            self.found = self.mini.core.stop_counting()


def counts_of(place: Place, mini: Any, **options: Any) -> dict[str, int]:
    """Return the counts of the last of three rounds of all clients."""
    counts = Counts(mini, round=2)
    callbacks = [counts, *options.pop("callbacks", [])]
    options = {"max_rounds": 3, "clients_per_round": 1.0, **options, **place.options()}
    fit(seeded(WithAdam, dropout=0.0), data(), callbacks=callbacks, **options)
    return counts.found


def host_reads(counts: dict[str, int]) -> int:
    return counts.get("scalar to host", 0)


KEPT: dict[str, Any] = {"algorithm": FedAvg(), "local_optimizer_state": "keep"}
RUNS: dict[str, dict[str, Any]] = {"kept by clients": KEPT, "kept by the server": {"algorithm": Mime()}}


@pytest.mark.parametrize("name", RUNS)
def test_resumed_round_has_no_additional_host_reads(place: Place, mini: Any, name: str, tmp_path: Path) -> None:
    saving = ModelCheckpoint(dirpath=tmp_path, save_top_k=-1, filename="{epoch}")
    before = counts_of(place, mini, callbacks=[saving], enable_checkpointing=True, **RUNS[name])
    resumed = counts_of(place, mini, ckpt_path=tmp_path / "epoch=1.ckpt", **RUNS[name])
    assert host_reads(resumed) == host_reads(before)


def test_states_on_disk_cause_no_additional_host_reads(place: Place, mini: Any, tmp_path: Path) -> None:
    in_memory = counts_of(place, mini, client_states="memory", **KEPT)
    on_disk = counts_of(place, mini, client_states="disk", client_states_dir=str(tmp_path), **KEPT)
    assert host_reads(on_disk) == host_reads(in_memory)


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_optimizer_statistics_have_the_device_the_optimizer_uses(place: Place, kind: Any) -> None:
    model = nn.Linear(4, 2).to(place.device)
    optimizer = kind(model.parameters(), lr=0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
    model(torch.ones(1, 4, device=place.device)).sum().backward()
    optimizer.step()
    for p, entries in optimizer.state.items():
        for name, value in entries.items():
            assert value is None or value.device == device_of(name, p, optimizer.param_groups[0]), name
    capturable = {"capturable": True}
    assert device_of("step", model.weight, capturable) == model.weight.device


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_client_states_are_kept_in_host_memory(place: Place, engine: str, where: str, tmp_path: Path) -> None:
    record = Trajectory()
    there = {"client_states_dir": str(tmp_path)} if where == "disk" else {}
    options = {"algorithm": Scaffold(), "engine": engine, "client_states": where, **there, **place.options()}
    fit(seeded(dropout=0.0), callbacks=[record], **options)
    states = record.states[-1]
    assert states
    assert {value.device.type for state in states.values() for value in state.values()} == {"cpu"}


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_small_states_of_a_round_use_one_device_transfer(place: Place, mini: Any, engine: str) -> None:
    options = {"engine": engine, "clients_per_round": 1.0}
    without = counts_of(place, mini, **options)
    keeping = counts_of(place, mini, algorithm=Scaffold(), **options)
    assert keeping["to host"] - without["to host"] == 1
    assert keeping["bytes to host"] - without["bytes to host"] == 6 * 4 * sum(p.numel() for p in Net().parameters())
