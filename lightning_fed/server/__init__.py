"""The server's side: who takes part, aggregation, the server's optimizers, client states."""

from lightning_fed.server.aggregator import Aggregator
from lightning_fed.server.compression import QSGD, Compressor, TopK
from lightning_fed.server.heterogeneity import SystemsHeterogeneity
from lightning_fed.server.optimizers import FedAdagrad, FedAdam, FedAvgM, FedRMSProp, FedYogi
from lightning_fed.server.privacy import DifferentialPrivacy
from lightning_fed.server.robust import CoordinateMedian, GeometricMedian, NormClipping, RobustAggregator, TrimmedMean
from lightning_fed.server.sampling import (
    AvailabilitySampler,
    BernoulliSampler,
    RoundRobinSampler,
    UniformSampler,
    WeightedSampler,
)

__all__ = [
    "QSGD",
    "Aggregator",
    "AvailabilitySampler",
    "BernoulliSampler",
    "Compressor",
    "CoordinateMedian",
    "DifferentialPrivacy",
    "FedAdagrad",
    "FedAdam",
    "FedAvgM",
    "FedRMSProp",
    "FedYogi",
    "GeometricMedian",
    "NormClipping",
    "RobustAggregator",
    "RoundRobinSampler",
    "SystemsHeterogeneity",
    "TopK",
    "TrimmedMean",
    "UniformSampler",
    "WeightedSampler",
]
