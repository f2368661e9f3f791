"""The server of a run: a fit with remote clients that saves every round, and continues from its checkpoint."""

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lightning_fed.callbacks.base import FederatedCallback
from lightning_fed.compat.package import pl
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import RoundReport
from lightning_fed.core.types import ClientId
from lightning_fed.deploy.exchange import named
from lightning_fed.deploy.remote import RemoteClients
from lightning_fed.deploy.site_process import Maker, called
from lightning_fed.deploy.transport import Transport

_PATIENCE = 30.0  # seconds to wait until another run with the checkpoint ends
_log = logging.getLogger("lightning_fed.deploy")


def serve(
    transport_to: Callable[[Sequence[ClientId]], Transport],
    make_trainer: Maker,
    make_model: Maker,
    client_ids: Sequence[ClientId] | Maker,
    checkpoint: str | Path,
    make_val: Maker | None,
    max_examples: int | None,
    batch_size: int | None,
    agree_on: Sequence[str],
) -> None:
    """Fit with the objects that functions make, given directly or by name, and with clients over a transport."""
    ids: Any = called(client_ids)() if callable(client_ids) or isinstance(client_ids, str) else client_ids
    transport, val = transport_to(ids), None if make_val is None else called(make_val)
    if val is not None and not agree_on:
        val = val()
    clients = RemoteClients(transport, ids, val, max_examples, batch_size, agree_on)
    fit(called(make_trainer)(), called(make_model)(), clients, Path(checkpoint).absolute())


def fit(trainer: pl.Trainer, module: pl.LightningModule, clients: RemoteClients, checkpoint: Path) -> None:
    """Run all rounds, from the checkpoint if it exists; no other run may use it meanwhile."""
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    try:  # the system frees the lock in any case
        held = FileLock(f"{checkpoint}.lock", timeout=_PATIENCE).acquire()
    except Timeout as error:
        raise FederatedError(
            f"Another run works with the checkpoint {checkpoint}. End that run, or give this one another checkpoint."
        ) from error
    with held:
        if is_begun := checkpoint.is_file():
            _log.info("The run continues from %s.", checkpoint)
        trainer.callbacks.append(_SaveRounds(checkpoint))  # type: ignore[attr-defined]
        trainer.fit(module, clients, ckpt_path=checkpoint if is_begun else None)
    _log.info("All rounds are done. The model is in %s.", checkpoint)


class _SaveRounds(FederatedCallback, pl.callbacks.Checkpoint):
    """Save every round, after all other callbacks, and keep the previous round's checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint, self._report = checkpoint, ""

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round_report: RoundReport) -> None:
        """Prepare the line to log once the round is saved."""
        done = round_report
        self._report = f"Round {done.round}: loss {done.loss:.6g}, clients {named(list(done.clients))}."

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the round."""
        if self._checkpoint.is_file():
            _keep(self._checkpoint, self._checkpoint.with_suffix(f".previous{self._checkpoint.suffix}"))
        trainer.save_checkpoint(self._checkpoint, weights_only=False)
        _log.info("%s", self._report)


def _keep(file: Path, other: Path) -> None:
    """Give a file a second name; at every moment, both names keep at least their former content."""
    work = other.with_name(f".{other.name}.new")
    work.unlink(missing_ok=True)
    try:
        os.link(file, work)
    except OSError:  # some network disks have no hard links
        shutil.copyfile(file, work)
    os.replace(work, other)
