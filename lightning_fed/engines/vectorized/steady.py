"""What clients that are run at once must all find alike: attributes of the module, options of the optimizer."""

from typing import Any

import pytorch_lightning as pl

from lightning_fed._compat import rank_zero_warn
from lightning_fed.algorithms.base import Algorithm
from lightning_fed.callbacks.base import hears
from lightning_fed.core.errors import FederatedError
from lightning_fed.engines.vectorized.attributes import Marks, changed, marks
from lightning_fed.optim import FederatedOptimizer

__all__ = ["Steady"]

_TELLING = 3  # rounds in a row that begin with another attribute, after which it is told


class Steady:
    """Sees to it that nothing changes between clients that are run at once.

    Args:
        trainer: The trainer, with its module attached.
        algorithm: The method.
        optimizer: The wrapped local optimizer.
    """

    def __init__(self, trainer: pl.Trainer, algorithm: Algorithm, optimizer: FederatedOptimizer) -> None:
        self.trainer, self.algorithm, self.optimizer = trainer, algorithm, optimizer
        self.module = trainer.lightning_module
        self._marks: Marks = {}
        self._options: list[dict[str, Any]] = []
        self._worked = 0  # times that clients have been at work in this round
        self._in_a_row = 0  # rounds before which an attribute has changed
        self._has_warned = False

    def remember(self) -> None:
        """Take note of all attributes."""
        self._marks = marks(self.module, self.algorithm)

    def begin_round(self) -> bool:
        """Take note of everything; return whether an attribute has changed since this was last done."""
        before = self._marks
        self.remember()
        self._options, self._worked = self._options_now(), 0
        name = changed(before, self._marks)
        self._in_a_row = 0 if name is None else self._in_a_row + 1
        if self._in_a_row == _TELLING:
            rank_zero_warn(
                f"The attribute {name!r} of {type(self.module).__name__} changes from round to round, so that"
                " engine='vectorized' tries the module out and traces it anew each time, which is slow. If no step"
                " reads it, keep it elsewhere, in a callback for one; or use engine='sequential'."
            )
        return name is not None

    def check_hooks(self) -> None:
        """Refuse what ``on_client_start`` has set for one client, which its neighbours would find too.

        Raises:
            FederatedError: Naming it.
        """
        what = self._changed_attribute()
        if what is None and self._options_now() != self._options:
            what = "an option of the local optimizer"
        if what is not None:
            raise FederatedError(
                f"engine='vectorized' cannot give each client its own settings: on_client_start changes {what}, and"
                " clients that are run at once share it. Make it part of the client's data, or use"
                " engine='sequential'."
            )

    def check_work(self) -> None:
        """Refuse a ``training_step`` that has begun to change attributes; after the first clients of a round.

        Raises:
            FederatedError: Naming one.
        """
        self._worked += 1
        if self._worked > 1:
            return
        what = self._changed_attribute()
        if what is not None:
            raise FederatedError(
                f"engine='vectorized' cannot go on with {type(self.module).__name__}.training_step: it changes {what},"
                " which it did not when it was tried out. Change that, or use engine='sequential'."
            )

    def end_round(self) -> None:
        """Warn, once, of attributes that changed while clients were at work: hooks between them may have done it."""
        if self._has_warned or not (self._worked > 1 or hears(self.trainer, "on_client_end")):
            return
        what = self._changed_attribute()
        if what is not None:
            self._has_warned = True
            rank_zero_warn(
                f"{what[:1].upper()}{what[1:]} changes while a round's clients are at work. With engine='vectorized'"
                " their local steps go by its value at the start of the round."
            )

    def _changed_attribute(self) -> str | None:
        name = changed(self._marks, marks(self.module, self.algorithm))
        return None if name is None else f"the attribute {name!r} of {type(self.module).__name__}"

    def _options_now(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
