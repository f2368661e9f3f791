"""Users' parts of the server that keep something from round to round, which checkpoints do not hold."""

import pickle
import random
from typing import Any

import numpy as np

from lightning_fed.compat.private import rank_zero_warn
from lightning_fed.core.plain import as_plain
from lightning_fed.core.rounds import RoundReport
from lightning_fed.server.aggregation.base import Aggregator
from lightning_fed.settings.settings import Settings

_REMEDIES = {
    "aggregator": "Override state_dict and load_state_dict, which checkpoints call",
    "compression": "Compute it from the message and its stream, or set error_feedback",
    "heterogeneity": "Compute it from the seed and the round",
    "attack": "Compute it from the message and its stream",
}


class OwnParts:
    """Warns of attributes that change again in a run's second round; the first one may fill a cache."""

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
