"""The logger that a trainer has by default."""

import traceback
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


def unwritable_logs(trainer: pl.Trainer, error: Exception) -> FederatedError | None:
    """Return the error of a run whose logs cannot be written, or None if it is about something else.

    A full disk does not name the file, and TensorBoard's logger hides it behind a ``ValueError`` about the number.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    for logger in trainer.loggers:
        root = getattr(logger, "root_dir", None)
        if not isinstance(root, str):
            continue
        name = cause.filename
        if isinstance(name, str) and Path(name).absolute().is_relative_to(Path(root).absolute()):
            remedy = "Choose another folder with default_root_dir, or with the save_dir of your logger."
        elif name is None and any(owner is logger for owner in owners):
            name, remedy = logger.log_dir, "Make room, and resume with ckpt_path='last'."
        else:
            continue
        return FederatedError(f"The logs cannot be written to {name}: {cause.strerror}. {remedy}")
    return None
