"""The logger that a trainer has by default."""

from pathlib import Path

from lightning_fed.compat.package import pl
from lightning_fed.core.errors import FederatedError


class MethodLogger(pl.loggers.TensorBoardLogger):
    """Lightning's default logger, whose folder for a run also names the method: ``version_0_Scaffold``.

    Lightning still finds the number in such a name, and counts on from it.
    """

    method: str

    @property
    def version(self) -> str:
        """The name of the run's folder."""
        return f"version_{super().version}_{self.method}"


def name_default_runs(trainer: pl.Trainer, method: str) -> None:
    """Let the loggers that Lightning has created name the method in the run's folder."""
    for logger in trainer.loggers:
        if type(logger) is pl.loggers.TensorBoardLogger:
            logger.__class__ = MethodLogger
            logger.method = method


def unwritable_logs(trainer: pl.Trainer, error: OSError) -> FederatedError | None:
    """Return the refusal of a run whose logs cannot be written, or None if the error is about another file."""
    if not isinstance(error.filename, str):
        return None
    for logger in trainer.loggers:
        place = getattr(logger, "root_dir", None)
        if isinstance(place, str) and Path(error.filename).absolute().is_relative_to(Path(place).absolute()):
            return FederatedError(
                f"The logs cannot be written to {error.filename}: {error.strerror}. Choose another folder with"
                " default_root_dir, or with the save_dir of your logger."
            )
    return None
