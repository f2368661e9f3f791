"""Every public name resolves and says what it is."""

import importlib
import inspect
import pkgutil
from typing import Any

import pytest

import lightning_fed

MODULES = [lightning_fed.__name__, *(m.name for m in pkgutil.walk_packages(lightning_fed.__path__, "lightning_fed."))]
FACE = {
    "lightning_fed": [
        "FederatedCallback", "FederatedDataModule", "FederatedLoop", "FederatedOptimizer", "FederatedTrainer",
    ],
    "lightning_fed.algorithms": [
        "Algorithm", "FedAvg", "FedProx", "FedDane", "Scaffold", "Mime", "MimeLite", "CMime", "MimeMVR", "FedCM",
        "FedDyn", "FedNova", "ServerOnly", "SGD", "SGDm", "RMSProp", "Adam", "Adagrad", "Yogi",
    ],
    "lightning_fed.server": ["FedAvgM", "FedAdam", "FedAdagrad", "FedYogi"],
    "lightning_fed.data": ["ByKey", "Dirichlet", "FederatedDataModule", "FederatedDataset", "Iid", "Shards"],
}  # fmt: skip


def public() -> list[tuple[str, str]]:
    return [
        (name, key)
        for name in MODULES
        if not name.endswith("__main__")
        for key in getattr(importlib.import_module(name), "__all__", ())
        if not key.startswith("_")
    ]


@pytest.mark.parametrize(("module", "name"), public())
def test_public_names_resolve_and_are_documented(module: str, name: str) -> None:
    value: Any = getattr(importlib.import_module(module), name)
    if not (inspect.isclass(value) or inspect.isfunction(value)) or not value.__module__.startswith("lightning_fed"):
        return
    text = inspect.getdoc(value)
    assert text
    assert text.split("\n")[0].endswith((".", ":"))
    if inspect.isclass(value):
        undocumented = [
            n
            for n, f in vars(value).items()
            if inspect.isfunction(f) and not n.startswith("_") and not inspect.getdoc(getattr(value, n))
        ]
        assert not undocumented


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_what_it_holds(module: str) -> None:
    assert (importlib.import_module(module).__doc__ or "").strip()


@pytest.mark.parametrize("module", FACE)
def test_the_face_of_the_package(module: str) -> None:
    assert set(FACE[module]) <= set(importlib.import_module(module).__all__)
