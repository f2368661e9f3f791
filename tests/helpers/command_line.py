"""The command line with fewer commands, since each takes 40 ms to add to the parser."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lightning_fed.cli.main import FederatedCLI
from lightning_fed.cli.parser import LightningCLI
from lightning_fed.compat.package import pl

__all__ = ["built", "one_stage"]


@contextmanager
def one_stage(name: str = "fit") -> Iterator[None]:
    """Restrict the command line to this one of Lightning's commands."""
    stage = {name: LightningCLI.subcommands()[name]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FederatedCLI, "subcommands", staticmethod(lambda: stage))
        yield


class _WithoutCommand(FederatedCLI):
    """Instantiates a configuration's classes and runs nothing. All instances share a parser, which has no state."""

    _shared: Any = None

    def setup_parser(self, *args: Any, **kwargs: Any) -> None:
        if _WithoutCommand._shared is None:
            super().setup_parser(*args, **kwargs)
            _WithoutCommand._shared = self.parser
        self.parser = _WithoutCommand._shared


def built(*words: str) -> FederatedCLI:
    """Return trainer, model and data as the command line creates them, without running anything."""
    quiet = ["--trainer.accelerator", "cpu", "--trainer.logger", "false"]
    return _WithoutCommand(
        model_class=pl.LightningModule, datamodule_class=pl.LightningDataModule, run=False, args=[*words, *quiet]
    )
