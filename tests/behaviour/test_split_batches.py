"""All processes train each client: they split batches and sum gradients. All else is as in one process."""

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from pytorch_lightning.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedCallback, FederatedDataModule, FederatedError
from lightning_fed.algorithms import Adam as AdamDirection
from lightning_fed.algorithms import (
    FedCM,
    FedDane,
    FedDyn,
    FedProx,
    FedProxVR,
    FedSAM,
    Mime,
    MimeMVR,
    Scaffold,
    ServerOnly,
    Yogi,
)
from tests.helpers.processes import in_processes
from tests.helpers.selection import few
from tests.helpers.training import FEATURES, Net, clients, parameters, same, seeded, trainer

SIZES = (9, 8, 13, 5, 1, 6)  # with batches of 4, some clients' last batch has a single example


class Exact(Net):
    """Trains in float64 without dropout. Logs means, a mean of plain numbers and a greatest value."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(dropout=0.0, **kwargs)
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self(x)
        loss = F.cross_entropy(out, y)
        self.log_dict({"loss": loss, "accuracy": (out.argmax(1) == y).double().mean()})
        self.log("number", float(x.abs().mean()), batch_size=len(x))
        self.log("greatest", x.max(), reduce_fx="max")
        return loss


class Hooked(Exact):
    """Logs the norm of the gradient between backward and step."""

    def on_after_backward(self) -> None:
        self.log("gradient", torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm())


class WithAdam(Exact):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02, weight_decay=0.1)


class Gated(Exact):
    """Has a layer that few examples use, a layer that none uses, and buffers that every batch changes."""

    def __init__(self) -> None:
        super().__init__(momentum=0.9, weight_decay=0.1)
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.gate, self.unused = nn.Linear(FEATURES, 3).double(), nn.Linear(2, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        out, chosen = super().forward(x), x[:, 0] > 0.8
        if chosen.any():
            out = out.index_add(0, chosen.nonzero()[:, 0], self.gate(x[chosen]))
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches += 1
        self.mean.copy_(batch[0].mean())
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


class Dropping(Exact):
    """Logs the greatest and the least of the processes' random numbers at the start of a client's only epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.body[2].p = 0.5

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            drawn = torch.rand((), dtype=torch.float64)
            self.log("most", drawn, reduce_fx="max")
            self.log("least", drawn, reduce_fx="min")
        return super().training_step(batch, batch_idx)


def only_the_largest(seed: int, round: int) -> list[int]:
    return [2]


class Normed(Exact):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES).double()


class Half(Exact):
    """Trains in float32, for a gradient scaler."""

    def __init__(self) -> None:
        super().__init__()
        self.float()


