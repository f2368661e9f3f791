"""Generators of the data module that clients' data are drawn from, and that the run does not seed."""

import pickle
import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_fed.compat.private import rank_zero_warn
from lightning_fed.core.rounds import RoundReport
from lightning_fed.core.seeds import preserved_random_state
from lightning_fed.core.types import ClientId
from lightning_fed.data.batches.random_states import RandomStates
from lightning_fed.data.datamodule import FederatedDataModule

_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)


class OwnGenerators:
    """Warns of a generator in an attribute of the data module that draws again in a fit's second round.

    Generators within data sets are seeded for every batch, also if an attribute holds them. One that ``state_dict``
    may hold is left to it.
    """

    def __init__(self, data: FederatedDataModule) -> None:
        self._data = data
        self._before: dict[str, bytes] | None = None

    def look(self, report: RoundReport) -> bool:
        """Compare the generators after a completed round; return whether to do so again."""
        data, before = self._data, self._before
        if type(data).state_dict is not FederatedDataModule.state_dict:
            return False
        if not report.cohort:
            return True
        held = {name: value for name, value in vars(data).items() if isinstance(value, _GENERATORS)}
        self._before = now = {name: _state_of(value) for name, value in held.items()}
        if before is None:
            return bool(now)
        for name in [name for name in now if now[name] != before.get(name)]:
            if not _is_seeded(data, report.cohort[0], held[name]):
                rank_zero_warn(
                    f"{type(data).__name__} draws from the generator in its attribute {name!r}, which the run does not"
                    " seed: its numbers depend on what was drawn before, so a resumed run and other engines have"
                    " others. Draw from PyTorch's global generator, which the run seeds for every client, or keep it in"
                    " the data set, where it is seeded for every batch."
                )
        return False


def _state_of(value: Any) -> bytes:
    return pickle.dumps(value.get_state().numpy() if isinstance(value, torch.Generator) else value)


def _is_seeded(data: FederatedDataModule, client_id: ClientId, value: Any) -> bool:
    """Return whether a generator is in the data of a client."""
    with preserved_random_state():
        is_loader = type(data).client_dataloader is not FederatedDataModule.client_dataloader
        made: Any = (
            data.client_dataloader(client_id, torch.Generator()) if is_loader else data.client_dataset(client_id)
        )
    roots = (made.dataset, made.collate_fn) if isinstance(made, DataLoader) else (made, data.collate_fn)
    return value in RandomStates(*roots)
