"""A failing client stops the run by name, or leaves the round as if it had not been drawn."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset
from torchmetrics import MeanMetric

from lightning_fed import ClientError, FederatedCallback, FederatedDataModule, FederatedError
from lightning_fed.algorithms import Algorithm, FedAvg, FedDane, FedDyn, FedProx, Mime, Scaffold, ServerOnly
from lightning_fed.callbacks import RunSummary
from lightning_fed.cli.main import main
from lightning_fed.rounds.failures import Faults
from lightning_fed.server import OptimalClientSampling
from tests.helpers import engines
from tests.helpers.command_line import one_stage
from tests.helpers.engines import Ordinary, Record, assert_close, assert_plain_agree, plain, results_of, state_of
from tests.helpers.processes import in_processes
from tests.helpers.selection import covering, few
from tests.helpers.training import FEATURES, Net, classification, same

SIZES = (13, 8, 21, 5, 16, 9)
BAD = 2
ENGINES = ("sequential", "vectorized")
DROP: dict[str, Any] = {"on_client_error": "drop", "max_failed_share": 0.9}
run = partial(engines.run, limit_val_batches=0)


# Clients that fail, each in its own way

# marks in an example's first feature, by the fault that they trigger
MARKS = {"inf loss": 101.0, "nan gradient": 102.0, "huge update": 103.0}


class Touchy(Ordinary):
    """A network whose training step fails on marked examples, using only tensor operations."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        marks = batch[0][:, 0]
        clean = torch.where(marks[:, None] > 100, torch.zeros_like(batch[0]), batch[0])
        loss = super().training_step([clean, batch[1]], batch_idx)
        weight = next(self.parameters()).square().sum()
        loss = loss + 0.0 * torch.sqrt(weight * (marks != 102).to(weight.dtype).min())
        loss = loss * torch.where((marks == 103).any(), 1e9, 1.0)
        return loss + torch.where((marks == 101).any(), math.inf, 0.0)


class Broken(Dataset):
    """Examples with a last one that cannot be read."""

    def __init__(self, examples: TensorDataset) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        if i == len(self) - 1:
            raise OSError("the disk is gone")
        return self.examples[i]


def with_invalid(examples: TensorDataset, cause: str) -> Dataset:
    """Return the examples of a client that fails for a cause."""
    x, y = examples.tensors
    x, y = x.clone(), y.clone()
    if cause in MARKS:
        x[:, 0] = MARKS[cause]
    elif cause == "nan loss":
        x[-1] = math.nan
    elif cause == "wrong shape":
        x = torch.cat([x, x], dim=1)
    elif cause == "wrong dtype":
        y = y.double()
    elif cause == "label out of range":
        y[-1] = 7
    elif cause == "loader raises":
        return Broken(examples)
    return TensorDataset(x, y)


class WithInvalid(FederatedDataModule):
    """Clients of :data:`SIZES`. Some of them fail."""

    def __init__(self, causes: Mapping[int, str], **kwargs: Any) -> None:
        clients = [with_invalid(classification(n, i), causes.get(i, "")) for i, n in enumerate(SIZES)]
        super().__init__(clients=clients, val=classification(20, 77), batch_size=4, **kwargs)


class OnDemand(FederatedDataModule):
    """The same clients, built lazily. Building the data of some of them fails."""

    def __init__(self, causes: Mapping[int, str]) -> None:
        super().__init__(val=classification(20, 77), batch_size=4)
        self.num_clients, self.causes = len(SIZES), causes

    def client_dataset(self, client_id: Any) -> Dataset:
        if self.causes.get(client_id) == "no data":
            raise FileNotFoundError("clients/2.csv")
        return with_invalid(classification(SIZES[client_id], client_id), self.causes.get(client_id, ""))


