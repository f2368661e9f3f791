"""The server's side: who takes part, aggregation, the server's optimizers, client states."""

from lightning_fed.server.heterogeneity import SystemsHeterogeneity
from lightning_fed.server.optimizers import FedAdagrad, FedAdam, FedAvgM, FedRMSProp, FedYogi
from lightning_fed.server.sampling import (
    AvailabilitySampler,
    BernoulliSampler,
    RoundRobinSampler,
    UniformSampler,
    WeightedSampler,
)

__all__ = [
    "AvailabilitySampler",
    "BernoulliSampler",
    "FedAdagrad",
    "FedAdam",
    "FedAvgM",
    "FedRMSProp",
    "FedYogi",
    "RoundRobinSampler",
    "SystemsHeterogeneity",
    "UniformSampler",
    "WeightedSampler",
]
