"""Keep metric-driven learning rate schedules in step with checkpoints."""

from lightning_fed.compat.package import pl
from lightning_fed.compat.private import TrainerFn

__all__ = ["PlateauSchedulers"]


class PlateauSchedulers(pl.Callback):
    """Step ``ReduceLROnPlateau`` right after validation, so that a checkpoint written then holds the step.

    Lightning steps these schedulers after the callbacks that save, and a run resumed from such a checkpoint would miss
    one step.
    """

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Step the schedulers, once a round."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            trainer.fit_loop.step_plateau_schedulers()
