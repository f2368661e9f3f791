"""What a framework needs in order to be measured: one class of a few methods, in a module of its own."""

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from conformance.cases import Case, Values

__all__ = ["Adapter", "load_adapter"]


class Adapter(ABC):
    """Runs cases through a framework.

    An adapter uses the framework as its documentation tells users to. It may choose the cohorts and the order of the
    examples, and take float64 where the framework has it; it must not compute what the framework computes.

    Attributes:
        packages: The packages whose versions a table gives, the framework's first.
    """

    packages: tuple[str, ...]

    def versions(self) -> dict[str, str]:
        """Return the versions of the packages."""
        return {name: version(name) for name in self.packages}

    @abstractmethod
    def offers(self, case: Case) -> Mapping[str, str]:
        """Return how the framework runs a case: the ways that its users have, each with what computes the method.

        The default way is first and has the name "". Empty if the framework does not have the method.
        """

    @abstractmethod
    def run(self, case: Case, way: str) -> list[Values]:
        """Return the server's parameters, and its buffers if the problem has some, after each round."""

    def resume(self, case: Case, way: str, folder: Path) -> list[Values] | None:
        """Return the same for the rounds after a restart; None if this is not measured.

        The first run ends after ``case.restart`` rounds. A second one, which gets nothing from the first but what the
        framework itself saved, plays the rounds that are left.

        Args:
            case: The case.
            way: One of those that :meth:`offers` returned.
            folder: An empty folder for what the framework saves.
        """
        return None


def load_adapter(name: str) -> Adapter:
    """Return an adapter of this package by its name, or one from a file by its path.

    The module has a function ``adapter()`` that returns it.
    """
    if name.endswith(".py"):
        spec = importlib.util.spec_from_file_location("conformance_adapter", name)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(f"conformance.adapters.with_{name}")
    made: Adapter = module.adapter()
    return made