class EmptyBatches(FederatedDataModule):
    """The same clients, but one client's loader yields a batch without examples."""

    def __init__(self, bad: int) -> None:
        super().__init__(clients=[classification(n, i) for i, n in enumerate(SIZES)], val=classification(20, 77))
        self.bad = bad

    def client_size(self, client_id: Any) -> int:
        return SIZES[client_id]

    def client_dataloader(self, client_id: Any, generator: torch.Generator) -> Iterable[Any]:
        x, y = classification(SIZES[client_id], client_id).tensors
        return [[x[:0], y[:0]] if client_id == self.bad and k == 1 else [x[:4], y[:4]] for k in range(3)]


def made(cause: str, bad: int = BAD) -> Callable[[], FederatedDataModule]:
    """Return a factory of data modules in which a client fails for a cause."""
    if cause == "empty batch":
        return partial(EmptyBatches, bad)
    return partial(OnDemand if cause == "no data" else WithInvalid, {bad: cause})


CAUSES: dict[str, str] = {
    "nan loss": r"returned parameters that are not finite in round 0, after 6 local steps; its loss was first"
    r" nan at local step \d",
    "inf loss": r"returned a loss that is not finite in round 0, after 6 local steps; its loss was first inf at"
    r" local step 1",
    "nan gradient": "returned parameters that are not finite in round 0",
    "huge update": r"returned an update of norm \S+ in round 0, \S+ times the cohort's median",
    "loader raises": r"failed in .* in round 0, local step \d: OSError: the disk is gone",
    "wrong shape": r"failed in .* in round 0, local step 1: RuntimeError: ",
    "wrong dtype": r"failed in .* in round 0, local step 1: \w+Error: ",
    "label out of range": r"failed in .* in round 0, local step \d: (IndexError|RuntimeError): ",
    "empty batch": r"returned .* in round 0, .*; its loss was first nan at local step 2",
    "no data": "failed in the making of its data in round 0: FileNotFoundError: clients/2.csv",
}


class Without(list):
    """A cohort sampler that always draws these clients."""

    def __call__(self, seed: int, round: int) -> list[int]:
        return list(self)


ALL = Without(range(len(SIZES)))
REST = Without(i for i in range(len(SIZES)) if i != BAD)


def outcome(engine: str, cause: str, **options: Any) -> tuple[Any, Record]:
    """Run two rounds in which a client may fail."""
    record = Record()
    options = {"clients_per_round": None, "sampler": ALL, "max_rounds": 2, "local_epochs": 1, **options}
    callbacks = [record, *options.pop("callbacks", [])]
    make = Ordinary if cause == "empty batch" else Touchy
    return run(engine, options.pop("make", make), made(cause), callbacks=callbacks, **options), record


def sound(engine: str, cause: str, **options: Any) -> tuple[Any, Record]:
    """Run the same rounds without ever drawing the failing client."""
    return outcome(engine, cause, **{"sampler": REST, **options})


@cache
def never_drawn(engine: str, kind: str) -> tuple[Any, Record]:
    """Return the cached sound run, shared by all causes that do not change the other clients."""
    return sound(engine, kind)


def assert_left_no_trace(dropped: tuple[Any, Record], never: tuple[Any, Record], rtol: float = 1e-12) -> None:
    """Compare a run that dropped a client with one that never drew it."""
    assert_close(state_of(dropped[0]), state_of(never[0]), rtol)
    for one, other in zip(dropped[1].rounds, never[1].rounds, strict=True):
        a, b = plain(one), plain(other)
        assert (set(a.pop("failed")), set(b.pop("failed"))) == ({BAD}, set())
        assert BAD in a.pop("dropped")
        for name in ("dropped", "bytes_up", "bytes_down"):
            a.pop(name, None), b.pop(name, None)
        assert_plain_agree(a, b, rel=1e-6)
    algorithm, ended = dropped[0].fit_loop.settings.algorithm, [[], [BAD] * 2]
    if (
        algorithm.full_grad_at and algorithm.full_grad_readers(1) == "nobody"
    ):  # it fails before its work only in round 0
        ended.append([BAD])
    assert [i for what, i in dropped[1].order if what == "end" and i == BAD] in ended


# By default the run stops


