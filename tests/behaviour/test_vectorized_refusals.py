"""Steps that cannot run for several clients at once are refused by name before the first round, without a trace."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import (
    GradientAccumulationScheduler,
)
from pytorch_lightning.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics import CatMetric, MeanMetric

from lightning_fed import FederatedDataModule, FederatedError
from lightning_fed.algorithms import Mime, ServerOnly
from lightning_fed.engines.sequential.engine import SequentialEngine
from tests.helpers.engines import Ordinary, assert_agree, full_batches, refused, run
from tests.helpers.selection import few
from tests.helpers.training import CLASSES, FEATURES, classification, data, parameters, trainer

WAY_OUT = "engine='sequential'"


class WithBatchNorm(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh())


class Step(Ordinary):
    """Calls a function in the training step."""

    def __init__(self, then: Callable[..., Any]) -> None:
        super().__init__()
        self.then = then
        self.calls, self.seen, self.notes = 0, [], {}
        self.metric, self.unreduced = MeanMetric(), CatMetric()
        self.register_buffer("counter", torch.zeros(()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        return self.then(self, loss, batch)


def count(module: Any, loss: Tensor, batch: Any) -> Tensor:
    module.calls += 1
    return loss


def append(module: Any, loss: Tensor, batch: Any) -> Tensor:
    module.seen.append(1)
    return loss


def note(module: Any, loss: Tensor, batch: Any) -> Tensor:
    module.notes["last"] = 0.0
    return loss


def write_buffer(module: Any, loss: Tensor, batch: Any) -> Tensor:
    module.counter += 1
    return loss


def update_metric(module: Any, loss: Tensor, batch: Any) -> Tensor:
    module.metric.update(loss.detach())
    return loss


def count_metric(module: Any, loss: Tensor, batch: Any) -> Tensor:
    module.unreduced.update(torch.ones(()))
    return loss


def log_metric(module: Any, loss: Tensor, batch: Any) -> Tensor:
    module.log("metric", module.metric)
    return loss


def log_largest(module: Any, loss: Tensor, batch: Any) -> Tensor:
    module.log("largest", loss, reduce_fx="max")
    return loss


def log_twice(module: Any, loss: Tensor, batch: Any) -> Tensor:
    module.log("twice", loss)
    module.log("twice", 3 * loss)
    return loss


def clamp_bias(module: Any, loss: Tensor, batch: Any) -> Tensor:
    with torch.no_grad():
        module.head.bias.clamp_(-100.0, 100.0)  # changes no value
    return loss


def halve_bias(module: Any, loss: Tensor, batch: Any) -> Tensor:
    module.head.bias.data.mul_(0.5)  # PyTorch does not detect this
    return loss


def by_length(module: Any, loss: Tensor, batch: Any) -> Tensor:
    return loss / module.trainer.num_training_batches


def weigh_last(module: Any, loss: Tensor, batch: Any) -> Tensor:
    return 5 * loss if module.trainer.is_last_batch else loss


def by_position(module: Any, loss: Tensor, batch: Any) -> Tensor:
    return loss * (1 + module.trainer.fit_loop.epoch_loop.batch_idx)


def by_progress(module: Any, loss: Tensor, batch: Any) -> Tensor:
    return loss * module.trainer.fit_loop.epoch_loop.batch_progress.total.ready


def by_moments(module: Any, loss: Tensor, batch: Any) -> Tensor:
    state = module.optimizers().state
    return loss * (1 + sum(float(state[p]["momentum_buffer"].norm()) for p in module.parameters() if p in state))


def log_gradient(module: Any, loss: Tensor, batch: Any) -> Tensor:
    module.log("gradient", sum((p.grad.norm() for p in module.parameters() if p.grad is not None), torch.zeros(())))
    return loss


def log_vector(module: Any, loss: Tensor, batch: Any) -> Tensor:
    module.log("vector", torch.stack([loss, loss]))
    return loss


def log_dictionary(module: Any, loss: Tensor, batch: Any) -> Tensor:
    module.log("parts", {"loss": loss})
    return loss


def log_text(module: Any, loss: Tensor, batch: Any) -> Tensor:
    module.log("text", "0.5")
    return loss


STEPS: dict[str, tuple[Callable[..., Any], str]] = {
    "item": (lambda module, loss, batch: loss * 1.0 if loss.item() > 0 else loss, r"at once \(.*item"),
    "a branch on a tensor": (lambda module, loss, batch: loss if loss > 0 else -loss, "data-dependent"),
    "a mask as an index": (
        lambda module, loss, batch: loss + batch[0][batch[0] > 0].sum() * 0,
        "cannot be run for several clients at once",
    ),
    "nonzero": (
        lambda module, loss, batch: loss + batch[1].nonzero().float().sum() * 0,
        "cannot be run for several clients at once",
    ),
    "NumPy": (lambda module, loss, batch: loss * float(loss.detach().numpy() > 0), "at once"),
    "a metric object that looks at no value": (count_metric, "updates the metric 'unreduced'.*functional metric"),
    "a logged metric object": (log_metric, r"self.log\('metric', ...\) of a MeanMetric"),
    "another reduction": (log_largest, r"self.log\('largest', ...\).*reduce_fx='max'"),
    "a logged vector": (log_vector, r"self.log\('vector', ...\)"),
    "a name logged twice": (log_twice, r"self.log\('twice', ...\) twice in training_step"),
    "a parameter in place": (clamp_bias, "changes the parameter 'head.bias' in place"),
    "a parameter's data": (halve_bias, "changes the parameter 'head.bias' in place"),
    "the number of batches": (by_length, "no value for trainer.num_training_batches in training_step"),
    "the last batch": (weigh_last, "no value for trainer.is_last_batch in training_step"),
    "the position": (by_position, "no value for batch_idx, total_batch_idx and batch_progress"),
    "the progress": (by_progress, "no value for batch_idx, total_batch_idx and batch_progress"),
    "the optimizer's state": (by_moments, "no value for the optimizer's state"),
    "the last gradient": (
        log_gradient,
        r"another value to self.log\('gradient', ...\).*reads the gradients of the step",
    ),
    "a logged dictionary": (log_dictionary, r"self.log\('parts', ...\) of a dict in"),
    "a logged text": (log_text, r"self.log\('text', ...\) of a str in"),
    "no loss": (lambda module, loss, batch: None, "NoneType instead of a loss"),
    "a number": (lambda module, loss, batch: 1.0, "float instead of a loss"),
    "a dictionary without a loss": (lambda module, loss, batch: {"x": loss}, "NoneType instead of a loss"),
    "a counter": (count, "changes the attribute 'calls'"),
    "a list that grows": (append, "changes the attribute 'seen'"),
    "a dictionary that grows": (note, "changes the attribute 'notes'"),
    "a buffer that counts": (write_buffer, "counter|in-?place"),
    "Python's randomness": (lambda module, loss, batch: loss * random.random(), "Python's or NumPy's generator"),
    "NumPy's randomness": (lambda module, loss, batch: loss * np.random.rand(), "Python's or NumPy's generator"),
}


@pytest.mark.parametrize("name", STEPS)
def test_training_step_that_cannot_be_vectorized_is_rejected(name: str) -> None:
    step, reason = STEPS[name]
    refused(partial(Step, step), reason)


def test_metric_object_in_training_step_is_rejected() -> None:
    refused(partial(Step, update_metric), "updates the metric 'metric'")


def test_batch_norm_in_train_mode_is_rejected() -> None:
    refused(WithBatchNorm, r"layer .body\.1. \(BatchNorm1d\) moves running statistics.*GroupNorm")


def test_rejection_restores_python_and_numpy_random_state() -> None:
    random.seed(1)
    np.random.seed(1)
    expected = random.Random(1).random(), np.random.RandomState(1).rand()
    refused(partial(Step, STEPS["Python's randomness"][0]), "Python's")
    assert (random.random(), np.random.rand()) == expected


class WithHook(Ordinary):
    """Has a hook on a parameter from round ``first`` on."""

    def __init__(self, register: str, first: int = 0) -> None:
        super().__init__()
        self.register, self.first = register, first
        self._hook_from(0)

    def on_train_epoch_start(self) -> None:
        self._hook_from(self.current_epoch)

    def _hook_from(self, round: int) -> None:
        if round == self.first and not self.head.weight._backward_hooks:
            getattr(self.head.weight, self.register)(lambda _: None)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_parameter_hooks_are_rejected(register: str) -> None:
    refused(partial(WithHook, register), "parameter 'head.weight' has a hook")
    t = trainer(engine="vectorized", max_rounds=3)
    with pytest.raises(FederatedError, match=r"parameter 'head.weight' has a hook"):
        t.fit(WithHook(register, first=1), data())
    assert t.fit_loop.round == 1


class FromRound(Ordinary):
    """Reads the number of batches from the second round on."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        return loss / self.trainer.num_training_batches if self.current_epoch else loss


