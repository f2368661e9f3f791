"""Side effects of a step: "vectorized" rejects them by name, and "auto" falls back to the sequential engine."""

import argparse
import random
import re
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric, MetricCollection

from lightning_fed import FederatedError
from lightning_fed.algorithms import FedAvg, Mime, SGDm
from lightning_fed.engines.changes import Snapshot, parts_of
from lightning_fed.engines.vectorized.trial import StepState
from tests.helpers.engines import Ordinary, assert_agree, assert_close, refused, run, state_of
from tests.helpers.selection import few
from tests.helpers.training import CLASSES, data, trainer

OTHERS = {"count": 0, "calls": 0}


class Meter:
    """A hand-written running mean."""

    def __init__(self) -> None:
        self.mean, self.count = 0.0, 0


class Layer(nn.Module):
    """A submodule with a buffer, an attribute, and an untrained parameter."""

    seen_by_all: list[int] = []

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.number, self.average = 0, torch.zeros(2)


class Leaves(Ordinary):
    """Calls a function with side effects in every step."""

    kinds = 0

    def __init__(self, then: Callable[..., Any], first: int = 0) -> None:
        super().__init__(partial(torch.optim.SGD, lr=0.1))
        self.then, self.first = then, first
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("hits", torch.zeros((), dtype=torch.int64))
        self.register_buffer("odd", torch.full((2,), float("nan")))
        self.layer, self.hidden = Layer(), [Layer(), Layer()]
        self.recent, self.losses, self.notes, self.meter = deque(maxlen=3), [], {"all": {"n": [0]}}, Meter()
        self.ema, self.metrics = torch.zeros(3), nn.ModuleDict({"mean": MeanMetric()})
        self.collection, self.listed = MetricCollection({"a": MeanMetric()}), [MeanMetric()]
        self.python, self.numpy = random.Random(0), np.random.default_rng(0)
        self.legacy, self.torch = np.random.RandomState(0), torch.Generator().manual_seed(0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch[0])
        loss = F.cross_entropy(out, batch[1])
        self.log("train_loss", loss)
        if self.current_epoch >= self.first:
            self.then(self, loss)
        return loss


def setting(path: str, value: Callable[[Any], Any]) -> Callable[..., None]:
    """Return a function that sets an attribute of a module to a function of its old value."""
    *owners, name = path.split(".")

    def then(module: Any, loss: Tensor) -> None:
        owner = module
        for part in owners:
            owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
        setattr(owner, name, value(getattr(owner, name, None)))

    return then


def calling(path: str, *arguments: Any) -> Callable[..., None]:
    """Return a function that calls a method of a module."""

    def then(module: Any, loss: Tensor) -> None:
        owner = module
        for part in path.split("."):
            owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
        with torch.no_grad():
            owner(*arguments)

    return then


def assign_loss(module: Any, loss: Tensor) -> None:
    module.seen = module.seen + loss.detach()


def add_loss(module: Any, loss: Tensor) -> None:
    module.seen.add_(loss.detach())


def register(module: Any, loss: Tensor) -> None:
    module.register_buffer("late", torch.zeros(1))


def drop(module: Any, loss: Tensor) -> None:
    module._buffers.pop("odd", None)


def shadow(module: Any, loss: Tensor) -> None:
    module.layer.frozen.data.mul_(0.9)


def write_notes(module: Any, loss: Tensor) -> None:
    module.notes["all"]["n"][0] += 1


def average(module: Any, loss: Tensor) -> None:
    module.meter.count += 1
    module.meter.mean += (1.0 - module.meter.mean) / module.meter.count


def class_count(module: Any, loss: Tensor) -> None:
    type(module).kinds += 1


def class_list(module: Any, loss: Tensor) -> None:
    Layer.seen_by_all.append(1)


def keep_loss(module: Any, loss: Tensor) -> None:
    module.last = loss.detach()


def add_layer(module: Any, loss: Tensor) -> None:
    module.added = nn.Identity()


def hook(module: Any, loss: Tensor) -> None:
    module.head.register_forward_hook(lambda *_: None)


def grow(value: Any) -> Any:
    return value + 1


