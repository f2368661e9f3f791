"""Every public name resolves and is documented."""

import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import lightning_fed

NEEDS = {"flwr": "lightning_fed.deploy.flower", "nvflare": "lightning_fed.deploy.flare"}
MODULES = [lightning_fed.__name__, *(m.name for m in pkgutil.walk_packages(lightning_fed.__path__, "lightning_fed."))]
for package, room in NEEDS.items():
    if importlib.util.find_spec(package) is None:  # another step of .ci/run checks with it
        MODULES = [name for name in MODULES if not name.startswith(room)]
FACE = {
    "lightning_fed": [
        "FederatedCallback", "FederatedDataModule", "FederatedLoop", "FederatedOptimizer", "FederatedTrainer",
    ],
    "lightning_fed.algorithms": [
        "Algorithm", "FedAvg", "FedProx", "FedDane", "Scaffold", "Mime", "MimeLite", "CMime", "MimeMVR", "FedCM",
        "APFL", "Ditto", "FedACG", "FedBN", "FedDyn", "FedExP", "FedNova", "FedPer", "FedProxVR", "FedRep", "FedSAM",
        "FedSpeed", "LGFedAvg", "MoFedSAM", "PFedMe", "Scaffnew", "ScaffoldM", "ServerOnly", "SGD", "SGDm", "RMSProp",
        "Adam", "Adagrad", "Yogi",
    ],
    "lightning_fed.server": ["FedAvgM", "FedAdam", "FedAdagrad", "FedYogi"],
    "lightning_fed.data": ["ByKey", "Dirichlet", "FederatedDataModule", "FederatedDataset", "Iid", "Shards"],
}  # fmt: skip


def public() -> Iterator[tuple[str, str, Any]]:
    """Yield every public name: its module, itself and its value."""
    for name in MODULES:
        if not name.endswith("__main__"):
            module = importlib.import_module(name)
            for key in getattr(module, "__all__", ()):
                yield name, key, getattr(module, key, None)


def fault_of(value: Any) -> str:
    """Return the gaps in the documentation of a class or function; empty if it is complete."""
    text = inspect.getdoc(value)
    if not text:
        return "has no docstring"
    if not text.split("\n")[0].endswith((".", ":")):
        return "has a docstring whose first line is no sentence"
    if inspect.isclass(value):
        for name, member in vars(value).items():
            if inspect.isfunction(member) and not name.startswith("_") and not inspect.getdoc(getattr(value, name)):
                return f"has no docstring for {name}"
    return ""


def test_public_names_resolve_and_are_documented() -> None:
    faults = []
    for module, name, value in public():
        if value is None and not hasattr(importlib.import_module(module), name):
            faults.append(f"{module}.{name} is not there")
        elif (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__.startswith("lightning_fed"):
            fault = "" if name.startswith("_") else fault_of(value)
            faults += [f"{module}.{name} {fault}"] if fault else []
    assert not faults, "\n".join(faults)


def test_every_module_has_a_docstring() -> None:
    assert not [name for name in MODULES if not (importlib.import_module(name).__doc__ or "").strip()]


def test_expected_public_names_are_exported() -> None:
    missing = {
        module: absent
        for module, names in FACE.items()
        if (absent := set(names) - set(importlib.import_module(module).__all__))
    }
    assert not missing
