"""Ordinary modules, data and settings give the same result in the vectorized and the sequential engine."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.algorithms import CMime, FedAvg, FedDyn, FedNova, FedProx, Mime, MimeMVR, Scaffold, SGDm
from lightning_fed.server import FedAdam, SystemsHeterogeneity
from tests.behaviour.test_contract import METHODS
from tests.helpers.engines import FULL, SIZES, Ordinary, Record, assert_agree, assert_close, full_batches, run, state_of
from tests.helpers.selection import covering, few
from tests.helpers.training import CLASSES, FEATURES, classification, clients, data, same

ENGINES = ("sequential", "vectorized")
ALGORITHMS = [FedAvg(), Scaffold(), Mime(base=SGDm()), FedNova()]


class ByIndex(Ordinary):
    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1]) * (1.0 + 0.3 * batch_idx)


class WithoutIndex(Ordinary):
    def training_step(self, batch: Sequence[Tensor]) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


class OfDictionaries(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch["x"]) * batch["more"][0][:, None], batch["y"])
        return {"loss": loss, "extra": loss.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step((batch["x"], batch["y"]), batch_idx)


class ByType(Ordinary):
    """Scales integer inputs like pixel values."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        x = batch[0] / 255 if batch[0].dtype == torch.uint8 else batch[0]
        return F.cross_entropy(self(x.double()), batch[1])


def of_two_types() -> FederatedDataModule:
    """Return clients of one shape, half of them with integer inputs."""
    own = [classification(12, seed) for seed in range(4)]
    whole = [TensorDataset((90 * d.tensors[0]).abs().to(torch.uint8), d.tensors[1]) for d in own[:2]]
    return FederatedDataModule([*whole, *own[2:]], batch_size=4, val=own[3])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("momentum", "chunk_size"),
    [pytest.param(m, n, id=f"{m}-{n}") for m in (0.0, 0.9) for n in (None, 1, 2)],
)
def test_engines_agree_on_batches_of_one_shape_and_several_types(momentum: float, chunk_size: int | None) -> None:
    make = partial(ByType, partial(torch.optim.SGD, lr=0.1, momentum=momentum))
    assert_agree(
        *(
            run(engine, make, of_two_types, chunk_size=size)
            for engine, size in zip(ENGINES, (None, chunk_size), strict=True)
        )
    )


class Tied(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES))
        self.body[2].weight = self.body[0].weight
        self.head = nn.Linear(FEATURES, CLASSES)


class Held(Ordinary):
    """Registers its network a second time in the loss, as losses with regularization often do."""

    reads = False

    def __init__(self) -> None:
        super().__init__()
        self.penalty = nn.ModuleDict({"of": self.body})

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        scale = loss.item() * 0 + 0.1 if self.reads else 0.1
        return loss + scale * sum(p.square().sum() for p in self.penalty["of"].parameters())


class HeldAndRead(Held):
    reads = True


class Frozen(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.body.requires_grad_(False)


class Unused(Ordinary):
    def __init__(self) -> None:
        super().__init__(partial(torch.optim.SGD, lr=0.1, momentum=0.5, weight_decay=0.1))
        self.spare = nn.Linear(3, 2)


class Grouped(Ordinary):
    def configure_optimizers(self) -> Any:
        body, head = {"params": self.body.parameters(), "weight_decay": 0.1}, {"params": self.head.parameters()}
        return torch.optim.SGD([body, {**head, "lr": 0.3}], lr=0.1, momentum=0.5)


class Scheduled(Ordinary):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}


class LogsInManyWays(Ordinary):
    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        out = self(batch[0])
        loss = F.cross_entropy(out, batch[1])
        self.log("weighted", loss, batch_size=2)
        self.log_dict({"one": loss, "two": 2 * loss}, prog_bar=True)
        self.log("stepwise", loss, on_step=True, on_epoch=True, logger=False)
        self.log("on_step", loss, on_step=True, on_epoch=False)
        self.log("accuracy", (out.argmax(1) == batch[1]).float().mean(), sync_dist=True)
        self.log(name="number", value=3.0)
        return loss


