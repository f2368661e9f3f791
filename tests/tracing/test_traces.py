"""Traced local steps match the module's, and are dropped if they would not."""

import gc
import math
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import proxy_tensor

from lightning_fed import FederatedCallback
from lightning_fed.algorithms import FedAvg, Mime, Scaffold, SGDm
from lightning_fed.engines.vectorized import local_steps
from lightning_fed.tracing import traces
from lightning_fed.tracing.traces import Trace, Traces
from tests.behaviour.test_contract import METHODS
from tests.helpers.engines import Ordinary, assert_agree, full_batches, run
from tests.helpers.selection import few
from tests.helpers.training import trainer

ADAM = partial(torch.optim.Adam, lr=0.01)


def traces_of(trainer: Any) -> Traces:
    return trainer.fit_loop.clients.engine.step.traces


TRACED = ["FedAvg", "Scaffold i", "FedDyn", "Mime Adam", "CMime SGDm", "MimeMVR eq15", "FedCM"]


@pytest.mark.parametrize(
    ("name", "chunk_size"),
    few(
        [pytest.param(name, n, id=f"{name}-{n}") for name in TRACED for n in (1, 64)],
        ["FedCM-64"],
    ),
)
def test_traced_steps_match_the_sequential_engine(name: str, chunk_size: int) -> None:
    method = METHODS[name]
    make = partial(Ordinary, method.optimizer)
    options = {"algorithm": method.algorithm, "local_epochs": 2, "max_rounds": 3, "datamodule": full_batches}
    traced = run("vectorized", make, chunk_size=chunk_size, **options)
    assert len(traces_of(traced)) > 0
    assert_agree(run("sequential", make, **options), traced)


@pytest.mark.thorough
def test_traced_steps_with_adam_match_the_sequential_engine() -> None:
    options = {"make": partial(Ordinary, ADAM), "algorithm": Scaffold(), "max_rounds": 3, "datamodule": full_batches}
    traced = run("vectorized", **options)
    assert len(traces_of(traced)) > 0
    assert_agree(run("sequential", **options), traced)


@pytest.mark.thorough
def test_tracing_creates_no_fake_tensor_mode_per_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """make_fx would create one per operation, which takes twice as long as the rest of tracing."""
    made = []

    class Counted(FakeTensorMode):
        def __init__(self, **options: Any) -> None:
            made.append(options)
            super().__init__(**options)

    monkeypatch.setattr(proxy_tensor, "FakeTensorMode", Counted)
    traced = run("vectorized", Ordinary, algorithm=Mime(), max_rounds=1)
    assert len(traces_of(traced)) > 0
    assert not made


class Garbage:
    """An object that only Python's garbage collection frees, which then notes whether an operation is recorded."""

    recorded: list[bool] = []

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        self.recorded.append(proxy_tensor.get_proxy_mode() is not None)


def test_no_finalizer_runs_while_a_step_is_traced() -> None:
    def step(x: torch.Tensor) -> Any:
        Garbage()
        return [x * 2], x.sum(), {}

    Garbage.recorded.clear()
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(1)
    try:
        trace = Traces(torch.float32, print).get("key", step, lambda _: [torch.ones(3)], (0,), moves=0, constants=0)
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert trace is not None
    assert Garbage.recorded
    assert not any(Garbage.recorded)
    assert gc.isenabled()


class Tempered(Ordinary):
    """Its loss depends on an attribute that a callback changes."""

    temperature = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x) * self.temperature, y)
        self.log("train_loss", loss)
        return loss


class Cool(FederatedCallback):
    def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
        pl_module.temperature = 1.0 + round


@pytest.mark.parametrize("chunk_size", few([1, 64], [1]))
def test_attribute_changed_between_rounds_takes_effect(chunk_size: int) -> None:
    runs = [
        run(engine, Tempered, full_batches, algorithm=FedAvg(), callbacks=[Cool()], **options)
        for engine, options in (("sequential", {}), ("vectorized", {"chunk_size": chunk_size}))
    ]
    assert traces_of(runs[1]).allowed
    assert_agree(*runs)


