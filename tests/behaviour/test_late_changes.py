"""Changes of modules and optimizers during a run: handled like in the sequential engine, or refused by name."""

import random
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_fed import FederatedCallback, FederatedError
from lightning_fed.algorithms import FedAvg, FedCM, FedDane, FedNova, Mime, Scaffold, SGDm
from lightning_fed.tracing.traces import Traces
from tests.helpers.engines import Ordinary, assert_agree, run
from tests.helpers.selection import covering, few
from tests.helpers.training import CLASSES, FEATURES, data, trainer

ADAM = partial(torch.optim.Adam, lr=0.01)
DECAYED = partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)
PLAIN = partial(torch.optim.SGD, lr=0.1)
EVEN = partial(data, (8, 8, 8, 8, 8, 8))
ENGINES: list[dict[str, Any]] = [
    {"engine": "vectorized"},
    {"engine": "vectorized", "chunk_size": 1},
    {"engine": "auto"},
]


def agree(engine: dict[str, Any], rounds: int = 3, **options: Any) -> None:
    """Check that an engine gives the sequential engine's results."""
    whole, other = run("sequential", max_rounds=rounds, **options), run(**engine, max_rounds=rounds, **options)
    assert_agree(whole, other)


class Heads(Ordinary):
    """Has a loss that depends on its head and body, or on its body alone."""

    def loss(self, x: Tensor, y: Tensor, by_head: bool) -> Tensor:
        hidden = self.body(x)
        return F.cross_entropy(self.head(hidden), y) if by_head else hidden.square().mean()


class ByBatch(Heads):
    def training_step(self, batch: Any, number: int) -> Tensor:
        return self.loss(*batch, by_head=number % 2 == 1)


class ByRound(Heads):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(*batch, by_head=self.current_epoch % 2 == 1)


class BySize(Heads):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(*batch, by_head=len(batch[0]) % 4 != 0)


class Weight:
    """A plain object that a module reads."""

    value = 0.0


class Reversal(Ordinary):
    """Adds a term to the gradient but not the loss, with weights in a plain object, a mapping and hyperparameters."""

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer)
        self.weight, self.weights = Weight(), {"all": [0.0]}
        self.hparams.weight = 0.0

    def on_train_epoch_start(self) -> None:
        self.weight.value = self.weights["all"][0] = self.hparams.weight = 0.1 * max(0, self.current_epoch - 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch[0])
        term = F.cross_entropy(2 * out, batch[1]) * (self.weight.value + self.weights["all"][0] + self.hparams.weight)
        return F.cross_entropy(out, batch[1]) + term - term.detach()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("engine", "optimizer", "module"), covering(ENGINES, [DECAYED, PLAIN, ADAM], [BySize, ByRound, ByBatch])
)
def test_engines_agree_when_loss_later_uses_other_parameters(
    engine: dict[str, Any], optimizer: Any, module: Any
) -> None:
    datamodule = partial(data, (8, 8, 8, 8, 8, 8), batch_size=3) if module is BySize else EVEN
    agree(engine, make=partial(module, optimizer), datamodule=datamodule)


