"""Trainer, model and data of a configuration, for the app that ``lightning-fed deploy`` writes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lightning_fed.cli.configuration import CellParts
from lightning_fed.cli.parser import LightningCLI, refusal_in
from lightning_fed.compat.package import pl
from lightning_fed.core.errors import FederatedError

__all__ = ["Configured"]


class Configured:
    """What a configuration describes, made anew at every call.

    Server and sites make all of it: each site uses the data of its own clients, the server the validation set alone.

    Args:
        file: The configuration.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def _parts(self) -> CellParts:
        try:
            return _Parts(yaml.safe_load(self._file.read_text(encoding="utf-8")))
        except Exception as error:
            raise FederatedError(f"{self._file}: {refusal_in(error) or error}") from error

    def trainer(self) -> pl.Trainer:
        """Return the trainer, without a progress bar."""
        trainer: pl.Trainer = self._parts().trainer
        return trainer

    def model(self) -> pl.LightningModule:
        """Return the model, which ``seed_everything`` makes the same everywhere."""
        model: pl.LightningModule = self._parts().model
        return model

    def data(self, node_config: Mapping[str, Any] | None = None) -> Any:
        """Return the data module."""
        return self._parts().datamodule

    def client_ids(self) -> list[int | str]:
        """Return the ids of all clients."""
        data = self.data()
        data.prepare_data()
        data.setup("fit")
        return list(data.client_ids)

    def val(self) -> Any:
        """Return the validation set of the server, None if there is none."""
        data = self.data()
        data.prepare_data()
        data.setup("fit")
        return data.val


class _Parts(CellParts):
    """The parts with the outputs that the configuration asks for, but for the progress bar."""

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Make the trainer."""
        quiet = {"enable_progress_bar": False, "enable_model_summary": False}
        trainer: pl.Trainer = LightningCLI.instantiate_trainer(self, **{**kwargs, **quiet})
        return trainer
