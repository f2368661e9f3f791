"""Buffers travel if a client has changed them, and else not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_fed import FederatedCallback
from lightning_fed.algorithms import FedAvg
from tests.helpers.training import Net, data, fit, seeded, trainer


class WithBuffers(Net):
    """Has a buffer that stays, in float64, and one that clients change where they are told to."""

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
def test_buffers_that_nobody_changes_do_not_travel(engine: str) -> None:
    model = seeded(WithBuffers, moves=False)
    before = model.positions.clone()
    assert traffic(model, engine=engine) == [(0, 0)] * 3
    assert torch.equal(model.positions, before)


def test_buffers_that_clients_change_travel_from_then_on_after_a_resume_too(tmp_path: Path) -> None:
    assert traffic(seeded(WithBuffers, moves=True)) == [(36, 0), (36, 36), (36, 36)]
    saver = ModelCheckpoint(tmp_path, filename="a")
    fit(seeded(WithBuffers, moves=True), callbacks=saver, enable_checkpointing=True, max_rounds=1)
    assert traffic(seeded(WithBuffers, moves=True), max_rounds=2, ckpt_path=tmp_path / "a.ckpt") == [(36, 36)]
    assert traffic(seeded(WithBuffers, moves=True), buffers="local") == [(0, 0)] * 3


class WritesBytes(Bytes):
    """Lets other processes' bytes be read once a run is over."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        (self.path / f"{trainer.global_rank}.json").write_text(json.dumps(self.rounds))


@pytest.mark.thorough
@pytest.mark.parametrize("moves", [False, True])
def test_buffers_travel_alike_from_several_processes(moves: bool, tmp_path: Path) -> None:
    model = seeded(WithBuffers, moves=moves)
    vector = 3 * 4 * sum(p.numel() for p in model.parameters())
    run = trainer(callbacks=WritesBytes(tmp_path), max_rounds=2, devices=2, strategy="clients_fork")
    run.fit(model, data())
    for rank in range(2):
        rounds = [[up - vector, down - vector] for up, down in json.loads((tmp_path / f"{rank}.json").read_text())]
        assert rounds == ([[36, 0], [36, 36]] if moves else [[0, 0], [0, 0]])
