"""The command line: ``lightning-fed fit | validate | test | predict | data``."""

import sys
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.cli import LightningCLI

from lightning_fed.callbacks import RunSummary
from lightning_fed.cli_data import picture
from lightning_fed.core.errors import ClientError, FederatedError
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
            # an option that is only the beginning of another one's name is a mistake, not an abbreviation
            "parser_kwargs": {"allow_abbrev": False, **{name: {"allow_abbrev": False} for name in self.subcommands()}},
        }
        super().__init__(**{**defaults, **kwargs})

    def instantiate_classes(self) -> None:
        """Make trainer, model and data, and let the summary tell how to resume from the command line."""
        super().instantiate_classes()
        for callback in self.trainer.callbacks:
            if isinstance(callback, RunSummary):
                callback.resume_with = (
                    "lightning-fed fit --config {logs}/config.yaml --ckpt_path {path} --trainer.max_rounds {rounds}"
                )


def main(args: list[str] | dict[str, Any] | None = None) -> None:
    """Run the command line; ``data`` draws how a configuration deals its data out, the rest is LightningCLI's.

    Args:
        args: The arguments; those of the process if None.

    Raises:
        SystemExit: With the message alone, where a setting cannot be federated.
        ClientError: If a client's work fails; the trace leads to the cause.
    """
    words = sys.argv[1:] if args is None else args
    try:
        if isinstance(words, list) and words[:1] == ["data"]:
            picture(words[1:])
            return
        FederatedCLI(model_class=pl.LightningModule, datamodule_class=pl.LightningDataModule, args=args)
    except ValueError as error:
        refusal = _refusal_in(error)
        if refusal is None or isinstance(refusal, ClientError):
            raise
        sys.exit(f"lightning-fed: {refusal}")


def _refusal_in(error: BaseException | None) -> FederatedError | None:
    """Find our own error in the chain of another one: the parser wraps what a class raises when it is made."""
    while error is not None and not isinstance(error, FederatedError):
        error = error.__cause__ or error.__context__
    return error


if __name__ == "__main__":
    main()