def test_client_losses_on_different_parameters_are_rejected() -> None:
    with pytest.raises(FederatedError, match=r"losses depend on 'head\.\w+' for some of them only"):
        run("vectorized", partial(BySize, ADAM), partial(data, (8, 7, 8, 7, 8, 7)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("algorithm", "engine"),
    [
        pytest.param(algorithm, engine, id=f"{type(algorithm).__name__}-{i}")
        for algorithm in (FedAvg(), Mime(SGDm()), FedDane(mu=0.1))
        for i, engine in enumerate(ENGINES)
    ],
)
def test_collections_and_objects_read_by_a_module_may_change(algorithm: Any, engine: dict[str, Any]) -> None:
    agree(engine, 3, make=partial(Reversal, PLAIN), algorithm=algorithm, datamodule=EVEN)


IMPLEMENTATIONS = {
    "fused Adam": partial(torch.optim.Adam, lr=0.01, fused=True),
    "fused AdamW": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "fused Adagrad": partial(torch.optim.Adagrad, lr=0.05, fused=True),
    "fused SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "foreach Adam": partial(torch.optim.Adam, lr=0.01, foreach=True),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "engine"),
    [pytest.param(name, engine, id=f"{name}-{i}") for name in IMPLEMENTATIONS for i, engine in enumerate(ENGINES)],
)
def test_engines_agree_for_all_optimizer_implementations(name: str, engine: dict[str, Any]) -> None:
    agree(engine, 2, make=partial(Ordinary, IMPLEMENTATIONS[name]), datamodule=EVEN)


class Momentum(FederatedCallback):
    """Turns momentum on in a round."""

    def __init__(self, round: int) -> None:
        self.round = round

    def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
        trainer.optimizers[0].param_groups[0]["momentum"] = 0.9 if round >= self.round else 0.0


METHODS = [FedNova(), FedAvg(), Scaffold(), FedCM(alpha=0.3)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("algorithm", "engine"),
    [
        pytest.param(algorithm, engine, id=f"{type(algorithm).__name__}-{i}")
        for algorithm in METHODS
        for i, engine in enumerate(ENGINES)
    ],
)
def test_momentum_can_be_enabled_mid_run(algorithm: Any, engine: dict[str, Any]) -> None:
    agree(engine, make=partial(Ordinary, PLAIN), algorithm=algorithm, callbacks=[Momentum(1)], datamodule=EVEN)


@pytest.mark.parametrize("algorithm", few(METHODS, METHODS[:1]))
def test_momentum_enabled_at_start_equals_built_in_momentum(algorithm: Any) -> None:
    make = partial(Ordinary, PLAIN)
    from_the_start = run("sequential", make=make, algorithm=algorithm, callbacks=[Momentum(0)])
    built = run("sequential", make=partial(Ordinary, partial(PLAIN, momentum=0.9)), algorithm=algorithm)
    assert_agree(from_the_start, built)


class Warming(Ordinary):
    """Starts with a rate of zero."""

    def configure_optimizers(self) -> Any:
        optimizer = DECAYED(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda round: round / 2)]


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ENGINES)
def test_normalized_mean_at_zero_rate_is_the_gradient_mean(engine: dict[str, Any]) -> None:
    first = run("sequential", Warming, algorithm=FedAvg("normalized"), max_rounds=1)
    assert not torch.equal(first.fit_loop.state.x, run("sequential", Warming, max_rounds=1).fit_loop.state.x)
    agree(engine, 2, make=Warming, algorithm=FedAvg("normalized"), datamodule=EVEN)


class Prior(Ordinary):
    prior: Any = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]) + self.prior, batch[1])


class SetsPrior(FederatedCallback):
    def on_client_start(self, trainer: Any, pl_module: Any, round: int, client_id: Any) -> None:
        pl_module.prior = torch.full((CLASSES,), float(client_id))


class SetsRate(FederatedCallback):
    def on_client_start(self, trainer: Any, pl_module: Any, round: int, client_id: Any) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] = 0.01 * (1 + client_id)


@pytest.mark.parametrize("engine", few(ENGINES[:2], ENGINES[:1]))
@pytest.mark.parametrize(
    ("callback", "what"),
    [(SetsPrior(), "the attribute 'prior' of Prior"), (SetsRate(), "the learning rate")],
)
def test_per_client_settings_are_rejected(callback: Any, what: str, engine: dict[str, Any]) -> None:
    with pytest.raises(FederatedError, match=f"(a hook|on_client_start) changes {what}.*engine='sequential'"):
        run(**engine, make=Prior, callbacks=[callback])


class Notes(FederatedCallback):
    """Writes to the module between clients."""

    def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
        pl_module.prior = 0.1 * client_report.client_id


@pytest.mark.thorough
def test_change_between_clients_requires_sequential_engine() -> None:
    with pytest.raises(FederatedError, match="on_client_end changes the attribute 'prior' of Prior after client"):
        run("vectorized", Prior, EVEN, callbacks=[Notes()])
    with pytest.warns(UserWarning, match="restarts round 0 with 'sequential'"):
        found = run("auto", Prior, EVEN, callbacks=[Notes()])
    assert_agree(found, run("sequential", Prior, EVEN, callbacks=[Notes()]))