@pytest.mark.parametrize(("cause", "engine"), covering([*CAUSES], ENGINES[::-1]))
def test_failing_client_stops_the_run(cause: str, engine: str) -> None:
    with pytest.raises(ClientError, match=CAUSES[cause]) as caught:
        outcome(engine, cause, chunk_size=1 if engine == "vectorized" else None)
    assert re.search(rf"^Client {BAD} ", str(caught.value))


def test_failing_client_in_a_chunk_is_identified() -> None:
    with pytest.raises(ClientError, match="^Client 2 failed in its local work in round 0, local step 1: RuntimeError"):
        outcome("vectorized", "wrong shape")


# With "drop" it leaves the round


@pytest.mark.parametrize(("cause", "engine"), covering([*CAUSES], ENGINES))
def test_dropped_client_does_not_affect_the_result(cause: str, engine: str) -> None:
    kind = cause if cause in ("empty batch", "no data") else "nan loss"
    assert_left_no_trace(outcome(engine, cause, **DROP), never_drawn(engine, kind))


METHODS: dict[str, Algorithm] = {
    "FedAvg by examples": FedAvg(),
    "Scaffold": Scaffold(),
    "Scaffold (i)": Scaffold(option="i"),
    "Scaffold (gradient)": Scaffold(initial="gradient"),
    "Mime": Mime(),
    "FedDane": FedDane(mu=0.1),
    "FedDyn": FedDyn(alpha=0.1),
}


FAILURES = ["sequential: nan gradient", "vectorized: huge update", "sequential: inf loss"]


@pytest.mark.parametrize(("method", "failure"), covering([*METHODS], FAILURES))
def test_dropped_client_does_not_affect_any_method(method: str, failure: str) -> None:
    engine, cause = failure.split(": ")
    options = {"algorithm": METHODS[method]}
    if method == "FedDane":
        dropped, never = (
            outcome(engine, cause, sampler=cohort, gradient_sampler=cohort, **options, **also)
            for cohort, also in ((ALL, DROP), (REST, {}))
        )
    else:
        dropped, never = outcome(engine, cause, **options, **DROP), sound(engine, cause, **options)
    assert_left_no_trace(dropped, never, 1e-9)


class Parts(FederatedDataModule):
    """Clients of equal size that are parts of one data set."""

    def __init__(self, cause: str) -> None:
        examples = classification(48, 0)
        x, y = examples.tensors
        rows = slice(8 * BAD, 8 * BAD + 8)
        x[rows], y[rows] = with_invalid(TensorDataset(x[rows], y[rows]), cause).tensors
        cut = lambda labels: [torch.arange(8 * i, 8 * i + 8) for i in range(6)]  # noqa: E731
        super().__init__(train=examples, partition=cut, val=classification(20, 77), batch_size=4)


@pytest.mark.parametrize(
    ("method", "cause"),
    covering(["FedAvg by examples", "Mime", "Scaffold (i)"], ["label out of range", "nan gradient"]),
)
def test_dropped_client_does_not_affect_shared_dataset_runs(method: str, cause: str) -> None:
    chunk_size = {"FedAvg by examples": 4, "Mime": None, "Scaffold (i)": 1}[method]
    options = {"algorithm": METHODS[method], "chunk_size": chunk_size, "clients_per_round": None, "max_rounds": 2}
    one, other = (
        run("vectorized", Touchy, lambda: Parts(cause), sampler=who, **options, **also)
        for who, also in ((ALL, DROP), (REST, {}))
    )
    assert_close(state_of(one), state_of(other), 1e-9)


@pytest.mark.thorough
def test_failed_client_has_no_weight_and_others_sum_to_one() -> None:
    for weighting in ("examples", "uniform"):
        _, record = outcome("sequential", "loader raises", weighting=weighting, **DROP)
        raw = {i: n if weighting == "examples" else 1 for i, n in enumerate(SIZES) if i != BAD}
        assert record.rounds[0].weights == pytest.approx({i: w / sum(raw.values()) for i, w in raw.items()})


