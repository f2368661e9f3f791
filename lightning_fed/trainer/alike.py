"""A check that all processes of a run have the same settings and data."""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fed.checkpoints.restoring import digest
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.origin import options_of
from lightning_fed.core.plain import as_plain, plain_options
from lightning_fed.core.seeds import preserved_random_state, seed_global
from lightning_fed.data.batches.batches import TensorBatches
from lightning_fed.data.batches.evaluation import are_several
from lightning_fed.data.batches.random_states import RandomStates
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.engines.prepared import PreparedModule
from lightning_fed.server.participation import Population
from lightning_fed.strategies.processes import Ranks

_ROWS = 100  # examples of one client to compare if they are tensors
_READ = 10  # examples to compare otherwise, which are read one by one
# in the text of a tensor, and of a function of batches that holds its device
_DEVICE = re.compile(r", device='[^']*'|, index=\d+|\b(?:cuda|xpu|hpu|npu):\d+")
# secret, long, or checksums
_UNSHOWN = ("seed", "clients", "sizes", "split", "examples", "validation examples", "parameters")


def check_alike(
    prepared: PreparedModule, population: Population, notes: Mapping[str, str], seed: int, ranks: Ranks
) -> None:
    """Raise in every process if any process has other settings or data than the first; all must call it.

    Such processes would draw different cohorts or train on different data. They would wait for each other if their
    numbers of exchanges differ.
    """
    split = prepared.split
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
    """Return the settings and data that all processes must share, as text."""
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
        "clients": digest(repr(ids if isinstance(ids, range) else list(ids)).encode()),
        **_examples(trainer.datamodule, population),
        **settings.transport(),
        **notes,
    }
    # addresses and devices differ between processes
    return {name: _DEVICE.sub("", text) for name, text in found.items() if " at 0x" not in text}


def _examples(data: FederatedDataModule, population: Population) -> dict[str, str]:
    """Return checksums of validation data and, if known at the start, of some of one client's examples."""
    found = {"examples": "", "validation examples": ""}
    with suppress(Exception):  # raised again in validation, or when the client trains and may be dropped
        parts: Any = data.val if are_several(data.val) else [data.val]
        found["validation examples"] = " ".join(_some_of(part, data) for part in parts)
    with suppress(Exception):
        if population.sizes_are_known:  # else clients are built only when they train
            found["examples"] = _some_of(data.client_dataset(population[0]), data)
            found["validation examples"] += _some_of(data.client_val_dataset(population[0]), data)
    return found


def _some_of(dataset: Any, data: FederatedDataModule) -> str:
    """Return a checksum of some examples, or an empty string if reading them draws random numbers."""
    dataset = dataset.dataset if isinstance(dataset, DataLoader) else dataset
    if dataset is None or not hasattr(dataset, "__len__"):
        return ""
    count, batches = len(dataset), TensorBatches.of(dataset, data.batch_settings)
    if batches is not None:
        rows = batches.stored_rows()[:_ROWS]
        return f"{count} {digest(b''.join(_bytes(t[rows.to(t.device)]) for t in batches.tensors))}"
    if RandomStates(dataset):
        return ""
    readings = []
    with preserved_random_state():
        for seed in range(2):  # the same seeds in all processes
            seed_global(seed)
            readings.append(repr([as_plain(dataset[k]) for k in range(min(_READ, count))]))
    return f"{count} {digest(readings[0].encode())}" if readings[0] == readings[1] else ""


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
