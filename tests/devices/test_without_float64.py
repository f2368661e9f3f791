"""On a device without float64, such as Apple's GPUs, sums over clients run in float64 on the CPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_fed.algorithms import FedDane, FedExP, FedProx, Mime, Scaffold
from lightning_fed.core import devices
from lightning_fed.metrics import gradient_dissimilarity
from lightning_fed.server import (
    Bulyan,
    CoordinateMedian,
    FedBuff,
    GeometricMedian,
    LabelFlipAttack,
    MultiKrum,
    NoiseAttack,
    NormClipping,
    OortSampler,
    OptimalClientSampling,
    PowerOfChoiceSampler,
    SignFlipAttack,
    TrimmedMean,
    UpdateNormSampler,
)
from lightning_fed.server.aggregation.mean import Aggregation
from tests.devices.conftest import Place
from tests.helpers.aggregation import add_one, cohort
from tests.helpers.training import CLASSES, FEATURES, Net, data, fit, seeded


@pytest.fixture(autouse=True)
def without_float64(mini: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mini.core.set_float64(False)
    monkeypatch.setattr(devices, "has_float64", lambda device: device.type != "mini")


class WithBuffers(Net):
    """Has averaged buffers and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.body[0].bias.requires_grad_(False)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("largest", loss, reduce_fx="max")
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


RUNS: dict[str, dict[str, Any]] = {
    "sequential": {"engine": "sequential"},
    "vectorized": {"engine": "vectorized"},
    "client states": {"algorithm": Scaffold(), "engine": "vectorized"},
    "gradient phase": {"algorithm": FedDane(0.1), "engine": "sequential"},
    "gradients at x": {"algorithm": Mime(), "engine": "sequential"},
    "loss of the population": {"algorithm": FedProx(mu=0.1, adaptive=True), "engine": "sequential"},
    "norms of messages": {"algorithm": FedExP(), "engine": "sequential"},
    "median": {"aggregator": CoordinateMedian()},
    "trimmed mean": {"aggregator": TrimmedMean(0.2)},
    "geometric median": {"aggregator": GeometricMedian()},
    "clipped messages": {"aggregator": NormClipping(0.1)},
    "Multi-Krum": {"aggregator": MultiKrum(1, num_selected=3), "clients_per_round": 6},
    "Bulyan": {"aggregator": Bulyan(0), "clients_per_round": 6},
    "attacked": {"algorithm": Scaffold("i"), "attack": NoiseAttack(0.4, 0.1), "clients_per_round": 6},
    "attacked gradients": {"algorithm": Mime(), "attack": SignFlipAttack(0.4), "clients_per_round": 6},
    "flipped labels": {"attack": LabelFlipAttack(0.4, CLASSES), "clients_per_round": 6},
    "fresh losses": {"sampler": PowerOfChoiceSampler(2, 4)},
    "utilities": {"sampler": OortSampler(3, exploration=0.4)},
    "update norms": {"sampler": UpdateNormSampler(3), "max_rounds": 3},
    "few send": {"aggregator": OptimalClientSampling(1)},
    "asynchronous": {"asynchronous": FedBuff(2, 4), "clients_per_round": None},
}


@pytest.mark.parametrize("name", RUNS)
def test_run_on_device_matches_the_cpu(place: Place, name: str) -> None:
    options = {"max_rounds": 2, **RUNS[name]}
    on_cpu = fit(seeded(dropout=0.0), **options)
    here = fit(seeded(dropout=0.0), **{**options, **place.options()})
    within = 5e-7 if options.get("engine") != "sequential" else 0.0
    torch.testing.assert_close(here.cpu(), on_cpu, rtol=0, atol=within)


def test_buffers_are_averaged_and_the_run_resumes(place: Place, tmp_path: Path) -> None:
    modules = []
    for options in ({}, place.options()):
        modules.append(seeded(WithBuffers))
        saving: dict[str, Any] = {"callbacks": [ModelCheckpoint(dirpath=tmp_path / str(len(modules)))]}
        fit(modules[-1], data(drop_last=True), max_rounds=2, **{**saving, "enable_checkpointing": True, **options})
        (saved,) = (tmp_path / str(len(modules))).glob("*.ckpt")
        fit(modules[-1], data(drop_last=True), max_rounds=3, ckpt_path=saved, **options)
    on_cpu, here = (module.state_dict() for module in modules)
    assert all(torch.equal(here[name].cpu(), value) for name, value in on_cpu.items())


def test_means_keep_float64_precision(place: Place) -> None:
    aggregation = Aggregation({"m": "uniform"}, "examples", cohort([1, 1, 1]), 3)
    for i, value in enumerate((1e8, 1.0, -1e8)):
        add_one(aggregation, i, 1, {"m": torch.tensor([value], device=place.device)})
    means, _ = aggregation.compute(torch.zeros(1, device=place.device))
    assert means["m"].device == place.device
    assert float(means["m"]) == pytest.approx(1 / 3, rel=1e-6)


def test_gradient_dissimilarity_is_computed_on_the_device(place: Place) -> None:
    pairs = [(torch.tensor([v, 1.0], device=place.device), 0.5) for v in (3.0, -3.0)]
    assert pytest.approx(9.0) == gradient_dissimilarity(pairs).G2
