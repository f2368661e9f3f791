"""Whether all processes of a run were given the same settings and data."""

import hashlib
import re
from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.origin import options_of
from lightning_fed.core.plain import plain_options
from lightning_fed.data.batches.batches import TensorBatches
from lightning_fed.engines.prepared import PreparedModule
from lightning_fed.server.participation import Population
from lightning_fed.strategies.ddp import split_of
from lightning_fed.strategies.processes import Ranks

_ROWS = 100  # of one client's examples, which are compared
_DEVICE = re.compile(r", device='[^']*'")  # in the text of a tensor
_UNSHOWN = ("seed", "clients", "sizes", "examples", "parameters")  # secret, long, or checksums


def check_alike(
    prepared: PreparedModule, population: Population, notes: Mapping[str, str], seed: int, ranks: Ranks
) -> None:
    """Raise in all processes if one was given other settings or data than the first; all must call it.

    They would draw other cohorts or train on other data, and wait for each other if they differ in the number of
    exchanges.
    """
    split = split_of(prepared.trainer)
    if ranks.size == split.size == 1:
        return
    own = _described(prepared, population, notes, seed)
    first, *others = split.gather(own) if split.size > 1 else ranks.gather(own)
    for rank, other in enumerate(others, start=1):
        differing = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if differing:
            raise FederatedError(
                f"Process {rank} was given other settings or data than process 0:"
                f" {', '.join(_shown(name, first, other) for name in differing)}. Each process runs the whole script:"
                " give all of them the same seed, settings and data. Call seed_everything(...) with one number before"
                " data are drawn or split; read a secret seed from a file or an environment variable that all have."
            )


def _shown(name: str, first: Mapping[str, str], other: Mapping[str, str]) -> str:
    if name in _UNSHOWN:
        return f"other {name}" if name.endswith("s") else f"another {name}"
    return f"{name}={other.get(name)} (process 0 has {first.get(name)})"


def _described(prepared: PreparedModule, population: Population, notes: Mapping[str, str], seed: int) -> dict[str, str]:
    """Return what all processes must have in common, as texts."""
    settings, trainer, ids = prepared.settings, prepared.trainer, population.ids
    found = {
        "seed": str(seed),
        "max_rounds": repr(trainer.max_epochs),
        "check_val_every_n_epoch": repr(trainer.check_val_every_n_epoch),
        "limit_val_batches": repr(trainer.limit_val_batches),
        "algorithm": type(settings.algorithm).__name__,
        "options": repr(plain_options(settings.algorithm.options())),
        "server_optimizer": repr(settings.server_optimizer),
        "local optimizer": repr(options_of(prepared.optimizer.base)),
        "clients": _checksum(repr(ids if isinstance(ids, range) else list(ids)).encode()),
        "examples": _examples(prepared, population),
        **settings.transport(),
        **notes,
    }
    # addresses and devices differ between processes
    return {name: _DEVICE.sub("", text) for name, text in found.items() if " at 0x" not in text}


def _examples(prepared: PreparedModule, population: Population) -> str:
    """Return a checksum of some of one client's examples, if they are tensors in memory."""
    if not population.sizes_are_known:
        return ""  # clients are built when they train
    data, batches = prepared.trainer.datamodule, None
    with suppress(Exception):  # raised again when the client trains, which may be dropped
        batches = TensorBatches.of(data.client_dataset(population[0]), data.batch_settings)
    if batches is None:
        return ""
    rows = batches.stored_rows()[:_ROWS]
    return _checksum(b"".join(_bytes(tensor[rows.to(tensor.device)]) for tensor in batches.tensors))


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


def _checksum(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