class History(Ordinary):
    """Appends a value to a list after every validation."""

    def __init__(self) -> None:
        super().__init__(PLAIN)
        self.history: list[float] = []

    def on_validation_epoch_end(self) -> None:
        self.history.append(1.0)


@pytest.mark.thorough
def test_attribute_that_changes_every_round_warns_once() -> None:
    with pytest.warns(UserWarning, match="The attribute 'history' of History changes from round to round") as caught:
        run("vectorized", History, max_rounds=5)
    assert sum("from round to round" in str(w.message) for w in caught) == 1


class Later(Ordinary):
    """Calls ``then`` from the second round on."""

    count = 0

    def __init__(self) -> None:
        super().__init__(PLAIN)
        self.norm = nn.BatchNorm1d(FEATURES).eval()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(self.norm(batch[0])), batch[1])
        return self.then(loss) if self.current_epoch else loss


class LaterDropout(Later):
    def then(self, loss: Tensor) -> Tensor:
        return F.dropout(loss, 0.5) + loss


class LaterPython(Later):
    def then(self, loss: Tensor) -> Tensor:
        return loss * (1 + random.random())


class LaterCount(Later):
    def then(self, loss: Tensor) -> Tensor:
        self.count += 1
        return loss * (1 + 0.1 * self.count)


class LaterSeed(Later):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + F.dropout(self(batch[0]), 0.5).square().mean()

    def then(self, loss: Tensor) -> Tensor:
        torch.manual_seed(0)
        return loss


class LaterGenerator(Later):
    def then(self, loss: Tensor) -> Tensor:
        return loss * (1 + torch.rand((), generator=torch.Generator().manual_seed(0)))


class LaterStatistics(Later):
    def on_train_epoch_start(self) -> None:
        self.norm.train(self.current_epoch > 0)

    def then(self, loss: Tensor) -> Tensor:
        return loss


class LaterNone(Later):
    """Skips its second batch, which the trial step does not see."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    def then(self, loss: Tensor) -> Tensor:
        return loss


@pytest.mark.parametrize("engine", few(ENGINES[:2], ENGINES[:1]))
@pytest.mark.parametrize(
    ("module", "what"),
    [
        (LaterNone, "training_step returned NoneType"),
        (LaterDropout, "draws random numbers"),
        (LaterPython, "draws random numbers"),
        (LaterCount, "changes the attribute 'count'"),
        (LaterStatistics, r"layer 'norm' \(BatchNorm1d\) moves running statistics"),
    ],
)
def test_unsupported_late_change_raises(module: Any, what: str, engine: dict[str, Any]) -> None:
    for algorithm in (FedAvg(), Mime(SGDm())):
        with pytest.raises(FederatedError, match=what):
            run(**engine, make=module, algorithm=algorithm)


@pytest.mark.parametrize("module", few([LaterDropout, LaterPython, LaterStatistics, LaterNone], [LaterNone]))
def test_auto_switches_to_sequential_when_a_step_requires_it(module: Any) -> None:
    for algorithm in (FedAvg(), Mime(SGDm())):
        with pytest.warns(
            UserWarning, match=r"engine='auto' (continues|restarts round \d) with 'sequential'"
        ) as warned:
            found = run("auto", make=module, datamodule=EVEN, algorithm=algorithm)
        assert sum("with 'sequential'" in str(w.message) for w in warned) == 1
        assert_agree(found, run("sequential", make=module, datamodule=EVEN, algorithm=algorithm))


class LaterFrozen(Later):
    """Freezes its head from the second round on. The trial step does not."""

    def then(self, loss: Tensor) -> Tensor:
        self.head.requires_grad_(False)
        return loss


@pytest.mark.parametrize("engine", ["vectorized", "auto"])
def test_step_that_later_freezes_a_layer_is_rejected(engine: str) -> None:
    with pytest.raises(FederatedError, match=r"has frozen the parameter 'head\.weight'"):
        run(engine, LaterFrozen, EVEN, max_rounds=2)


@pytest.mark.parametrize(
    ("module", "what"),
    [(LaterSeed, "seeds torch's generator"), (LaterGenerator, "draws from a generator of its own")],
)
def test_step_that_later_draws_from_its_own_stream_raises(module: Any, what: str) -> None:
    with pytest.raises(FederatedError, match=rf"{what}, and did not in its trial step.*engine='sequential'"):
        run("vectorized", module, EVEN, max_rounds=2)


class LaterData(Ordinary):
    """Assigns to a parameter's data from the third batch on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx > 1:
            self.head.weight.data = self.head.weight.data * 0.9
        return super().training_step(batch, batch_idx)


