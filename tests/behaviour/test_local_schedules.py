"""Schedules by local step match a plain torch loop, over engines, interruptions and processes."""

import warnings
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, OneCycleLR
from torch.utils.data import TensorDataset

from lightning_fed import FederatedCallback, FederatedDataModule, FederatedError
from lightning_fed.algorithms import Algorithm, Ditto, FedAvg, FedCM, FedProxVR, FedSpeed, Scaffold
from lightning_fed.engines.vectorized.chunk_work import ChunkWork
from lightning_fed.server import FedBuff
from tests.helpers.processes import in_processes
from tests.helpers.training import parameters, same, trainer

SIZES, BATCH, ROUNDS = (7, 4, 2, 6), 2, 4  # 4, 2, 1 and 3 batches an epoch
COHORTS = [(0, 1, 2, 3), (0, 2), (1, 3), (0, 1, 3)]
IN_GROUPS = [(0, 1, 2, 3), (0, 2), (3, 0, 1, 2), (1, 0, 3)]
"""Cohorts in which several clients have taken the same number of local steps, and others more."""
MODES = ("restart", "continue", "total")


def warm_up(optimizer: Optimizer) -> LambdaLR:
    """Return the schedule of Hugging Face's examples: the rate rises from zero and then falls."""
    return LambdaLR(optimizer, lambda t: t / 3 if t < 3 else max(0.1, (20 - t) / 17))


def apart(optimizer: Optimizer) -> LambdaLR:
    """Return a schedule whose groups start with the same rate and have different ones later."""
    return LambdaLR(optimizer, [lambda t: 0.9**t, lambda t: 1.1**t])


SCHEDULES: dict[str, tuple[Callable[..., Optimizer], Callable[[Optimizer], Any]]] = {
    "warm-up": (partial(SGD, lr=0.2), warm_up),
    "cosine": (partial(SGD, lr=0.2, weight_decay=0.1), partial(CosineAnnealingLR, T_max=9)),
    "one cycle": (partial(SGD, lr=0.2, momentum=0.9), partial(OneCycleLR, max_lr=0.3, total_steps=60)),
    "adam": (partial(Adam, lr=0.1, betas=(0.8, 0.9)), partial(OneCycleLR, max_lr=0.2, total_steps=60)),
    "decay": (partial(SGD, lr=0.2), partial(ExponentialLR, gamma=0.95)),
    "groups": (partial(SGD, lr=0.2), apart),
}


class Regression(pl.LightningModule):
    """Least squares, with a schedule by local step."""

    def __init__(self, schedule: str = "warm-up", frequency: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)
        self.make, self.make_schedule = SCHEDULES[schedule]
        self.has_groups, self.frequency = schedule == "groups", frequency

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return (self.layer(x)[:, 0] - y).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        optimizer = self.make(groups_of(self.layer, self.has_groups))
        schedule = {"scheduler": self.make_schedule(optimizer), "interval": "step", "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def groups_of(layer: nn.Linear, apart: bool) -> Any:
    return [{"params": [layer.weight]}, {"params": [layer.bias]}] if apart else layer.parameters()


def clients() -> list[TensorDataset]:
    stream = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, generator=stream, dtype=torch.float64)
    return [TensorDataset(draw(n, 3), draw(n)) for n in SIZES]


def data() -> FederatedDataModule:
    return FederatedDataModule(clients=clients(), batch_size=BATCH, shuffle=False)


def drawn(seed: int, round: int) -> tuple[int, ...]:
    return COHORTS[round]


def run(mode: Any, schedule: str = "warm-up", frequency: int = 1, ckpt_path: Any = None, **options: Any) -> Any:
    options = {"local_epochs": 2, "max_rounds": ROUNDS, "sampler": drawn, "precision": "64-true"} | options
    fitted = trainer(local_schedule=mode, **options)
    fitted.fit(Regression(schedule, frequency), data(), ckpt_path=ckpt_path)
    return fitted


