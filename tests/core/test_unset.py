"""Attributes that a base class would have set are reported by name."""

import copy
import pickle
from typing import Any

import pytest

from lightning_fed import FederatedDataModule, FederatedError
from lightning_fed.algorithms import FedProx
from lightning_fed.callbacks import TrainingLoss
from lightning_fed.core.unset import UnsetAttributeError
from lightning_fed.data import Iid
from lightning_fed.server import NormClipping, SystemsHeterogeneity, TopK, UniformSampler
from tests.helpers.training import data, seeded, trainer


def without_init(base: type) -> Any:
    return type("Mine", (base,), {"__init__": lambda self: None})()


class Prox(FedProx):
    def __init__(self) -> None:
        self.rate = 0.1


@pytest.mark.parametrize(
    ("base", "name", "setter"),
    [
        (FedProx, "mu", "FedProx"),
        (NormClipping, "max_norm", "NormClipping"),
        (TopK, "share", "TopK"),
        (UniformSampler, "clients_per_round", "CountingSampler"),
        (SystemsHeterogeneity, "stragglers", "SystemsHeterogeneity"),
        (TrainingLoss, "every_n_rounds", "Measure"),
        (Iid, "num_clients", "SeededPartition"),
        (FederatedDataModule, "client_val", "FederatedDataModule"),
    ],
)
def test_subclass_without_base_init_raises_with_a_hint(base: type, name: str, setter: str) -> None:
    message = rf"Mine has no attribute '{name}', which {setter}.__init__ sets\. Call super\(\).__init__\(...\) in Mine"
    with pytest.raises(UnsetAttributeError, match=message):
        getattr(without_init(base), name)


def test_run_with_an_uninitialized_method_is_rejected() -> None:
    with pytest.raises(FederatedError, match=r"Prox has no attribute 'mu'.* Call super\(\).__init__"):
        trainer(algorithm=Prox(), max_rounds=1).fit(seeded(), data())


def test_other_missing_attributes_raise_as_usual() -> None:
    method = FedProx(mu=0.1)
    assert not hasattr(method, "sigma")
    with pytest.raises(AttributeError, match="'FedProx' object has no attribute 'sigma'"):
        method.sigma  # noqa: B018
    assert vars(pickle.loads(pickle.dumps(copy.deepcopy(method)))) == vars(method)


def test_error_inside_a_property_is_kept() -> None:
    class Data(FederatedDataModule):
        @property
        def client_ids(self) -> Any:
            return self.names

    with pytest.raises(AttributeError, match="'Data' object has no attribute 'names'"):
        Data().client_ids  # noqa: B018