class Scaled(MixedPrecision):
    """Float16 with a gradient scaler on a CPU. Its first steps overflow."""

    def __init__(self) -> None:
        super().__init__("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**24))

    def convert_input(self, data: Any) -> Any:
        return [data[0].float(), data[1]]


def _numbers(report: Any) -> list[Any]:
    loss = None if math.isnan(report.loss) else report.loss
    return [report.size, report.steps, loss, report.update_norm, dict(report.metrics)]


class Record(FederatedCallback):
    """Records the results of every round."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, Any]] = []

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        self.report = round_report

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        state, report = trainer.fit_loop.state, self.report
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.rounds.append(
            {
                "model": parameters(pl_module),
                "server": dict(state.state),
                "clients": state.clients.state_dict(),
                "buffers": dict(state.buffers),
                "metrics": {name: value for name, value in metrics.items() if "seconds" not in name},
                "reports": {i: _numbers(r) for i, r in report.clients.items()},
                "report": [report.update_norm, report.drift, report.bytes_up, report.bytes_down],
            }
        )


def federation(**kwargs: Any) -> FederatedDataModule:
    sets = [TensorDataset(s.tensors[0].double(), s.tensors[1]) for s in clients((*SIZES, 30))]
    return FederatedDataModule(clients=sets[:-1], val=sets[-1], batch_size=4, full_batch_size=5, **kwargs)


def noise(batch: list[Tensor], generator: torch.Generator) -> list[Tensor]:
    return [batch[0] + torch.randn(batch[0].shape, generator=generator, dtype=batch[0].dtype), batch[1]]


def run(
    module: type[Net] = Exact, augment: Any = None, save: Path | None = None, load: Path | None = None, **kwargs: Any
) -> list[dict[str, Any]]:
    """Fit and return the results of every round: four of six clients a round, three rounds."""
    record = Record()
    fitted = trainer(**{"clients_per_round": 4, "callbacks": record, "inference_mode": True, **kwargs})
    fitted.fit(seeded(module), federation(augment=augment), ckpt_path=load)
    if save is not None:
        fitted.save_checkpoint(save)
    return record.rounds


CLIP: Mapping[str, Any] = {"gradient_clip_val": 0.1, "algorithm": Scaffold()}
RUNS: Mapping[str, Callable[..., list[dict[str, Any]]]] = {
    "FedAvg": partial(run, local_epochs=2),
    "Scaffold": partial(run, algorithm=Scaffold()),
    "Scaffold, option i": partial(run, algorithm=Scaffold(option="i")),
    "Mime": partial(run, algorithm=Mime(base=AdamDirection())),
    "Mime with Yogi": partial(run, algorithm=Mime(base=Yogi(v0="grad")), accumulate_grad_batches=3),
    "Mime with weight decay": partial(run, module=WithAdam, algorithm=Mime(), accumulate_grad_batches=2),
    "FedDane": partial(run, algorithm=FedDane(mu=0.1)),
    "FedProx": partial(run, algorithm=FedProx(mu=0.1, adaptive=True)),
    "FedDyn": partial(run, algorithm=FedDyn(alpha=0.1)),
    "FedCM": partial(run, algorithm=FedCM(alpha=0.1)),
    "MimeMVR": partial(run, algorithm=MimeMVR(a=0.1)),
    "FedSAM": partial(run, algorithm=FedSAM(0.2), local_epochs=2),
    "FedProxVR": partial(run, algorithm=FedProxVR(0.1, "sarah")),
    "ServerOnly": partial(run, algorithm=ServerOnly(), local_epochs=None),
    "clipped by norm": partial(run, **CLIP),
    "clipped by value": partial(run, gradient_clip_algorithm="value", **CLIP),
    "clipped after the correction": partial(run, gradient_clip_on="corrected", **CLIP),
    "accumulated": partial(run, algorithm=Scaffold(), accumulate_grad_batches=2),
    "hooked and clipped": partial(run, module=Hooked, **CLIP),
    "Adam, kept": partial(run, module=WithAdam, local_optimizer_state="keep"),
    "augmented": partial(run, augment=noise, engine="auto"),
}
UNLIKE: Mapping[str, Callable[..., list[dict[str, Any]]]] = {
    "gated": partial(run, module=Gated),
    "dropping": partial(run, module=Dropping, sampler=only_the_largest, clients_per_round=None),
    "scaled": partial(run, module=Half, plugins=Scaled()),
}
FEW = ("Scaffold", "Mime with weight decay")
"""One of each kind. Kinds differ in whose gradients are summed, and when."""


class OneFails(Exact):
    """Fails in one process only: in training_step, without a loss, or after all steps of a client."""

    how = "raises"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        fails = self.global_rank == 1 and self.trainer.fit_loop.round == 1
        if fails and self.how == "raises":
            raise OverflowError("no such number")
        loss = super().training_step(batch, batch_idx)
        return None if fails and self.how == "returns nothing" else loss


class NoLoss(OneFails):
    how = "returns nothing"


class LateFailure(Record):
    """Fails in one process between two clients."""

    def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
        if trainer.global_rank == 0 and trainer.fit_loop.round == 1:
            raise OSError("no space left")


class Skipping(Exact):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.global_rank == 1 else None


FAILURES: Mapping[str, Callable[..., Any]] = {
    "raises": partial(run, module=OneFails),
    "raises before a gradient at x": partial(run, module=OneFails, algorithm=Mime()),
    "returns nothing": partial(run, module=NoLoss),
    "fails late": partial(run, callbacks=LateFailure()),
    "skips": partial(run, module=Skipping),
    "cannot be cut": partial(run, augment=lambda batch, generator: [*batch, torch.zeros(2, 17)]),
    "BatchNorm": partial(run, module=Normed),
    "vectorized": partial(run, engine="vectorized"),
}
ALL = {**RUNS, **UNLIKE}


def texts_of_failures() -> dict[str, str]:
    texts = {}
    for name, start in FAILURES.items():
        try:
            start(strategy="ddp", devices=2)
        except (FederatedError, OSError) as error:
            texts[name] = str(error)
    return texts


def work(folder: Path) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run everything in this process and another one, and return this one's results and errors."""
    results = {name: ALL[name](strategy="ddp", devices=2) for name in (*FEW, *UNLIKE)}
    results["again"] = RUNS["Scaffold"](strategy="ddp_find_unused_parameters_true", devices=2)
    resumed = partial(run, algorithm=Scaffold(), strategy="ddp", devices=2)
    results["from one"] = resumed(load=folder / "one.ckpt")
    resumed(max_rounds=2, save=folder / "two.ckpt")
    return results, texts_of_failures()


class Together(NamedTuple):
    """The results and errors of two processes, by rank."""

    results: list[dict[str, list[dict[str, Any]]]]
    errors: list[dict[str, str]]
    folder: Path


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Together:
    folder = tmp_path_factory.mktemp("ddp")
    run(algorithm=Scaffold(), max_rounds=2, save=folder / "one.ckpt")
    outcomes = in_processes(partial(work, folder), folder)
    for outcome in outcomes:
        assert not outcome.error, outcome.trace
    return Together([o.value[0] for o in outcomes], [o.value[1] for o in outcomes], folder)


@pytest.fixture(scope="module")
def of_others(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[dict[str, Any]]]]:
    """Return the results of two processes, by rank, in the runs that the default run leaves out."""
    others = [name for name in RUNS if name not in FEW]
    outcomes = in_processes(
        lambda: {name: RUNS[name](strategy="ddp", devices=2) for name in others}, tmp_path_factory.mktemp("ddp")
    )
    for outcome in outcomes:
        assert not outcome.error, outcome.trace
    return [outcome.value for outcome in outcomes]


