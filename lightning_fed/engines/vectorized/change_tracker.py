"""Checks that nothing changes between clients that run at once."""

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.compat.package import pl
from lightning_fed.compat.private import rank_zero_warn
from lightning_fed.core.errors import FederatedError
from lightning_fed.engines.base import begun_later
from lightning_fed.engines.changes import Key, Snapshot, TensorMarks, parts_of_method, without_metrics

_WARN_AFTER = 3  # consecutive rounds that begin with a changed attribute


class ChangeTracker:
    """Ensures that nothing changes between clients that run at once."""

    def __init__(self, trainer: pl.Trainer, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self.module = trainer.lightning_module
        self._attributes = Snapshot()
        self._tensors: TensorMarks | None = None  # see begin_work
        self._worked = 0  # times that clients worked in this round
        self._in_a_row = 0  # consecutive rounds before which an attribute changed

    def remember(self) -> None:
        """Record all attributes."""
        self._attributes = Snapshot(without_metrics(self.module))
        for name, part in parts_of_method(self.algorithm):
            self._attributes.add("attribute", f"algorithm.{name}", part)

    def begin_round(self) -> bool:
        """Return whether an attribute has changed since the last record, and record all if so."""
        self._worked, found = 0, self._attributes.changed()
        self._in_a_row = 0 if found is None else self._in_a_row + 1
        if found is not None and self._in_a_row == _WARN_AFTER:
            rank_zero_warn(
                f"The attribute {found[1]!r} of {type(self.module).__name__} changes from round to round, so that"
                " engine='vectorized' repeats its trial step and its traces in each, which is slow. If no step reads"
                " it, keep it elsewhere, such as in a callback. Otherwise, use engine='sequential'."
            )
        if found is not None:
            self.remember()
        return found is not None

    def begin_work(self) -> None:
        """Record buffers, metrics and frozen parameters before clients work."""
        self._tensors = TensorMarks(self.module)

    def check_work(self) -> None:
        """Raise if ``training_step`` has begun to have side effects.

        Attributes are compared after the first clients of a round, and by :meth:`end_round`. Tensors are compared after
        all: what a client that is run alone changes would be overwritten before the next.
        """
        self._worked += 1
        assert self._tensors is not None
        found = self._attributes.changed() if self._worked == 1 else None
        self._check(found or self._tensors.changed())
        self._tensors = None

    def end_round(self) -> None:
        """Raise if later clients' work changed an attribute, whose value others of its chunk have not seen."""
        if self._worked > 1:
            self._check(self._attributes.changed())

    def _check(self, found: Key | None) -> None:
        if found is not None:
            what = f"changes the {found[0]} {found[1]!r} of {type(self.module).__name__}"
            raise begun_later(self.module, what, kind=FederatedError)  # the round's first clients cannot be undone