LEFT: dict[str, tuple[Callable[..., None], str]] = {
    "an assigned buffer": (setting("seen", grow), "changes the buffer 'seen'"),
    "a buffer that is assigned its value": (setting("seen", lambda v: v * 1), "changes the buffer 'seen'"),
    "a buffer made of the loss": (assign_loss, "changes the buffer 'seen'"),
    "a buffer to which the loss is added": (add_loss, "changes the buffer 'seen'"),
    "an integer buffer": (setting("hits", grow), "changes the buffer 'hits'"),
    "an integer buffer in place": (calling("hits.add_", 1), "changes the buffer 'hits'"),
    "a buffer in place that stays": (calling("hits.add_", 0), "changes the buffer 'hits'"),
    "a buffer's data": (lambda module, loss: module.seen.data.add_(1), "changes the buffer 'seen'"),
    "a submodule's buffer": (setting("layer.calls", grow), "changes the buffer 'layer.calls'"),
    "a buffer that is not saved": (setting("layer.scratch", grow), "changes the buffer 'layer.scratch'"),
    "a hidden module's buffer": (setting("hidden.1.calls", grow), "changes the buffer 'hidden.1.calls'"),
    "a hidden module's attribute": (setting("hidden.0.number", grow), "changes the attribute 'hidden.0.number'"),
    "a registered buffer": (register, "changes the buffer 'late'"),
    "a removed buffer": (drop, "changes the buffer 'odd'"),
    "a frozen parameter": (calling("layer.frozen.add_", 1.0), "changes the parameter 'layer.frozen'"),
    "a frozen parameter's data": (shadow, "changes the parameter 'layer.frozen'"),
    "a replaced parameter": (
        setting("layer.frozen", lambda v: nn.Parameter(v + 1, requires_grad=False)),
        "changes the parameter 'layer.frozen'",
    ),
    "an assigned tensor": (setting("ema", grow), "changes the attribute 'ema'"),
    "a tensor in place": (calling("ema.mul_", 0.9), "changes the attribute 'ema'"),
    "a tensor's data": (
        lambda module, loss: module.layer.average.data.add_(1),
        "changes the attribute 'layer.average'",
    ),
    "a counter of a submodule": (setting("layer.number", grow), "changes the attribute 'layer.number'"),
    "a deque that moves": (calling("recent.append", 1), "changes the attribute 'recent'"),
    "a list that grows": (lambda module, loss: module.losses.append(loss.detach()), "changes the attribute 'losses'"),
    "a list in a dictionary in a dictionary": (write_notes, "changes the attribute 'notes'"),
    "a running mean": (average, "changes the attribute 'meter'"),
    "the last loss": (keep_loss, "changes the attribute 'last'"),
    "a counter of the class": (class_count, "changes the attribute 'Leaves.kinds'"),
    "a list of a submodule's class": (class_list, "changes the attribute 'Layer.seen_by_all'"),
    "a metric in a dictionary": (calling("metrics.mean.update", 1.0), "updates the metric 'metrics.mean'"),
    "a collection of metrics": (calling("collection.update", 1.0), "updates the metric 'collection.a'"),
    "a metric in a list": (calling("listed.0.update", 1.0), "updates the metric 'listed.0'"),
    "a metric's state": (calling("metrics.mean.weight.add_", 1.0), "updates the metric 'metrics.mean'"),
    "a generator of Python's": (calling("python.random"), "changes the attribute 'python'"),
    "a generator of NumPy's": (calling("numpy.random"), "changes the attribute 'numpy'"),
    "an old generator of NumPy's": (calling("legacy.rand"), "changes the attribute 'legacy'"),
    "a generator of PyTorch's": (
        lambda module, loss: torch.rand(1, generator=module.torch),
        "changes the attribute 'torch'|cannot be run for several clients at once",
    ),
    "a layer": (add_layer, "changes the attribute '_modules'"),
    "a hook": (hook, "changes the attribute 'head._forward_hooks'"),
}
IN_DEFAULT = ["an assigned buffer", "a hidden module's buffer", "a deque that moves", "a list of a submodule's class"]


LATER = [
    *("an assigned buffer", "an integer buffer in place", "a frozen parameter", "a metric in a list"),
    *("a deque that moves", "a submodule's buffer", "a hidden module's buffer"),
]