class WithHooks(Ordinary):
    """Changes batches on their way to the device."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [2 * batch[0], batch[1]]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 1, batch[1]]


class HookedData(FederatedDataModule):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] - 1, batch[1]]


class OwnLoaders(FederatedDataModule):
    def client_dataloader(self, client_id: Any, generator: torch.Generator) -> Any:
        return DataLoader(self.client_dataset(client_id), batch_size=3 + client_id, shuffle=True, generator=generator)


class Listed(Dataset[Any]):
    """A data set that is not cut out of tensors."""

    def __init__(self, source: TensorDataset) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return self.source[index]


def collated(examples: list[Any]) -> Any:
    x, y = (torch.stack(column) for column in zip(*examples, strict=True))
    return {"x": x, "y": y, "more": (torch.ones(len(x)) * 2, [x.sum(1)])}


def listed(**options: Any) -> FederatedDataModule:
    return FederatedDataModule([Listed(part) for part in clients(FULL)], batch_size=4, **options)


def partitioned() -> FederatedDataModule:
    parts = [list(range(0, 20)), list(range(20, 23)), list(range(23, 40)), list(range(40, 47)), list(range(47, 60))]
    return FederatedDataModule(train=classification(60, 3), partition=lambda labels: parts, batch_size=4)


def augmented() -> FederatedDataModule:
    def noise(batch: Any, stream: torch.Generator) -> Any:
        return [batch[0] + torch.randn(batch[0].shape, generator=stream, dtype=batch[0].dtype), batch[1]]

    return data(FULL, augment=noise, transform=lambda batch: [0.5 * batch[0], batch[1]])


CASES: dict[str, dict[str, Any]] = {
    "losses that depend on the batch's index": {"make": ByIndex, "local_epochs": 2},  # with epochs of different lengths
    "a step without an index": {"make": WithoutIndex},
    "batches and losses in dictionaries": {
        "make": OfDictionaries,
        "datamodule": partial(data, FULL, collate_fn=collated),
    },
    "tied weights": {"make": Tied},
    "frozen parameters": {"make": Frozen},
    "unused parameters": {"make": Unused},
    "parameter groups": {"make": Grouped, "algorithm": Scaffold()},
    "a schedule": {"make": Scheduled},
    "logs": {"make": LogsInManyWays},
    "transfer hooks of the module": {"make": WithHooks},
    "transfer hooks of the data module": {"datamodule": lambda: HookedData(clients(FULL), batch_size=4)},
    "loaders of the user's own": {"datamodule": lambda: OwnLoaders(clients(SIZES), batch_size=4)},
    "data sets of any kind": {"datamodule": listed},
    "a partition of shared tensors": {"datamodule": partitioned},
    "augmented and transformed batches": {"datamodule": augmented},
    "a last batch left out": {"datamodule": partial(data, SIZES, drop_last=True)},
    "stored order": {"datamodule": partial(data, SIZES, shuffle=False)},
    "very unequal clients": {"datamodule": partial(data, (1, 40, 2, 17, 3, 4)), "clients_per_round": 6},
    "a number of local steps": {"local_steps": 7},
    "a limit of batches": {"limit_train_batches": 2, "local_epochs": 2},
    "server optimizers": {"server_optimizer": partial(FedAdam, lr=0.1, beta1=0.9, beta2=0.99, tau=0.1)},
    "equal weights": {"weighting": "uniform", "algorithm": FedAvg()},
    "clipping": {"gradient_clip_val": 0.1},
    "a submodule with two names": {"make": Held},
}
CHUNKED = ["losses that depend on the batch's index", "unused parameters"]
ALONE = ["logs", "tied weights", "a submodule with two names", "loaders of the user's own", "frozen parameters"]
ALONE += ["parameter groups", "a schedule", "transfer hooks of the module", "augmented and transformed batches"]


@pytest.mark.parametrize(
    ("name", "chunk_size"),
    few(
        [pytest.param(name, n, id=f"{name}-{n}") for name in CASES for n in (None, 1)],
        [*(f"{name}-None" for name in CHUNKED), *(f"{name}-1" for name in ALONE)],
    ),
)
def test_result_matches_sequential_engine(name: str, chunk_size: int | None) -> None:
    algorithm = ALGORITHMS[list(CASES).index(name) % len(ALGORITHMS)]
    options = {"algorithm": algorithm, "datamodule": full_batches, "max_rounds": 2, **CASES[name]}
    one, two = (Record() for _ in ENGINES)
    assert_agree(
        run("sequential", callbacks=one, **options),
        run("vectorized", callbacks=two, chunk_size=chunk_size, **options),
    )
    assert_same_reports(one, two)


def test_submodule_with_two_names_is_intact_after_a_failed_trial() -> None:
    assert_agree(run("sequential", HeldAndRead), run("auto", HeldAndRead))


class StepsOwnSchedule(Ordinary):
    """Steps a schedule once a round, which Lightning does not know."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.own = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return optimizer

    def on_train_epoch_end(self) -> None:
        self.own.step()


def test_schedule_that_a_hook_steps_once_a_round_causes_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    assert_agree(run("vectorized", StepsOwnSchedule), run("sequential", StepsOwnSchedule))
    assert not [warning for warning in recwarn if "lr_scheduler.step()" in str(warning.message)]


