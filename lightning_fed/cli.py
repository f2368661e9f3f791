"""The command line: ``lightning-fed fit | validate | test | predict``."""

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.cli import LightningCLI

from lightning_fed.callbacks import RunSummary
from lightning_fed.trainer import FederatedTrainer

__all__ = ["FederatedCLI", "main"]


class FederatedCLI(LightningCLI):
    """LightningCLI with a :class:`FederatedTrainer`, and model and data chosen by class.

    ``seed_everything`` also seeds cohorts, batch orders and random layers.
    """

    def __init__(self, **kwargs: Any) -> None:
        defaults = {
            "trainer_class": FederatedTrainer,
            "subclass_mode_model": True,
            "subclass_mode_data": True,
            "save_config_kwargs": {"overwrite": True},
        }
        super().__init__(**{**defaults, **kwargs})

    def instantiate_classes(self) -> None:
        """Make trainer, model and data, and tell the summary how to resume from here."""
        super().instantiate_classes()
        for callback in self.trainer.callbacks:
            if isinstance(callback, RunSummary) and self.trainer.log_dir is not None:
                callback.resume_with = (
                    f"lightning-fed fit --config {self.trainer.log_dir}/config.yaml"
                    " --ckpt_path {path} --trainer.max_rounds {rounds}"
                )


def main(args: list[str] | dict[str, Any] | None = None) -> None:
    """Run the command line.

    Args:
        args: The arguments; those of the process if None.
    """
    FederatedCLI(
        model_class=pl.LightningModule, datamodule_class=pl.LightningDataModule, args=args, parser_kwargs=_PARSERS
    )


_PARSERS: dict[str, Any] = {"parser_mode": "yaml"}


if __name__ == "__main__":
    main()
