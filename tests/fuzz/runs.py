"""Runs of configurations with the real trainer, and their outcomes as plain values."""

import logging
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor

import lightning_fed.algorithms as methods
from lightning_fed import ClientError, FederatedCallback, FederatedTrainer
from lightning_fed.callbacks import ClientAccuracy, PersonalizedAccuracy
from lightning_fed.core.errors import FederatedError
from lightning_fed.server import (
    QSGD,
    BernoulliSampler,
    ClientClock,
    CoordinateMedian,
    FedAdagrad,
    FedAdam,
    FedAsync,
    FedAvgM,
    FedBuff,
    FedYogi,
    GeometricMedian,
    NormClipping,
    RoundRobinSampler,
    SystemsHeterogeneity,
    TopK,
    TrimmedMean,
    WeightedSampler,
)
from tests.fuzz.configuration import Configuration
from tests.fuzz.data import make_data
from tests.fuzz.modules import SetsPerClient, SetsPerRound, make_module
from tests.helpers.engines import plain
from tests.helpers.processes import in_processes
from tests.helpers.training import QUIET

__all__ = ["METHODS", "ROUNDS", "Failure", "Outcome", "run", "run_in_processes"]

ROUNDS = 3

METHODS: Mapping[str, tuple[Callable[[], methods.Algorithm], ...]] = {
    "FedAvg": (methods.FedAvg, partial(methods.FedAvg, "normalized")),
    "FedProx": (
        partial(methods.FedProx, 0.5),
        partial(methods.FedProx, 0.5, adaptive={"step": 0.1, "patience": 1}),
    ),
    "Scaffold": (methods.Scaffold, partial(methods.Scaffold, "i")),
    "FedCM": (partial(methods.FedCM, 0.3), partial(methods.FedCM, 0.7, eta_g=0.1, eta_g_mode="paper")),
    "Mime": (
        partial(methods.Mime, methods.SGD()),
        partial(methods.Mime, methods.SGDm(0.5)),
        partial(methods.Mime, methods.Adam(0.5, 0.9, eps=0.1)),
        methods.Mime,
    ),
    "MimeLite": (
        partial(methods.MimeLite, methods.SGDm(0.5, "heavy_ball")),
        partial(methods.MimeLite, methods.RMSProp(0.9, eps=0.1)),
        partial(methods.MimeLite, methods.Adam(0.5, 0.9, eps=0.1, v0="grad", stats="old")),
        methods.MimeLite,
    ),
    "CMime": (
        partial(methods.CMime, methods.SGDm(0.5)),
        partial(methods.CMime, methods.Adagrad(eps=0.1)),
        partial(methods.CMime, methods.Yogi(0.5, 0.9, eps=0.1)),
    ),
    "MimeMVR": (
        partial(methods.MimeMVR, 0.5),
        partial(methods.MimeMVR, 0.5, "lemma9"),
        partial(methods.MimeMVR, 0.5, "current", "zeros"),
    ),
    "FedDyn": (partial(methods.FedDyn, 2.0), partial(methods.FedDyn, 2.0, "inverse_size", "mean")),
    "FedNova": (methods.FedNova,),
    "FedExP": (methods.FedExP, partial(methods.FedExP, 0.1, "cohort", 0.9)),
    "FedACG": (partial(methods.FedACG, 0.5, 0.1),),
    "FedDane": (partial(methods.FedDane, 0.1), partial(methods.FedDane, 0.1, "same")),
    "FedSAM": (partial(methods.FedSAM, 0.1), partial(methods.FedSAM, 0.1, 0.01)),
    "MoFedSAM": (partial(methods.MoFedSAM, 0.1, 0.7, eta_g=0.5), partial(methods.MoFedSAM, 0.1, 0.7, 0.1, "paper")),
    "FedSpeed": (
        partial(methods.FedSpeed, 2.0, 0.1),
        partial(methods.FedSpeed, 2.0, 0.1, 0.7, "unit", 0.01, "all"),
    ),
    "FedProxVR": (partial(methods.FedProxVR, 0.1), partial(methods.FedProxVR, 0.1, "sarah")),
    "ScaffoldM": (
        partial(methods.ScaffoldM, 0.7, gamma=0.9),
        partial(methods.ScaffoldM, 0.7, gamma=0.1, gamma_mode="paper"),
    ),
    "Scaffnew": (partial(methods.Scaffnew, 0.3),),
    "ServerOnly": (methods.ServerOnly,),
    "FedPer": (partial(methods.FedPer, ["head.*"]),),
    "LGFedAvg": (partial(methods.LGFedAvg, ["body.*"]),),
    "FedRep": (partial(methods.FedRep, ["head.*"], head_epochs=1), partial(methods.FedRep, ["head.*"], head_epochs=2)),
    "FedBN": (methods.FedBN,),
    "Ditto": (
        partial(methods.Ditto, 0.5),
        partial(methods.Ditto, 0.5, 0.7, 1, "own"),
        partial(methods.Ditto, 0.5, 0.7, 2),
    ),
    "APFL": (partial(methods.APFL, 0.4),),
    "PFedMe": (partial(methods.PFedMe, 2.0, 2), partial(methods.PFedMe, 1.0, 1, 0.5)),
}
"""Every method, with variants of its options."""

