"""The server's side of a run restored from a checkpoint, and what goes wrong, in terms of the checkpoint."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lightning_fed._compat import rank_zero_warn
from lightning_fed._lightning import pl
from lightning_fed.client_states import ClientStatesPlace
from lightning_fed.core.arguments import kind_of
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.options import differing_options, options_of
from lightning_fed.engines.prepared import PreparedModule
from lightning_fed.server.client_store import ClientStore
from lightning_fed.server.server import Server
from lightning_fed.settings import Settings
from lightning_fed.strategies.processes import Ranks

__all__ = [
    "Schedules",
    "check_optimizer_states",
    "compare_work",
    "notes_of",
    "restore_server",
    "restored_from",
    "start_server",
]

_TELLS = (LookupError, TypeError, AttributeError, ValueError, RuntimeError, OverflowError)


@contextmanager
def restored_from(path: Any, what: str) -> Iterator[None]:
    """Let whatever goes wrong inside be told of the checkpoint that is restored.

    Args:
        path: The checkpoint.
        what: What is restored, in words.

    Raises:
        FederatedError: From the error, naming checkpoint and part; its own kind passes as it is.
    """
    try:
        yield
    except FederatedError:
        raise
    except _TELLS as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = f"{type(error).__name__}: {' '.join(lines[:3])}".rstrip(".")
        raise FederatedError(
            f"The checkpoint {path} does not fit this run: restoring {what} ended in {told}. Resume with the model and"
            " the settings it was written with, or start anew, without ckpt_path."
        ) from error


def restore_server(
    server: Server, saved: Mapping[str, Any], settings: Settings, notes: Mapping[str, str], path: Any
) -> dict[str, torch.Tensor]:
    """Bring a new server to where a checkpoint's stands, but for the states of clients, and tell what differs.

    Args:
        server: The server.
        saved: What the checkpoint has of it.
        settings: How this run's rounds are run.
        notes: What this run would note of its data and optimizer; see :func:`notes_of`.
        path: The checkpoint.

    Returns:
        The metrics of the last completed round, by name.

    Raises:
        FederatedError: If the checkpoint does not fit the run.
    """
    with restored_from(path, "the state of the server"):
        settings.check_transport(saved.get("transport", {}))
        built = options_of(server.step.optimizer)
        server.load_state_dict({**saved, "client_states": {}}, any_seed=not settings.seed_is_given)
        loaded, is_scheduled = options_of(server.step.optimizer), server.step.scheduler is not None
        if differing := differing_options(built, loaded, is_scheduled):
            rank_zero_warn(f"The server's optimizer goes on with the checkpoint's {', '.join(differing)}.")
        if saved["seed"] != settings.seed and not settings.seed_is_given and "PL_GLOBAL_SEED" in os.environ:
            rank_zero_warn(f"The run goes on with the checkpoint's seed {saved['seed']}, not with {settings.seed}.")
        compare_work(saved.get("work", {}), notes, bool(saved["client_states"]))
        check_optimizer_states(server.step.optimizer, "the server's optimizer")
        return {name: torch.as_tensor(value) for name, value in saved["metrics"].items()}


def check_optimizer_states(optimizer: torch.optim.Optimizer, what: str) -> None:
    """Refuse an optimizer's state that is none, when it has been loaded; what its entries are is the optimizer's own.

    Args:
        optimizer: The optimizer.
        what: What it is, in words.

    Raises:
        FederatedError: Naming what cannot be.
    """
    for entries in optimizer.state.values():
        if not isinstance(entries, Mapping):
            raise FederatedError(f"The checkpoint's state of {what} holds {kind_of(entries)} for a parameter.")
    for group in optimizer.param_groups:
        rate = group.get("lr", 0.0)
        if not isinstance(rate, (int, float, torch.Tensor)) or isinstance(rate, bool):
            raise FederatedError(f"The checkpoint's state of {what} has the learning rate {rate!r}.")


def notes_of(sizes: Sequence[int] | None, batch_size: int | None, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return what a checkpoint notes of clients' data and of what trains on them.

    Args:
        sizes: The numbers of examples of all clients, which are noted by a checksum; None if they are not known.
        batch_size: The examples in a full batch.
        optimizer: The local optimizer.
    """
    notes = {"batch_size": repr(batch_size), "optimizer": type(optimizer).__name__}
    if sizes is not None:
        notes["sizes"] = hashlib.blake2b(np.array(sizes, dtype=np.int64).tobytes(), digest_size=8).hexdigest()
    return notes


