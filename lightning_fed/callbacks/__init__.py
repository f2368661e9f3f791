"""Callbacks that hear of rounds and clients, and those that every trainer brings along."""

from lightning_fed.callbacks.base import FederatedCallback
from lightning_fed.callbacks.inexactness import Inexactness
from lightning_fed.callbacks.progress import RoundProgressBar
from lightning_fed.callbacks.round_logger import RoundLogger
from lightning_fed.callbacks.summary import RunSummary

__all__ = ["FederatedCallback", "Inexactness", "RoundLogger", "RoundProgressBar", "RunSummary"]