def everything(module: nn.Module) -> Any:
    """Return the module's whole state as plain values."""
    tensors = {name: value.tolist() for _, part in parts_of(module) for name, value in part._buffers.items()}
    m: Any = module
    held = (list(m.recent), len(m.losses), m.notes["all"]["n"][0], vars(m.meter), m.ema.tolist(), m.kinds)
    layers = [(p.number, p.average.tolist(), p.frozen.tolist(), len(p.seen_by_all)) for p in (m.layer, *m.hidden)]
    drawn = (m.python.getstate(), str(m.numpy.bit_generator.state), m.legacy.rand(), m.torch.get_state().sum().item())
    updates = [p._update_count for _, p in parts_of(module) if hasattr(p, "_update_count")]
    return repr((tensors, held, layers, drawn, updates, sorted(vars(module)), len(m.head._forward_hooks)))


@pytest.mark.parametrize("name", few(LEFT, IN_DEFAULT))
def test_side_effects_of_a_step_are_rejected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leaves, "kinds", 0)
    monkeypatch.setattr(Layer, "seen_by_all", [])
    then, what = LEFT[name]
    module, untouched = Leaves(then), Leaves(then)
    with pytest.raises(FederatedError, match=f"cannot take Leaves.training_step: .*({what}).*engine='sequential'"):
        trainer(engine="vectorized").fit(module, data())
    if name != "a removed buffer":  # everything() would list it in another place
        assert everything(module) == everything(untouched)


FROZEN = [name for name in LEFT if "layer.frozen" in LEFT[name][1]]
RUNS = [name for name in LEFT if name not in ("a removed buffer", *FROZEN)]


@pytest.mark.parametrize("engine", ["sequential", "auto"])
@pytest.mark.parametrize("name", few(FROZEN, FROZEN[-1:]))
def test_step_that_changes_a_frozen_parameter_is_rejected(name: str, engine: str) -> None:
    with pytest.raises(
        FederatedError, match=r"Leaves changes the parameter 'layer.frozen' .* though the optimizer does not train it"
    ):
        run(engine, partial(Leaves, LEFT[name][0]), max_rounds=2)