def test_per_client_trainer_values_are_rejected_in_later_rounds() -> None:
    t = trainer(engine="vectorized", max_rounds=3)
    with pytest.raises(FederatedError, match=r"no value for trainer.num_training_batches in training_step"):
        t.fit(FromRound(), data())
    assert t.fit_loop.round == 1
    assert t.num_training_batches == 1  # it has a value outside the clients' work


class WithMaxNorm(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, CLASSES, max_norm=0.5)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]) + self.table(batch[1]), batch[1])


def test_auto_runs_rejected_modules_with_sequential_engine() -> None:
    steps = [partial(Step, step) for step in (by_length, by_moments, log_twice)]
    for make in (WithMaxNorm, *steps, partial(WithHook, "register_hook")):
        ends = []
        for engine in ("sequential", "auto"):
            t = trainer(engine=engine, max_rounds=2)
            torch.manual_seed(1)
            t.fit(make(), data())
            ends.append(t.fit_loop.state.x)
            assert isinstance(t.fit_loop.clients.engine, SequentialEngine)
        assert torch.equal(*ends)


@pytest.mark.parametrize("sizes", [(8, 8, 8), (13, 8, 5)])
def test_methods_without_local_work_also_run_a_trial(sizes: tuple[int, ...]) -> None:
    class Recurrent(Ordinary):
        def __init__(self) -> None:
            super().__init__()
            self.memory = nn.LSTM(FEATURES, FEATURES, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.memory(x[:, None])[0][:, 0])

    alone = {"algorithm": ServerOnly(), "local_epochs": None, "clients_per_round": 3}
    refused(Recurrent, r"runs its layer 'memory' \(LSTM\) for one client at a time only", data(sizes), **alone)
    t = trainer(engine="auto", max_rounds=1, **alone)
    t.fit(Recurrent(), data(sizes))
    assert isinstance(t.fit_loop.clients.engine, SequentialEngine)


