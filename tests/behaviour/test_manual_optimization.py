"""Modules that step one or several optimizers themselves train like others: same numbers, same guarantees."""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import FederatedCallback, FederatedDataModule, FederatedError, FederatedTrainer
from lightning_fed.algorithms import (
    FedAvg,
    FedCM,
    FedDyn,
    FedNova,
    FedProx,
    FedSAM,
    Mime,
    Scaffnew,
    Scaffold,
    ScaffoldM,
    ServerOnly,
)
from lightning_fed.algorithms.base import Algorithm
from lightning_fed.callbacks import GradientDissimilarity
from lightning_fed.engines.sequential.engine import SequentialEngine
from lightning_fed.server import ClientPrivacy, OortSampler, PowerOfChoiceSampler
from tests.helpers.processes import in_processes
from tests.helpers.training import QUIET, Net, data, fit, parameters, same, seeded, trainer

SIZES = (40, 24, 32)


class OwnStep(Net):
    """The shared module, but it steps its optimizer itself."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Gan(pl.LightningModule):
    """A generator and a critic, each with an optimizer. The generator steps once per ``every`` steps of the critic."""

    def __init__(self, adam: bool = False, every: int = 1, momentum: float = 0.0) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.adam, self.every, self.momentum = adam, every, momentum
        self.generator = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.critic = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        self.double()

    def losses(self, batch: Sequence[Tensor]) -> Iterator[Callable[[], Tensor]]:
        x, z = batch
        yield lambda: F.softplus(-self.critic(x)).mean() + F.softplus(self.critic(self.generator(z).detach())).mean()
        yield lambda: F.softplus(-self.critic(self.generator(z))).mean()

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        of_generator, of_critic = self.optimizers()  # type: ignore[misc]
        for i, (optimizer, loss) in enumerate(zip((of_critic, of_generator), self.losses(batch), strict=True)):
            if i == 1 and (batch_idx + 1) % self.every:
                break
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            value = loss()
            self.manual_backward(value)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.log(("critic_loss", "generator_loss")[i], value)

    def configure_optimizers(self) -> Any:
        if self.adam:
            of_critic: Any = torch.optim.Adam(self.critic.parameters(), lr=0.02, weight_decay=0.01)
        else:
            of_critic = torch.optim.SGD(self.critic.parameters(), lr=0.2, weight_decay=0.01, momentum=self.momentum)
        return torch.optim.SGD(self.generator.parameters(), lr=0.1), of_critic


class Freezes(Gan):
    """Freezes the critic while the generator trains, and leaves it frozen."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        of_generator, of_critic = self.optimizers()  # type: ignore[misc]
        parts = (of_critic, True, False), (of_generator, False, True)
        for (optimizer, *trains), loss in zip(parts, self.losses(batch), strict=True):
            for part, is_on in zip((self.critic, self.generator), trains, strict=True):
                part.requires_grad_(is_on)
            optimizer.zero_grad()
            self.manual_backward(loss())
            optimizer.step()


class StepsFrozen(Gan):
    """Steps the optimizer of a layer that it froze: with a method's correction, the layer would move."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.critic[2].requires_grad_(False)
        super().training_step(batch, batch_idx)


class Pool(Gan):
    """Shows its critic earlier batches, too, as the pool of pictures in CycleGAN does."""

    reads = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(adam=True, **kwargs)
        self.pool: list[Tensor] = []

    def losses(self, batch: Sequence[Tensor]) -> Iterator[Callable[[], Tensor]]:
        self.pool = [*self.pool, batch[0]][-2:]
        yield from super().losses([torch.cat(self.pool) if self.reads else batch[0], batch[1]])


class OnlyNotes(Pool):
    reads = False


class InnerOptimizer(Pool):
    """Has an optimizer of its own, whose state a trial step would change."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.optim.Adam([torch.zeros(1, requires_grad=True)])


class Counts(pl.Callback):
    def __init__(self) -> None:
        self.calls = 0

    def on_before_backward(self, *_: Any) -> None:
        self.calls += 1

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.calls += 1


def points(size: int, seed: int) -> TensorDataset:
    stream = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 2, generator=stream, dtype=torch.float64) + seed
    return TensorDataset(x, torch.randn(size, 3, generator=stream, dtype=torch.float64))


def some(**kwargs: Any) -> FederatedDataModule:
    sets = [points(size, seed) for seed, size in enumerate(SIZES)]
    return FederatedDataModule(clients=sets, batch_size=8, shuffle=False, **kwargs)


def trained(module: pl.LightningModule, method: Algorithm, **kwargs: Any) -> Tensor:
    ckpt_path = kwargs.pop("ckpt_path", None)
    trainer(algorithm=method, clients_per_round=3, **kwargs).fit(module, some(), ckpt_path=ckpt_path)
    return parameters(module)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "weight_decay": 0.01}], ids=["plain", "momentum"])
