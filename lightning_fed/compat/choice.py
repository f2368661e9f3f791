"""The choice of the Lightning package, ``lightning`` or ``pytorch_lightning``, without importing either."""

import os
import sys
from importlib.metadata import PackageNotFoundError, version

__all__ = ["NAMES", "OTHER", "REASON", "SERIES", "USED", "VARIABLE", "choose"]

VARIABLE = "LIGHTNING_FED_PACKAGE"
"""The environment variable that names the package."""

SERIES = "2.6"
"""The releases whose internals the loop builds on."""

NAMES = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
}
"""By package, the module imported as ``pl``, and the package that it builds on."""


def choose(imported: set[str], asked: str | None, lightning_is_installed: bool) -> tuple[str, str]:
    """Return the package to use, and the reason.

    ``imported`` has the packages that are already imported. ``asked`` is the value of the environment variable.
    """
    if asked is not None and asked not in NAMES:
        raise ImportError(f"{VARIABLE}={asked!r}: set it to {' or '.join(NAMES)}, or unset it.")
    if len(imported) == 1:
        return next(iter(imported)), "it was imported before lightning_fed was used"
    if asked is not None:
        return asked, f"the environment variable {VARIABLE} says so"
    if imported:
        raise ImportError(
            "Both lightning and pytorch_lightning are imported. They hold the same classes under two names, and a"
            " trainer takes the classes of one. Import only one of them, in your code and its imports; or,"
            f" before lightning_fed is used, set the environment variable {VARIABLE} to lightning or to"
            " pytorch_lightning."
        )
    if lightning_is_installed:
        return "lightning", "it is installed, and neither was imported before lightning_fed was used"
    return "pytorch_lightning", "the package lightning is neither imported nor installed in a tested version"


_imported = {name for name, (module, _) in NAMES.items() if module in sys.modules}
try:
    _has_tested = version("lightning").startswith(f"{SERIES}.")
except PackageNotFoundError:
    _has_tested = False
USED, REASON = choose(_imported, os.environ.get(VARIABLE) or None, _has_tested)
OTHER = next(name for name in NAMES if name != USED)
