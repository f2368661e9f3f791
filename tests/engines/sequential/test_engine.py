"""Changes by one client's steps never reach another: frozen parameters, momentum, buffers of split batches."""

import copy
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_fed import FederatedCallback, FederatedDataModule
from lightning_fed.algorithms import FedAvg, FedProx, Mime, Scaffold, SGDm
from lightning_fed.core.errors import FederatedError
from lightning_fed.engines.sequential.engine import SequentialEngine
from tests.helpers.engines import Ordinary, run, state_of
from tests.helpers.training import clients, data, fit, seeded


class Teacher(Ordinary):
    """A student, and a frozen teacher that follows it in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.head).requires_grad_(False)

    def follow(self) -> None:
        for old, new in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
            old.data = 0.9 * old.data + 0.1 * new.data

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.follow()
        return super().training_step(batch, batch_idx)


class Watched(Teacher):
    """Has a teacher that never changes."""

    def follow(self) -> None:
        assert all(not p.requires_grad for p in self.teacher.parameters())


class Pulled(Teacher):
    """Is pulled towards its teacher."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + (self(batch[0]) - F.linear(self.body(batch[0]), self.teacher.weight)).square().mean()


class PulledToBuffer(Pulled):
    """The same, with a teacher whose weight is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in list(self.teacher.named_parameters()):
            delattr(self.teacher, name)
            self.teacher.register_buffer(name, value.detach().clone())

    def follow(self) -> None:
        for name, old in self.teacher.named_buffers():
            old.copy_(0.9 * old + 0.1 * self.head.get_parameter(name).data)


@pytest.mark.thorough
@pytest.mark.parametrize("method", [FedAvg(), Mime(base=SGDm())], ids=repr)
def test_teacher_can_be_treated_as_buffers(method: Any) -> None:
    options = {"algorithm": method, "max_rounds": 2}
    found = run("auto", Pulled, as_buffers=["teacher.*"], **options)
    expected = run("sequential", PulledToBuffer, **options)
    assert_same(state_of(found), state_of(expected))
    for name, value in found.lightning_module.teacher.named_parameters():
        assert torch.equal(value, expected.lightning_module.teacher.get_buffer(name))


class Average:
    """Keeps an average of weights in an object that is not a module."""

    def __init__(self, module: nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in module.named_parameters()}

    def update(self, module: nn.Module) -> None:
        for name, p in module.named_parameters():
            self.shadow[name] = torch.lerp(self.shadow[name].to(p.dtype), p.detach(), 0.1)


class Averages(Ordinary):
    """Moves an average in every step, and collects its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.utils.spectral_norm(self.head)
        self.average, self.losses, self.last = Average(self), [], None
        with torch.inference_mode():  # validation leaves such tensors
            self.pictures = torch.zeros(200, 200)

    def on_before_zero_grad(self, *_: Any) -> None:
        self.average.update(self)
        self.losses.append(torch.zeros(()))
        self.last = self.head.weight_orig.detach().clone()


def test_weight_average_carried_across_clients_warns_once() -> None:
    with pytest.warns(UserWarning, match="Averages changes a tensor in its attribute") as told:
        run("sequential", Averages)
    assert [str(one.message).split("'")[1] for one in told if "attribute" in str(one.message)] == ["average"]


