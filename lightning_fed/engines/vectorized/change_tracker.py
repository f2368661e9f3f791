"""Checks that nothing changes between clients that run at once."""

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.compat.package import pl
from lightning_fed.compat.private import rank_zero_warn
from lightning_fed.core.errors import FederatedError
from lightning_fed.engines.changes import Marks, changed, marks, tensor_marks

_WARN_AFTER = 3  # consecutive rounds that begin with a changed attribute


class ChangeTracker:
    """Ensures that nothing changes between clients that run at once."""

    def __init__(self, trainer: pl.Trainer, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self.module = trainer.lightning_module
        self._marks = Marks()
        self._tensors = Marks()  # see begin_work
        self._worked = 0  # times that clients worked in this round
        self._in_a_row = 0  # consecutive rounds before which an attribute changed

    def remember(self) -> None:
        """Record all attributes."""
        self._marks = marks(self.module, self.algorithm)

    def begin_round(self) -> bool:
        """Record all attributes; return whether one changed since the last record."""
        before, self._marks = self._marks, marks(self.module, self.algorithm)
        self._worked, name = 0, changed(before, self._marks)
        self._in_a_row = 0 if name is None else self._in_a_row + 1
        if self._in_a_row == _WARN_AFTER:
            rank_zero_warn(
                f"The attribute {name!r} of {type(self.module).__name__} changes from round to round, so that"
                " engine='vectorized' repeats its trial step and its traces in each, which is slow. If no step reads"
                " it, keep it elsewhere, such as in a callback. Otherwise, use engine='sequential'."
            )
        return name is not None

    def begin_work(self) -> None:
        """Record buffers, metrics and frozen parameters before clients work."""
        self._tensors = tensor_marks(self.module, with_trained=False)

    def check_work(self) -> None:
        """Raise if ``training_step`` has begun to have side effects.

        Attributes are compared after the first clients of a round, and by :meth:`end_round`. Tensors are compared after
        all: what a client that is run alone changes would be overwritten before the next.
        """
        self._worked += 1
        tensors, self._tensors = self._tensors, Marks()
        kind, name = "attribute", None
        if self._worked == 1:
            name = changed(self._marks, marks(self.module, self.algorithm))
        if name is None and (tensor := changed(tensors, tensor_marks(self.module, with_trained=False))) is not None:
            kind, _, name = tensor.partition(".")
        if name is not None:
            raise self._refusal(kind, name)

    def end_round(self) -> None:
        """Raise if later clients' work changed an attribute, whose value others of its chunk have not seen."""
        if self._worked <= 1:
            return
        name = changed(self._marks, marks(self.module, self.algorithm))
        if name is not None:
            raise self._refusal("attribute", name)

    def _refusal(self, kind: str, name: str) -> FederatedError:
        return FederatedError(
            f"engine='vectorized' cannot continue with {type(self.module).__name__}.training_step: it changes the"
            f" {kind} {name!r} of {type(self.module).__name__}, and did not in its trial step. Change that, or use"
            " engine='sequential'."
        )
