"""Restores a run's server state from a checkpoint or an earlier fit, with errors that name the source."""

import copy
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lightning_fed.checkpoints.client_states import ClientStatesStorage
from lightning_fed.compat.package import pl
from lightning_fed.compat.private import rank_zero_warn
from lightning_fed.core.arguments import kind_of
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.origin import CHECKPOINT, EARLIER_FIT, Origin, differing_options, options_of, schedule_options
from lightning_fed.core.plain import as_plain
from lightning_fed.engines.prepared import PreparedModule
from lightning_fed.server.aggregation.lora import lora_needs_mean
from lightning_fed.server.client_states.store import ClientStore
from lightning_fed.server.participation import Population
from lightning_fed.server.privacy import PrivacyLedger
from lightning_fed.server.server import Server
from lightning_fed.settings.settings import Settings
from lightning_fed.strategies.processes import Ranks

_OF_TRAINER = ("accumulate_grad_batches", "limit_train_batches", "precision")
_OF_DATA = ("batch_size", "drop_last", "shuffle", "batch_transform", "batch_augment")
_MISMATCHES = (LookupError, TypeError, AttributeError, ValueError, RuntimeError, OverflowError)


@contextmanager
def restored_from(path: Any, what: str) -> Iterator[None]:
    """Add the checkpoint and the restored part to any error inside."""
    try:
        yield
    except FederatedError:
        raise
    except _MISMATCHES as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        listed = f"{type(error).__name__}: {' '.join(lines[:3])}".rstrip(".")
        raise FederatedError(
            f"The checkpoint {path} does not fit this run: restoring {what} ended in {listed}. Resume with the model"
            " and the settings it was written with, or start a new run, without ckpt_path."
        ) from error


def _continue(
    server: Server,
    saved: Mapping[str, Any],
    settings: Settings,
    notes: Mapping[str, str],
    keeps_states: bool,
    origin: Origin,
) -> None:
    """Restore a new server from the state of another server of the same run, except for client states."""
    settings.check_transport(saved.get("transport", {}), origin)
    schedules = [] if server.step.scheduler is None else [server.step.scheduler]
    with warning_of_options("server's optimizer", server.step.optimizer, schedules, origin):
        server.load_state_dict({**saved, "client_states": {}}, any_seed=not settings.seed_is_given, origin=origin)
    if saved["seed"] != settings.seed and not settings.seed_is_given and "PL_GLOBAL_SEED" in os.environ:
        its = origin.name[0].lower() + origin.name[1:]
        rank_zero_warn(f"The run continues with {its}'s seed {saved['seed']}, not with {settings.seed}.")
    compare_work(saved.get("work", {}), notes, keeps_states, origin)
    if keeps_states and server.expected_state.own and saved["step"]["x"].dtype != server.x.dtype:
        raise FederatedError(
            f"{origin.name}'s parameters are {saved['step']['x'].dtype}, {origin.this}'s are {server.x.dtype}, and what"
            f" its clients keep is of their type. {origin.remedy('the precision')}"
        )


def check_optimizer_states(optimizer: torch.optim.Optimizer, what: str) -> None:
    """Raise if a loaded optimizer state is invalid; the optimizer checks the entries' meaning."""
    for key, entries in optimizer.state.items():
        if isinstance(key, torch.Tensor) and not isinstance(entries, Mapping):
            raise FederatedError(f"The checkpoint's state of {what} holds {kind_of(entries)} for a parameter.")
    for group in optimizer.param_groups:
        rate = group.get("lr", 0.0)
        if not isinstance(rate, (int, float, torch.Tensor)) or isinstance(rate, bool):
            raise FederatedError(f"The checkpoint's state of {what} has the learning rate {rate!r}.")