class Recurrent(Ordinary):
    """Starts each step from the state of the last one, as stateful recurrent modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.shown, self.draws = None, None, nn.Dropout(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, own = super().training_step(batch, batch_idx), self.draws(batch[0]).mean()
        state = own if self.state is None else 0.5 * (own + self.state[0])
        self.state, self.shown = (state.detach(), None), batch[0]
        return loss * (1 + state.square())


class Resets(Recurrent):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self.state = None
        return super().training_step(batch, batch_idx)


def test_state_carried_across_clients_warns_once() -> None:
    plain = state_of(run("sequential", Resets))
    with pytest.warns(
        UserWarning, match="Recurrent.training_step reads what earlier steps have left in 'state'"
    ) as told:
        run("sequential", Recurrent)
    assert len([one for one in told if "earlier steps" in str(one.message)]) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*earlier steps have left")
        assert_same(state_of(run("sequential", Resets)), plain)


class Keeps(Ordinary):
    """Reads state that earlier steps stored, and collects losses that no step reads."""

    flag = False

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.losses, self.rows = where, [], list[Any]()
        self.words, self.bank, self.labels = {"phase": "first"}, np.zeros(100), set[int]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss * (0.5 if getattr(self, f"by_{self.where}")(batch) else 1.0)

    def by_flag(self, batch: Any) -> bool:
        was, self.flag = self.flag, True
        if not was:  # layers with data-dependent initialization do this
            self.head.bias.data.copy_(batch[0].mean())
        return was

    def by_class(self, batch: Any) -> bool:
        was, Keeps.flag = Keeps.flag, True
        return was

    def by_rows(self, batch: Any) -> bool:
        self.rows = [*self.rows, batch[0]][-3:]
        return len(self.rows) > 1

    def by_words(self, batch: Any) -> bool:
        was, self.words["phase"] = self.words["phase"], "later"
        return was == "later"

    def by_bank(self, batch: Any) -> bool:
        was, self.bank[7] = self.bank[7], 1.0
        return bool(was)

    def by_labels(self, batch: Any) -> bool:
        was = 7 in self.labels
        self.labels.add(7)
        return was


PLACES = {name: name for name in ("flag", "rows", "words", "bank", "labels")} | {"class": "Keeps.flag"}


@pytest.mark.parametrize("where", PLACES)
def test_attribute_read_by_a_step_warns_and_is_kept(where: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(Keeps, "flag", False)
    with pytest.warns(UserWarning, match=rf"training_step reads what earlier steps have left in .*'{PLACES[where]}'"):
        found = run("sequential", partial(Keeps, where), max_rounds=1)
    monkeypatch.setattr(Keeps, "flag", False)
    monkeypatch.setattr(SequentialEngine, "_check_read", lambda *_: None)
    assert_same(state_of(found), state_of(run("sequential", partial(Keeps, where), max_rounds=1)))


class Draws(Keeps):
    """Takes a number from an iterator in each step."""

    def __init__(self) -> None:
        super().__init__("rows")
        self.numbers = (0.9**k for k in range(100))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * next(self.numbers)


class Sets(FederatedCallback):
    def on_client_start(self, trainer: Any, pl_module: Any, round: int, client_id: Any) -> None:
        pl_module.flag = False


@pytest.mark.filterwarnings("error:.*earlier steps have left")
def test_trial_step_is_skipped_for_iterators_and_hook_attributes() -> None:
    module = run("sequential", Draws, max_rounds=1).lightning_module
    assert next(module.numbers) == 0.9 ** len(module.losses)
    run("sequential", partial(Keeps, "flag"), callbacks=[Sets()], max_rounds=1)


class AverageOfModel(pl.Callback):
    """Averages the module's weights after every batch, as in ordinary training, and records its calls."""

    def __init__(self, kind: str) -> None:
        self.kind, self.seen, self.module = kind, [], None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        copied = copy.deepcopy(pl_module.head)
        self.average = copied if self.kind == "module" else {n: p.detach() for n, p in copied.named_parameters()}
        self.module = pl_module

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        average = self.average if isinstance(self.average, dict) else dict(self.average.named_parameters())
        for name, p in pl_module.head.named_parameters():
            average[name].lerp_(p, 0.1)
        self.seen.append(torch.zeros(()))


@pytest.mark.parametrize("kind", ["module", "tensors"])
def test_callback_average_carried_across_clients_warns_once(kind: str) -> None:
    with pytest.warns(UserWarning, match=r"AverageOfModel\.average changes .* on_train_epoch_end") as told:
        run("sequential", callbacks=[AverageOfModel(kind)])
    assert len([one for one in told if "AverageOfModel" in str(one.message)]) == 1


