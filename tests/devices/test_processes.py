"""Two processes on their own devices: they exchange states, leave the other device alone, and resume every scaler."""

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.devices.conftest import Place
from tests.devices.pair import RUNS, Overflows, run_of
from tests.helpers.processes import HANGS, Outcome
from tests.helpers.training import parameters, rounds_in, seeded

ROOT = Path(__file__).parent.parent.parent
Outcomes = Mapping[str, Sequence[Outcome]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pair")


@pytest.fixture(scope="module")
def outcomes(place: Place, folder: Path) -> Outcomes:
    """The results of each process of each run."""
    if place.name != "mini":
        pytest.skip("two processes run on two test devices")
    command, around = [sys.executable, "-m", "tests.devices.pair", str(folder)], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=around, capture_output=True, text=True, timeout=2 * HANGS)
    assert done.returncode == 0, done.stderr
    found: Outcomes = pickle.loads((folder / "outcomes").read_bytes())
    return found


def values_of(outcomes: Outcomes, name: str) -> list[dict[str, Any]]:
    assert [one.error for one in outcomes[name]] == ["", ""], outcomes[name][0].trace
    return [one.value for one in outcomes[name]]


@pytest.mark.parametrize("name", RUNS)
def test_states_are_exchanged_between_devices(outcomes: Outcomes, name: str) -> None:
    first, second = values_of(outcomes, name)
    kind, options = RUNS[name]
    alone = seeded(kind)
    run_of(alone, **options)
    assert first["exchanges of states"] >= 2
    assert torch.equal(first["parameters"], second["parameters"])
    torch.testing.assert_close(first["parameters"], parameters(alone), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", RUNS)
def test_process_allocates_nothing_on_the_other_device(outcomes: Outcomes, name: str) -> None:
    for value in values_of(outcomes, name):
        assert value["bytes on the other's device"] == 0
        own, others = value["gathered"]
        assert torch.equal(own + 1, others)


def test_gradient_scaler_of_every_process_is_restored(outcomes: Outcomes) -> None:
    scales = []
    for value in values_of(outcomes, "scaled"):
        (whole, scale), (resumed, resumed_scale) = value["whole"], value["resumed"]
        assert torch.equal(whole, resumed)
        assert scale == resumed_scale
        scales.append(scale)
    assert scales[0] != scales[1]


def test_dropping_scalers_of_other_processes_warns(outcomes: Outcomes, place: Place, folder: Path) -> None:
    saved = folder / "epoch=0.ckpt"
    assert rounds_in(saved) == 1
    with pytest.warns(UserWarning, match=re.escape("written by 2 processes with a gradient scaler each, and this run")):
        run_of(seeded(Overflows), ckpt_path=saved, **place.options("16-mixed"))