class Remembers(Ordinary):
    """Reads its features one after the other, with a recurrent layer or a loop of cells."""

    def __init__(self, kind: str, is_frozen: bool, own_state: bool) -> None:
        super().__init__()
        self.memory, self.out, self.own_state = getattr(nn, kind)(1, 4), nn.Linear(4, CLASSES), own_state
        self.memory.requires_grad_(not is_frozen)

    def forward(self, x: Tensor) -> Tensor:
        steps = x.t()[:, :, None]
        state: Any = x.new_zeros(1, len(x), 4) if self.own_state else None
        if isinstance(self.memory, nn.RNNBase):
            pair = (state, state) if isinstance(self.memory, nn.LSTM) and self.own_state else state
            return self.out(self.memory(steps, pair)[0][-1])
        state = None if state is None else state[0]
        pair = (state, state) if isinstance(self.memory, nn.LSTMCell) and self.own_state else state
        for step in steps:
            pair = self.memory(step, pair)
        return self.out(pair[0] if isinstance(self.memory, nn.LSTMCell) else pair)


@pytest.mark.parametrize("is_frozen", few([False, True], [True]), ids=["free", "frozen"])
@pytest.mark.parametrize("kind", few(["GRU", "LSTM", "RNN"], ["GRU"]))
def test_error_for_recurrent_layers_suggests_a_fix(kind: str, is_frozen: bool) -> None:
    reason = rf"runs its layer 'memory' \({kind}\) for one client at a time only; a loop of nn.{kind}Cell can"
    if is_frozen:
        reason = rf"its frozen layer 'memory' \({kind}\) starts from a state that all clients share; pass it a first"
    if not (kind == "LSTM" and is_frozen):  # in float32, a frozen LSTM has a kernel for several clients
        refused(partial(Remembers, kind, is_frozen, False), reason)
    changed = partial(Remembers, kind if is_frozen else f"{kind}Cell", is_frozen, True)  # as the refusal suggests
    assert_agree(*(run(engine, changed, full_batches) for engine in ("vectorized", "sequential")))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["GRUCell", "LSTMCell", "RNNCell"])
