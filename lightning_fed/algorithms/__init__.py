"""Federated methods, each with its paper's formula in one file, and the base optimizers of Mime."""

from lightning_fed.algorithms.apfl import APFL
from lightning_fed.algorithms.base import Algorithm
from lightning_fed.algorithms.base_optimizers import SGD, Adagrad, Adam, BaseOptimizer, RMSProp, SGDm, Yogi
from lightning_fed.algorithms.ditto import Ditto
from lightning_fed.algorithms.fedacg import FedACG
from lightning_fed.algorithms.fedavg import FedAvg
from lightning_fed.algorithms.fedbn import FedBN
from lightning_fed.algorithms.fedcm import FedCM
from lightning_fed.algorithms.feddane import FedDane
from lightning_fed.algorithms.feddyn import FedDyn
from lightning_fed.algorithms.fedexp import FedExP
from lightning_fed.algorithms.fednova import FedNova
from lightning_fed.algorithms.fedper import FedPer, LGFedAvg
from lightning_fed.algorithms.fedprox import FedProx
from lightning_fed.algorithms.fedproxvr import FedProxVR
from lightning_fed.algorithms.fedrep import FedRep
from lightning_fed.algorithms.fedsam import FedSAM, MoFedSAM
from lightning_fed.algorithms.fedspeed import FedSpeed
from lightning_fed.algorithms.mime import CMime, Mime, MimeLite
from lightning_fed.algorithms.mime_mvr import MimeMVR
from lightning_fed.algorithms.pfedme import PFedMe
from lightning_fed.algorithms.scaffnew import Scaffnew
from lightning_fed.algorithms.scaffold import Scaffold
from lightning_fed.algorithms.scaffold_m import ScaffoldM
from lightning_fed.algorithms.server_only import ServerOnly

__all__ = [
    "APFL",
    "SGD",
    "Adagrad",
    "Adam",
    "Algorithm",
    "BaseOptimizer",
    "CMime",
    "Ditto",
    "FedACG",
    "FedAvg",
    "FedBN",
    "FedCM",
    "FedDane",
    "FedDyn",
    "FedExP",
    "FedNova",
    "FedPer",
    "FedProx",
    "FedProxVR",
    "FedRep",
    "FedSAM",
    "FedSpeed",
    "LGFedAvg",
    "Mime",
    "MimeLite",
    "MimeMVR",
    "MoFedSAM",
    "PFedMe",
    "RMSProp",
    "SGDm",
    "Scaffnew",
    "Scaffold",
    "ScaffoldM",
    "ServerOnly",
    "Yogi",
]