@pytest.mark.parametrize(
    ("cause", "options"),
    covering(
        ["loader raises", "nan gradient", "huge update"],
        [{"local_optimizer_state": "keep"}, {"algorithm": Scaffold()}, {"buffers": "local"}],
    ),
)
def test_kept_state_of_failed_client_is_unchanged(cause: str, options: dict[str, Any]) -> None:
    class OnceBad(WithInvalid):
        def client_batches(self, client_id: Any) -> Any:
            return (self if self.trainer.fit_loop.round == 1 else good).client_batches_of(client_id)

        def client_batches_of(self, client_id: Any) -> Any:
            return super().client_batches(client_id)

    good = OnceBad({}, drop_last=True)
    kept: list[Any] = []

    class Watch(FederatedCallback):
        def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
            state = trainer.fit_loop.state.clients.get(BAD)
            kept.append({} if state is None else {name: value.clone() for name, value in state.items()})

    def make() -> Ordinary:
        model = Touchy(partial(torch.optim.SGD, lr=0.1, momentum=0.9))
        model.norm = torch.nn.BatchNorm1d(FEATURES)
        model.body.insert(0, model.norm)
        return model

    options = {**DROP, **options, "sampler": ALL, "clients_per_round": None, "max_rounds": 3, "callbacks": [Watch()]}
    run("sequential", make, lambda: OnceBad({BAD: cause}, drop_last=True), **options)
    assert kept[0], "it keeps something"
    assert same(kept[0], kept[1])
    assert not same(kept[1], kept[2])


@pytest.mark.thorough
def test_traffic_counts_only_sent_messages() -> None:
    size = sum(p.numel() * p.element_size() for p in Touchy().double().parameters())
    for cause, sent in (("loader raises", 5), ("nan loss", 5), ("huge update", 6)):
        _, record = outcome("sequential", cause, **DROP)
        assert record.rounds[0].bytes_down == 6 * size, cause
        assert record.rounds[0].bytes_up == sent * size, cause
    _, record = outcome("sequential", "huge update", aggregator=OptimalClientSampling(6), **DROP)
    assert record.rounds[0].bytes_up == 5 * size + 6 * 8, "it is refused for its norm, and does not send"
    assert record.rounds[0].bytes_down == 6 * size + 6 * 8