@pytest.mark.parametrize(
    "method",
    [FedAvg(), FedProx(0.1), Scaffold(), FedDyn(0.1), FedCM(0.5), FedNova(), ScaffoldM(0.1)],
    ids=lambda method: type(method).__name__,
)
def test_manual_and_automatic_optimization_give_identical_bits(method: Algorithm, options: dict[str, float]) -> None:
    runs, logged = [], []
    for kind in (Net, OwnStep):
        module, run = seeded(kind, **options), trainer(algorithm=copy.deepcopy(method))
        run.fit(module, data())
        runs.append(parameters(module))
        logged.append({name: value for name, value in run.callback_metrics.items() if name != "round/seconds"})
    assert torch.equal(*runs)
    assert same(*logged)


def by_hand(method: Algorithm, rounds: int, **options: Any) -> Tensor:
    """Return the server's model after rounds of a method, from a plain loop over both optimizers' parameters."""
    module = seeded(Gan, **options)
    x = parameters(module)
    c, c_i = torch.zeros_like(x), [torch.zeros_like(x) for _ in SIZES]
    num_generator = parameters(module.generator).numel()
    for _ in range(rounds):
        ys, changes = [], []
        for i, size in enumerate(SIZES):
            nn.utils.vector_to_parameters(x.clone(), module.parameters())
            of_generator, of_critic = module.configure_optimizers()
            steps = {id(of_generator): 0, id(of_critic): 0}
            path = torch.zeros_like(x)
            for number, batch in enumerate(DataLoader(points(size, i), 8)):
                for optimizer, loss in zip((of_critic, of_generator), module.losses(batch), strict=True):
                    if optimizer is of_generator and (number + 1) % module.every:
                        break
                    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
                    (group,) = optimizer.param_groups
                    decay, group["weight_decay"] = group["weight_decay"], 0.0
                    module.zero_grad()
                    loss().backward()
                    first = 0
                    for p in module.parameters():
                        part = slice(first, first := first + p.numel())
                        if id(p) not in own:
                            p.grad = None
                            continue
                        assert p.grad is not None
                        p.grad += decay * p.detach()
                        if isinstance(method, FedProx):
                            p.grad += method.mu * (p.detach() - x[part].view_as(p))
                        if isinstance(method, Scaffold):
                            p.grad += (c - c_i[i])[part].view_as(p)
                        path[part] += group["lr"] * p.grad.reshape(-1)
                    optimizer.step()
                    group["weight_decay"] = decay
                    steps[id(optimizer)] += 1
            ys.append(parameters(module))
            rates = torch.full_like(x, 0.02 if module.adam else 0.2) * steps[id(of_critic)]
            rates[:num_generator] = 0.1 * steps[id(of_generator)]
            changes.append(path / rates - c if isinstance(method, Scaffold) else path * 0)
        sizes = torch.ones(len(SIZES)) if isinstance(method, Scaffold) else torch.tensor(SIZES)
        weights = sizes.to(x.dtype) / sizes.sum()
        x = sum(w * y for w, y in zip(weights, ys, strict=True))  # type: ignore[assignment]
        c_i = [own + change for own, change in zip(c_i, changes, strict=True)]
        c = c + sum(changes) / len(changes)
    return x


@pytest.mark.parametrize("options", [{}, {"every": 2}, {"adam": True, "every": 2}], ids=["sgd", "every 2", "adam"])
@pytest.mark.parametrize("method", [FedAvg(), FedProx(0.3), Scaffold()], ids=lambda method: type(method).__name__)
def test_multiple_optimizers_match_corrected_plain_loop(method: Algorithm, options: dict[str, Any]) -> None:
    found = trained(seeded(Gan, **options), copy.deepcopy(method))
    torch.testing.assert_close(found, by_hand(method, 3, **options), rtol=0, atol=1e-12)


@pytest.mark.parametrize("adam", [False, True], ids=["sgd", "adam"])
def test_one_client_in_one_round_matches_lightning(adam: bool) -> None:
    plain, module = seeded(Gan, adam=adam, every=2), seeded(Gan, adam=adam, every=2)
    pl.Trainer(**QUIET, max_epochs=2, log_every_n_steps=1).fit(plain, DataLoader(points(40, 0), 8))
    run = FederatedTrainer(**QUIET, max_rounds=1, local_epochs=2, seed=0)
    run.fit(module, FederatedDataModule(clients=[points(40, 0)], batch_size=8, shuffle=False))
    assert torch.equal(parameters(plain), parameters(module))
    assert {"critic_loss", "generator_loss"} <= run.callback_metrics.keys()
    assert [type(optimizer) for optimizer in run.optimizers] == [
        torch.optim.SGD,
        [torch.optim.SGD, torch.optim.Adam][adam],
    ]


