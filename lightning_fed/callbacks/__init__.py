"""Callbacks: hooks for rounds and clients, the defaults of every trainer, and measures of a run."""

from lightning_fed.callbacks.base import FederatedCallback
from lightning_fed.callbacks.client_metrics import ClientAccuracy, PersonalizedAccuracy
from lightning_fed.callbacks.client_models import ClientModels
from lightning_fed.callbacks.client_paths import LocalDrift, LocalIterates, UpdateCosine
from lightning_fed.callbacks.measures import (
    ClientMeasure,
    ControlVariateError,
    GradientDissimilarity,
    HessianDissimilarity,
    Inexactness,
    Measure,
    TrainingLoss,
)
from lightning_fed.callbacks.progress import RoundLines, RoundProgressBar
from lightning_fed.callbacks.round_logger import RoundLogger, SimulatedTime
from lightning_fed.callbacks.split_picture import SplitPicture
from lightning_fed.callbacks.summary import RunSummary
from lightning_fed.callbacks.target import TargetMetric

__all__ = [
    "ClientAccuracy",
    "ClientMeasure",
    "ClientModels",
    "ControlVariateError",
    "FederatedCallback",
    "GradientDissimilarity",
    "HessianDissimilarity",
    "Inexactness",
    "LocalDrift",
    "LocalIterates",
    "Measure",
    "PersonalizedAccuracy",
    "RoundLines",
    "RoundLogger",
    "RoundProgressBar",
    "RunSummary",
    "SimulatedTime",
    "SplitPicture",
    "TargetMetric",
    "TrainingLoss",
    "UpdateCosine",
]