class LogsAll(Touchy):
    """Logs in every way, before it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        for reduce_fx in ("mean", "sum", "min", "max"):
            self.log(f"{reduce_fx} of labels", batch[1].double().max(), reduce_fx=reduce_fx)
        self.log("number", float(batch[1].sum()))
        self.metric(batch[1].double())
        self.log("metric", self.metric)
        if len(batch[0]) == 4 and batch_idx == 2:
            self.log("rare", batch[1].double().sum())
        return super().training_step(batch, batch_idx)


@pytest.mark.thorough
@pytest.mark.parametrize("cause", ["inf loss", "loader raises", "huge update"])
def test_values_logged_by_failed_client_are_discarded(cause: str) -> None:
    one, other = (run_of("sequential", cause, make=LogsAll)[0] for run_of in (partial(outcome, **DROP), sound))
    names = {name for name in one.callback_metrics if "/" not in name}
    assert {"mean of labels", "max of labels", "metric", "rare", "number", "train_loss"} <= names
    for name in names:
        assert float(one.callback_metrics[name]) == pytest.approx(float(other.callback_metrics[name])), name


# Counted, logged, warned of, and shown


@pytest.mark.parametrize("engine", ENGINES)
def test_failures_are_counted_logged_and_warned_about_once(engine: str, capsys: Any, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="OSError") as warnings:
        trainer, record = outcome(engine, "loader raises", callbacks=[RunSummary()], **DROP)
    texts = [str(w.message) for w in warnings if "OSError" in str(w.message)]
    assert len(texts) == 1
    assert re.search(r"^Client 2 failed .* round 0, local step \d: OSError: the disk is gone\. It has left", texts[0])
    assert float(trainer.callback_metrics["round/failed"]) == 1
    assert float(trainer.callback_metrics["round/dropped"]) == 1
    assert [list(r.failed) for r in record.rounds] == [[2], [2]]
    assert re.search("clients failed +1, 2 times in all: 2 in 2", capsys.readouterr().out)


def test_run_without_failures_reports_none(capsys: Any) -> None:
    trainer, record = sound("sequential", "", callbacks=[RunSummary()])
    assert "round/failed" not in trainer.callback_metrics
    assert "failed" not in capsys.readouterr().out
    assert record.rounds[0].failed == {}


# The limit


def spoil(*clients: int, cause: str = "loader raises") -> Callable[[], FederatedDataModule]:
    return lambda: WithInvalid(dict.fromkeys(clients, cause))


@pytest.mark.parametrize("engine", few(ENGINES, ["sequential"]))
def test_too_many_failures_end_the_run(engine: str) -> None:
    options = {"sampler": ALL, "clients_per_round": None, "on_client_error": "drop"}
    run(engine, Touchy, spoil(0, 2, 5), **options)
    with pytest.raises(ClientError, match="4 of 6 clients failed in round 0, more than max_failed_share=0.5") as caught:
        run(engine, Touchy, spoil(0, 2, 3, 5), **options)
    assert len(re.findall(r"\n- Client \d failed .*OSError: the disk is gone", str(caught.value))) == 4
    run(engine, Touchy, spoil(0, 2, 3, 5), max_failed_share=0.7, **options)


@pytest.mark.parametrize("cause", ["loader raises", "nan loss"])
@pytest.mark.parametrize("engine", ENGINES)
def test_run_always_ends_when_whole_cohort_fails(engine: str, cause: str) -> None:
    options = {**DROP, "max_failed_share": 1.0, "sampler": ALL, "clients_per_round": None}
    with pytest.raises(ClientError, match="6 of 6 clients failed in round 0:"):
        run(engine, Touchy, spoil(*range(6), cause=cause), **options)


def test_trial_step_skips_failing_clients() -> None:
    options = {**DROP, "sampler": ALL, "clients_per_round": None}
    run("vectorized", Touchy, spoil(0, 1, 2, cause="wrong shape"), **options)
    with pytest.raises(ClientError, match="Client 0 failed in a trial step in round 0: RuntimeError"):
        run("vectorized", Touchy, spoil(*range(6), cause="wrong shape"), **options)


def test_user_code_error_ends_the_run_with_original_traceback() -> None:
    class Wrong(Ordinary):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.hed(batch[0]).sum()

    with pytest.raises(ClientError, match="4 of 4 clients failed .*") as caught:
        run("sequential", Wrong, on_client_error="drop")
    cause: BaseException = caught.value
    while cause.__cause__ is not None:
        cause = cause.__cause__
    assert isinstance(cause, AttributeError)
    assert "hed" in str(cause)


def test_run_ends_when_whole_gradient_cohort_fails() -> None:
    options = {"sampler": REST, "gradient_sampler": Without([BAD]), "algorithm": FedDane(mu=0.1)}
    with pytest.raises(ClientError, match="1 of 1 clients failed in round 0:"):
        outcome("sequential", "loader raises", **options, **DROP)


# Errors that no client causes are not dropped


class Fails(FederatedCallback):
    """Fails the first time that a hook is called."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.fail)
        self.has_failed = False

    def fail(self, *_: Any) -> None:
        if not self.has_failed:
            self.has_failed = True
            raise ZeroDivisionError("in a callback")


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end", "on_after_backward"])
def test_callback_errors_stop_the_run(hook: str) -> None:
    with pytest.raises(ClientError, match="in round 0, .*ZeroDivisionError: in a callback"):
        outcome("sequential", "", callbacks=[Fails(hook)], **DROP)


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError, FederatedError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("engine", ENGINES)
def test_errors_not_caused_by_a_client_stop_the_run(engine: str, error: type[BaseException]) -> None:
    class Data(Broken):
        def __getitem__(self, i: int) -> Any:
            raise error("not the client's")

    clients = [classification(n, i) if i != BAD else Data(classification(n, i)) for i, n in enumerate(SIZES)]
    with pytest.raises((Exception, SystemExit)) as caught:
        run(
            engine,
            Touchy,
            lambda: FederatedDataModule(clients, batch_size=4),
            sampler=ALL,
            clients_per_round=None,
            **DROP,
        )
    if issubclass(error, Exception):
        assert isinstance(caught.value, ClientError)
        assert f"{error.__name__}: not the client's" in str(caught.value)
    else:
        assert isinstance(caught.value, SystemExit)  # Lightning turns an interrupt into one