class Epochal(Ordinary):
    """Its loss depends on the round."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y) * (1.0 + self.current_epoch)
        self.log("train_loss", loss)
        return loss


@pytest.mark.thorough
def test_step_that_reads_the_trainer_is_not_traced() -> None:
    runs = [run(engine, Epochal, algorithm=FedAvg(), max_rounds=4) for engine in ("sequential", "vectorized")]
    assert not traces_of(runs[1]).allowed
    assert_agree(*runs)


HIDDEN = {"scale": 1.0}


class Global(Ordinary):
    """Its loss depends on a hidden global value."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y) * HIDDEN["scale"]
        self.log("train_loss", loss)
        return loss


class Scale(FederatedCallback):
    def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
        HIDDEN["scale"] = 1.0 + round


@pytest.mark.thorough
@pytest.mark.parametrize("chunk_size", [1, 64])
def test_step_whose_loss_differs_from_its_trace_is_retraced(chunk_size: int) -> None:
    sequential = run("sequential", Global, algorithm=FedAvg(), max_rounds=4, callbacks=[Scale()])
    with pytest.warns(UserWarning, match="gives another loss than when it was traced.* have changed in 3 rounds"):
        traced = run("vectorized", Global, algorithm=FedAvg(), max_rounds=4, callbacks=[Scale()], chunk_size=chunk_size)
    assert len(traces_of(traced)) > 0
    assert_agree(sequential, traced)


class Reversal(Ordinary):
    """Its gradient depends on a hidden global value, but its loss does not."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        z = self(x) * HIDDEN["scale"]
        return F.cross_entropy(z + (self(x) - z).detach(), y)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "chunk_size"),
    [pytest.param(name, n, id=f"{name}-{n}") for name in ("FedAvg", "Scaffold", "Adam", "Mime") for n in (1, 64)],
)
def test_gradient_change_without_a_loss_change_takes_effect(method: str, chunk_size: int) -> None:
    algorithm = {"FedAvg": FedAvg(), "Mime": Mime()}.get(method, Scaffold())
    make = partial(Reversal, ADAM) if method == "Adam" else Reversal
    options = {"algorithm": algorithm, "max_rounds": 3, "datamodule": full_batches}
    sequential = run("sequential", make, callbacks=[Scale()], **options)
    traced = run("vectorized", make, callbacks=[Scale()], chunk_size=chunk_size, **options)
    assert len(traces_of(traced)) > 0
    assert_agree(sequential, traced)


@pytest.mark.thorough
@pytest.mark.parametrize("chunk_size", [1, 64])
def test_steps_too_short_to_compare_are_checked_like_long_ones(
    chunk_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"algorithm": Scaffold(), "max_rounds": 3, "datamodule": full_batches, "chunk_size": chunk_size}
    divided = run("vectorized", Reversal, callbacks=[Scale()], **options)
    monkeypatch.setattr(local_steps, "_LEAST_RATE", math.inf)
    calls = Mock(wraps=local_steps.LocalSteps._call)
    monkeypatch.setattr(local_steps.LocalSteps, "_call", lambda *args, **kwargs: calls(*args, **kwargs))
    tried = run("vectorized", Reversal, callbacks=[Scale()], **options)
    assert -1.0 in [call.kwargs.get("factor") for call in calls.mock_calls]
    assert torch.equal(divided.fit_loop.state.x, tried.fit_loop.state.x)


@pytest.mark.thorough
def test_run_with_a_retraced_step_resumes_with_identical_bits(tmp_path: Path) -> None:
    options = {"datamodule": full_batches, "algorithm": FedAvg(), "max_rounds": 4}
    whole = run("vectorized", Global, callbacks=[Scale()], **options)
    part = run("vectorized", Global, callbacks=[Scale()], **{**options, "max_rounds": 2})
    part.save_checkpoint(tmp_path / "part.ckpt")
    resumed = run("vectorized", Global, callbacks=[Scale()], ckpt_path=tmp_path / "part.ckpt", **options)
    assert torch.equal(whole.fit_loop.state.x, resumed.fit_loop.state.x)


@pytest.mark.thorough
@pytest.mark.parametrize("chunk_size", [1, 64])
def test_failing_trace_warns_and_falls_back_to_untraced_steps(chunk_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Trace, parameter: torch.Tensor, *_: Any, **__: Any) -> None:
        parameter.add_(1.0)
        raise RuntimeError("no such view")

    sequential = run("sequential", algorithm=Scaffold())
    monkeypatch.setattr(Trace, "__call__", fail)
    with pytest.warns(UserWarning, match=r"untraced, which is slower: RuntimeError at work \(no such view\)"):
        traced = run("vectorized", algorithm=Scaffold(), chunk_size=chunk_size)
    assert not traces_of(traced).allowed
    assert_agree(sequential, traced)


class LogsNumbers(Ordinary):
    """Logs a Python number, which a trace would repeat forever."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("scale", HIDDEN["scale"])
        return loss