def notes_of(prepared: PreparedModule, population: Population) -> dict[str, str]:
    """Return a checkpoint's notes on clients' work and data, the optimizer and the parameters.

    Parameters' names and shapes, and clients' numbers of examples and the split of a data set into clients if known,
    are stored as checksums.
    """
    flat, trainer = prepared.flat, prepared.trainer
    named = [(name, list(p.shape)) for name, p in zip(flat.names, flat.params, strict=True)]
    clip, by = trainer.fit_loop.corrected_clip or (trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
    notes = {
        **prepared.settings.work(),
        **{name: str(as_plain(getattr(trainer.datamodule, name))) for name in _OF_DATA},
        **{name: repr(getattr(trainer, name)) for name in _OF_TRAINER},
        "gradient_clip_val": repr(clip),
        "gradient_clip_algorithm": repr(getattr(by, "value", by or "norm")),
        "optimizer": ", ".join([type(own).__name__ for own in trainer.optimizers]),
        "schedules": ", ".join(type(config.scheduler).__name__ for config in trainer.lr_scheduler_configs) or "none",
        "parameters": digest(repr(named).encode()),
    }
    if population.sizes_are_known:
        notes["sizes"] = digest(np.array(population.sizes, dtype=np.int64).tobytes())
        clients = trainer.datamodule.clients
        if clients is not None and clients.split is not None:
            order, shift = clients.split
            notes["split"] = digest(order.numpy().tobytes() + shift.encode())
    return notes


@contextmanager
def warning_of_options(
    what: str, optimizer: torch.optim.Optimizer, schedules: Sequence[Any], origin: Origin, remedy: str = ""
) -> Iterator[None]:
    """Warn if loading states inside changes options of an optimizer or its schedules."""
    built, planned = options_of(optimizer), [schedule_options(schedule) for schedule in schedules]
    yield
    its = origin.name[0].lower() + origin.name[1:]
    for schedule, options in zip(schedules, planned, strict=True):
        if differing := differing_options([options], [schedule_options(schedule)], True, origin):
            rank_zero_warn(f"{type(schedule).__name__} continues with {its}'s {', '.join(differing)}.")
    if differing := differing_options(built, options_of(optimizer), bool(schedules), origin):
        rank_zero_warn(f"The {what} continues with {its}'s {', '.join(differing)}.{remedy}")


def digest(content: bytes) -> str:
    """Return a short checksum, to compare the contents of two processes or runs."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def compare_work(saved: Mapping[str, str], mine: Mapping[str, str], keeps_states: bool, origin: Origin) -> None:
    """Warn if work or data changed; raise if parameters, data of kept client states, or step counts do not fit."""
    differing = {name for name in saved.keys() & mine.keys() if saved[name] != mine[name]}
    if "parameters" in differing:
        raise FederatedError(
            f"{origin.name} {origin.ran} other trained parameters: as many numbers, but other names or shapes."
            f" {origin.remedy('the model and the frozen parameters')}"
        )
    changes = {"sizes": "other numbers of examples per client", "split": "another split of the examples"}
    if found := [text for name, text in changes.items() if name in differing]:
        change = f"{origin.name} {origin.ran} {found[0]}"
        if keeps_states:
            raise FederatedError(
                f"{change}, and what its clients keep belongs to their data."
                f" {origin.remedy('the data and the partition')}"
            )
        rank_zero_warn(f"{change}. The run continues with {origin.this}'s.")
    counted = saved.get("local_schedule", "None")
    if mine.get("local_schedule") == repr("continue") != counted:
        raise FederatedError(
            f"{origin.name} {origin.ran} local_schedule={counted}, so its clients have not counted the steps that"
            f" 'continue' needs. {origin.remedy('the local_schedule')}"
        )
    raised_later = {"optimizer", "schedules"}  # loading their state raises
    if others := sorted(differing - changes.keys() - raised_later):
        listed = ", ".join(f"{name}={saved[name]} ({origin.this} has {mine[name]})" for name in others)
        rank_zero_warn(f"{origin.name} {origin.ran} {listed}. The run continues with {origin.this}'s.")


@dataclass(frozen=True)
class EarlierFit:
    """The state that a trainer's fit leaves for the next one."""

    module: pl.LightningModule
    server: Server
    noted: Mapping[str, Any]  # the run's identity, transport and work
    optimizer: dict[str, Any]
    schedules: Sequence[dict[str, Any]]

    @staticmethod
    def of(prepared: PreparedModule, server: Server, notes: Mapping[str, str]) -> "EarlierFit":
        """Return a fit's state."""
        noted = {**server.identity(), "transport": prepared.settings.transport(), "work": dict(notes), "metrics": {}}
        schedules = [config.scheduler.state_dict() for config in prepared.trainer.lr_scheduler_configs]
        return EarlierFit(prepared.module, server, noted, prepared.optimizer.state_dict(), schedules)

    def continue_in(self, server: Server, prepared: PreparedModule, ranks: Ranks, notes: Mapping[str, str]) -> None:
        """Restore the next fit's server, except for client states, and local optimizer from this fit's end."""
        if prepared.module is not self.module:
            raise FederatedError(
                f"This trainer has already run {self.server.round} rounds on another model. Make a new"
                " FederatedTrainer, or resume with fit(..., ckpt_path=...)."
            )
        keeps_states = any(ranks.gather(len(self.server.clients) > 0))  # each process only counts its own clients
        saved = {**self.server.state_dict({}), **self.noted}
        _continue(server, saved, prepared.settings, notes, keeps_states, EARLIER_FIT)
        before, optimizer = self.noted["work"], prepared.optimizer.base
        groups = [[len(g["params"]) for g in of] for of in (self.optimizer["param_groups"], optimizer.param_groups)]
        kinds = {
            "local optimizer": (before["optimizer"], notes["optimizer"]),
            "parameters per group of the local optimizer": tuple(groups),
            "schedules": (before["schedules"], notes["schedules"]),
        }
        for what, (theirs, mine) in kinds.items():
            if theirs != mine:
                raise FederatedError(
                    f"{EARLIER_FIT.name}'s {what}: {theirs}. This fit's: {mine}."
                    f" {EARLIER_FIT.remedy('the optimizer and the schedules')}"
                )
        schedules = [config.scheduler for config in prepared.trainer.lr_scheduler_configs]
        remedy = " To train with other options, make a new FederatedTrainer."
        with warning_of_options("local optimizer", optimizer, schedules, EARLIER_FIT, remedy):
            optimizer.load_state_dict(self.optimizer)
            for schedule, state in zip(schedules, self.schedules, strict=True):
                schedule.load_state_dict(state)
        if not torch.equal(prepared.flat.y, server.evaluation_x()):
            rank_zero_warn(
                f"The model's parameters have changed since this trainer's earlier fit. This fit continues from the"
                f" server's own after {server.round} rounds and ignores the change. To start from the changed ones,"
                " make a new FederatedTrainer."
            )


def start_server(
    prepared: PreparedModule,
    storage: ClientStatesStorage,
    ranks: Ranks,
    notes: Mapping[str, str],
    restored: dict[str, Any] | None,
    earlier: EarlierFit | None,
    ledger: PrivacyLedger | None = None,
) -> Server:
    """Return the server's state at the start of a fit: new, from a checkpoint, or from the earlier fit."""
    s, flat = prepared.settings, prepared.flat
    trainer: Any = prepared.trainer
    server = Server(
        s.algorithm, flat.y, flat.layout, s.server_optimizer, s.server_lr_scheduler,
        trainer.datamodule.client_ids, s.seed,
    )  # fmt: skip
    server.personal, server.num_parameters = flat.personal.clone(), len(flat.params)
    server.buffers, server.kept_buffers = prepared.buffers.read(), prepared.buffers.kept
    server.counts_steps = s.local_schedule == "continue"
    server.advance_solver = prepared.optimizer.advance_solver
    server.lora = prepared.lora
    if server.lora is not None and not (server.step.takes_mean and server.step.scheduler is None):
        raise FederatedError(lora_needs_mean("server_optimizer or server_lr_scheduler changes the step"))
    server.ledger = ledger
    kept: ClientStore | None = None
    if restored is not None:
        with restored_from(trainer.ckpt_path, "the state of the server"):
            _continue(server, restored, s, notes, bool(restored["client_states"]), CHECKPOINT)
            check_optimizer_states(server.step.optimizer, "the server's optimizer")
            metrics = {name: torch.as_tensor(value) for name, value in restored["metrics"].items()}
        if not torch.equal(flat.y, server.evaluation_x()):
            rank_zero_warn(
                f"The state_dict of {trainer.ckpt_path} is not the server's model after {server.round} rounds: it was"
                " edited, or the module saves or loads it in its own way. The run continues from the server's own"
                " parameters, and ignores the others. To start from these, load them into the module, and begin a new"
                " run without ckpt_path."
            )
        trainer._logger_connector._callback_metrics.update(metrics)
    elif earlier is not None:
        earlier.continue_in(server, prepared, ranks, notes)
        kept = earlier.server.clients
    if s.algorithm.uses_solver_state:
        server.state = prepared.optimizer.placed(server.state)
    storage.open(server, kept, s)
    if restored is not None:
        with restored_from(trainer.ckpt_path, "client states"):
            storage.load(server, restored["client_states"], ranks)
    if s.aggregator is not None and earlier is None:
        with restored_from(trainer.ckpt_path, "the messages on their way"):
            s.aggregator.load_state_dict((restored or {}).get("aggregator", {}), server.x)
    if s.sampler_learns and earlier is None:
        with restored_from(trainer.ckpt_path, "what the sampler has learned"):
            _start_sampler(s, restored)
    return server


def sampler_state(settings: Settings) -> dict[str, Any]:
    """Return the name and state of a sampler that learns, for checkpoints."""
    sampler: Any = settings.sampler
    return {"name": type(sampler).__name__, "state": copy.deepcopy(sampler.state_dict())}


def _start_sampler(settings: Settings, restored: Mapping[str, Any] | None) -> None:
    """Restore the state of a sampler that learns, or reset it to the start of a new run."""
    sampler: Any = settings.sampler
    name, saved = type(sampler).__name__, (restored or {}).get("sampler")
    if saved is not None and saved["name"] == name:
        sampler.load_state_dict(saved["state"])
        return
    if restored is not None:
        found = f"what {saved['name']} has learned" if saved is not None else "nothing that a sampler has learned"
        rank_zero_warn(f"The checkpoint holds {found}: {name} begins as in a new run.")
    sampler.load_state_dict(copy.deepcopy(settings.sampler_start))
