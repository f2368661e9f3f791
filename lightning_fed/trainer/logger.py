"""The logger that a trainer has by default."""

from lightning_fed.compat.package import pl

__all__ = ["MethodLogger", "name_default_runs"]


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
