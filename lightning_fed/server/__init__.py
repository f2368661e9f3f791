"""The server's side: sampling, aggregation, the server's optimizers, client states."""

from lightning_fed.server.optimizers import FedAdagrad, FedAdam, FedAvgM, FedRMSProp, FedYogi
from lightning_fed.server.sampling import UniformSampler

__all__ = ["FedAdagrad", "FedAdam", "FedAvgM", "FedRMSProp", "FedYogi", "UniformSampler"]