@pytest.mark.parametrize("state", ["reset", "keep"])
def test_resumed_run_has_identical_bits(tmp_path: Path, state: Any) -> None:
    kwargs: dict[str, Any] = {"local_optimizer_state": state}
    whole = trained(seeded(Gan, adam=True), Scaffold(), max_rounds=4, **kwargs)
    first = trainer(algorithm=Scaffold(), clients_per_round=3, max_rounds=2, **kwargs)
    first.fit(seeded(Gan, adam=True), some())
    first.save_checkpoint(path := tmp_path / "two.ckpt")
    assert torch.equal(trained(seeded(Gan, adam=True), Scaffold(), max_rounds=4, ckpt_path=path, **kwargs), whole)
    first.fit_loop.max_epochs = 4  # the same trainer can continue, too
    first.fit(first.lightning_module, some())
    assert torch.equal(parameters(first.lightning_module), whole)
    with pytest.raises(FederatedError, match="local optimizer is SGD, Adam, this run's is SGD, SGD"):
        trained(seeded(Gan), Scaffold(), max_rounds=4, ckpt_path=path, **kwargs)


def test_keeping_optimizer_states_changes_the_result() -> None:
    kept, new = (
        trained(seeded(Gan, momentum=0.9), FedAvg(), local_optimizer_state=state) for state in ("keep", "reset")
    )
    assert not torch.equal(kept, new)


class Scheduled(Gan):
    """Halves both rates after each round."""

    def configure_optimizers(self) -> Any:
        optimizers = super().configure_optimizers()
        return list(optimizers), [torch.optim.lr_scheduler.ExponentialLR(own, 0.5) for own in optimizers]

    def on_train_epoch_end(self) -> None:
        for schedule in self.lr_schedulers():  # type: ignore[union-attr]
            schedule.step()  # type: ignore[call-arg]


class Rates(FederatedCallback):
    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
        if client_report.client_id == 0:
            self.seen.append([group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups])


def test_manually_stepped_schedules_advance_per_round_and_resume(tmp_path: Path) -> None:
    rates = Rates()
    whole = trained(seeded(Scheduled), FedAvg(), callbacks=[rates])
    assert rates.seen == [[0.1, 0.2], [0.05, 0.1], [0.025, 0.05]]
    first = trainer(clients_per_round=3, max_rounds=2)
    first.fit(seeded(Scheduled), some())
    first.save_checkpoint(path := tmp_path / "two.ckpt")
    assert torch.equal(trained(seeded(Scheduled), FedAvg(), ckpt_path=path), whole)

    class EachBatch(Scheduled):
        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            self.lr_schedulers()[0].step()  # type: ignore[index,call-arg]

    with pytest.raises(FederatedError, match="steps its schedule .*Call step.. in on_train_epoch_end, once a round"):
        trained(seeded(EachBatch), FedAvg())


@pytest.mark.parametrize("method", [FedAvg(), Scaffold()], ids=["FedAvg", "Scaffold"])
def test_step_may_leave_the_part_frozen_that_does_not_step(method: Algorithm) -> None:
    whole = trained(seeded(Gan), method, max_rounds=2)
    module = seeded(Freezes)
    assert torch.equal(trained(module, method, max_rounds=2), whole)
    assert all(p.requires_grad for p in module.parameters())


def test_state_that_a_step_reads_from_the_last_client_warns(monkeypatch: Any) -> None:
    counts = Counts(), Counts()
    with pytest.warns(UserWarning, match="Pool.training_step reads what earlier steps have left in 'pool'"):
        found = trained(seeded(Pool), Scaffold(), max_rounds=1, callbacks=[counts[0]])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*earlier steps have left")
        for silent in (OnlyNotes, InnerOptimizer):
            trained(seeded(silent), FedAvg(), max_rounds=1)
    monkeypatch.setattr(SequentialEngine, "_check_read", lambda *_: None)
    assert torch.equal(trained(seeded(Pool), Scaffold(), max_rounds=1, callbacks=[counts[1]]), found)
    assert counts[0].calls == counts[1].calls


def test_frozen_layer_that_a_correction_would_move_is_rejected() -> None:
    trained(seeded(StepsFrozen), FedAvg(), max_rounds=1)
    with pytest.raises(FederatedError, match=r"has frozen the parameter 'critic\.2\.weight'"):
        trained(seeded(StepsFrozen), Scaffold(), max_rounds=1)