def results_of(name: str, request: pytest.FixtureRequest) -> list[list[dict[str, Any]]]:
    """Return the results of a run, by rank."""
    is_default = name in (*FEW, *UNLIKE)
    found = request.getfixturevalue("together").results if is_default else request.getfixturevalue("of_others")
    return [results[name] for results in found]


def assert_close(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, Mapping):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_close(found[name], value, 1e-6 if name == "number" else tolerance)  # Lightning keeps it in float32
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            assert_close(*pair, tolerance)
    elif isinstance(expected, Tensor) and expected.is_floating_point():
        assert (found - expected).norm() <= tolerance * max(1e-2, expected.norm())
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=tolerance)
    else:
        assert same(found, expected)


@pytest.mark.parametrize("name", few(RUNS, FEW))
def test_two_processes_match_one(name: str, request: pytest.FixtureRequest) -> None:
    alone = RUNS[name]()
    assert len(alone) == 3
    assert_close(results_of(name, request)[0], alone)


@pytest.mark.parametrize("name", few([*RUNS, *UNLIKE], [*FEW, *UNLIKE]))
def test_all_processes_have_identical_bits(name: str, request: pytest.FixtureRequest) -> None:
    first, second = results_of(name, request)
    assert same(first, second)


def test_second_run_has_identical_bits(together: Together) -> None:
    assert same(together.results[0]["again"], together.results[0]["Scaffold"])


def test_run_resumes_with_a_different_number_of_processes(together: Together) -> None:
    alone = RUNS["Scaffold"]()
    assert_close(together.results[0]["from one"], alone[2:])
    assert_close(run(algorithm=Scaffold(), load=together.folder / "two.ckpt"), alone[2:])


def test_random_layers_draw_different_masks_in_each_process(together: Together) -> None:
    assert all(r["metrics"]["most"] == r["metrics"]["least"] for r in UNLIKE["dropping"]())
    assert all(r["metrics"]["most"] > r["metrics"]["least"] for r in together.results[0]["dropping"])


def test_gradient_scaler_skips_the_same_steps_in_all_processes(together: Together) -> None:
    alone, found = UNLIKE["scaled"](), together.results[0]["scaled"]
    assert [report[1] for report in found[0]["reports"].values()] == [r[1] for r in alone[0]["reports"].values()]
    assert_close(found[-1]["model"], alone[-1]["model"], tolerance=0.05)


def test_buffers_updated_by_batch_parts_are_averaged(together: Together) -> None:
    alone, found = UNLIKE["gated"](), together.results[0]["gated"]
    for one, two in zip(alone, found, strict=True):
        assert torch.equal(one["buffers"]["batches"], two["buffers"]["batches"])
        assert_close(two["model"], one["model"])
        assert 0 != two["buffers"]["mean"] != one["buffers"]["mean"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"failed in its local work in round 1, local step 1: OverflowError: no such number"),
        ("raises before a gradient at x", r"failed in its full-batch gradient in round 1: OverflowError"),
        ("returns nothing", "training_step returned None for a part of a batch.*strategy='clients'"),
        ("fails late", "no space left"),
        ("skips", "on_train_batch_start returned -1"),
        ("cannot be cut", r"A batch of . examples holds a tensor of shape \(2, 17\), which cannot be split"),
        ("vectorized", "engine='vectorized' cannot be combined with strategy='ddp' on 2 devices"),
        ("BatchNorm", r"norm \(BatchNorm1d\) normalises by the statistics of a batch.*Use GroupNorm"),
    ],
)
def test_error_in_one_process_ends_all(name: str, message: str, together: Together) -> None:
    for errors in together.errors:
        assert re.search(message, errors[name], flags=re.S)
