"""Users' parts that keep something from round to round which neither checkpoints nor seeds cover."""

import pickle
import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_fed.compat.private import rank_zero_warn
from lightning_fed.core.plain import as_plain
from lightning_fed.core.rounds import RoundReport
from lightning_fed.core.seeds import preserved_random_state
from lightning_fed.core.types import ClientId
from lightning_fed.data.batches.random_states import RandomStates
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.server.aggregation.mean import Aggregator
from lightning_fed.settings.settings import Settings

_REMEDIES = {
    "algorithm": "Keep what changes in the states that hooks return",
    "aggregator": "Override state_dict and load_state_dict, which checkpoints call",
    "compression": "Compute it from the message and its stream, or set error_feedback",
    "heterogeneity": "Compute it from the seed and the round",
    "attack": "Compute it from the message and its stream",
}
_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)


class OwnParts:
    """Warns of attributes of the server's parts that change again in a run's second round.

    The first round may fill a cache.
    """

    def __init__(self, settings: Settings) -> None:
        parts = {name: getattr(settings, name) for name in _REMEDIES}
        self._parts = {name: part for name, part in parts.items() if part is not None and _is_watched(part)}
        self._before: dict[str, dict[str, Any]] | None = None

    def look(self, report: RoundReport) -> bool:
        """Compare the attributes after a completed round; return whether to do so again."""
        now = {name: {key: _plain(value) for key, value in vars(part).items()} for name, part in self._parts.items()}
        if self._before is None:
            self._before = now
            return bool(now)
        for name, part in self._parts.items():
            changed = [key for key, value in now[name].items() if value != self._before[name].get(key)]
            if changed:
                rank_zero_warn(
                    f"{name}={type(part).__name__}(...) changes its attribute {changed[0]!r} from round to round."
                    " Attributes are not in checkpoints: a resumed run begins with the initial value, another trainer"
                    f" with the last one, and every process has its own. {_REMEDIES[name]}, unless no round reads it."
                )
        return False


def _is_watched(part: Any) -> bool:
    """Return whether a part is of the user's own class, and has no state in checkpoints."""
    keeps_state = isinstance(part, Aggregator) and type(part).state_dict is not Aggregator.state_dict
    return not keeps_state and type(part).__module__.partition(".")[0] != "lightning_fed" and hasattr(part, "__dict__")


def _plain(value: Any) -> Any:
    """Return a description that changes with the value, and with what a generator will draw."""
    is_generator = isinstance(value, random.Random | np.random.RandomState | np.random.Generator)
    return pickle.dumps(value) if is_generator else as_plain(value)


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