_SERVERS: Mapping[str, Any] = {
    "half": partial(torch.optim.SGD, lr=0.5),
    "momentum": partial(FedAvgM, lr=0.7, momentum=0.5),
    "adam": partial(torch.optim.Adam, lr=0.05, eps=0.1),
    "FedAdam": partial(FedAdam, lr=0.05, tau=0.1),
    "FedYogi": partial(FedYogi, lr=0.05, tau=0.1),
    "FedAdagrad": partial(FedAdagrad, lr=0.05, tau=0.1),
}
_SAMPLERS: Mapping[str, Any] = {
    "bernoulli": partial(BernoulliSampler, 0.6),
    "weighted": partial(WeightedSampler, 3),
    "round robin": partial(RoundRobinSampler, 2),
}
_HETEROGENEITY: Mapping[str, Any] = {
    "stragglers": partial(SystemsHeterogeneity, stragglers=0.5),
    "late dropped": partial(SystemsHeterogeneity, stragglers=0.3, policy="drop"),
    "deadline": partial(SystemsHeterogeneity, deadline=2.5),
    "lost": partial(SystemsHeterogeneity, dropout=0.3),
}
_AGGREGATORS: Mapping[str, Any] = {
    "median": CoordinateMedian,
    "trimmed": partial(TrimmedMean, 0.25),
    "geometric": GeometricMedian,
    "clipping": partial(NormClipping, 0.1),
}
_CLOCK = partial(ClientClock, spread=0.5, jitter=0.3)
_ASYNCHRONOUS: Mapping[str, Any] = {
    "FedBuff": lambda: FedBuff(size=2, concurrency=3, clock=_CLOCK()),
    "FedAsync": lambda: FedAsync(concurrency=3, clock=_CLOCK()),
}
_COMPRESSION: Mapping[str, Any] = {"TopK": partial(TopK, 0.2), "QSGD": partial(QSGD, 15)}
_MEASURES: Mapping[str, Any] = {
    "accuracy": partial(ClientAccuracy, "val_loss", "min", on="train"),
    "personalized": partial(PersonalizedAccuracy, "val_loss", "min", on="train", local_steps=2),
}
_WORK: Mapping[str, dict[str, int]] = {
    "1 epoch": {"local_epochs": 1},
    "2 epochs": {"local_epochs": 2},
    "1 step": {"local_steps": 1},
    "3 steps": {"local_steps": 3},
}

_REMEDY = re.compile(
    r"\b(Use|Set|Leave|Pass|Choose|Write|Change|Raise|Lower|Give|Remove|Log|Make|Name|Resume|Return|Add|Take|Train|Look"
    r"|Put|Let|Assign|Keep|Start|Call|use|set|pass|leave|or use|lower|give)\b"
)


@dataclass(frozen=True)
class Failure:
    """The exception that ended a run.

    Attributes:
        kind: The exception's class.
        text: Its message.
        trace: Its trace.
        is_refusal: Whether it is an error that may refuse a run.
        has_remedy: Whether the message suggests a change.
        began: Whether a client had trained. Some checks follow the hooks that start the first round.
    """

    kind: str
    text: str
    trace: str
    is_refusal: bool
    has_remedy: bool
    began: bool

    @classmethod
    def of(cls, error: BaseException, began: bool) -> "Failure":
        """Return the failure that describes an exception."""
        trace = "".join(traceback.format_exception(error))
        refuses = isinstance(error, FederatedError | MisconfigurationException)
        return cls(type(error).__name__, str(error), trace, refuses, bool(_REMEDY.search(str(error))), began)


@dataclass
class Outcome:
    """The outcome of a run, as plain values that can be compared and sent between processes.

    Attributes:
        failure: The exception that ended it, if any.
        engines: The engine of each round.
        rounds: The reports by round.
        models: The server's parameters after every round, by name.
        buffers: The server's buffers after every round, by name.
        logged: The values given to the loggers, by step.
        state: The server's state and the client states at the end.
    """

    failure: Failure | None = None
    engines: dict[int, str] = field(default_factory=dict)
    rounds: dict[int, Any] = field(default_factory=dict)
    models: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    buffers: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    logged: dict[int, dict[str, float]] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)


class _MemoryLogger(pl.loggers.Logger):
    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> str:
        return "0"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        kept = {name: float(value) for name, value in metrics.items() if "seconds" not in name}
        self.outcome.logged.setdefault(-1 if step is None else step, {}).update(kept)


class _Recorder(FederatedCallback):
    def __init__(self, outcome: Outcome) -> None:
        self.outcome, self.began = outcome, False

    def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
        self.began = True

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        r = round_report.round
        self.outcome.engines[r] = getattr(trainer.fit_loop.run_state.engine, "name", "")
        self.outcome.rounds[r] = plain(round_report)
        self.outcome.models[r] = {n: p.detach().clone() for n, p in pl_module.named_parameters()}
        self.outcome.buffers[r] = {n: b.detach().clone() for n, b in pl_module.named_buffers()}