@pytest.mark.parametrize("name", few(RUNS, IN_DEFAULT[:2]))
def test_auto_falls_back_to_the_sequential_engine(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    then, what = LEFT[name]
    runs: list[Any] = []
    left: list[Any] = []
    for engine in ("sequential", "auto"):
        monkeypatch.setattr(Leaves, "kinds", 0)
        monkeypatch.setattr(Layer, "seen_by_all", [])
        with caplog.at_level("INFO"):
            runs.append(run(engine, partial(Leaves, then), max_rounds=2))
        left.append(everything(runs[-1].lightning_module))
    assert left[0] == left[1]
    (told,) = [r.getMessage() for r in caplog.records if "takes 'sequential'" in r.getMessage()]
    assert re.search(what, told)
    assert_agree(*runs)


def test_assigned_buffer_is_saved_in_the_checkpoint(tmp_path: Any) -> None:
    found = []
    for engine in ("sequential", "auto"):
        run(engine, partial(Leaves, setting("seen", grow))).save_checkpoint(tmp_path / "end.ckpt")
        found.append(torch.load(tmp_path / "end.ckpt", weights_only=False)["state_dict"]["seen"])
    assert found[0] == found[1] > 0


@pytest.mark.parametrize("chunk_size", few([1, 64], [1]))
@pytest.mark.parametrize("name", few(LATER, LATER[:1]))
def test_side_effects_that_begin_after_the_first_step_raise(name: str, chunk_size: int) -> None:
    then, what = LEFT[name]
    named = what.partition(" ")[2]
    for algorithm in (FedAvg(), Mime(SGDm())):
        with pytest.raises(FederatedError, match=f"{named}|is changed by an in-place operation"):
            run("vectorized", partial(Leaves, then, first=1), algorithm=algorithm, chunk_size=chunk_size)


def count_elsewhere(module: Any, loss: Tensor) -> None:
    OTHERS["count"] += 1
    module.log("calls", torch.tensor(float(OTHERS["count"])))


class Drifting(Ordinary):
    """Its loss depends on the number of calls, which none of its attributes show."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        OTHERS["calls"] += 1
        return F.cross_entropy(self(batch[0]), batch[1]) * (1 + 0.1 * OTHERS["calls"])


def test_step_that_is_not_repeatable_is_rejected() -> None:
    with pytest.raises(FederatedError, match="gives another loss when it is called again on the same batch"):
        run("vectorized", Drifting)
    with pytest.raises(FederatedError, match=r"another value to self.log\('calls', ...\) when it is called again"):
        run("vectorized", partial(Leaves, count_elsewhere))


class Pulled(Ordinary):
    """Is pulled towards its weights at the start of a round, but keeps only views of them."""

    def __init__(self) -> None:
        super().__init__(partial(torch.optim.SGD, lr=0.1))
        self.start = [torch.zeros_like(p) for p in self.parameters()]

    def on_train_epoch_start(self) -> None:
        self.start = [p.detach() for p in self.parameters()]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        away = sum((p - start.flip(0)).pow(2).sum() for p, start in zip(self.parameters(), self.start, strict=True))
        return F.cross_entropy(self(batch[0]), batch[1]) + 0.1 * away


def test_view_of_parameters_made_by_a_hook_is_rejected() -> None:
    """In a plain loop it follows a client's weights. With several clients at once, it holds only the server's."""
    with pytest.raises(FederatedError, match=r"its attribute 'start' is in the memory of the parameters.* clone\(\)"):
        run("vectorized", Pulled)
    assert torch.equal(state_of(run("auto", Pulled))["x"], state_of(run("sequential", Pulled))["x"])


class Decays(Ordinary):
    """Penalizes weights that it keeps outside its layers. The penalty is too small for a comparison of gradients."""

    def __init__(self, strength: float = 1e-4) -> None:
        super().__init__(partial(torch.optim.SGD, lr=0.1))
        self.weights, self.strength = [p for p in self.parameters() if p.ndim > 1], strength

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1]) + self.strength * sum(w.pow(2).sum() for w in self.weights)


class DecaysAtRandom(Decays):
    """Draws dropout masks as well."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.1))


class Shows(Decays):
    """Only looks at the size of its weights, and at their place."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].to(self.weights[0].device, self.weights[0].dtype)
        return F.cross_entropy(self(x), batch[1]) * self.weights[0].numel() / len(self.weights[0])


def test_parameters_used_outside_their_layers_are_rejected() -> None:
    """The functional call of a step with several clients' values does not replace them there."""
    refused(Decays, r"it uses the parameter 'body.0.weight' from elsewhere than its layer.*self.parameters\(\)")
    with pytest.raises(FederatedError, match=r"it uses the parameter 'body.0.weight'"):
        run("vectorized", DecaysAtRandom)
    assert torch.equal(state_of(run("auto", Decays))["x"], state_of(run("sequential", Decays))["x"])
    assert_agree(run("vectorized", Shows), run("sequential", Shows))


class Notes(Ordinary):
    """Stores a value in its first step, as Hugging Face classifiers store the kind of their labels."""

    def __init__(self, noted: Callable[..., Any], weight: float = 1.0) -> None:
        super().__init__(dropout=0.5 if weight != 1.0 else 0.0)
        self.noted, self.weight = noted, weight
        self.config = argparse.Namespace(kind=None)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, kind = F.cross_entropy(self(batch[0]), batch[1]), self.config.kind
        self.config.kind = self.noted(self, batch[1], kind)
        return loss * (self.weight if kind is None else 1.0)


def by_type(module: Any, labels: Tensor, kind: Any) -> Any:
    return kind or ("regression" if labels.is_floating_point() else "classes")


def beside_a_number(module: Any, labels: Tensor, kind: Any) -> Any:
    module.size = len(labels)
    return by_type(module, labels, kind)


def by_number(module: Any, labels: Tensor, kind: Any) -> Any:
    return kind or ("some" if labels.float().mean() > 0.5 else "few")


@pytest.mark.thorough
def test_data_kind_recorded_by_the_first_step_is_kept() -> None:
    runs = [run(engine, partial(Notes, by_type), max_rounds=1) for engine in ("sequential", "vectorized")]
    assert [r.lightning_module.config.kind for r in runs] == ["classes"] * 2
    assert_agree(*runs)


REFUSED_NOTES: dict[str, tuple[tuple[Any, ...], str]] = {
    "a number": ((lambda module, labels, kind: len(labels),), "changes the attribute 'config'"),
    "beside a number": ((beside_a_number,), "changes the attribute '(config|size)'"),
    "none again": ((lambda module, labels, kind: None if kind else "a",), "changes the attribute 'config'"),
    "in every step": ((lambda module, labels, kind: "train",), "changes the attribute 'config'"),
    "of the data": ((by_number,), "cannot be run for several clients at once"),
    "what a random step reads": ((by_type, 2.0), "gives another loss when it is called again"),
    "of clients at once": ((lambda module, labels, kind: kind or str(labels),), "changes the attribute 'config'"),
}


@pytest.mark.parametrize("name", REFUSED_NOTES)
def test_other_recorded_attributes_are_rejected_and_undone(name: str) -> None:
    arguments, what = REFUSED_NOTES[name]
    module = Notes(*arguments)
    with pytest.raises(FederatedError, match=f"cannot take Notes.training_step: .*({what})"):
        trainer(engine="vectorized").fit(module, data())
    assert module.config.kind is None


class Samples(Ordinary):
    """Draws from a distribution of PyTorch, as variational autoencoders do."""

    def forward(self, x: Tensor) -> Tensor:
        mean = super().forward(x)
        return torch.distributions.Normal(mean, mean.exp()).rsample()


class Fixed(Ordinary):
    """Adds noise that is the same in every step of every client."""

    def __init__(self, noise: Callable[[Tensor], Tensor], dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.noise(x))


def own(x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(0))


def own_in_place(x: Tensor) -> Tensor:
    return torch.empty_like(x).uniform_(generator=torch.Generator().manual_seed(0))


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return torch.rand_like(x)


def seeded_inside(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return seeded(x)


def repeated(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return torch.rand_like(x)


FIXED: dict[str, tuple[Any, float, str]] = {
    "of a generator": (own, 0.0, "draws from a generator of its own"),
    "of a generator, beside dropout": (own, 0.5, "draws from a generator of its own"),
    "of a generator, in place": (own_in_place, 0.0, "draws from a generator of its own"),
    "of a seed": (seeded, 0.0, "seeds torch's generator"),
    "of a seed, undone": (seeded_inside, 0.5, "seeds torch's generator"),
    "undone": (repeated, 0.0, "of several clients at once differs from that of one"),
}


@pytest.mark.parametrize("name", few(list(FIXED), ["of a generator", "of a seed, undone"]))
def test_random_numbers_shared_by_all_clients_are_rejected(name: str) -> None:
    noise, dropout, reason = FIXED[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)  # the module sets the same seed
        refused(partial(Fixed, noise, dropout), reason)


def test_default_generator_can_be_passed_explicitly() -> None:
    def noise(x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=torch.default_generator)

    assert run("vectorized", partial(Fixed, noise), max_rounds=1).fit_loop.round == 1


class Requires(Ordinary):
    """Calls ``requires_grad_`` on a tensor that it creates."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.zeros(len(x), 1).requires_grad_().detach())


class Converts(Ordinary):
    """Computes its accuracy with NumPy."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("acc", (self(batch[0]).argmax(1).detach().cpu().numpy() == batch[1].cpu().numpy()).mean())
        return super().training_step(batch, batch_idx)


class Reversed(torch.autograd.Function):
    """Reverses the gradient, as domain-adversarial training does, with the older form of autograd.Function."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return -gradient


class ReversedForAll(torch.autograd.Function):
    """Does the same in the form that supports several clients, but without a rule for them."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(context: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Reverses(Ordinary):
    function: Any = Reversed

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(super().forward(x))


class ReversesForAll(Reverses):
    function: Any = ReversedForAll


class Scales(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0].mul_(2)), batch[1])


class HookedLayer(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.head.register_full_backward_hook(lambda layer, inputs, outputs: None)


class Recomputes(Ordinary):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))