def test_non_vectorizable_module_is_rejected_when_dropping() -> None:
    class Reads(Ordinary):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss if float(loss.detach()) < 1e9 else 2 * loss

    with pytest.raises(FederatedError, match="engine='vectorized' cannot take Reads") as caught:
        outcome("vectorized", "", make=Reads, **DROP)
    assert not isinstance(caught.value, ClientError)


def test_ddp_rejects_dropping_clients(tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match="on_client_error='drop' cannot be combined with strategy='ddp'"):
        run("sequential", strategy="ddp", devices=2, **DROP)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_client_error": "ignore"}, r"on_client_error='ignore'\): on_client_error must be 'raise' or 'drop'"),
        (
            {"on_client_error": "drop", "max_failed_share": 0},
            r"max_failed_share=0\): max_failed_share must be a finite number in \(0, 1\]",
        ),
        ({"on_client_error": "drop", "max_failed_share": 1.5}, r"max_failed_share must be a finite number in \(0, 1\]"),
        (
            {"on_client_error": "drop", "max_failed_share": math.nan},
            r"max_failed_share must be a finite number in \(0, 1\]",
        ),
        ({"max_failed_share": 0.2}, "is of no use to on_client_error='raise'"),
        ({"max_update_ratio": 1}, r"max_update_ratio=1\): max_update_ratio must be a finite number in \(1, inf\)"),
        ({"max_update_ratio": math.nan}, r"max_update_ratio must be a finite number in \(1, inf\)"),
        ({"max_update_ratio": True}, r"max_update_ratio must be a finite number in \(1, inf\)"),
    ],
)
def test_invalid_settings_are_rejected_immediately(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        run("sequential", **options)


@pytest.mark.thorough
def test_failing_batch_does_not_disable_traces() -> None:
    for cause in ("wrong shape", "label out of range"):
        trainer, _ = outcome("vectorized", cause, **DROP)
        assert trainer.fit_loop.clients.engine.step.traces.allowed, cause


# Disproportionate updates


def test_max_update_ratio_can_be_set_or_disabled() -> None:
    outcome("sequential", "huge update", max_update_ratio=None)
    outcome("sequential", "huge update", max_update_ratio=math.inf)
    with pytest.raises(ClientError, match="max_update_ratio=1.01 allows less"):
        sound("sequential", "", max_update_ratio=1.01)


def test_huge_gradient_of_one_client_is_dropped() -> None:
    for engine in ENGINES:
        options = {"algorithm": ServerOnly(), "local_epochs": None}
        assert_left_no_trace(outcome(engine, "huge update", **options, **DROP), sound(engine, "", **options))


def test_updates_of_rounding_size_cause_no_outliers() -> None:
    def clients() -> FederatedDataModule:
        return FederatedDataModule([TensorDataset(torch.zeros(4, FEATURES), torch.zeros(4).long())] * 3, batch_size=4)

    class Tiny(Ordinary):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            scale = 1.0 if self.trainer.fit_loop.round % 2 else 1e-30
            return super().training_step(batch, batch_idx) * scale

    run("sequential", Tiny, clients, clients_per_round=3)


class Hinge(pl.LightningModule):
    """A linear classifier in float64 whose loss and gradient vanish when all margins are above 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(FEATURES, 1, bias=False, dtype=torch.float64)
        torch.nn.init.constant_(self.layer.weight, 0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return (1 - y * self.layer(x).squeeze(1)).clamp(min=0).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", [{}, {"on_client_error": "drop"}], ids=["raise", "drop"])
@pytest.mark.parametrize("decay", [0.0, 1e-15])
def test_learning_client_is_not_an_outlier_among_converged_ones(
    decay: float, options: dict[str, Any], engine: str
) -> None:
    class Decays(Hinge):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # leaves converged clients rounding errors
            return super().training_step(batch, batch_idx) + decay * self.layer.weight.square().sum()

    def clients() -> FederatedDataModule:
        x, y = torch.ones(4, FEATURES, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
        return FederatedDataModule([TensorDataset(x, y), TensorDataset(x, y), TensorDataset(0.1 * x, y)], batch_size=4)

    record, model = Record(), Decays()
    run(engine, lambda: model, clients, clients_per_round=3, max_rounds=3, callbacks=[record], **options)
    assert [report.failed for report in record.rounds] == [{}] * 3
    assert all(report.clients[2].update_norm > 1e-3 for report in record.rounds)


def test_update_beyond_float32_rounding_is_an_outlier() -> None:
    x = torch.ones(4, dtype=torch.float64)  # its norm is 2, so 2.4e-7 may be rounding
    with pytest.raises(
        ClientError, match="an update of norm 0.3 in round 0, 1.26e.06 times the 2.38e-07 that may be rounding"
    ):
        Faults(max_ratio=1e6).add_outliers({0: 0.0, 1: 0.2, 2: 0.3, 3: 0.0, 4: 1e-16}, "an update", x)
    assert Faults(max_ratio=1e6).add_outliers({0: 0.0, 1: 0.2, 2: 0.0}, "an update", x) == set()


# The population's loss


@pytest.mark.parametrize(("engine", "cause"), [("sequential", "nan loss"), ("vectorized", "label out of range")])
def test_population_loss_excludes_failing_clients(engine: str, cause: str) -> None:
    options = {"algorithm": FedProx(mu=0.1, adaptive=True)}
    with pytest.raises(ClientError, match="Client 2 .* in the population's loss in round 0"):
        sound(engine, cause, **options)
    _, record = sound(engine, cause, **options, **DROP)
    assert [list(r.failed) for r in record.rounds] == [[BAD]] * 2
    assert all(BAD not in r.cohort and BAD not in r.dropped for r in record.rounds)
    outcome(engine, cause, **options, **DROP)


# Resuming, several processes, and random combinations


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("engine", "cause"),
    [("sequential", "huge update"), ("vectorized", "wrong shape")],
)
def test_run_resumed_after_a_failure_has_identical_bits(engine: str, cause: str, tmp_path: Path) -> None:
    options = {**DROP, "algorithm": Scaffold(), "precision": "32-true"}
    whole, _ = outcome(engine, cause, max_rounds=4, **options)
    saves = ModelCheckpoint(tmp_path, every_n_epochs=2, save_top_k=-1, filename="{epoch}")
    outcome(engine, cause, enable_checkpointing=True, callbacks=[saves], **options)
    path = next(tmp_path.glob("*.ckpt"))
    resumed, _ = outcome(engine, cause, max_rounds=4, ckpt_path=path, **options)
    assert same(state_of(whole), state_of(resumed))


def test_summary_failure_counts_are_restored(tmp_path: Path) -> None:
    trainer: Any = SimpleNamespace(checkpoint_callbacks=[])
    module: Any = None
    first: Any = SimpleNamespace(failed={2: "cause", "bob": "cause"})
    second: Any = SimpleNamespace(failed={2: "cause"})
    summary = RunSummary()
    summary.on_round_end(trainer, module, first)
    torch.save(summary.state_dict(), tmp_path / "state")
    later = RunSummary()
    later.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    later.on_round_end(trainer, module, second)
    assert later._failures() == [("clients failed", "2, 3 times in all: 2 in 2, 'bob' in 1")]


PARALLEL = [
    *(("FedAvg", engine, cause) for engine in ENGINES for cause in ("loader raises", "huge update", "no data")),
    *((method, "sequential", cause) for method in ("Scaffold", "Mime") for cause in ("nan gradient", "huge update")),
]


FEW_PARALLEL = [
    *(("FedAvg", "sequential", "loader raises"), ("FedAvg", "sequential", "no data")),
    *(("FedAvg", "vectorized", "huge update"), ("Scaffold", "sequential", "huge update")),
    ("Mime", "sequential", "nan gradient"),
]


def ends(runs: Sequence[tuple[str, str, str]], **also: Any) -> list[dict[str, Any]]:
    found = []
    for method, engine, cause in runs:
        algorithm = METHODS.get(method, FedAvg())
        trainer, record = outcome(engine, cause, algorithm=algorithm, **DROP, **also)
        found.append(results_of(trainer, record))
    try:
        run(
            "sequential", Touchy, spoil(0, 2, 3, 5), sampler=ALL, clients_per_round=None, on_client_error="drop", **also
        )
    except ClientError as error:
        found.append({"error": str(error)})
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("runs", [FEW_PARALLEL, PARALLEL], ids=len)
def test_two_processes_match_one(runs: Sequence[tuple[str, str, str]], tmp_path: Path) -> None:
    alone = ends(runs)
    for process in in_processes(partial(ends, runs, strategy="clients", devices=2), tmp_path):
        assert not process.error, process.trace
        assert process.value[-1] == alone[-1]
        assert "4 of 6 clients failed" in alone[-1]["error"]
        for one, other in zip(alone[:-1], process.value[:-1], strict=True):
            assert_close(one["state"], other["state"], 1e-9)
            assert_plain_agree(one["metrics"], other["metrics"])
            assert_plain_agree(one["rounds"], other["rounds"])


@settings(max_examples=settings().max_examples // 6)
@given(
    bad=st.dictionaries(st.integers(0, 5), st.sampled_from(sorted(set(CAUSES) - {"empty batch"})), max_size=3),
    cohort=st.lists(st.integers(0, 5), min_size=4, max_size=6, unique=True),
    method=st.sampled_from(sorted(METHODS)),
    weighting=st.sampled_from([None, "uniform", "examples"]),
    engine=st.sampled_from(ENGINES),
)
def test_dropping_failed_clients_matches_never_sampling_them(
    bad: dict[int, str], cohort: list[int], method: str, weighting: str | None, engine: str
) -> None:
    good = [i for i in cohort if i not in bad]
    if 2 * len(good) <= len(cohort):
        return  # without a majority of good clients, the median means nothing
    if weighting is not None and "weighting" not in METHODS[method].reduces.values():
        weighting = None
    options = {"algorithm": METHODS[method], "weighting": weighting, "max_rounds": 2, "clients_per_round": None}
    one, other = (
        run(
            engine,
            Touchy,
            lambda: OnDemand(bad),
            sampler=Without(who),
            **({"gradient_sampler": Without(who)} if method == "FedDane" else {}),
            **options,
            **also,
        )
        for who, also in ((cohort, DROP), (good, {}))
    )
    assert_close(state_of(one), state_of(other), 1e-9)


# The command line


class Misspelt(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.forwards(batch[0]), batch[1])


def test_command_line_shows_user_traceback_and_one_line_error(capsys: Any) -> None:
    words = ["fit", "--model", f"{__name__}.Misspelt", "--data", f"{__name__}.WithInvalid", "--data.causes", "{}"]
    words += ["--trainer.max_rounds", "1", "--trainer.local_epochs", "1", "--trainer.accelerator", "cpu"]
    words += [f"--trainer.{what}=false" for what in ("logger", "enable_checkpointing", "enable_progress_bar")]
    message = "^lightning-fed: Client 0 failed in its local work in round 0, local step 1"
    with one_stage("fit"), pytest.raises(SystemExit, match=message):
        main(words)
    shown = capsys.readouterr().err
    trace = shown[shown.index("Traceback") :]
    assert trace.startswith("Traceback (from the user's own code on):")
    assert re.search(r'test_bad_clients.py", line \d+, in training_step\n', trace.splitlines(keepends=True)[1])
    assert trace.splitlines()[-1].startswith("AttributeError: 'Misspelt' object has no attribute 'forwards'")
    with one_stage("fit"), pytest.raises(SystemExit, match="6 of 6 clients failed in round 0:"):
        main([*words, "--trainer.on_client_error", "drop", "--trainer.max_failed_share", "0.3"])
    assert "in training_step" in capsys.readouterr().err