def plain_loop(
    mode: str, schedule: str, method: str = "FedAvg", frequency: int = 1, cohorts: Any = COHORTS, steps: int = 0
) -> Tensor:
    """Return the model of a plain loop in which every client has its own optimizer and schedule.

    Each client takes the given number of local steps, or two local epochs.
    """
    module, sets = Regression(schedule).double(), clients()
    x, total, own = parameters(module).clone(), 0, [0] * len(SIZES)
    c, c_of = torch.zeros_like(x), [torch.zeros_like(x) for _ in SIZES]
    for cohort in cohorts:
        models, longest, changes = [], 0, []
        for i in cohort:
            nn.utils.vector_to_parameters(x.clone(), module.parameters())
            optimizer = module.make(groups_of(module.layer, module.has_groups))
            scheduler = module.make_schedule(optimizer)
            first = {"restart": 0, "continue": own[i], "total": total}[mode]
            for t in range(first):
                if (t + 1) % frequency == 0:
                    scheduler.step()
            moved, rates, taken = torch.zeros_like(x), torch.zeros_like(x), 0
            epoch = torch.arange(SIZES[i]).split(BATCH)
            for rows in islice(cycle(epoch), steps or 2 * len(epoch)):
                optimizer.zero_grad()
                module.training_step(sets[i][rows], 0).backward()
                corrections = list(torch.split(c - c_of[i], [3, 1]))
                for p, correction in zip(module.parameters(), corrections, strict=True):
                    assert p.grad is not None
                    p.grad += correction.view_as(p) if method == "Scaffold" else 0.0
                group_rates = [float(group["lr"]) for group in optimizer.param_groups]
                rate = torch.tensor([group_rates[0]] * 3 + [group_rates[-1]], dtype=x.dtype)
                moved += rate * torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
                rates += rate
                optimizer.step()
                taken += 1
                if (first + taken) % frequency == 0:
                    scheduler.step()
            models.append((SIZES[i], parameters(module).clone()))
            longest, own[i] = max(longest, taken), own[i] + taken
            changes.append(moved / rates - c)
            c_of[i] = c_of[i] + changes[-1] if method == "Scaffold" else c_of[i]
        total += longest
        weights = [1.0 if method == "Scaffold" else float(n) for n, _ in models]
        x = sum(w * y for w, (_, y) in zip(weights, models, strict=True)) / sum(weights)  # type: ignore[assignment]
        if method == "Scaffold":
            c = c + sum(changes) / len(SIZES)
    return x


ALL = [(mode, schedule, "FedAvg") for schedule in SCHEDULES for mode in MODES]
ALL += [(mode, schedule, "Scaffold") for schedule in ("warm-up", "groups", "adam") for mode in MODES]
FEW = [("restart", "warm-up", "FedAvg"), ("continue", "one cycle", "FedAvg"), ("total", "groups", "Scaffold")]


@pytest.mark.parametrize("cases", [FEW, pytest.param(ALL, marks=pytest.mark.thorough)], ids=["few", "all"])
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*before")
def test_every_mode_matches_a_plain_loop(engine: Any, cases: list[tuple[str, str, str]]) -> None:
    for mode, schedule, method in cases:
        algorithm = Scaffold("ii") if method == "Scaffold" else FedAvg()
        found = run(mode, schedule, engine=engine, algorithm=algorithm).fit_loop.state.x
        told = f"{mode} {schedule} {method}"
        torch.testing.assert_close(found, plain_loop(mode, schedule, method), rtol=1e-12, atol=1e-13, msg=told)


CHUNKED = [("adam", "Scaffold"), pytest.param("cosine", "FedAvg", marks=pytest.mark.thorough)]