def test_client_without_a_step_is_rejected_if_steps_are_needed() -> None:
    trained(seeded(Gan, every=9), FedAvg())
    with pytest.raises(FederatedError, match=r"took no step for this client \(SGD: 0, SGD: 5\), and Scaffold reads"):
        trained(seeded(Gan, every=9), Scaffold())

    class Still(OwnStep):
        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
            return Net.training_step(self, batch, batch_idx)

    with pytest.raises(
        FederatedError, match="no optimizer took a step with a gradient. Call self.manual_backward.*has too few"
    ):
        fit(seeded(Still))


class OneLoss(OwnStep):
    """Has a step that returns nothing, so a client's loss is unknown."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        super().training_step(batch, batch_idx)


def test_step_may_return_no_loss_but_non_finite_values_raise() -> None:
    assert torch.equal(fit(seeded(OneLoss)), fit(seeded(OwnStep)))
    with pytest.raises(FederatedError, match="returned (a loss|parameters) that (is|are) not finite"):
        fit(seeded(OneLoss, lr=1e30))


class Measures(FederatedCallback):
    """A user's callback that asks for a gradient that the module cannot give."""

    def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
        trainer.fit_loop.full_gradient(0, trainer.fit_loop.state.x)


class Shared(Gan):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.critic.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": Mime()}, "Mime.*, whose clients compute full-batch gradients. Use a method that corrects"),
        ({"algorithm": Scaffold(option="i")}, "Scaffold.*, whose clients compute full-batch gradients"),
        ({"algorithm": ServerOnly()}, "ServerOnly.*, whose clients take no local steps"),
        ({"algorithm": FedSAM(rho=0.1)}, "FedSAM.*, which takes a second gradient on every batch"),
        ({"algorithm": FedProx(0.1, adaptive=True)}, "FedProx.*, whose clients send losses"),
        ({"engine": "vectorized"}, "cannot be combined with engine='vectorized'. Set engine='sequential'"),
        ({"gradient_clip_val": 1.0, "gradient_clip_on": "corrected"}, "gradient_clip_val. Leave it unset"),
        ({"local_schedule": "restart"}, "local_schedule='restart'. Leave it unset, and step the schedule in"),
        ({"sampler": PowerOfChoiceSampler(2, 3)}, "which chooses clients by their losses. Use another sampler"),
        ({"sampler": OortSampler(2)}, "which chooses clients by their losses. Use another sampler"),
        ({"callbacks": [GradientDissimilarity()]}, "the callback GradientDissimilarity, which measures the loss or"),
        ({"callbacks": [Measures()]}, "its loss and gradient at a given model cannot be measured. Remove the measure"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_requiring_automatic_optimization_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        fit(seeded(OwnStep), **options)


def test_record_privacy_and_shared_parameters_are_rejected() -> None:
    pytest.importorskip("opacus")
    with pytest.raises(FederatedError, match="client_privacy=.... Leave it unset"):
        fit(seeded(OwnStep), client_privacy=ClientPrivacy(noise_multiplier=1.0, max_grad_norm=1.0))
    with pytest.raises(FederatedError, match="two of them share a parameter"):
        trained(seeded(Shared), FedAvg())


@pytest.mark.thorough
def test_two_processes_match_one(tmp_path: Path) -> None:
    def work() -> Tensor:
        return trained(seeded(Gan, adam=True), Scaffold(), devices=2, strategy="clients")

    torch.manual_seed(0)
    outcomes = in_processes(work, tmp_path)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    wanted = trained(seeded(Gan, adam=True), Scaffold())
    assert torch.equal(outcomes[0].value, outcomes[1].value)
    torch.testing.assert_close(outcomes[0].value, wanted, rtol=0, atol=1e-12)


def test_logged_rates_and_checkpoints_cover_every_optimizer(tmp_path: Path) -> None:
    monitor = pl.callbacks.LearningRateMonitor(logging_interval="epoch")
    options = {"logger": pl.loggers.CSVLogger(tmp_path), "enable_checkpointing": True, "log_every_n_steps": 1}
    run = trainer(clients_per_round=3, callbacks=[monitor], **options)
    run.fit(seeded(Gan, adam=True), some())
    assert monitor.lrs == {"lr-SGD": [0.1] * 3, "lr-Adam": [0.02] * 3}
    assert run.checkpoint_callback is not None
    saved = torch.load(run.checkpoint_callback.best_model_path, weights_only=True)
    rates = [[group["lr"] for group in state["param_groups"]] for state in saved["optimizer_states"]]
    assert rates == [[0.1], [0.02]]


def test_auto_selects_sequential_engine_for_scaffnew(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        found = trained(seeded(Gan), Scaffnew(0.5), engine="auto", local_steps=3)
    assert "the only one that runs modules with manual optimization" in caplog.text
    assert torch.equal(found, trained(seeded(Gan), Scaffnew(0.5), local_steps=3))
