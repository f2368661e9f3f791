"""The trainer, model and data of a configuration of ``lightning-fed fit``, created without running it."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from lightning_fed.cli.parser import ArgsType, LightningArgumentParser, LightningCLI, Parser
from lightning_fed.compat.package import pl
from lightning_fed.trainer.trainer import FederatedTrainer


class CellParts(LightningCLI):
    """The trainer, model and data that a configuration describes; nothing is run.

    ``outputs`` override the configuration's outputs. By default, nothing is shown or saved, and only ``logger`` gets
    logs.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        logger: pl.loggers.Logger | None = None,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        self._outputs = outputs or {
            "logger": logger or False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
        }
        super().__init__(
            model_class=pl.LightningModule,
            datamodule_class=pl.LightningDataModule,
            trainer_class=FederatedTrainer,
            save_config_callback=None,
            subclass_mode_model=True,
            subclass_mode_data=True,
            load_from_checkpoint_support=False,
            parser_class=Parser,  # its errors suggest the intended names
            parser_kwargs={"exit_on_error": False, "allow_abbrev": False},
            args=deepcopy(dict(config)),
            run=False,
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the configuration alone, since the process's arguments belong to another command."""
        self.config = parser.parse_object(args)

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Create the trainer, with the outputs of a cell."""
        return super().instantiate_trainer(**{**kwargs, **self._outputs})
