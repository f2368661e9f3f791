"""A method of each kind has the same results on a device and on the CPU, in both engines."""

from functools import partial
from typing import Any

import pytest
import torch

from lightning_fed.algorithms import (
    Adam,
    Algorithm,
    FedAvg,
    FedDane,
    FedDyn,
    FedPer,
    Mime,
    PFedMe,
    RMSProp,
    Scaffold,
    ServerOnly,
)
from lightning_fed.server import FedAdam
from tests.devices.conftest import Place
from tests.helpers.training import fit, seeded

METHODS: dict[str, tuple[Algorithm, dict[str, Any]]] = {
    "one gradient": (ServerOnly(), {"local_epochs": None}),
    "server optimizer": (FedAvg(), {"server_optimizer": partial(FedAdam, lr=0.05)}),
    "client states": (Scaffold(), {}),
    "client states and dual": (FedDyn(0.5), {}),
    "gradient phase": (FedDane(0.1), {}),
    "anchored gradients": (Mime(Adam()), {}),
    "fixed statistics": (
        Mime(RMSProp(eps=0.1)),
        {},
    ),  # with 1e-3, steps on small gradients amplify rounding 1,000 times
    "personal models": (PFedMe(2.0, 2), {}),
    "personal layers": (FedPer(["head.*"]), {}),
}


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("name", METHODS)
def test_method_on_device_matches_the_cpu(place: Place, name: str, engine: str) -> None:
    algorithm, options = METHODS[name]
    options = {"algorithm": algorithm, "engine": engine, "max_rounds": 3, "local_epochs": 1, **options}
    on_cpu, here = fit(seeded(dropout=0.0), **options), fit(seeded(dropout=0.0), **{**options, **place.options()})
    within = place.tolerance or (0.0 if engine == "sequential" else 5e-7)
    torch.testing.assert_close(here.cpu(), on_cpu, rtol=0, atol=within)
