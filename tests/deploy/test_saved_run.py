"""A fit that saves every round, and resumes from the saved one."""

from functools import partial
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy import saved_run
from tests.deploy.wire import Wire, make_trainer, parameters, simulated

METHOD = "Scaffold ii"


def run(wire: Wire, checkpoint: Path, **options: int) -> torch.Tensor:
    module = wire.make_model()
    saved_run.fit(make_trainer(METHOD, **options), module, wire.clients(), checkpoint)
    return parameters(module)


def rounds_in(checkpoint: Path) -> int:
    return int(torch.load(checkpoint, weights_only=True)["loops"]["fit_loop"]["state_dict"]["round"])


@pytest.mark.thorough
def test_every_round_is_saved_and_the_previous_one_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wire, checkpoint = Wire(tmp_path, partial(make_trainer, METHOD)), tmp_path / "new" / "last.ckpt"
    with caplog.at_level("INFO"):
        run(wire, checkpoint, max_rounds=2)
        assert rounds_in(checkpoint) == 2
        assert rounds_in(checkpoint.with_name("last.previous.ckpt")) == 1
        wire.kill()
        found = run(wire, checkpoint)
    assert torch.equal(found, parameters(simulated(partial(make_trainer, METHOD)).lightning_module))
    assert [line.split(":")[0] for line in caplog.messages if line.startswith("Round")] == [
        f"Round {r}" for r in range(5)
    ]
    assert f"The run continues from {checkpoint}." in caplog.messages
    assert "weights_only" not in caplog.text, "Lightning's own default is no news"


def test_two_runs_cannot_share_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_run, "_PATIENCE", 0.1)
    wire, checkpoint = Wire(tmp_path, partial(make_trainer, METHOD)), tmp_path / "last.ckpt"
    with (
        FileLock(f"{checkpoint}.lock"),
        pytest.raises(FederatedError, match="Another run works with .*last.ckpt. End that run, or give this one"),
    ):
        run(wire, checkpoint)
    assert not wire.phases
