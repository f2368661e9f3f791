"""Random runs of the whole package, each compared with itself run another way, and with a loop that does not use it."""

import lightning_fed  # noqa: F401  # before anything imports Lightning
