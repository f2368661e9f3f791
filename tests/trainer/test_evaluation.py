"""Two processes that share the batches of an evaluation get the results of one."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_fed import FederatedCallback
from tests.helpers.processes import in_processes
from tests.helpers.selection import few
from tests.helpers.training import CLASSES, Net, classification, data, parameters, seeded, trainer


class Logs(Net):
    """Logs in every way that an evaluation step can."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.seen: list[int] = []

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        x, y = batch
        self.seen.append(batch_idx)
        losses = F.cross_entropy(self(x), y, reduction="none")
        loss = losses.mean()
        self.log("mean", loss)
        self.log("synced", loss, sync_dist=True)
        self.log("weighted", loss, batch_size=0.5 + batch_idx)
        self.log("sum", losses.sum(), reduce_fx="sum")
        self.log("synced_sum", losses.sum(), reduce_fx="sum", sync_dist=True)
        self.log("max", losses.max(), reduce_fx=torch.max)
        self.log("min", losses.min(), reduce_fx="min", prog_bar=True)
        self.log("both", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log_dict({"one": loss, "two": 2 * loss}, batch_size=len(x))
        if batch_idx == 0:
            self.log("first", loss)
        if batch_idx == 1:
            self.log("second", loss.double())
        return loss

    test_step = validation_step


class Counts(Logs):
    """Logs metric objects."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.total = MulticlassAccuracy(CLASSES), SumMetric()

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        self.seen.append(batch_idx)
        self.accuracy(self(x), y)
        self.total(float(len(x)))
        if batch_idx % 2:  # the order of keys differs between processes
            self.log("accuracy", self.accuracy)
        self.log("total", self.total)
        self.log("mean", self.accuracy.compute() * 0)
        if not batch_idx % 2:
            self.log("accuracy", self.accuracy)

    test_step = validation_step


class AtTheEnd(Logs):
    """Combines the outputs of all batches itself."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.total = SumMetric()

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.total.update(float(len(batch[0])))
        self.outputs.append(super().validation_step(batch, batch_idx, dataloader_idx))

    def on_validation_epoch_end(self) -> None:
        self.log("largest", torch.stack(self.outputs).max(), sync_dist=True, reduce_fx="sum")
        self.log("examples", self.total.compute())
        self.total.reset()
        self.outputs.clear()


class SyncsEveryStep(Logs):
    """Has a metric that synchronizes processes in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.average = MeanMetric(dist_sync_on_step=True)

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(batch_idx)
        self.log("average", self.average(F.cross_entropy(self(batch[0]), batch[1])))


class SeesOutputs(FederatedCallback):
    def __init__(self) -> None:
        self.outputs: list[float] = []

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.outputs.append(float(outputs))


class OfOneClient(FederatedCallback):
    """Evaluates a client in one process, while the others continue."""

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        loop = trainer.fit_loop
        value = loop.evaluate_client(2, on="train") if trainer.is_global_zero else {}
        (found, *_) = loop.gather(value)
        loop.log_round({f"one/{name}": value for name, value in found.items()})


ODD, EVEN, ONE = classification(37, 5), classification(46, 6), classification(7, 7)


def fit(module: Callable[[], Logs], val: Any, **options: Any) -> dict[str, Any]:
    """Return the results of the last round, and the batches that this process saw."""
    t, model = trainer(max_rounds=2, num_sanity_val_steps=2, **options), seeded(module)
    t.fit(model, data(val=val, eval_batch_size=8))
    return {**found(t), "batches": sorted(set(model.seen))}


def found(t: Any) -> dict[str, Any]:
    families = ("round/", "client/")
    return {k: float(v) for k, v in t.callback_metrics.items() if not k.startswith(families)}


def evaluate(how: str, module: Callable[[], Logs], **options: Any) -> dict[str, Any]:
    t, model = trainer(**options), seeded(module)
    (first, *rest) = getattr(t, how)(model, data(val=ODD, test=[EVEN, ODD], eval_batch_size=8), verbose=False)
    return {**first, **{k: v for part in rest for k, v in part.items()}, "batches": sorted(set(model.seen))}


def loader(n: int) -> DataLoader[Any]:
    return DataLoader(classification(n, 8), batch_size=8)


SHARED: dict[str, Callable[..., dict[str, Any]]] = {
    "an odd number of batches": partial(fit, Logs, ODD),
    "an even number of batches": partial(fit, Logs, EVEN),
    "several sets": partial(fit, Logs, [ODD, EVEN]),
    "a limit": partial(fit, Logs, EVEN, limit_val_batches=3),
    "a share as the limit": partial(fit, Logs, EVEN, limit_val_batches=0.7),
    "doubles": partial(fit, Logs, ODD, precision="64-true"),
    "metric objects": partial(fit, Counts, ODD),
    "validate": partial(evaluate, "validate", Logs),
    "test": partial(evaluate, "test", Logs),
    "metric objects that would meet in every step": partial(fit, SyncsEveryStep, ODD),
    "test of metric objects": partial(evaluate, "test", Counts),
}
WHOLE: dict[str, Callable[..., dict[str, Any]]] = {
    "a single batch": partial(fit, Logs, ONE),
    "a set and a single batch": partial(fit, Logs, [ODD, ONE]),
    "a loader of the user's own": partial(fit, Logs, loader(37)),
    "metric objects over a loader of the user's own": partial(fit, Counts, loader(37)),
    "one client": lambda **options: fit(Logs, ONE, callbacks=OfOneClient(), **options),
    "metric objects of one client": lambda **options: fit(Counts, ONE, callbacks=OfOneClient(), **options),
    "a hook that sees all outputs": partial(fit, AtTheEnd, ODD),
    "a callback that sees all outputs": lambda **options: fit(Logs, ODD, callbacks=SeesOutputs(), **options),
}
TWO: dict[str, Any] = {"strategy": "clients", "devices": 2}


CASES = {**SHARED, **WHOLE}
THOROUGH = (
    *("an even number of batches", "a limit", "a share as the limit", "doubles", "validate", "test of metric objects"),
    *(
        "a single batch",
        "several sets",
        "a callback that sees all outputs",
        "metric objects over a loader of the user's own",
        "metric objects of one client",
    ),
)
FEW = [name for name in CASES if name not in THOROUGH]


def found_in_two(names: Sequence[str], folder: Path) -> list[dict[str, dict[str, Any]]]:
    """Return the results of each of two processes."""
    outcomes = in_processes(lambda: {name: CASES[name](**TWO) for name in names}, folder)
    for outcome in outcomes:
        assert not outcome.error, outcome.trace
    return [outcome.value for outcome in outcomes]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return found_in_two(FEW, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def of_others(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return found_in_two(THOROUGH, tmp_path_factory.mktemp("others"))


@pytest.mark.thorough  # two processes take eight seconds
@pytest.mark.parametrize("name", few(CASES, FEW))
def test_two_processes_match_one(name: str, request: pytest.FixtureRequest) -> None:
    together = request.getfixturevalue("together" if name in FEW else "of_others")
    alone = CASES[name]()
    batches = alone.pop("batches")
    seen = [dict(part[name]) for part in together]
    theirs = [part.pop("batches") for part in seen]
    assert seen[0] == seen[1]
    steps = {"both_step", "both_step/dataloader_idx_0", "both_step/dataloader_idx_1"}  # each process has its own values
    assert seen[0].keys() - steps == alone.keys() - steps
    for key in alone.keys() - steps:
        assert seen[0][key] == pytest.approx(alone[key], rel=1e-6), key
    assert theirs == ([batches[0::2], batches[1::2]] if name in SHARED else [batches, batches])


def test_metrics_not_logged_by_every_process_are_rejected(tmp_path: Path) -> None:
    class Sometimes(Counts):
        def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
            self.total(1.0)
            if batch_idx == 0:
                self.log("total", self.total)

    for outcome in in_processes(lambda: fit(Sometimes, ODD, **TWO), tmp_path):
        assert "did not log the same metric objects: 'validation_step.total'" in outcome.error


def test_each_round_validates_with_new_random_numbers() -> None:
    class Draws(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            drawn.append(float(torch.rand(())))

    drawn: list[float] = []
    trainer(max_rounds=2, num_sanity_val_steps=0).fit(Draws(), data())
    first, second = drawn[: len(drawn) // 2], drawn[len(drawn) // 2 :]
    assert first
    assert first != second


class FailsOnce(Net):
    """Fails in one call of ``validation_step``."""

    due = -1

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.due -= 1
        if self.due == 0:
            raise RuntimeError("stop here")
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("due", [1, 2], ids=["sanity check", "round"])
def test_fit_after_a_failed_validation_trains_in_training_mode(due: int) -> None:
    straight, model, run = seeded(FailsOnce), seeded(FailsOnce), trainer(max_rounds=2)
    trainer(max_rounds=2).fit(straight, data())
    model.head.eval()  # as the user chose
    straight.head.eval()
    model.due = due
    with pytest.raises(RuntimeError, match="stop here"):
        run.fit(model, data())
    assert {name for name, part in model.named_modules() if not part.training} == {"head"}
    run.fit(model, data())
    assert torch.equal(parameters(model), parameters(straight))


def test_failed_test_leaves_the_module_in_training_mode() -> None:
    class FailsInTest(Net):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            raise RuntimeError("stop here")

    model = FailsInTest()
    with pytest.raises(RuntimeError, match="stop here"):
        trainer().test(model, DataLoader(classification(4, 0), batch_size=4), verbose=False)
    assert model.body.training
