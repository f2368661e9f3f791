"""Recorded local steps and data on the device, with stand-ins for what only a GPU has."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fed import FederatedCallback, FederatedDataModule
from lightning_fed.algorithms import Algorithm, FedAvg, Mime, Scaffold
from lightning_fed.engines import captures
from lightning_fed.engines.resident import ResidentData
from tests.helpers.engines import Ordinary
from tests.helpers.selection import few
from tests.helpers.training import clients, parameters, seeded, trainer


class Again:
    """A recording that does the work anew, into the memory that was there when it was recorded."""

    made = 0
    replayed = 0

    def record(self, work: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        Again.made += 1
        self.work, self.results = work, work()
        return self.results

    def replay(self) -> None:
        Again.replayed += 1
        for memory, value in zip(self.results, self.work(), strict=True):
            memory.copy_(value)


class Refuses(Again):
    def record(self, work: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        work()
        raise RuntimeError("operation not permitted when stream is capturing")


class Decays(FederatedCallback):
    """Halves the local learning rate after the second round."""

    def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
        if round == 2:
            for group in trainer.optimizers[0].param_groups:
                group["lr"] *= 0.5


def trained(algorithm: Algorithm, chunk: int) -> Tensor:
    run = trainer(
        engine="vectorized",
        chunk_size=chunk,
        algorithm=algorithm,
        max_rounds=4,
        local_epochs=2,
        callbacks=Decays(),
        limit_val_batches=0,
    )
    run.fit(model := seeded(Ordinary), FederatedDataModule(clients((12, 12, 8, 12)), batch_size=4))
    return parameters(model)


@pytest.mark.parametrize(
    ("method", "chunk"),
    few([pytest.param(m, n, id=f"{m.__name__}-{n}") for m in (FedAvg, Scaffold, Mime) for n in (1, 2)], ["Scaffold-1"]),
)
def test_a_recorded_step_is_the_same_step(method: type[Algorithm], chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(method(), chunk)
    monkeypatch.setattr(captures, "recording_on", lambda device: Again())
    Again.made = Again.replayed = 0
    found = trained(method(), chunk)
    assert torch.equal(found, expected)
    assert Again.replayed > Again.made > 0


@pytest.mark.thorough
def test_a_step_that_cannot_be_recorded_is_taken_as_it_is_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(Scaffold(), 1)
    monkeypatch.setattr(captures, "recording_on", lambda device: Refuses())
    with pytest.warns(UserWarning, match="not recorded as CUDA graphs.*capturing"):
        found = trained(Scaffold(), 1)
    assert torch.equal(found, expected)


def test_a_cpu_records_nothing() -> None:
    assert captures.recording_on(torch.device("cpu")) is None


class Far(ResidentData):
    """A device that is another one than the data's, with so much free memory."""

    room = 10**6

    def is_near(self, device: torch.device) -> bool:
        return False

    def free(self) -> int:
        return self.room


def test_data_is_moved_once_and_anew_when_it_was_written_to() -> None:
    far = Far(torch.device("meta"))  # a device that has shapes without values
    x, y = torch.arange(6.0), torch.arange(6)
    first = far.of((x, y))
    assert [t.device.type for t in first] == ["meta", "meta"]
    assert far.of((x, y)) is first
    x[0] = 1.0
    assert far.of((x, y)) is not first


def test_data_that_does_not_fit_stays_where_it_is() -> None:
    far = Far(torch.device("meta"))
    far.room = 100
    x = torch.arange(26.0)
    assert far.of((x,)) == (x,)


@pytest.mark.parametrize("room", [10**6, 0])
def test_data_that_is_gone_leaves_nothing_behind(room: int) -> None:
    far = Far(torch.device("meta"))
    far.room = room
    x, y = torch.arange(6.0), torch.arange(6)
    far.of((x, y))
    kept = weakref.ref(x)
    assert len(far._held) == 1
    del x
    assert kept() is None
    assert not far._held
    assert far.of((y,))[0].device.type == ("meta" if room else "cpu")
    copies = weakref.ref(far.of((y,))[0])
    del far
    assert room == 0 or copies() is None


def test_rows_travel_in_one_transfer_and_come_back_as_they_were() -> None:
    rows = [torch.tensor([4, 1]), torch.tensor([2]), torch.tensor([0, 3, 5])]
    far = Far(torch.device("cpu"))
    for found, expected in zip(far.index(rows), rows, strict=True):
        assert torch.equal(found, expected)
    assert far.index([]) == []


@pytest.mark.parametrize("chunk", few([1, 4], [4]))
def test_a_run_on_data_elsewhere_is_the_same_run(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(FedAvg(), chunk)
    monkeypatch.setattr("lightning_fed.engines.vectorized.ResidentData", Far)
    assert torch.equal(trained(FedAvg(), chunk), expected)
