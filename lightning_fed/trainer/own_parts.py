"""User-defined parts that keep state between rounds outside of checkpoints and seeds."""

import pickle
import random
from collections.abc import Sequence
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
_PICKLED = (random.Random, np.random.RandomState, np.random.Generator)  # generators, compared by their pickles


class OwnParts:
    """Warns about user-defined parts with attributes that still change in a fit's second round.

    It checks attributes of the server's parts, and generators in attributes of the data module. It ignores the first
    round, which may fill a cache, and parts with their own ``state_dict``. Generators within data sets are seeded for
    every batch, even if an attribute holds them too.

    Args:
        settings: The settings, with the server's parts.
        data: The data module, if the clients' data are in this process.
    """

    def __init__(self, settings: Settings, data: FederatedDataModule | None) -> None:
        self._data = data
        self._parts: dict[str, Any] = {}
        for name in _REMEDIES:
            part = getattr(settings, name)
            is_saved = isinstance(part, Aggregator) and type(part).state_dict is not Aggregator.state_dict
            is_users = part is not None and type(part).__module__.partition(".")[0] != "lightning_fed"
            if is_users and not is_saved and hasattr(part, "__dict__"):
                self._parts[name] = part
        if data is not None and type(data).state_dict is FederatedDataModule.state_dict:
            self._parts["datamodule"] = data
        self._before: dict[str, dict[str, Any]] | None = None

    def look(self, report: RoundReport) -> bool:
        """Compare the attributes after a completed round; return whether to compare again."""
        if not report.cohort:
            return True
        now = {name: self._attributes(part) for name, part in self._parts.items()}
        before, self._before = self._before, now
        if before is None:
            return any(now.values())
        for name, part in self._parts.items():
            changed = [key for key, value in now[name].items() if value != before[name].get(key)]
            if part is self._data:
                self._warn_of_generators(changed, report.cohort[0])
            elif changed:
                rank_zero_warn(
                    f"{name}={type(part).__name__}(...) changes its attribute {changed[0]!r} from round to round."
                    " Attributes are not in checkpoints: a resumed run begins with the initial value, another trainer"
                    f" with the last one, and every process has its own. {_REMEDIES[name]}, unless no round reads it."
                )
        return False

    def _attributes(self, part: Any) -> dict[str, Any]:
        """Return descriptions that change with the values, and with the states of generators."""
        found = vars(part).items()
        return {
            key: pickle.dumps(value) if isinstance(value, _PICKLED) else as_plain(value)
            for key, value in found
            if part is not self._data or isinstance(value, (*_PICKLED, torch.Generator))
        }

    def _warn_of_generators(self, names: Sequence[str], client_id: ClientId) -> None:
        for name in names:
            if not _is_seeded(self._data, client_id, vars(self._data)[name]):
                rank_zero_warn(
                    f"{type(self._data).__name__} draws from the generator in its attribute {name!r}, which the run"
                    " does not seed: its numbers depend on what was drawn before, so a resumed run and other engines"
                    " have others. Draw from PyTorch's global generator, which the run seeds for every client, or keep"
                    " it in the data set, which seeds it for every batch."
                )


def _is_seeded(data: Any, client_id: ClientId, value: Any) -> bool:
    """Return whether a generator is in a client's data, which the run seeds."""
    with preserved_random_state():
        is_loader = type(data).client_dataloader is not FederatedDataModule.client_dataloader
        made: Any = (
            data.client_dataloader(client_id, torch.Generator()) if is_loader else data.client_dataset(client_id)
        )
    roots = (made.dataset, made.collate_fn) if isinstance(made, DataLoader) else (made, data.collate_fn)
    return value in RandomStates(*roots)
