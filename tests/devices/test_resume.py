"""A checkpoint of one device resumes on another."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_fed.algorithms import Adam, FedAvg, Mime, Scaffold
from tests.devices.conftest import Place
from tests.helpers.training import Net, data, fit, seeded

RUNS: dict[str, dict[str, Any]] = {
    "client states": {"algorithm": Scaffold()},
    "client states on disk": {"algorithm": Scaffold(), "client_states": "disk"},
    "server statistics": {"algorithm": Mime(Adam())},
    "kept optimizers": {"algorithm": FedAvg(), "local_optimizer_state": "keep"},
}


class WithAdam(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def run(place: Place, name: str, tmp_path: Path, starts_here: bool, ends_here: bool) -> tuple[Tensor, Tensor]:
    """Return the parameters of a run that resumes after two of four rounds, and of one on the first device."""
    options = {"clients_per_round": 4, **RUNS[name]}
    here, cpu = {**options, **place.options()}, options
    kind = WithAdam if "keep" in options.values() else Net
    first, second = (here if starts_here else cpu), (here if ends_here else cpu)
    on_disk = options.get("client_states") == "disk"
    folders = [{"client_states_dir": str(tmp_path / f"states{i}")} if on_disk else {} for i in range(2)]
    saving = {"callbacks": [ModelCheckpoint(dirpath=tmp_path / "saved")], "enable_checkpointing": True}
    fit(seeded(kind, dropout=0.0), data(), max_rounds=2, **{**first, **folders[0]}, **saving)
    (path,) = (tmp_path / "saved").glob("*.ckpt")
    resumed = fit(seeded(kind, dropout=0.0), data(), max_rounds=4, ckpt_path=path, **{**second, **folders[0]})
    whole = fit(seeded(kind, dropout=0.0), data(), max_rounds=4, **{**first, **folders[1]})
    return resumed.cpu(), whole.cpu()


@pytest.mark.parametrize("name", RUNS)
def test_run_resumes_on_its_device_with_identical_bits(place: Place, name: str, tmp_path: Path) -> None:
    resumed, whole = run(place, name, tmp_path, True, True)
    assert torch.equal(resumed, whole)


@pytest.mark.parametrize("starts_here", [True, False])
@pytest.mark.parametrize("name", ["client states on disk", "kept optimizers"])
def test_run_resumes_on_another_device(place: Place, name: str, starts_here: bool, tmp_path: Path) -> None:
    resumed, whole = run(place, name, tmp_path, starts_here, not starts_here)
    torch.testing.assert_close(resumed, whole, rtol=0, atol=place.tolerance)
