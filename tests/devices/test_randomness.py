"""Random layers draw from the device's stream. The run's seed determines it, and other streams are unchanged."""

import pytest
import torch

from lightning_fed.core.seeds import preserved_random_state
from tests.devices.conftest import Place
from tests.helpers.training import fit, seeded


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_dropout_depends_only_on_the_seed(place: Place, engine: str) -> None:
    found = []
    for before, seed in ((1, 3), (2, 3), (2, 4)):
        torch.manual_seed(before)
        found.append(fit(seeded(dropout=0.4), engine=engine, seed=seed, **place.options()))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


def test_device_random_state_can_be_preserved(place: Place) -> None:
    device = place.device
    torch.manual_seed(0)
    with preserved_random_state(device):
        inside = torch.rand(4, device=device)
    assert torch.equal(torch.rand(4, device=device), inside)


def test_auto_uses_the_vectorized_engine_for_random_layers(place: Place) -> None:
    options = {"seed": 3, **place.options()}
    assert torch.equal(
        fit(seeded(dropout=0.4), engine="auto", **options), fit(seeded(dropout=0.4), engine="vectorized", **options)
    )
