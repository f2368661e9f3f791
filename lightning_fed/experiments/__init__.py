"""Grids of runs: the papers' experiments, users' own sweeps, and logs side by side."""

from lightning_fed.experiments.compare import compare
from lightning_fed.experiments.reproduce import reproduce
from lightning_fed.experiments.sweep import sweep

__all__ = ["compare", "reproduce", "sweep"]