class LogsOtherwise(Ordinary):
    """Calls a method that it has taken from itself before the fit."""

    def __init__(self) -> None:
        super().__init__()
        self.note = self.log

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.note("loss", loss)
        return loss


class LogsPowers(Ordinary):
    """Logs the exponential of every value, whose mean is not the exponential of the mean."""

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        super().log(f"exp_{name}", value.exp(), *args, **kwargs)


class Catches(Ordinary):
    """Logs the number 0.5 if a function outside PyTorch fails, which needs the memory of one client's tensors."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch[0])
        try:
            score = float(np.mean(out.argmax(1).numpy() == batch[1].numpy()))
        except Exception:
            score = 0.5
        self.log("score", score)
        return F.cross_entropy(out, batch[1])


class OneHot(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), F.one_hot(batch[1], CLASSES).to(batch[0].dtype))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Reverses, r"an autograd.Function .*setup_context\(\) and generate_vmap_rule"),
        (ReversesForAll, r"an autograd.Function .*setup_context\(\) and generate_vmap_rule"),
        (OneHot, r"a tensor's value is read, .*by one_hot\(\)"),
        (Scales, r"a tensor that the step did not make, such as one of its batch.* clone\(\)"),
        (HookedLayer, r"takes one client at a time, as .* for backward hooks of layers"),
        (Recomputes, r"gradient checkpointing and other hooks of saved tensors"),
        (LogsOtherwise, r"it logs by a method .* call it as self.log\(...\)"),
        (LogsPowers, r"it has a log\(\) of its own"),
        (Catches, r"it goes on after an error of PyTorch \(a tensor's memory is read.* let the error end the step"),
        (Samples, r"as torch.distributions does.*randn_like"),
        (Requires, r"it calls requires_grad_\(\)"),
        (Converts, r"a tensor's memory is read, as .numpy\(\)"),
    ],
)
def test_common_vmap_errors_explain_their_cause(make: Any, reason: str) -> None:
    refused(make, reason)


class Harmless(Leaves):
    """Reads all its state without changing it, except for missing attributes that a step sets to None."""

    def __init__(self) -> None:
        super().__init__(lambda module, loss: None)
        self.adjacency = torch.eye(3).to_sparse()
        self.positions = torch.arange(3)[None].expand(4, 3)
        with torch.inference_mode():
            self.seen_in_validation = torch.zeros(2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.metrics["mean"].update(self(batch[0]).mean())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        read = self.seen + self.hits + self.layer.frozen.sum() + self.hidden[0].calls + self.ema.sum()
        self.features = self.layer.features = None
        odd = torch.nan_to_num(self.odd).sum() + self.positions.sum() + self.adjacency.to_dense().sum()
        self.log("read", read.detach() + odd.detach())
        return F.cross_entropy(self(batch[0]), batch[1]) * (1 + 0 * read)


@pytest.mark.thorough
def test_reading_an_attribute_keeps_the_engine_and_traces() -> None:
    one, other = (run(engine, Harmless, max_rounds=2) for engine in ("sequential", "vectorized"))
    assert len(other.fit_loop.clients.engine.step.traces) > 0
    assert_close(state_of(one), state_of(other))
    assert float(other.callback_metrics["read"]) == pytest.approx(float(one.callback_metrics["read"]))


@pytest.mark.thorough
@pytest.mark.filterwarnings("error:Local steps run untraced", "error:Error detected in")
def test_detect_anomaly_raises_no_false_warnings() -> None:
    one, other = (run(engine, detect_anomaly=True, max_rounds=2) for engine in ("sequential", "vectorized"))
    assert len(other.fit_loop.clients.engine.step.traces) == 0
    assert_agree(one, other)


def test_snapshot_detects_an_object_replaced_at_the_same_address() -> None:
    module = nn.Linear(2, 2)
    module.own = torch.zeros(1)
    before = Snapshot([("", module)])
    for _ in range(10):  # the allocator may reuse the first tensor's memory if nothing holds it
        module.own = None
        module.own = torch.zeros(1)
        assert before.changed() == ("attribute", "own")


def test_step_state_is_restored() -> None:
    module = Leaves(lambda *_: None)
    state = StepState(module)
    before = everything(module)
    for then, _ in LEFT.values():
        then(module, torch.ones(()))
    state.restore()
    assert everything(module) == before
    Leaves.kinds, Layer.seen_by_all = 0, []
