"""Run a function as soon as PyTorch is imported, without importing it."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = ["after_torch"]


def after_torch(act: Callable[[], None]) -> None:
    """Call a function now if PyTorch is imported, else right after its import, before any other code uses it."""
    if "torch" in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Waiting(act))


class _Waiting(MetaPathFinder):
    """Finds PyTorch through the other finders, and acts after its import."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return PyTorch's spec, with the action after the import."""
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = find_spec("torch")
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                try:
                    run(module)
                except BaseException:
                    sys.meta_path.insert(0, self)
                    raise
                self._act()

            loader.exec_module = exec_module
        return spec
