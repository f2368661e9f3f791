"""What is built with the library: experiments and sweeps, diagnosis, comparisons, and the other commands of our own."""

from lightning_fed.lab.compare import compare
from lightning_fed.lab.reproduce import reproduce
from lightning_fed.lab.sweep import sweep

__all__ = ["compare", "reproduce", "sweep"]