class Counts(Ordinary):
    """Counts labels in a dictionary, keeps a mean of its losses, and collects them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.mean, self.scale = {"batches": 0}, 1.0, 2.0
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen["batches"] += 1
        self.mean = 0.9 * self.mean + 0.1 * float(loss.detach())
        self.losses.append(self.mean)
        return loss / self.mean


def test_numbers_carried_across_clients_warn_once() -> None:
    with pytest.warns(UserWarning, match="Counts changes a number in its attribute") as told:
        run("sequential", Counts)
    assert [str(one.message).split("'")[1] for one in told if "a number" in str(one.message)] == ["seen", "mean"]


class OwnMetric(Metric):
    """The mean loss: a user's own metric."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.batches = 0

    def update(self, loss: Tensor) -> None:
        self.total += loss.detach()
        self.batches += 1

    def compute(self) -> Tensor:
        return self.total / self.batches


class WithOwnMetric(Ordinary):
    """Updates its metric in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = OwnMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.metric.update(loss)
        return loss


def test_own_metric_warns_of_a_number_that_is_no_state_alone() -> None:
    with pytest.warns(UserWarning, match="WithOwnMetric changes a number in its attribute") as told:
        run("sequential", WithOwnMetric)
    assert [str(one.message).split("'")[1] for one in told if "a number" in str(one.message)] == ["metric.batches"]


class Registers(Ordinary):
    """Registers a buffer in its first step."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.persistent = persistent

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not hasattr(self, "center"):
            self.register_buffer("center", batch[0].mean(), persistent=self.persistent)
        return F.cross_entropy(self(batch[0] - self.center), batch[1])


def test_persistent_buffer_registered_by_a_step_warns_once() -> None:
    with pytest.warns(UserWarning, match="Registers registers the buffer 'center' while a client trains") as told:
        run("sequential", partial(Registers, True))
    assert sum("registers the buffer" in str(warning.message) for warning in told) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*registers the buffer")
        run("sequential", partial(Registers, False))


class OwnGenerator(Ordinary):
    """Draws from its own generator, and keeps another one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn, self.kept = torch.Generator(), torch.Generator()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * torch.rand((), generator=self.drawn)


def test_module_generator_carried_across_clients_warns_once() -> None:
    with pytest.warns(UserWarning, match="OwnGenerator draws from the generator in its attribute") as told:
        run("sequential", OwnGenerator)
    assert [str(one.message).split("'")[1] for one in told if "generator" in str(one.message)] == ["drawn"]


class Clamps(Ordinary):
    """Clamps its weights in place before every batch and after every step."""

    def __init__(self) -> None:
        super().__init__(partial(torch.optim.SGD, lr=0.1, momentum=0.9))

    def clamp(self, p: nn.Parameter, bound: float) -> None:
        p.data.clamp_(-bound, bound)

    def clamp_all(self, bound: float) -> None:
        for p in self.parameters():
            self.clamp(p, bound)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.clamp_all(0.28)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.clamp_all(0.27)


class Assigns(Clamps):
    """The same, by assignment to ``.data``."""

    def clamp(self, p: nn.Parameter, bound: float) -> None:
        p.data = p.data.clamp(-bound, bound)


@pytest.mark.thorough
@pytest.mark.parametrize("method", [Scaffold(), FedProx(0.1), Mime(base=SGDm())], ids=repr)
def test_parameters_can_be_assigned_through_data(method: Any) -> None:
    make = partial(run, "sequential", algorithm=method, max_rounds=2)
    if isinstance(method, Mime):
        make = partial(make, local_optimizer_state="reset")
    assert_same(state_of(make(partial(tuned, Assigns, method))), state_of(make(partial(tuned, Clamps, method))))


def tuned(make: type[Clamps], method: Any) -> Clamps:
    """Return the module, with plain SGD if the method has its own optimizer."""
    module = make()
    if isinstance(method, Mime):
        module.make = partial(torch.optim.SGD, lr=0.1)
    return module


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert {name.removeprefix("buffer.") for name in a} == {name.removeprefix("buffer.") for name in b}
    assert all(torch.equal(a[name], b[name]) for name in a)


class Replaces(Ordinary):
    """Replaces a weight by a clamped new parameter, after a batch or after the round."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        setattr(self, hook, self.replace)

    def replace(self, *_: Any) -> None:
        self.head.weight = nn.Parameter(self.head.weight.clamp(min=0))