def test_implicit_initial_state_of_frozen_cell_is_rejected(kind: str) -> None:
    refused(partial(Remembers, kind, True, False), "the first state of a recurrent cell: make it from the input")
    changed = partial(Remembers, kind, True, True)
    assert_agree(*(run(engine, changed, full_batches) for engine in ("vectorized", "sequential")))


def test_accumulation_scheduled_for_later_rounds_is_rejected() -> None:
    refused(Ordinary, "GradientAccumulationScheduler", callbacks=[GradientAccumulationScheduler({0: 1, 2: 2})])
    chosen = trainer(engine="auto", max_rounds=3, callbacks=[GradientAccumulationScheduler({0: 1, 2: 2})])
    chosen.fit(Ordinary(), data())
    assert isinstance(chosen.fit_loop.clients.engine, SequentialEngine)
    never = GradientAccumulationScheduler({0: 1, 2: 1})
    trainer(engine="vectorized", max_rounds=1, callbacks=[never]).fit(Ordinary(), data())


def test_kept_local_optimizer_state_is_rejected() -> None:
    refused(Ordinary, "local_optimizer_state='keep'", local_optimizer_state="keep")


class WithBuffer(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))


def test_local_buffers_are_rejected_for_module_with_buffers() -> None:
    refused(WithBuffer, "clients keep their own buffers, such as 'scale'", buffers="local")


@pytest.mark.thorough
def test_local_buffers_are_allowed_for_module_without_buffers() -> None:
    trainer(engine="vectorized", buffers="local", max_rounds=1).fit(Ordinary(), data())


class Scaled(MixedPrecision):
    """Half precision with a gradient scaler on a CPU. Lightning itself uses one on a GPU only."""

    def __init__(self) -> None:
        super().__init__("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))


def test_gradient_scaler_is_rejected() -> None:
    refused(Ordinary, "precision='16-mixed' scales the loss", plugins=Scaled())


class Named(Dataset[Any]):
    """Examples with a name."""

    def __init__(self, n: int) -> None:
        self.inner = classification(n, 3)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return *self.inner[index], f"example {index}"


def test_strings_in_a_batch_are_rejected() -> None:
    refused(Ordinary, "tensors only, found a str", FederatedDataModule([Named(9), Named(6), Named(7)], batch_size=4))


class Surprise(Ordinary):
    """Reads its loss on batches of three examples only, and so not on the first batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if len(batch[0]) == 3:
            return loss if loss.item() > 0 else -loss
        return loss


@pytest.mark.parametrize("algorithm", [None, Mime()], ids=repr)
def test_error_for_later_batch_suggests_a_workaround(algorithm: Any) -> None:
    model = Surprise()
    before = parameters(model).clone()
    run = trainer(engine="vectorized", clients_per_round=2, algorithm=algorithm)
    with pytest.raises(FederatedError, match=rf"cannot run clients of Surprise in round 0.*item.*{WAY_OUT}"):
        run.fit(model, data(sizes=(11, 11)))
    assert torch.equal(parameters(model), before)
    assert "log" not in vars(model)


class Counts(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.names = 0, [7], {"a": 1}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        self.seen.append(batch_idx)
        self.names["b"] = self.calls
        self.late = True
        return super().training_step(batch, batch_idx)


def test_rejected_module_keeps_its_attributes() -> None:
    model = Counts()
    seen, names = model.seen, model.names
    refused(lambda: model, "changes the attribute")
    assert model.calls == 0
    assert model.seen is seen
    assert model.names is names
    assert (seen, names) == ([7], {"a": 1})
    assert not hasattr(model, "late")


class AugmentsOnTransfer(Ordinary):
    """Augments in a transfer hook by a layer that stores what it drew, as in kornia's example."""

    drawn: Tensor | None = None

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            self.drawn = torch.rand(len(batch[0]), 1)
            return [batch[0] + self.drawn, batch[1]]
        return batch


def test_transfer_hook_that_changes_an_attribute_is_rejected() -> None:
    refused(AugmentsOnTransfer, "a hook for their transfer changes the attribute 'drawn'")


def test_auto_runs_such_transfer_hooks_with_sequential_engine() -> None:
    t = trainer(engine="auto", max_rounds=2)
    t.fit(AugmentsOnTransfer(), data())
    assert isinstance(t.fit_loop.clients.engine, SequentialEngine)