def test_step_that_later_assigns_to_data_raises() -> None:
    """With one client at a time, the optimizer would continue with the old values."""
    with pytest.raises(FederatedError, match=r"assigns to \.data of the parameter 'head\.weight', and did not"):
        run("vectorized", LaterData, partial(data, (16, 16, 16, 16)), chunk_size=1, max_rounds=1)


class WithMetric(Ordinary):
    def __init__(self) -> None:
        super().__init__(PLAIN)
        self.accuracy = MulticlassAccuracy(CLASSES)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.accuracy(self(batch[0]), batch[1])
        self.log("val_acc", self.accuracy)


@pytest.mark.thorough
def test_evaluation_metrics_keep_the_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    split = Traces._split
    monkeypatch.setattr(Traces, "_split", lambda self, *a, **k: made.append(1) or split(self, *a, **k))
    t = trainer(engine="vectorized", max_rounds=1, chunk_size=1)
    t.fit(WithMetric(), EVEN())
    in_one_round = len(made)
    made.clear()
    trainer(engine="vectorized", max_rounds=4, chunk_size=1).fit(WithMetric(), EVEN())
    assert len(made) == in_one_round > 0


class CountsLater(Ordinary):
    """Counts in a buffer from the third batch on, and reads the count. Only one client has a third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx > 1:
            self.count += 1
        return super().training_step(batch, batch_idx) * (1 + self.count)


def test_buffer_changed_by_a_later_client_is_rejected() -> None:
    """With one client at a time, the next client's buffers would overwrite it."""
    with pytest.raises(FederatedError, match="cannot continue with CountsLater.training_step.*the buffer 'count'"):
        run("vectorized", CountsLater, partial(data, (8, 8, 24, 8)), chunk_size=1, max_rounds=1)


class SetsLater(Ordinary):
    """Sets an attribute from the third batch on, and reads it. Only one client has a third batch."""

    extra = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx > 1:
            self.extra = 1.0
        return super().training_step(batch, batch_idx) * (1 + self.extra)


@pytest.mark.parametrize("chunk_size", [1, 2])
def test_attribute_changed_by_a_later_client_is_rejected(chunk_size: int) -> None:
    """Another client of the same chunk would train with the old value."""
    with pytest.raises(FederatedError, match="cannot continue with SetsLater.training_step.*the attribute 'extra'"):
        run("vectorized", SetsLater, partial(data, (8, 8, 24, 8)), chunk_size=chunk_size, max_rounds=1)


class KeepsLosses(Ordinary):
    """Collects losses from the second round on, and sets a flag that the next step reads."""

    def __init__(self) -> None:
        super().__init__()
        self.losses, self.seen = list[float](), {"any": False}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.current_epoch > 0:
            loss = loss * (1.0 + self.seen["any"])
            self.losses.append(1.0)
            self.seen["any"] = True
        return loss


class WithTensor(KeepsLosses):
    """Has a tensor that a step could change undetected through its ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.ones(1)


@pytest.mark.filterwarnings("ignore:.*earlier steps have left")
def test_auto_restarts_round_when_step_starts_setting_attributes() -> None:
    expected = run("sequential", KeepsLosses)
    with pytest.warns(UserWarning, match="restarts round 1 with 'sequential'.*changes the attribute 'losses'"):
        found = run("auto", KeepsLosses)
    assert_agree(expected, found)
    assert found.lightning_module.losses == expected.lightning_module.losses
    with pytest.raises(FederatedError, match="cannot continue with WithTensor.training_step.*the attribute 'losses'"):
        run("auto", WithTensor)
