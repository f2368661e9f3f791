"""Callbacks that hear of rounds and clients, those that every trainer brings along, and measures of a run."""

from lightning_fed.callbacks.base import FederatedCallback
from lightning_fed.callbacks.client_metrics import ClientAccuracy, PersonalizedAccuracy
from lightning_fed.callbacks.client_paths import LocalDrift, LocalIterates, UpdateCosine
from lightning_fed.callbacks.control_variates import ControlVariateError
from lightning_fed.callbacks.dissimilarity import GradientDissimilarity, HessianDissimilarity
from lightning_fed.callbacks.inexactness import Inexactness
from lightning_fed.callbacks.measure import ClientMeasure, Measure
from lightning_fed.callbacks.progress import RoundProgressBar
from lightning_fed.callbacks.round_logger import RoundLogger
from lightning_fed.callbacks.simulated_time import SimulatedTime
from lightning_fed.callbacks.split_picture import SplitPicture
from lightning_fed.callbacks.summary import RunSummary
from lightning_fed.callbacks.target import TargetMetric
from lightning_fed.callbacks.training_loss import TrainingLoss

__all__ = [
    "ClientAccuracy",
    "ClientMeasure",
    "ControlVariateError",
    "FederatedCallback",
    "GradientDissimilarity",
    "HessianDissimilarity",
    "Inexactness",
    "LocalDrift",
    "LocalIterates",
    "Measure",
    "PersonalizedAccuracy",
    "RoundLogger",
    "RoundProgressBar",
    "RunSummary",
    "SimulatedTime",
    "SplitPicture",
    "TargetMetric",
    "TrainingLoss",
    "UpdateCosine",
]