def assert_same_reports(one: Record, two: Record) -> None:
    assert [report.client_id for report in one.reports] == [report.client_id for report in two.reports]
    for a, b in zip(one.reports, two.reports, strict=True):
        assert (a.size, a.steps) == (b.size, b.steps)
        assert b.loss == pytest.approx(a.loss, rel=1e-10, nan_ok=True)
        assert b.update_norm == pytest.approx(a.update_norm, rel=1e-9, abs=1e-14)
        metrics = a.metrics if a.steps else {}  # a client without steps reports none
        assert b.metrics == {name: pytest.approx(value, rel=1e-9) for name, value in metrics.items()}
    for a, b in zip(one.rounds, two.rounds, strict=True):
        assert (a.cohort, a.dropped, a.sizes, a.steps, a.weights) == (b.cohort, b.dropped, b.sizes, b.steps, b.weights)
        assert (a.bytes_up, a.bytes_down) == (b.bytes_up, b.bytes_down)
        assert b.drift == pytest.approx(a.drift, rel=1e-6, abs=1e-9)
    for a, b in zip(one.models, two.models, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


class FromZero:
    """Some clients take fewer steps, and some take none."""

    def __call__(self, seed: int, round: int, clients: Any, epochs: Any, steps: Any) -> list[int | None]:
        return [0 if (round + i) % 3 == 0 else max(1, n - i) for i, n in zip(clients, steps, strict=True)]


HETEROGENEITY: dict[str, Any] = {
    "nothing": FromZero(),
    "keep": SystemsHeterogeneity(0.7, deadline=3),
    "drop": SystemsHeterogeneity(0.5, policy="drop"),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("stragglers", "algorithm"),
    [
        pytest.param(stragglers, algorithm, id=f"{stragglers}-{type(algorithm).__name__}")
        for stragglers in HETEROGENEITY
        for algorithm in [*ALGORITHMS, FedProx(0.1), FedDyn(1.0)]
    ],
)
def test_engines_agree_on_stragglers_including_clients_without_steps(stragglers: str, algorithm: Any) -> None:
    one, two = (Record() for _ in ENGINES)
    options = {"algorithm": algorithm, "max_rounds": 4, "local_epochs": 2, "heterogeneity": HETEROGENEITY[stragglers]}
    options["datamodule"] = full_batches
    runs = [run(e, callbacks=c, **options) for e, c in zip(ENGINES, (one, two), strict=True)]
    assert_agree(*runs)
    assert_same_reports(one, two)
    steps = [report.steps for report in one.reports]
    assert min(steps) < max(steps)


# Random layers


def dropout(**options: Any) -> Any:
    return run("vectorized", partial(Ordinary, dropout=0.5), **options)


@pytest.mark.parametrize(("chunk_size", "algorithm"), covering([None, 1, 2], [Mime(base=SGDm()), FedAvg()]))
def test_dropout_is_deterministic(chunk_size: int | None, algorithm: Any) -> None:
    runs = [dropout(algorithm=algorithm, chunk_size=chunk_size, max_rounds=2) for _ in range(2)]
    assert same(*(state_of(t) for t in runs))


def test_clients_draw_separate_dropout_masks() -> None:
    equal = [classification(4, 1)] * 4
    seen = Record()
    dropout(datamodule=lambda: FederatedDataModule(equal, batch_size=4, shuffle=False), callbacks=seen, max_rounds=1)
    assert len({model.sum().item() for model in seen.models}) == 4


class MaskedInput(Ordinary):
    """Logs the share of its input that dropout lets through."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        x = F.dropout(torch.ones(20_000, dtype=batch[0].dtype), 0.2, training=True)
        self.log("share", (x > 0).to(x.dtype).mean())
        self.log("mean", x.mean())
        return F.cross_entropy(self(batch[0]) * x[:CLASSES], batch[1])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("chunk_size", [None, 1])
def test_dropout_drops_the_requested_share(engine: str, chunk_size: int | None) -> None:
    if engine == "sequential" and chunk_size:
        pytest.skip("has no chunks")
    found = run(engine, MaskedInput, chunk_size=chunk_size).callback_metrics
    assert float(found["share"]) == pytest.approx(0.8, abs=0.01)  # standard deviation of a step: 0.003
    assert float(found["mean"]) == pytest.approx(1.0, abs=0.0125)


@pytest.mark.parametrize(
    ("algorithm", "chunk_size"), covering([Mime(base=SGDm()), CMime(base=SGDm()), MimeMVR(0.5)], [None, 1, 2])
)
def test_both_gradients_of_a_step_use_the_same_masks(algorithm: Any, chunk_size: int | None) -> None:
    # The first step is at the anchor. Gradient and anchor gradient cancel for any masks,
    # so all clients make the same step.
    seen = Record()
    dropout(
        algorithm=algorithm, chunk_size=chunk_size, clients_per_round=6, local_steps=1, max_rounds=1, callbacks=seen
    )
    for model in seen.models[1:]:
        torch.testing.assert_close(model, seen.models[0], rtol=1e-12, atol=1e-14)


# Precision


def test_engines_agree_in_mixed_precision_up_to_rounding() -> None:
    options = {"algorithm": Scaffold(), "precision": "bf16-mixed", "max_rounds": 2}
    runs = [run(engine, Ordinary, full_batches, **options) for engine in ENGINES]
    assert_close(*(state_of(t) for t in runs), rtol=3e-2)


# Callbacks


@pytest.mark.thorough
@pytest.mark.parametrize("chunk_size", [1, 2, None])
def test_clients_start_and_end_in_cohort_order_chunk_by_chunk(chunk_size: int | None) -> None:
    seen = Record()
    run("vectorized", chunk_size=chunk_size, max_rounds=1, callbacks=seen)
    cohort = list(seen.rounds[0].cohort)
    chunks = [cohort[i : i + (chunk_size or 4)] for i in range(0, 4, chunk_size or 4)]
    expected = [(what, i) for chunk in chunks for what in ("start", "end") for i in chunk]
    assert seen.order == expected


# Resume


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., str]:
    def save(engine: str, **options: Any) -> str:
        saver = ModelCheckpoint(tmp_path / engine, save_last=True)
        run(engine, callbacks=saver, enable_checkpointing=True, max_rounds=2, **options)
        return saver.last_model_path

    return save


RESUMED = [FedAvg(), Scaffold(), Mime(base=SGDm()), FedDyn(1.0)]


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", RESUMED, ids=repr)
def test_resumed_run_has_identical_bits(algorithm: Any, checkpoint: Callable[..., str]) -> None:
    options = {"algorithm": algorithm, "make": partial(Ordinary, dropout=0.5)}
    path = checkpoint("vectorized", **options)
    whole, resumed = (run("vectorized", max_rounds=4, ckpt_path=start, **options) for start in (None, path))
    assert same(state_of(whole), state_of(resumed))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("first", "algorithm"),
    [pytest.param(e, a, id=f"{e}-{type(a).__name__}") for e in ENGINES for a in RESUMED],
)
def test_run_resumes_under_the_other_engine(first: str, algorithm: Any, checkpoint: Callable[..., str]) -> None:
    (second,) = set(ENGINES) - {first}
    options = {"algorithm": algorithm, "datamodule": full_batches}
    resumed = run(second, max_rounds=4, ckpt_path=checkpoint(first, **options), **options)
    assert_agree(run("sequential", max_rounds=4, **options), resumed)


@pytest.mark.thorough
def test_run_is_deterministic() -> None:
    assert same(*(state_of(run("vectorized", algorithm=Scaffold())) for _ in range(2)))


class Noisy(Ordinary):
    """Draws in a batch hook."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + torch.randn_like(batch[0]), batch[1]] if self.trainer.training else batch


@pytest.mark.thorough
def test_resumed_run_has_identical_bits_when_batch_hooks_draw(checkpoint: Callable[..., str]) -> None:
    options = {"make": Noisy, "datamodule": full_batches, "chunk_size": 1}
    path = checkpoint("vectorized", **options)
    whole, resumed = (run("vectorized", max_rounds=4, ckpt_path=start, **options) for start in (None, path))
    assert same(state_of(whole), state_of(resumed))


FEW = ("ServerOnly", "FedNova")  # others: test_schedule.py, test_traces.py


@pytest.mark.parametrize("name", few(METHODS, FEW))
def test_every_method_matches_sequential_engine(name: str) -> None:
    method = METHODS[name]
    local = {"local_epochs": 2} if method.algorithm.local_work else {"local_epochs": None}
    local["max_rounds"] = 2  # rounding errors of Mime with RMSProp grow a hundredfold a round
    runs = [
        run(engine, partial(Ordinary, method.optimizer), full_batches, algorithm=method.algorithm, **local)
        for engine in ("sequential", "vectorized")
    ]
    assert_agree(*runs)


@pytest.mark.thorough  # the default run has chunks of several sizes in test_schedule.py
@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4])
def test_chunk_size_changes_only_rounding(chunk_size: int) -> None:
    runs = [run("vectorized", algorithm=Scaffold(), chunk_size=n) for n in (chunk_size, 64)]
    assert_agree(*runs)


def test_engines_agree_in_float32_up_to_rounding() -> None:
    runs = [run(engine, algorithm=Scaffold(), precision="32-true", max_rounds=2) for engine in ENGINES]
    assert_agree(*runs, rtol=1e-5)