def compare_work(saved: Mapping[str, str], mine: Mapping[str, str], keeps_states: bool) -> None:
    """Warn where a checkpoint was written with other work or data; refuse it where clients' states rest on their data.

    Args:
        saved: What the checkpoint notes.
        mine: The same of this run.
        keeps_states: Whether the checkpoint has states of clients.

    Raises:
        FederatedError: If clients have other data than what they keep belongs to.
    """
    differing = {name for name in saved.keys() & mine.keys() if saved[name] != mine[name]}
    if "sizes" in differing:
        change = "The checkpoint was written with other numbers of examples per client"
        if keeps_states:
            raise FederatedError(
                f"{change}, and what its clients keep belongs to their data. Resume with the data and the partition it"
                " was written with, or start from its weights alone: Model.load_from_checkpoint(path), then fit"
                " without ckpt_path."
            )
        rank_zero_warn(f"{change}. The run goes on with this run's.")
    if others := sorted(differing - {"sizes"}):
        told = ", ".join(f"{name}={saved[name]} (this run has {mine[name]})" for name in others)
        rank_zero_warn(f"The checkpoint was written with {told}. The run goes on with this run's.")


@dataclass(frozen=True)
class Schedules:
    """Where learning rates and their schedules stand.

    Attributes:
        optimizer: The state of the local optimizer.
        schedules: The states of its schedules.
    """

    optimizer: dict[str, Any]
    schedules: Sequence[dict[str, Any]]

    @staticmethod
    def of(trainer: pl.Trainer, optimizer: torch.optim.Optimizer) -> "Schedules":
        """Return where those of a trainer stand."""
        configs = trainer.lr_scheduler_configs
        return Schedules(optimizer.state_dict(), [config.scheduler.state_dict() for config in configs])

    def resume(self, trainer: pl.Trainer, optimizer: torch.optim.Optimizer) -> None:
        """Let those of a trainer go on from here."""
        optimizer.load_state_dict(self.optimizer)
        for config, saved in zip(trainer.lr_scheduler_configs, self.schedules, strict=True):
            config.scheduler.load_state_dict(saved)


def start_server(
    prepared: PreparedModule,
    place: ClientStatesPlace,
    ranks: Ranks,
    notes: Mapping[str, str],
    restored: dict[str, Any] | None,
    previous: Server | None,
) -> Server:
    """Return the server's side of a run as a fit starts.

    Args:
        prepared: The module, which holds x^0.
        place: Where clients' states are kept.
        ranks: The processes that share the clients.
        notes: What this run's checkpoints note of its work.
        restored: The state of the checkpoint that the run goes on from, if there is one.
        previous: The server's side at the end of the trainer's previous fit, if that is to go on.

    Raises:
        FederatedError: If the checkpoint is not of this run.
    """
    s, flat = prepared.settings, prepared.flat
    trainer: Any = prepared.trainer
    server = Server(
        s.algorithm, flat.y, flat.layout, s.server_optimizer, s.server_lr_scheduler,
        trainer.datamodule.client_ids, s.seed,
    )  # fmt: skip
    server.personal, server.num_parameters = flat.personal.clone(), len(flat.params)
    server.buffers, server.kept_buffers = prepared.buffers.read(), prepared.buffers.kept
    server.advance_solver = prepared.optimizer.advance_solver
    kept: ClientStore | None = None
    if restored is not None:
        metrics = restore_server(server, restored, s, notes, trainer.ckpt_path)
        trainer._logger_connector._callback_metrics.update(metrics)
    elif previous is not None:
        server.load_state_dict(previous.state_dict({}), any_seed=True)
        kept = previous.clients
    place.open(server, ranks, kept, flat, s)
    if restored is not None:
        with restored_from(trainer.ckpt_path, "client states"):
            place.load(server, restored["client_states"], ranks.is_home_of)
    return server
