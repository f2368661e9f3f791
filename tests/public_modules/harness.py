"""Tests of every published module in rounds: it equals a loop by hand, engines agree, and it resumes bit for bit.

The loop by hand uses PyTorch and the module's own ``training_step`` and ``configure_optimizers``. It shares no code
with lightning_fed. It attaches a plain ``Trainer`` of Lightning because some modules use theirs.
"""

import hashlib
import importlib
import importlib.util
import inspect
import logging
import os
import random
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

__all__ = ["AGREED", "FLOAT32", "SIZES", "PublicCase", "Published", "needs", "refusal", "thin"]

COHORTS = ((0, 1, 3), (1, 2, 3), (0, 2, 3))
"""The clients of each round, of four."""

SIZES = (8, 7, 11, 4)
"""Their numbers of examples. Each batch has 3 or 4: BatchNorm refuses one example, and amplifies rounding with two."""

LOCAL_STEPS = 2
"""The local steps of a client in a round, if a schedule steps after each of them; otherwise it is one local epoch."""

SEED = 5

FLOAT32 = {"precision": "32-true", "tolerance": (2e-6, 1e-5)}
"""Of modules that cannot compute in float64."""

AGREED = "a trial step of the module agreed"
"""Why ``engine="auto"`` takes the vectorized engine."""


def needs(package: str, lightning: str = "pytorch_lightning") -> ModuleType:
    """Return a package; skip the file if it is not installed.

    Args:
        package: The name to import.
        lightning: The one of Lightning's two packages that it builds on. lightning_fed then uses the same.
    """
    if importlib.util.find_spec(package) is None:
        reason = f"{package} is not installed: pip install -e '.[public]' -c constraints.txt, or see docs/platforms.md"
        pytest.skip(reason, allow_module_level=True)
    if os.environ.setdefault("LIGHTNING_FED_PACKAGE", lightning) != lightning:
        pytest.exit(f"{package} builds on {lightning}, and this process uses another package: run this file alone.", 2)
    import lightning_fed.trainer.trainer  # noqa: F401  # a published package may import either Lightning

    return importlib.import_module(package)


