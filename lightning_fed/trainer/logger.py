"""A trainer's default logger, and the numbering of runs."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from typing import Any

from lightning_fed.checkpoints.files import local_path
from lightning_fed.compat.package import pl
from lightning_fed.core.errors import ClientError, FederatedError


class MethodLogger(pl.loggers.TensorBoardLogger):
    """Lightning's default logger, with the method in the name of a run's folder: ``version_0_Scaffold``.

    Lightning still finds the number in such a name, and continues to count from it.
    """

    method: str

    @property
    def version(self) -> str:
        """The name of the run's folder."""
        return f"version_{super().version}_{self.method}"


_LOGGED = ("config.yaml", "hparams.yaml", "metrics.csv")  # files of the command line and of Lightning's loggers
_NUMBERED = (pl.loggers.TensorBoardLogger, pl.loggers.CSVLogger, MethodLogger)


def name_default_runs(trainer: pl.Trainer, method: str) -> None:
    """Make loggers that Lightning has created add the method to the name of the run's folder."""
    for logger in trainer.loggers:
        if type(logger) is pl.loggers.TensorBoardLogger:
            logger.__class__ = MethodLogger
            logger.method = method


@contextmanager
def numbered(trainer: pl.Trainer) -> Iterator[None]:
    """Reserve a run number for loggers that number their runs, by creating the run's folder.

    Lightning's loggers list the folders, and create their own a little later. Two processes that start together would
    use one folder, and overwrite each other's files. An error before the first round ends removes an empty folder. If
    the run is refused, it also removes a folder with only a logger's files and the configuration.

    Raises:
        FederatedError: If the logs cannot be written.
    """
    try:
        for logger in trainer._checkpoint_connector.unnumbered if trainer.is_global_zero else ():
            if type(logger) not in _NUMBERED:  # a subclass may name its folder differently
                continue
            if logger._version is not None:  # set by an earlier fit, or by code that read the folder
                continue
            while (folder := local_path(logger.log_dir)) is not None:
                try:
                    folder.mkdir(parents=True)
                except FileExistsError:
                    assert logger._version is not None  # log_dir has set it
                    logger._version += 1
                else:
                    break
        yield
    except BaseException as error:
        is_refusal = isinstance(error, FederatedError | SystemExit) and not isinstance(error, ClientError)
        if trainer.is_global_zero and not trainer.fit_loop.has_run:
            for logger in trainer._checkpoint_connector.unnumbered:  # their numbers were free
                _remove_folder(logger, is_refusal)
        if isinstance(error, FederatedError) or (refusal := _unwritable_logs(trainer, error)) is None:
            raise
        raise refusal from error


def _remove_folder(logger: Any, with_logs: bool) -> None:
    if not isinstance(logger, _NUMBERED):
        return
    if logger._version is not None:
        files = [file for file in Path(logger.log_dir).rglob("*") if file.is_file()]
        are_logs = all(file.name in _LOGGED or file.name.startswith("events.out.tfevents.") for file in files)
        if files and not (with_logs and are_logs):
            return
        rmtree(logger.log_dir, ignore_errors=True)
        logger._version = None
        if isinstance(logger, pl.loggers.CSVLogger):
            logger._experiment = None  # another trainer with this logger creates the folder again
    if logger.name:  # without a name, the parent folder belongs to the user
        with suppress(OSError):  # it may hold other runs
            Path(logger.root_dir).rmdir()


def _unwritable_logs(trainer: pl.Trainer, error: BaseException) -> FederatedError | None:
    """Return an error for logs that cannot be written, or None if the given error has another cause.

    A full disk's error does not name the file. TensorBoard's logger hides it behind a ``ValueError`` about the number.
    """
    cause: BaseException | None = error if isinstance(error, OSError | ValueError) else None
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
