"""Grids of runs: the papers' experiments, users' own sweeps, and logs side by side."""

from lightning_fed.lab.compare import compare
from lightning_fed.lab.reproduce import reproduce
from lightning_fed.lab.sweep import sweep

__all__ = ["compare", "reproduce", "sweep"]