def run(
    c: Configuration,
    engine: str = "sequential",
    chunk: int | None = None,
    rounds: int = ROUNDS,
    ckpt_path: Path | None = None,
    save_to: Path | None = None,
    states_dir: Path | None = None,
    **options: Any,
) -> Outcome:
    """Run a configuration, and return its outcome.

    Args:
        c: The configuration.
        engine: The engine.
        chunk: Its ``chunk_size``.
        rounds: The number of rounds.
        ckpt_path: A checkpoint to resume.
        save_to: The path of a checkpoint to save at the end.
        states_dir: The folder of client states, if the configuration keeps them on disk. Logs go next to it.
        options: Further arguments of the trainer.
    """
    outcome = Outcome()
    recorder = _Recorder(outcome)
    with _quiet():
        try:
            options |= _options(c, states_dir)
            options |= {} if chunk is None else {"chunk_size": chunk}
            callbacks: list[pl.Callback] = [recorder]
            if c.attribute in ("one", "distinct") or c.client_lr != "none":
                callbacks.append(SetsPerClient(c))
            if c.measure != "none":
                callbacks.append(_MEASURES[c.measure]())
            if c.attribute == "round":
                callbacks.append(SetsPerRound())
            root = None if states_dir is None else states_dir.parent
            quiet = {**QUIET, "default_root_dir": root, "logger": _MemoryLogger(outcome), "num_sanity_val_steps": 0}
            trainer = FederatedTrainer(engine=engine, max_rounds=rounds, callbacks=callbacks, **{**quiet, **options})
            module = make_module(c)
            trainer.fit(module, make_data(c), ckpt_path=ckpt_path)
            if save_to is not None:
                trainer.save_checkpoint(save_to)
            outcome.state = _state_of(trainer)
        except Exception as error:
            worked = bool(outcome.rounds) or isinstance(error, ClientError)
            outcome.failure = Failure.of(error, recorder.began and worked)
    return outcome


def run_in_processes(c: Configuration, folder: Path, **options: Any) -> list[Outcome]:
    """Run a configuration in two processes that share its clients."""
    found = in_processes(
        partial(run, c, strategy="clients", devices=2, **options), folder, timeout=120 if c.states == "memory" else 180
    )
    gone = (Failure("process", o.error, o.trace, False, False, True) for o in found)
    return [o.value or Outcome(failure=why) for o, why in zip(found, gone, strict=True)]


def _roots(client_id: Any, size: int, steps: int) -> float:
    return float(size**0.5)


def _options(c: Configuration, states_dir: Path | None) -> dict[str, Any]:
    variants = METHODS[c.method]
    algorithm = variants[c.variant % len(variants)]()
    options: dict[str, Any] = {"algorithm": algorithm, "seed": c.number, "precision": c.precision}
    options |= _WORK[c.work] if algorithm.local_work else {}
    weighting = _roots if c.weighting == "roots" else c.weighting
    options |= {"weighting": weighting, "buffers": c.buffers, "local_optimizer_state": c.local_state}
    if c.clients in _SAMPLERS:
        options["sampler"] = _SAMPLERS[c.clients]()
    else:
        options["clients_per_round"] = c.clients
    if c.server != "sgd":
        options["server_optimizer"] = _SERVERS[c.server]
    if c.server_schedule == "step":
        options["server_lr_scheduler"] = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    for name, table, key in (
        ("heterogeneity", _HETEROGENEITY, c.heterogeneity),
        ("aggregator", _AGGREGATORS, c.aggregator),
        ("asynchronous", _ASYNCHRONOUS, c.asynchronous),
        ("compression", _COMPRESSION, c.compression),
    ):
        if key != "none":
            options[name] = table[key]()
    if c.clip != "none":
        options["gradient_clip_val"] = 0.1 if c.clip == "value" else 0.5
        options["gradient_clip_algorithm"] = "value" if c.clip == "value" else "norm"
        options["gradient_clip_on"] = "corrected" if c.clip == "corrected" else "gradient"
    if c.accumulate != 1:
        options["accumulate_grad_batches"] = c.accumulate
    if c.limit != 1.0:
        options["limit_train_batches"] = c.limit
    if c.personal:
        options["personal"] = ["head.*"]
    if c.on_error == "drop":
        options["on_client_error"] = "drop"
    options["client_states"] = c.states
    if c.states == "disk" and states_dir is not None:
        options["client_states_dir"] = states_dir
    return options


def _state_of(trainer: Any) -> dict[str, Any]:
    loop = trainer.fit_loop
    state = loop.state
    kept = {i: own for part in loop.gather(state.clients.state_dict()) for i, own in part.items()}
    if any(not isinstance(own, Mapping) for own in kept.values()):
        kept = {}
    return {
        "x": state.x.clone(),
        "server": {k: v.clone() for k, v in state.state.items()},
        "clients": {i: {k: v.clone() for k, v in kept[i].items()} for i in sorted(kept)},
    }


@contextmanager
def _quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fed")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
