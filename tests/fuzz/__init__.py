"""Random runs of the whole package, compared with runs under other settings and with a loop that does not use it."""

import lightning_fed  # noqa: F401  # before anything imports Lightning