@pytest.mark.parametrize(("hook", "engine"), [("on_train_batch_end", "auto"), ("on_train_epoch_end", "vectorized")])
def test_replacing_a_trained_parameter_is_rejected(hook: str, engine: str) -> None:
    with pytest.raises(FederatedError, match=r"Replaces has replaced the parameter 'head.weight'.*copy_"):
        run(engine, partial(Replaces, hook))


class Swaps(Ordinary):
    """Uses another optimizer from the second round on, as staged fine-tuning does."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers = [torch.optim.SGD(self.parameters(), lr=0.0)]


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_replacing_the_local_optimizer_is_rejected(engine: str) -> None:
    with pytest.raises(FederatedError, match=r"has replaced the local optimizer \(trainer.optimizers\).*param_groups"):
        run(engine, Swaps)


class Accumulates(Ordinary):
    """Never clears its gradients, which add up over a client's steps."""

    def optimizer_zero_grad(self, *_: Any) -> None:
        """Clear nothing."""


def test_client_starts_without_the_gradients_of_another() -> None:
    options: dict[str, Any] = {"clients_per_round": 1.0, "max_rounds": 1, "precision": "64-true"}
    sizes = (8, 12)
    together = fit(seeded(Accumulates), data(sizes, shuffle=False), **options)
    alone = [
        fit(seeded(Accumulates), FederatedDataModule(clients=[one], batch_size=4, shuffle=False), **options)
        for one in clients(sizes)
    ]
    torch.testing.assert_close(together, (8 * alone[0] + 12 * alone[1]) / 20)


class StepsItself(Ordinary):
    """Steps the optimizer in its training step, and returns nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        super().training_step(batch, batch_idx).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_step_that_trains_without_returning_a_loss_is_rejected() -> None:
    with pytest.raises(
        FederatedError, match="StepsItself.training_step returned None.*stepped the optimizer itself"
    ) as said:
        run("sequential", StepsItself)

    class Manual(StepsItself):
        automatic_optimization = False

    assert "set self.automatic_optimization = False" in str(said.value)
    run("sequential", Manual)


def test_unchanged_frozen_parameter_is_allowed() -> None:
    module = Watched()
    with torch.no_grad():
        module.teacher.weight[0] = float("nan")
    run("sequential", lambda: module)


class Late(Teacher):
    """Creates its teacher in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = None

    def follow(self) -> None:
        if self.teacher is None:
            self.teacher = copy.deepcopy(self.head).requires_grad_(False)


def test_frozen_parameter_can_be_created_in_a_step() -> None:
    assert run("sequential", Late).lightning_module.teacher is not None


def test_buffers_of_split_batches_are_weighted_by_examples() -> None:
    written: dict[str, Tensor] = {}
    before = {"mean": torch.zeros(1), "same": torch.ones(1)}
    engine: Any = SimpleNamespace(
        buffers=SimpleNamespace(read=lambda: {**before, "mean": torch.tensor([4.0])}, write=written.update),
        split=SimpleNamespace(gather=lambda mine: [mine, (1, {"mean": torch.tensor([8.0])})]),
        epoch_loop=SimpleNamespace(own_examples=3),
    )
    merged = SequentialEngine._merged_buffers(engine, before)
    assert {name: value.item() for name, value in merged.items()} == {"mean": 5.0, "same": 1.0}
    assert written == merged


class Breaks(Ordinary):
    """Fails in the step of a client whose features are huge, from the given batch on."""

    at = 0

    def __init__(self) -> None:
        super().__init__(partial(torch.optim.SGD, lr=0.1, momentum=0.9))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if float(batch[0].abs().max()) > 100 and batch_idx >= self.at:
            raise ValueError("too large")
        return super().training_step(batch, batch_idx)


class BreaksLater(Breaks):
    at = 2


def test_momentum_of_a_failed_client_does_not_leak() -> None:
    def end(make: type[Breaks]) -> dict[str, Any]:
        rows = clients((8, 13, 7))
        rows[1].tensors[0].mul_(1000)
        datamodule = partial(FederatedDataModule, clients=rows, batch_size=4)
        return state_of(run("sequential", make, datamodule, clients_per_round=3, on_client_error="drop"))

    assert torch.equal(end(Breaks)["x"], end(BreaksLater)["x"])