@pytest.mark.thorough
def test_logged_python_number_is_not_frozen_in_the_trace() -> None:
    runs = [
        run(engine, LogsNumbers, algorithm=FedAvg(), max_rounds=4, callbacks=[Scale()])
        for engine in ("sequential", "vectorized")
    ]
    assert float(runs[1].callback_metrics["scale"]) == 4.0
    assert_agree(*runs)


@pytest.mark.thorough
def test_traced_run_is_deterministic() -> None:
    one, other = (run("vectorized", algorithm=Mime(SGDm()), max_rounds=4) for _ in range(2))
    assert torch.equal(one.fit_loop.state.x, other.fit_loop.state.x)


class Entangled(Ordinary):
    """Gradients of its parameters are products and views of its parameters."""

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer)
        self.left, self.right = (torch.nn.Parameter(0.1 * torch.randn(6, 6)) for _ in range(2))
        self.p, self.q = (torch.nn.Parameter(torch.randn(4)) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        penalty = (self.left @ self.right).sum() + self.p.square().sum() + self.p @ self.q
        loss = F.cross_entropy(self(x), y) + 0.1 * penalty
        self.log("train_loss", loss, batch_size=len(y))
        return loss


@pytest.mark.thorough
@pytest.mark.parametrize("chunk_size", [1, 64])
def test_traced_steps_with_coupled_gradients_match_sequential(chunk_size: int) -> None:
    make = partial(Entangled, partial(torch.optim.SGD, lr=0.02))
    options = {"algorithm": FedAvg(), "max_rounds": 3}
    traced = run("vectorized", make, chunk_size=chunk_size, **options)
    assert len(traces_of(traced)) > 0
    assert_agree(run("sequential", make, **options), traced)


@pytest.mark.parametrize("chunk_size", few([1, 64], [1]))
def test_resumed_traced_run_has_identical_bits(chunk_size: int, tmp_path: Any) -> None:
    options = {"algorithm": FedAvg(), "chunk_size": chunk_size, "precision": "32-true"}
    whole, half = (run("vectorized", datamodule=full_batches, max_rounds=rounds, **options) for rounds in (4, 2))
    half.save_checkpoint(tmp_path / "half.ckpt")
    rest = trainer(engine="vectorized", clients_per_round=4, max_rounds=4, **options)
    rest.fit(Ordinary(), full_batches(), ckpt_path=tmp_path / "half.ckpt")
    assert torch.equal(rest.fit_loop.state.x, whole.fit_loop.state.x)


class Normed(Ordinary):
    """Its backward pass has its own kernel, and a formula of many steps that could be differentiated again."""

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer)
        self.norm = torch.nn.GroupNorm(2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x)))


@pytest.mark.thorough
@pytest.mark.parametrize("chunk_size", [1, 64])
def test_backward_passes_are_not_traced_for_double_backward(chunk_size: int) -> None:
    traced = run("vectorized", Normed, chunk_size=chunk_size, algorithm=Scaffold())
    steps = [trace for trace in traces_of(traced)._traces.values() if trace is not None]
    operators = [{getattr(node.target, "__name__", "") for node in trace.graph.call.nodes} for trace in steps]
    assert steps
    assert all("aten.native_group_norm_backward.default" in found for found in operators)
    assert_agree(run("sequential", Normed, algorithm=Scaffold()), traced)


@pytest.mark.thorough
def test_steps_run_untraced_without_pytorch_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = run("vectorized")
    monkeypatch.setattr(traces, "_MISSING", "cannot import name 'tracing'")
    with pytest.warns(UserWarning, match=r"run untraced, which is slower: PyTorch .* no longer .*cannot import name"):
        untraced = run("vectorized")
    assert len(traced.fit_loop.clients.engine.step.traces) > 0 == len(untraced.fit_loop.clients.engine.step.traces)
    assert_agree(traced, untraced)
