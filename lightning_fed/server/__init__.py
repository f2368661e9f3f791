"""Client sampling, aggregation, server optimizers and client states."""

from lightning_fed.server.aggregation.compression import QSGD, Compressor, TopK
from lightning_fed.server.aggregation.mean import Aggregator
from lightning_fed.server.aggregation.robust import (
    Bulyan,
    CoordinateMedian,
    GeometricMedian,
    Krum,
    MultiKrum,
    NormClipping,
    RobustAggregator,
    TrimmedMean,
)
from lightning_fed.server.asynchronous import Asynchronous, FedAsync, FedBuff
from lightning_fed.server.attacks import Attack, LabelFlipAttack, NoiseAttack, SignFlipAttack
from lightning_fed.server.heterogeneity import ClientClock, SystemsHeterogeneity
from lightning_fed.server.oort import OortSampler
from lightning_fed.server.optimal_sampling import OptimalClientSampling, UpdateNormSampler
from lightning_fed.server.optimizers import FedAdagrad, FedAdam, FedAvgM, FedRMSProp, FedYogi
from lightning_fed.server.power_of_choice import PowerOfChoiceSampler
from lightning_fed.server.privacy import ClientPrivacy, DifferentialPrivacy
from lightning_fed.server.sampling import (
    AvailabilitySampler,
    BernoulliSampler,
    LearningSampler,
    RoundRobinSampler,
    UniformSampler,
    WeightedSampler,
)

__all__ = [
    "QSGD",
    "Aggregator",
    "Asynchronous",
    "Attack",
    "AvailabilitySampler",
    "BernoulliSampler",
    "Bulyan",
    "ClientClock",
    "ClientPrivacy",
    "Compressor",
    "CoordinateMedian",
    "DifferentialPrivacy",
    "FedAdagrad",
    "FedAdam",
    "FedAsync",
    "FedAvgM",
    "FedBuff",
    "FedRMSProp",
    "FedYogi",
    "GeometricMedian",
    "Krum",
    "LabelFlipAttack",
    "LearningSampler",
    "MultiKrum",
    "NoiseAttack",
    "NormClipping",
    "OortSampler",
    "OptimalClientSampling",
    "PowerOfChoiceSampler",
    "RobustAggregator",
    "RoundRobinSampler",
    "SignFlipAttack",
    "SystemsHeterogeneity",
    "TopK",
    "TrimmedMean",
    "UniformSampler",
    "UpdateNormSampler",
    "WeightedSampler",
]