@pytest.mark.parametrize(("schedule", "method"), CHUNKED)
@pytest.mark.parametrize("chunk_size", [4, pytest.param(3, marks=pytest.mark.thorough)])
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*before")
def test_clients_at_the_same_schedule_step_train_together(
    schedule: str, method: str, chunk_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[tuple[int, int]] = []
    begin = ChunkWork.begin
    monkeypatch.setattr(
        ChunkWork, "begin", lambda work, at, step: (began.append((len(at), step)), begin(work, at, step))
    )
    cohorts = {"sampler": lambda seed, round: IN_GROUPS[round], "local_epochs": None, "local_steps": 3}
    algorithm = Scaffold("ii") if method == "Scaffold" else FedAvg()
    chunks = {"engine": "vectorized", "chunk_size": chunk_size}
    found = run("continue", schedule, algorithm=algorithm, **chunks, **cohorts).fit_loop.state.x
    expected = plain_loop("continue", schedule, method, cohorts=IN_GROUPS, steps=3)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    if chunk_size == 4:
        assert began == [(4, 0), (2, 3), (2, 3), (2, 6), (2, 6), (1, 9)]


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*before")
def test_schedule_may_step_every_few_local_steps() -> None:
    found = run("total", "cosine", frequency=3).fit_loop.state.x
    expected = plain_loop("total", "cosine", frequency=3)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    assert not torch.allclose(found, plain_loop("total", "cosine"), rtol=1e-3)


class Rates(FederatedCallback):
    """Records the optimizer's rate at each round's start, between clients and at its end, and saves checkpoints."""

    def __init__(self, folder: Path | None = None) -> None:
        self.at_start: list[float] = []
        self.between: list[tuple[int, float]] = []
        self.at_end: list[float] = []
        self.folder = folder

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.at_start.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
        self.between.append((trainer.fit_loop.round, trainer.optimizers[0].param_groups[0]["lr"]))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.at_end.append(trainer.optimizers[0].param_groups[0]["lr"])
        if self.folder is not None:
            trainer.save_checkpoint(self.folder / f"{trainer.fit_loop.round}.ckpt")


def state_of(fitted: Any) -> Any:
    return fitted.fit_loop.state.state_dict()


@pytest.mark.parametrize(
    ("mode", "schedule", "engine"),
    [
        ("continue", "adam", "vectorized"),
        pytest.param("continue", "adam", "sequential", marks=pytest.mark.thorough),
        ("total", "decay", "sequential"),  # computes each rate from the one before
        pytest.param("total", "adam", "vectorized", marks=pytest.mark.thorough),
        *(pytest.param(mode, "adam", "sequential", marks=pytest.mark.thorough) for mode in ("restart", "total")),
    ],
)
def test_resumed_or_refitted_run_has_identical_bits(mode: str, schedule: str, engine: Any, tmp_path: Path) -> None:
    options = {"engine": engine, "algorithm": Scaffold("ii"), "chunk_size": 3 if engine == "vectorized" else None}
    whole = run(mode, schedule, **options)
    part = run(mode, schedule, max_rounds=2, callbacks=[Rates(tmp_path)], **options)
    assert same(state_of(run(mode, schedule, ckpt_path=tmp_path / "2.ckpt", **options)), state_of(whole))
    part.save_checkpoint(tmp_path / "after.ckpt")
    assert same(state_of(run(mode, schedule, ckpt_path=tmp_path / "after.ckpt", **options)), state_of(whole))
    part.max_rounds = ROUNDS
    part.fit(part.lightning_module, data())
    assert same(state_of(part), state_of(whole))


@pytest.mark.thorough
def test_optimizer_has_rate_of_next_local_step_between_rounds() -> None:
    scale = [warm_up(SGD([nn.Parameter(torch.ones(1))], 1.0)).lr_lambdas[0](t) for t in range(31)]
    rates = {mode: Rates() for mode in MODES}
    for mode in MODES:
        run(mode, callbacks=[rates[mode]])
    assert rates["restart"].at_start == rates["continue"].at_start == [0.0] * ROUNDS
    # the longest clients of the rounds take 8, 8, 6 and 8 steps
    assert rates["total"].at_start == pytest.approx([0.2 * scale[t] for t in (0, 8, 16, 22)])
    assert rates["total"].at_end == pytest.approx([0.2 * scale[t] for t in (8, 16, 22, 30)])
    steps = Rates()
    run("total", callbacks=[steps], local_epochs=None, local_steps=5, engine="vectorized")
    assert steps.at_start == pytest.approx([0.2 * scale[t] for t in (0, 5, 10, 15)])
    for noted in (*rates.values(), steps):
        assert noted.between == [(r, noted.at_start[r]) for r, cohort in enumerate(COHORTS) for _ in cohort]


@pytest.mark.thorough
def test_each_client_counts_its_own_steps() -> None:
    counts = {i: int(kept["schedule.steps"]) for i, kept in run("continue").fit_loop.state.clients.state_dict().items()}
    assert counts == {0: 24, 1: 12, 2: 4, 3: 18}
    ditto = run("continue", algorithm=Ditto(0.5)).fit_loop
    assert {i: int(kept["schedule.steps"]) for i, kept in ditto.state.clients.state_dict().items()} == counts
    assert "schedule.steps" not in run("total").fit_loop.state.new_client()


def test_asynchronous_clients_start_at_the_step_of_their_model() -> None:
    rates = Rates()
    buffered = FedBuff(size=2, concurrency=3)
    run(
        "total",
        "cosine",
        callbacks=[rates],
        sampler=None,
        asynchronous=buffered,
        clients_per_round=None,
        local_epochs=None,
        local_steps=3,
    )
    schedule = CosineAnnealingLR(SGD([nn.Parameter(torch.ones(1))], 0.2), T_max=9)
    expected = []
    with warnings.catch_warnings(action="ignore"):
        for t in range(10):
            if t % 3 == 0:
                expected.append(schedule.get_last_lr()[0])
            schedule.step()
    assert rates.at_start == expected


@pytest.mark.thorough
@pytest.mark.parametrize(
    "algorithm",
    [
        FedProxVR(0.1),  # its constants depend on the rate
        FedCM(alpha=0.5),
        FedSpeed(lam=2.0, rho=0.1),
        FedAvg(pseudo_grad="normalized"),
    ],
    ids=lambda a: type(a).__name__,
)
@pytest.mark.parametrize(
    "schedule",
    ["warm-up", "groups", "adam"],
)
def test_engines_agree_for_methods_that_read_rates(algorithm: Algorithm, schedule: str) -> None:
    for mode in ("continue", "total"):
        one, two = (
            run(mode, schedule, engine=engine, algorithm=algorithm).fit_loop.state
            for engine in ("sequential", "vectorized")
        )
        torch.testing.assert_close(one.x, two.x, rtol=1e-12, atol=1e-13)
        for name, value in one.state.items():
            torch.testing.assert_close(value, two.state[name], rtol=1e-11, atol=1e-13)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "algorithm",
    [Scaffold("ii"), FedProxVR(1.0)],
    ids=lambda a: type(a).__name__,
)
def test_engines_agree_when_chunk_clients_start_at_zero_rate(algorithm: Algorithm) -> None:
    """In the last round, all three clients start at different steps with a rate of zero."""
    SCHEDULES["pause"] = partial(SGD, lr=0.2), lambda optimizer: LambdaLR(optimizer, lambda t: float(not 8 <= t < 24))
    one, two = (
        state_of(run("continue", "pause", engine=engine, algorithm=algorithm))
        for engine in ("sequential", "vectorized")
    )
    torch.testing.assert_close(one["step"]["x"], two["step"]["x"], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(one["state"], two["state"], rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(one["client_states"], two["client_states"], rtol=1e-11, atol=1e-13)


class FineTuned(FederatedCallback):
    """Measures a client's loss after a few steps from each round's model."""

    def __init__(self) -> None:
        self.found: list[tuple[Tensor, float]] = []

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        loss = trainer.fit_loop.evaluate_client(0, "train", steps=3)["val_loss"]
        self.found.append((trainer.fit_loop.state.x.clone(), loss))


@pytest.mark.parametrize("mode", MODES)
def test_fine_tuning_uses_new_client_schedule_and_keeps_the_run(mode: str) -> None:
    tuned, module, (rows, *_) = FineTuned(), Regression("warm-up").double(), clients()
    assert torch.equal(
        run(mode, callbacks=[tuned], max_rounds=2).fit_loop.state.x, run(mode, max_rounds=2).fit_loop.state.x
    )
    for (x, loss), first in zip(tuned.found, (8, 16) if mode == "total" else (0, 0), strict=True):
        nn.utils.vector_to_parameters(x, module.parameters())
        optimizer = SGD(module.parameters(), lr=1.0)
        scale = warm_up(optimizer).lr_lambdas[0]
        for k, at in enumerate(torch.arange(6).split(BATCH)):
            optimizer.param_groups[0]["lr"] = 0.2 * scale(first + k)
            optimizer.zero_grad()
            module.training_step(rows[at], 0).backward()
            optimizer.step()
        assert loss == pytest.approx(module.training_step(rows[torch.arange(7)], 0).item(), rel=1e-6)


TWO = [*((mode, "sequential") for mode in MODES), ("continue", "vectorized")]


def work_of_two() -> dict[tuple[str, str], Tensor]:
    two = {"strategy": "clients", "devices": 2, "num_nodes": 1}
    return {
        case: run(case[0], "adam", algorithm=Scaffold("ii"), engine=case[1], **two).fit_loop.state.x for case in TWO
    }


@pytest.mark.thorough
def test_two_processes_match_one(tmp_path: Path) -> None:
    first, second = in_processes(work_of_two, tmp_path)
    for part in (first, second):
        assert not part.error, part.trace
    for case in TWO:
        assert torch.equal(first.value[case], second.value[case])
        alone = run(case[0], "adam", algorithm=Scaffold("ii"), engine=case[1]).fit_loop.state.x
        torch.testing.assert_close(first.value[case], alone, rtol=1e-12, atol=1e-13)


class SetsRate(FederatedCallback):
    """Sets a rate for one client."""

    def on_client_start(self, trainer: Any, pl_module: Any, round: int, client_id: Any) -> None:
        if client_id == 2:
            trainer.optimizers[0].param_groups[0]["lr"] = 0.7


class SetsLastRate(Regression):
    """Sets a rate after the first step."""

    def optimizer_step(self, epoch: int, batch_idx: int, *args: Any) -> None:
        super().optimizer_step(epoch, batch_idx, *args)
        if batch_idx == 0:
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.7


class Logs(Regression):
    """Logs the rate of its step from the two sources that modules use: the schedule and the optimizer."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("told", self.lr_schedulers().get_last_lr()[0])
        self.log("used", self.trainer.optimizers[0].param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_module_reads_current_rate_from_its_schedule(engine: Any) -> None:
    fitted = trainer(local_schedule="total", engine=engine, local_epochs=2, sampler=drawn, precision="64-true")
    fitted.fit(Logs("cosine"), data())
    told, used = (float(fitted.callback_metrics[name]) for name in ("told", "used"))
    assert told == used < 0.19


class Updates(Regression):
    """Has a scheduler like timm's, which takes the number of steps."""

    reads = "global_step"

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        for group in scheduler.optimizer.param_groups:
            group["lr"] = scheduler.base_lrs[0] * scheduler.lr_lambdas[0](getattr(self, self.reads))


def test_schedule_reading_global_step_gets_its_own_step_count(tmp_path: Path) -> None:
    def own(**options: Any) -> Tensor:
        options = {"max_rounds": ROUNDS, "local_epochs": 2, "sampler": drawn, "precision": "64-true"} | options
        path = options.pop("ckpt_path", None)
        fitted = trainer(local_schedule="total", **options)
        fitted.fit(Updates(), data(), ckpt_path=path)
        return fitted.fit_loop.state.x

    found = own(callbacks=[Rates(tmp_path)])
    torch.testing.assert_close(found, run("total").fit_loop.state.x, rtol=1e-14, atol=0)
    assert torch.equal(own(ckpt_path=tmp_path / "2.ckpt"), found)
    Updates.reads = "current_epoch"
    try:
        with pytest.raises(FederatedError, match="lr_scheduler_step reads current_epoch.*Read global_step"):
            own()
    finally:
        Updates.reads = "global_step"


def test_zero_rate_clients_do_not_make_others_outliers() -> None:
    SCHEDULES["late"] = partial(SGD, lr=0.2), lambda optimizer: LambdaLR(optimizer, lambda t: float(t > 2))
    options = {"max_rounds": 1, "local_epochs": 1}  # only client 0 takes a fourth step
    found = run("restart", "late", max_update_ratio=10.0, **options).fit_loop.state.x
    assert torch.equal(found, run("restart", "late", max_update_ratio=None, **options).fit_loop.state.x)


class Decays(Regression):
    """Has a schedule that changes the weight decay."""

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()
        scheduler.optimizer.param_groups[0]["weight_decay"] += 0.1


def test_settings_conflicting_with_local_schedule_are_rejected() -> None:
    for mode in MODES:
        with pytest.raises(
            FederatedError, match=f"local_schedule='{mode}': a hook has set lr=0.7 in group 0.*LambdaLR"
        ):
            run(mode, callbacks=[SetsRate()])
    with pytest.raises(FederatedError, match="'total': a hook has set lr=0.7 in group 0"):
        trainer(local_schedule="total", local_steps=2, precision="64-true").fit(SetsLastRate(), data())
    SCHEDULES["short"] = partial(SGD, lr=0.2, momentum=0.9), partial(OneCycleLR, max_lr=0.3, total_steps=9)
    with pytest.raises(FederatedError, match="'total': OneCycleLR has no options for step 10.*those of all rounds"):
        run("total", "short")
    run("restart", "short")
    with pytest.raises(FederatedError, match="changes other options .* weight_decay from 0 to 0.1"):
        trainer(local_schedule="total").fit(Decays(), FederatedDataModule(clients=float_clients(), batch_size=2))


def float_clients() -> list[TensorDataset]:
    return [TensorDataset(*(tensor.float() for tensor in own.tensors)) for own in clients()]


def test_estimated_stepping_batches_gives_schedule_length() -> None:
    lengths = {
        mode: trainer(local_schedule=mode, local_steps=5, max_rounds=4).estimated_stepping_batches for mode in MODES
    }
    assert lengths == {"restart": 5, "continue": 20, "total": 20}
    assert trainer(local_schedule="total", local_steps=5, max_rounds=-1).estimated_stepping_batches == float("inf")
    with pytest.raises(FederatedError, match="local_epochs=2 does not tell.*Set local_steps instead"):
        _ = trainer(local_schedule="total", local_epochs=2).estimated_stepping_batches


class Multiplies(Regression):
    """Computes its schedule's length from the batches of an epoch, as modules of several libraries do."""

    def configure_optimizers(self) -> Any:
        self.length = self.trainer.num_training_batches * self.trainer.max_epochs
        found = super().configure_optimizers()
        return found if self.trainer.fit_loop.settings.local_schedule else found["optimizer"]


def test_module_may_compute_schedule_length_from_batch_count() -> None:
    for options, length in (
        ({"local_schedule": "total", "local_steps": 2, "accumulate_grad_batches": 2}, 8),
        ({"local_epochs": 1}, 2),
    ):
        module = Multiplies()
        trainer(max_rounds=2, **options).fit(module, FederatedDataModule(clients=float_clients(), batch_size=2))
        assert module.length == length
    with pytest.raises(FederatedError, match="num_training_batches.*local_epochs=2 does not tell"):
        trainer(local_schedule="total", local_epochs=2).fit(Multiplies(), data())


def test_checkpoint_without_step_counts_is_rejected(tmp_path: Path) -> None:
    run("total", max_rounds=2, callbacks=[Rates(tmp_path)])
    saved = torch.load(tmp_path / "2.ckpt", weights_only=True)
    del saved["loops"]["fit_loop"]["state_dict"]["longest_steps"]
    torch.save(saved, tmp_path / "old.ckpt")
    with pytest.raises(FederatedError, match="checkpoint is of an earlier version.*Set local_steps instead"):
        run("total", ckpt_path=tmp_path / "old.ckpt")
    with pytest.warns(UserWarning, match="was written with local_schedule='total'"):
        run("restart", ckpt_path=tmp_path / "old.ckpt")


def test_continue_mode_rejects_clients_without_step_counts(tmp_path: Path) -> None:
    run("total", max_rounds=2, callbacks=[Rates(tmp_path)])
    with pytest.raises(FederatedError, match="local_schedule='total', so its clients have not counted the steps"):
        run("continue", ckpt_path=tmp_path / "2.ckpt")
