"""The command line of the Lightning in use; on its own, since Lightning does not import it unasked."""

import importlib

from lightning_fed.compat.package import pl

__all__ = ["ArgsType", "LightningArgumentParser", "LightningCLI"]

importlib.import_module(f"{pl.__name__}.cli")

ArgsType = pl.cli.ArgsType
LightningArgumentParser = pl.cli.LightningArgumentParser
LightningCLI = pl.cli.LightningCLI
