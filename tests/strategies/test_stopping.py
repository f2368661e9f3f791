"""A request to stop takes effect at the next local step, and no completed round is lost."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.plugins.environments import SLURMEnvironment
from pytorch_lightning.plugins.precision import MixedPrecision
from pytorch_lightning.trainer.connectors import signal_connector
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_fed import FederatedCallback
from lightning_fed.algorithms import MimeLite, Scaffold
from lightning_fed.compat.private import SIGTERMException
from tests.helpers.selection import few
from tests.helpers.training import Net, data, seeded, trainer


class At(FederatedCallback):
    """Calls a function at the start of a round's second client, or in another hook of the round."""

    def __init__(self, act: Callable[[], Any], round: int = 3, hook: str = "on_client_start") -> None:
        self.act, self.round, self.hook, self.calls = act, round, hook, 0

    def on_client_start(self, trainer: Any, pl_module: Any, round: int, client_id: Any) -> None:
        self._meet("on_client_start", round)

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        self._meet("on_round_end", round_report.round)

    def _meet(self, hook: str, round: int) -> None:
        if hook == self.hook and round == self.round:
            self.calls += 1
            if self.calls == 2 or hook != "on_client_start":  # in the middle of a round
                self.act()


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def run(folder: Path, rounds: int = 6, ckpt_path: Any = None, model: Any = None, **options: Any) -> Any:
    callbacks = [*options.pop("callbacks", [])]
    keep = options.pop("keep", {"every_n_epochs": 2})
    if keep is not None:
        callbacks.append(ModelCheckpoint(folder, filename="{step}", **keep))
    algorithm = options.pop("algorithm", Scaffold())
    kwargs = {"default_root_dir": folder, "enable_checkpointing": keep is not None, **options}
    made = trainer(algorithm=algorithm, max_rounds=rounds, callbacks=callbacks, **kwargs)
    made.fit(seeded(Steps) if model is None else model, data(), ckpt_path=ckpt_path)
    return made


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a run that was not interrupted."""
    return run(tmp_path_factory.mktemp("whole"))


class Steps(Net):
    """Counts calls of ``training_step`` over all instances."""

    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        Steps.calls += 1
        return super().training_step(batch, batch_idx)


STOPS = {signal.SIGTERM: SIGTERMException, signal.SIGINT: SystemExit}


@pytest.mark.parametrize("number", STOPS, ids=lambda n: n.name)
def test_signal_stops_at_the_next_local_step_and_saves_last_round(
    number: int, whole: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []
    act = At(lambda: (seen.append(Steps.calls), send(number)()))
    with pytest.raises(STOPS[number]) as caught:
        run(tmp_path, callbacks=[act])
    assert caught.value.code == (None if number == signal.SIGTERM else 1)
    assert Steps.calls == seen[0]
    assert "Stopped after 3 completed rounds" in caplog.text
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=2.ckpt"]
    resumed = run(tmp_path, ckpt_path="last")
    assert str(resumed.ckpt_path).endswith("last.ckpt")
    assert torch.equal(resumed.fit_loop.state.x, whole.fit_loop.state.x)


def test_run_stopped_in_its_first_round_leaves_no_log_folder(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, keep=None, logger=TensorBoardLogger(tmp_path), callbacks=[At(send(signal.SIGINT), round=0)])
    assert not list(tmp_path.rglob("version_*"))


def test_round_already_in_a_checkpoint_is_not_saved_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SIGTERMException):
        run(tmp_path, keep={}, callbacks=[At(send(signal.SIGTERM))])
    assert os.listdir(tmp_path) == ["step=3.ckpt"]
    assert "Stopped after 3 completed rounds. To resume," in caplog.text
    with pytest.raises(SIGTERMException):  # nor if this run resumed from it
        run(tmp_path, keep={}, ckpt_path="last", callbacks=[At(send(signal.SIGTERM))])
    assert os.listdir(tmp_path) == ["step=3.ckpt"]


def test_last_checkpoint_of_another_run_is_kept(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").write_bytes(b"of another run")
    with pytest.raises(SIGTERMException):
        run(tmp_path, callbacks=[At(send(signal.SIGTERM))])
    assert sorted(os.listdir(tmp_path)) == ["last-v1.ckpt", "last.ckpt", "step=2.ckpt"]
    assert (tmp_path / "last.ckpt").read_bytes() == b"of another run"


def test_stopped_run_without_checkpoints_saves_nothing_and_logs_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(SIGTERMException):
        run(tmp_path, keep=None, callbacks=[At(send(signal.SIGTERM))])
    assert os.listdir(tmp_path) == []
    assert "no checkpoint holds them" in caplog.text


def test_signal_at_round_end_waits_for_the_round_to_finish(tmp_path: Path) -> None:
    with pytest.raises(SIGTERMException):
        run(tmp_path, keep={}, callbacks=[At(send(signal.SIGTERM), hook="on_round_end")])
    assert os.listdir(tmp_path) == ["step=4.ckpt"]


def test_second_interrupt_stops_immediately(tmp_path: Path) -> None:
    def twice() -> None:
        send(signal.SIGINT)()
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)()
        raise KeyboardInterrupt

    with pytest.raises(SystemExit):
        run(tmp_path, keep={}, callbacks=[At(twice, hook="on_round_end")])
    assert os.listdir(tmp_path) == ["step=3.ckpt"]


def test_signal_handlers_are_restored_after_fit(tmp_path: Path) -> None:
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    run(tmp_path, 1)
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize("ckpt_path", few([None, "last"], ["last"]))
def test_slurm_requeue_signal_saves_requeues_and_stops(
    ckpt_path: Any, whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(signal_connector, "call", lambda command: asked.append(command) or 0)
    for name, value in {"SLURM_JOB_ID": "42", "SLURM_NTASKS": "1", "SLURM_JOB_NAME": "train"}.items():
        monkeypatch.setenv(name, value)
    for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "1")
    plugin = {"plugins": [SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR1)]}
    with pytest.raises(SIGTERMException):
        run(tmp_path, callbacks=[At(send(signal.SIGUSR1))], **plugin)
    assert asked == [["scontrol", "requeue", "42"]]
    assert "hpc_ckpt_1.ckpt" in os.listdir(tmp_path)
    resumed = run(tmp_path, ckpt_path=ckpt_path, **plugin)
    assert str(resumed.ckpt_path).endswith("hpc_ckpt_1.ckpt")
    assert torch.equal(resumed.fit_loop.state.x, whole.fit_loop.state.x)


# ---------------------------------------------------------------------- other state that outlives a round


class Half(MixedPrecision):
    """Half precision with a scaler that changes in every round: its first steps overflow, and it soon grows."""

    def __init__(self) -> None:
        super().__init__("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=3))


METHODS = [Scaffold(), MimeLite()]


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_gradient_scaler_resumes_from_the_start_of_the_round(method: Any, tmp_path: Path) -> None:
    options = {"algorithm": method, "ckpt_path": "last"}
    for at in (1, 4):
        with pytest.raises(SIGTERMException):
            run(tmp_path, plugins=[Half()], callbacks=[At(send(signal.SIGTERM), at)], **options)
    resumed = run(tmp_path, plugins=[Half()], **options)
    whole = run(tmp_path / "whole", plugins=[Half()], **options)
    assert resumed.precision_plugin.state_dict() == whole.precision_plugin.state_dict()
    assert torch.equal(resumed.fit_loop.state.x, whole.fit_loop.state.x)


def test_mid_round_checkpoint_holds_the_scaler_of_the_round_start(tmp_path: Path) -> None:
    class Save(FederatedCallback):
        def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
            if trainer.fit_loop.round == 3:
                trainer.save_checkpoint(tmp_path / "3.ckpt")

    whole = run(tmp_path / "whole", plugins=[Half()], callbacks=[Save()])
    resumed = run(tmp_path / "rest", ckpt_path=tmp_path / "3.ckpt", plugins=[Half()])
    assert resumed.precision_plugin.state_dict() == whole.precision_plugin.state_dict()
    assert torch.equal(resumed.fit_loop.state.x, whole.fit_loop.state.x)


def test_early_stopping_ends_a_resumed_run_in_the_same_round(tmp_path: Path) -> None:
    def early() -> dict[str, Any]:
        return {"callbacks": [EarlyStopping("val_loss", min_delta=10.0, patience=3)], "keep": {"save_top_k": -1}}

    whole = run(tmp_path, **early())
    assert whole.current_epoch == 4
    for step in (1, 3, 4):  # the last one was written just before the run ended
        resumed = run(tmp_path / "rest", ckpt_path=tmp_path / f"step={step}.ckpt", **early())
        assert resumed.current_epoch == 4
        assert torch.equal(resumed.fit_loop.round and parameters_of(resumed), parameters_of(whole))


def parameters_of(made: Any) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in made.lightning_module.parameters()])


def test_run_that_fails_at_round_end_does_not_save_that_round(whole: Any, tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("my own")

    on_exception = OnExceptionCheckpoint(tmp_path / "broken")
    with (
        pytest.raises(RuntimeError, match="my own"),
        pytest.warns(UserWarning, match="is not saved: the run was interrupted while round 4 ended"),
    ):
        run(tmp_path, keep={}, callbacks=[At(fail, hook="on_round_end"), on_exception])
    assert sorted(os.listdir(tmp_path)) == ["step=3.ckpt"]
    resumed = run(tmp_path, ckpt_path="last")
    assert torch.equal(resumed.fit_loop.state.x, whole.fit_loop.state.x)


@pytest.mark.thorough
def test_tensorboard_shows_each_round_once(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("my own")

    def logger() -> TensorBoardLogger:
        return TensorBoardLogger(tmp_path, name="", version="here")

    with pytest.raises(RuntimeError, match="my own"):
        run(tmp_path, logger=logger(), callbacks=[At(fail, 3, hook="on_round_end")])  # step=2.ckpt is the newest
    time.sleep(1.0)  # files of the same second sort by their number in the process, which puts 10 before 9
    run(tmp_path, logger=logger(), ckpt_path="last")
    events = EventAccumulator(str(tmp_path / "here")).Reload()
    assert [e.step for e in events.Scalars("val_loss")] == list(range(1, 7))
    assert [e.step for e in events.Scalars("client/loss")] == list(range(1, 7))