@dataclass(frozen=True, eq=False)
class PublicCase:
    """A published module of another package, with data for four clients.

    Attributes:
        name: The test's name.
        module: Returns the module; it is called after seeding.
        clients: Returns the four clients' data sets, the same every time.
        engine: What ``engine="auto"`` must take: "vectorized" or "sequential".
        reason: A regular expression that its reason must match.
        val: Returns the validation set.
        batch_size: The examples in a batch.
        collate: Makes a batch of examples; PyTorch's default by default.
        loader: Returns a client's ``DataLoader`` in stored order, if the package has its own.
        sizes: The clients' numbers of examples, if the length of the data set is not it.
        logged: The metrics of ``training_step`` that are compared with the loop by hand.
        precision: Lightning's, "64-true" or "32-true".
        tolerance: The allowed deviations of the sequential and the vectorized engine from the loop by hand, relative to
            each tensor's largest entry.
        draws: Whether ``training_step`` draws random numbers; the engines then agree in law only.
        local_schedule: The trainer's, for a module whose schedule steps after every local step.
        by_hand: Whether the loop by hand can train it.
        prepare: What the loop by hand does to the module first, in place of hooks that a trainer would call.
        kwargs: More arguments of ``FederatedTrainer``.
    """

    name: str
    module: Callable[[], Any]
    clients: Callable[[], Sequence[Any]]
    engine: str
    reason: str
    val: Callable[[], Any] | None = None
    batch_size: int = 4
    collate: Callable[[list[Any]], Any] | None = None
    loader: Callable[[Any], DataLoader] | None = None
    sizes: Callable[[Any], int] = len
    logged: Sequence[str] = ()
    precision: str = "64-true"
    tolerance: tuple[float, float] = (1e-12, 1e-12)
    draws: bool = False
    local_schedule: str | None = None
    by_hand: bool = True
    prepare: Callable[[Any], None] = lambda module: None
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def make(self) -> Any:
        """Return the module, with the same parameters every time."""
        _seed(SEED)
        return self.module()

    def batches(self, dataset: Any) -> Iterable[Any]:
        """Return a client's batches in stored order."""
        if self.loader is not None:
            return self.loader(dataset)
        # its own generator; otherwise it would draw from the module's
        return DataLoader(dataset, self.batch_size, collate_fn=self.collate, generator=torch.Generator())

    @property
    def work(self) -> dict[str, Any]:
        """The arguments of ``FederatedTrainer`` that set the clients' work in a round."""
        if self.local_schedule is None:
            return {"local_epochs": 1}
        return {"local_steps": LOCAL_STEPS, "local_schedule": self.local_schedule}

    def counts(self, size: int) -> list[int]:
        """Return the examples in each batch of a client, given its number of examples."""
        return [min(self.batch_size, size - start) for start in range(0, size, self.batch_size)]

    def buffers(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the buffers of a module, and the parameters that are treated like buffers."""
        patterns = self.kwargs.get("as_buffers", ())
        named = {n: p for n, p in module.named_parameters() if any(fnmatchcase(n, pattern) for pattern in patterns)}
        return dict(module.named_buffers()) | named


@dataclass
class Outcome:
    """The outcome of a run.

    Attributes:
        model: Parameters and buffers by name.
        states: The states of server and clients by name.
        metrics: The logged values by round.
        said: The messages of ``engine="auto"``.
    """

    model: dict[str, Tensor]
    states: dict[str, Tensor]
    metrics: dict[int, dict[str, float]]
    said: list[str] = field(default_factory=list)


class Published:
    """The tests. Each file derives a class whose ``cases`` are those of its package."""

    cases: Sequence[PublicCase] = ()

    def test_sequential_equals_the_loop_by_hand(self, case: PublicCase, method: str) -> None:
        if not case.by_hand:
            pytest.skip("no loop by hand can train it")
        expected, found = by_hand(case, method), federated(case, method, "sequential")
        assert_close(found, expected, case.tolerance[0], case.logged)

    def test_auto_takes_the_engine_it_should(self, case: PublicCase, method: str) -> None:
        (line,) = federated(case, method, "auto").said
        assert re.search(rf"engine='auto' takes '{case.engine}'.*{case.reason}", line), line

    def test_auto_equals_the_loop_by_hand(self, case: PublicCase, method: str) -> None:
        found, sequential = federated(case, method, "auto"), federated(case, method, "sequential")
        if case.engine == "sequential":
            assert_same(found, sequential)
        elif case.draws:
            pytest.skip("the engines draw other numbers")
        else:
            expected = by_hand(case, method) if case.by_hand else sequential
            assert_close(found, expected, case.tolerance[1], case.logged)

    def test_a_run_resumes_bit_for_bit(self, case: PublicCase, method: str) -> None:
        for engine in (
            ("auto", "sequential") if case.engine == "vectorized" else ("auto",)
        ):  # otherwise, auto is sequential
            whole = federated(case, method, engine)
            with pytest.raises(Interruption):
                _fit(case, method, engine, stop_after=2, folder=engine)
            assert_same(_fit(case, method, engine, ckpt_path=f"{engine}/last.ckpt"), whole, rounds=[3])


class Interruption(BaseException):
    """Ends a run at once, like Ctrl-C."""


def thin(
    network: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    lr: float = 0.1,
) -> Any:
    """Return a minimal LightningModule around a package's network, trained by SGD.

    Args:
        network: The network.
        loss: The loss of the network on a batch.
        lr: The rate.
    """
    from lightning_fed.compat.package import pl

    class Thin(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            value = loss(self.network, batch)
            self.log("train_loss", value)
            return value

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", loss(self.network, batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=lr)

    return Thin()


def refusal(case: PublicCase) -> str:
    """Return the error that refuses a module before its first round."""
    from lightning_fed import FederatedError

    with pytest.raises(FederatedError) as caught:
        _fit(case, "fedavg", "sequential", stop_after=0)
    return str(caught.value)


# A run of lightning_fed


@cache
def federated(case: PublicCase, method: str, engine: str) -> Outcome:
    """Return the outcome of an uninterrupted run."""
    return _fit(case, method, engine)


def _fit(
    case: PublicCase,
    method: str,
    engine: str,
    stop_after: int | None = None,
    ckpt_path: str | None = None,
    folder: str = "whole",
) -> Outcome:
    from lightning_fed import FederatedTrainer
    from lightning_fed.compat.package import pl
    from lightning_fed.algorithms import FedAvg, Scaffold

    module, logger = case.make(), _memory_logger()
    buffers = dict(module.named_buffers()).keys()  # a step may make more, which are not the run's
    stopper = _stopper(stop_after)
    checkpoint = pl.callbacks.ModelCheckpoint(dirpath=Path(folder), save_last=True)
    trainer = FederatedTrainer(
        algorithm=FedAvg() if method == "fedavg" else Scaffold(),
        max_rounds=len(COHORTS),
        **case.work,
        sampler=lambda seed, round, population: COHORTS[round],
        seed=SEED,
        engine=engine,
        precision=case.precision,
        accelerator="cpu",
        callbacks=[checkpoint, stopper],
        logger=logger,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        **case.kwargs,
    )
    with _listening() as said, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="engine='auto' continues with")
        _seed(17)  # runs must not depend on earlier draws
        trainer.fit(module, _data(case), ckpt_path=ckpt_path)
    state = trainer.fit_loop.state
    states = {f"server.{name}": value for name, value in state.state.items()}
    kept = state.clients.state_dict()
    states |= {f"client {i}.{name}": value for i in sorted(kept) for name, value in kept[i].items()}
    model = dict(module.named_parameters()) | {name: module.get_buffer(name) for name in buffers}
    return Outcome(_copies(model), _copies(states), logger.rounds, said)


def _data(case: PublicCase) -> Any:
    from lightning_fed import FederatedDataModule

    class OwnLoaders(FederatedDataModule):
        def client_dataloader(self, client_id: Any, generator: torch.Generator) -> Any:
            return case.loader(self.client_dataset(client_id))

        def client_size(self, client_id: Any) -> int:
            return case.sizes(self.client_dataset(client_id))

    return (FederatedDataModule if case.loader is None else OwnLoaders)(
        clients=case.clients(),
        val=None if case.val is None else case.val(),
        batch_size=case.batch_size,
        collate_fn=case.collate,
        shuffle=False,
    )


def _memory_logger() -> Any:
    from lightning_fed.compat.package import pl

    class Memory(pl.loggers.Logger):
        """Records the logged values by round."""

        name, version = "memory", 0

        def __init__(self) -> None:
            super().__init__()
            self.rounds: dict[int, dict[str, float]] = defaultdict(dict)

        def log_hyperparams(self, params: Any, *args: Any) -> None:
            pass

        def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
            timeless = {name: float(value) for name, value in metrics.items() if "seconds" not in name}
            self.rounds[step or 0].update(timeless)

    return Memory()


def _stopper(after: int | None) -> Any:
    from lightning_fed import FederatedCallback

    class Stop(FederatedCallback):
        def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
            if round == after:
                raise Interruption

    return Stop()


@contextmanager
def _listening() -> Iterator[list[str]]:
    """Collect the messages of ``engine="auto"``."""
    said: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "engine='auto'" in record.getMessage():
                said.append(record.getMessage())

    handler = Collect()
    loggers = [logging.getLogger(f"{name}.utilities.rank_zero") for name in ("pytorch_lightning", "lightning.pytorch")]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield said
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


# The loop by hand


@cache
def by_hand(case: PublicCase, method: str) -> Outcome:
    """Return the outcome of three rounds of FedAvg, or of SCAFFOLD with option ii."""
    dtype = torch.float64 if case.precision == "64-true" else torch.float32
    module = case.make().to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _rounds_by_hand(case, module, method, dtype)


def _rounds_by_hand(case: PublicCase, module: Any, method: str, dtype: torch.dtype) -> Outcome:
    clients = case.clients()
    trainer = module.trainer = _plain_trainer()
    record = module.log = _Record()
    case.prepare(module)
    x = _trained(module)
    buffers, known = _copies(case.buffers(module)), dict(module.named_buffers()).keys()
    c = {name: torch.zeros_like(p) for name, p in x.items()}
    own, taken = {i: dict(c) for i in range(len(SIZES))}, dict.fromkeys(range(len(SIZES)), 0)
    metrics = {}
    for number, cohort in enumerate(COHORTS):
        trainer.fit_loop.epoch_progress.current.processed = trainer.fit_loop.epoch_progress.current.completed = number
        record.start()
        results, correction = {}, {}
        for i in cohort:
            _load(module, x, buffers)
            if method == "scaffold":
                correction = {name: c[name] - own[i][name] for name in c}
            _seed(_stream(number, i))
            counts = case.counts(case.sizes(clients[i]))
            first_step = {None: number, "restart": 0, "continue": taken[i], "total": number * LOCAL_STEPS}
            path = _train(
                module,
                _batches(case, clients[i], counts, dtype),
                correction,
                first_step[case.local_schedule],
                case.local_schedule is not None,
                record,
                dtype,
            )
            taken[i] += LOCAL_STEPS
            y = {name: p.detach().clone() for name, p in module.named_parameters() if name in x}
            now = case.buffers(module)
            results[i] = (y, path, _copies({name: now[name] for name in buffers}))
        sizes = {i: case.sizes(clients[i]) for i in cohort}
        weights = dict.fromkeys(cohort, 1.0) if method == "scaffold" else sizes
        before = x
        x = _mean({i: results[i][0] for i in cohort}, weights)
        buffers = _mean_buffers({i: results[i][2] for i in cohort}, sizes)
        if method == "scaffold":
            new = {i: _new_control(before, *results[i][:2], own[i], c) for i in cohort}
            c = {
                name: (c[name] + sum((new[i][name] - own[i][name]).double() for i in cohort) / len(SIZES)).to(dtype)
                for name in c
            }
            own |= new
        metrics[number + 1] = record.means()
    _load(module, x, buffers)
    states = {}
    if method == "scaffold":
        states = {"server.c": _joined(c)} | {f"client {i}.c_i": _joined(own[i]) for i in range(len(SIZES))}
    if case.local_schedule == "continue":
        states |= {f"client {i}.schedule.steps": torch.tensor(count) for i, count in taken.items()}
    held = dict(module.named_parameters()) | {name: module.get_buffer(name) for name in known}
    return Outcome(_copies(held), states, metrics)


def _batches(
    case: PublicCase, dataset: Any, counts: Sequence[int], dtype: torch.dtype
) -> Iterator[tuple[int, Any, int]]:
    """Yield a client's batches, each with its index in the local epoch and its number of examples."""
    left = len(counts) if case.local_schedule is None else LOCAL_STEPS
    while left > 0:
        for index, (batch, n) in enumerate(zip(case.batches(dataset), counts, strict=True)):
            if left > 0:
                yield index, _cast(batch, dtype), n
            left -= 1


def _train(
    module: Any,
    batches: Iterable[tuple[int, Any, int]],
    correction: Mapping[str, Tensor],
    first_step: int,
    steps_schedule: bool,
    record: "_Record",
    dtype: torch.dtype,
) -> tuple[float, dict[str, Tensor] | None]:
    """Train on batches, and return the sum of rates and, except for plain SGD, the mean corrected gradient.

    The schedule has stepped ``first_step`` times before, and steps after every batch if ``steps_schedule``.
    """
    optimizer, schedulers = _optimizer(module, first_step)
    held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    named = {name: p for name, p in module.named_parameters() if id(p) in held}
    plain = type(optimizer) is torch.optim.SGD and not any(g["momentum"] for g in optimizer.param_groups)
    decays = {id(p): group.get("weight_decay", 0) for group in optimizer.param_groups for p in group["params"]}
    total, path = 0.0, {name: torch.zeros_like(p) for name, p in named.items()}
    module.train()
    takes_index = len(inspect.signature(module.training_step).parameters) > 1
    for number, batch, record.examples in batches:
        optimizer.zero_grad()
        with _default(dtype):
            output = module.training_step(batch, number) if takes_index else module.training_step(batch)
        (output["loss"] if isinstance(output, Mapping) else output).backward()
        with torch.no_grad():
            for name, p in named.items():
                if correction:
                    p.grad = correction[name] + (torch.zeros_like(p) if p.grad is None else p.grad)
                if p.grad is not None:
                    decay = 0.0 if isinstance(optimizer, torch.optim.AdamW) else decays.get(id(p), 0.0)
                    path[name] += optimizer.param_groups[0]["lr"] * (p.grad + decay * p)
        optimizer.step()
        total += optimizer.param_groups[0]["lr"]
        for scheduler in schedulers if steps_schedule else ():
            scheduler.step()
    return total, None if plain else {name: value / total for name, value in path.items()}


def _new_control(
    x: Mapping[str, Tensor],
    y: Mapping[str, Tensor],
    work: tuple[float, Mapping[str, Tensor] | None],
    own: Mapping[str, Tensor],
    c: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return c_i - c + (x - y) / (K lr); without plain SGD, the mean corrected gradient replaces the last term."""
    rates, path = work
    seen = {name: (x[name] - y[name]) / rates for name in x} if path is None else path
    return {name: own[name] + (seen[name] - c[name]) for name in x}


def _optimizer(module: Any, steps: int) -> tuple[torch.optim.Optimizer, list[Any]]:
    """Return an optimizer without state, and its schedules after some steps."""
    found = module.configure_optimizers()
    schedulers: Any = ()
    if isinstance(found, Mapping):
        found, schedulers = found["optimizer"], [found.get("lr_scheduler")]
    elif isinstance(found, Sequence):
        found, schedulers = found if found and isinstance(found[0], Sequence) else (found, ())
        (found,) = found
    made = [scheduler["scheduler"] if isinstance(scheduler, Mapping) else scheduler for scheduler in schedulers]
    kinds = (type(None), torch.optim.lr_scheduler.ReduceLROnPlateau)
    made = [scheduler for scheduler in made if not isinstance(scheduler, kinds)]
    for scheduler in made:
        for _ in range(steps):
            scheduler.step()
    found.state.clear()  # the module may return the same optimizer every time
    return found, made


def _plain_trainer() -> Any:
    from lightning_fed.compat.package import pl

    class Plain(pl.Trainer):
        """Gives modules the length of a schedule that steps after every local step."""

        num_training_batches = LOCAL_STEPS
        estimated_stepping_batches = LOCAL_STEPS * len(COHORTS)

    trainer = Plain(
        max_epochs=len(COHORTS), accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False
    )
    trainer.training = True
    return trainer


class _Record:
    """Replaces ``self.log`` and computes the example-weighted means of a round."""

    examples = 0

    def start(self) -> None:
        self._sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def __call__(self, name: str, value: Any, *args: Any, batch_size: int | None = None, **flags: Any) -> None:
        if isinstance(value, Tensor | float | int):
            weight = batch_size or self.examples
            total = self._sums[name]
            total[0] += float(value) * weight
            total[1] += weight

    def means(self) -> dict[str, float]:
        return {name: total / weight for name, (total, weight) in self._sums.items()}


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    """Set the default dtype inside, as Lightning does around a step."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _stream(round: int, client: int) -> int:
    """Return the seed of a client's training in a round, a function of the arguments defined in docs/reliability.md."""
    key = f"{SEED}/4/{round}/{client}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed * 0x9E3779B97F4A7C15 >> 32 & 0xFFFFFFFF)


@torch.no_grad()
def _load(module: nn.Module, x: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    for name, p in module.named_parameters():
        if name in x:
            p.copy_(x[name])
            p.grad = None
    held = dict(module.named_parameters()) | dict(module.named_buffers())
    for name, value in buffers.items():
        held[name].copy_(value)


def _mean(values: Mapping[int, Mapping[str, Tensor]], weights: Mapping[int, float]) -> dict[str, Tensor]:
    total, some = sum(weights.values()), next(iter(values.values()))
    return {
        name: sum(values[i][name].double() * (weights[i] / total) for i in values).to(like.dtype)
        for name, like in some.items()
    }


def _mean_buffers(values: Mapping[int, Mapping[str, Tensor]], sizes: Mapping[int, int]) -> dict[str, Tensor]:
    """Return the example-weighted mean of floating-point buffers, and the largest client's other buffers."""
    floats = {i: {n: b for n, b in own.items() if b.is_floating_point()} for i, own in values.items()}
    largest = max(sizes, key=lambda i: (sizes[i], -i))
    return {**values[largest], **_mean(floats, sizes)}


def _trained(module: Any) -> dict[str, Tensor]:
    """Return copies of the parameters that the optimizer trains."""
    held = {id(p) for group in _optimizer(module, 0)[0].param_groups for p in group["params"] if p.requires_grad}
    return {name: p.detach().clone() for name, p in module.named_parameters() if id(p) in held}


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    """Return a batch with its floating-point tensors cast to a dtype, as in Lightning's precision plugin."""
    from lightning_utilities.core.apply_func import apply_to_collection

    return apply_to_collection(batch, Tensor, lambda t: t.to(dtype) if torch.is_floating_point(t) else t)


def _joined(values: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([value.reshape(-1) for value in values.values()])


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in tensors.items()}


# Comparisons


def assert_close(found: Outcome, expected: Outcome, tolerance: float, logged: Sequence[str]) -> None:
    """Compare tensors relative to their largest entries, and the named metrics."""
    for kind, room in (("model", tolerance), ("states", 4 * tolerance)):  # states are differences, divided by the rate
        ours, theirs = getattr(found, kind), getattr(expected, kind)
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            scale = max(1e-3, float(value.double().abs().max())) if value.numel() else 1.0
            off = float((ours[name].double() - value.double()).abs().max()) / scale if value.numel() else 0.0
            assert off <= room, f"{kind}, {name}: off by {off:.1e} of its largest entry"
    for done, values in expected.metrics.items():
        for name in logged:
            close = pytest.approx(values[name], rel=max(tolerance, 1e-6))
            logged_as = name if name in found.metrics[done] else f"{name}_epoch"  # if it is also logged per step
            assert found.metrics[done][logged_as] == close, f"{name} after {done} rounds"


def assert_same(found: Outcome, expected: Outcome, rounds: Sequence[int] | None = None) -> None:
    """Compare all bits, and the metrics of some rounds."""
    for kind in ("model", "states"):
        ours, theirs = getattr(found, kind), getattr(expected, kind)
        assert ours.keys() == theirs.keys()
        different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
        assert not different, f"{kind}: {different[:5]} differ"
    for done in rounds or expected.metrics:
        assert expected.metrics[done], f"nothing was logged after {done} rounds"
        assert found.metrics[done] == pytest.approx(expected.metrics[done], rel=0, abs=0, nan_ok=True)
