"""The command line without the commands that a test does not use, since each takes 40 ms to describe itself."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lightning_fed.cli.main import FederatedCLI
from lightning_fed.compat.cli import LightningCLI

__all__ = ["one_stage"]


@contextmanager
def one_stage(name: str = "fit") -> Iterator[None]:
    """Let the command line have this command of Lightning's and no other."""
    stage = {name: LightningCLI.subcommands()[name]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FederatedCLI, "subcommands", staticmethod(lambda: stage))
        yield
