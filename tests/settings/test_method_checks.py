"""Methods that cannot be right are refused before they run, by the name of what is wrong."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fed import FederatedError, algorithms
from lightning_fed.algorithms import (
    Algorithm,
    CMime,
    FedAvg,
    FedPer,
    FedRep,
    FedSpeed,
    LGFedAvg,
    MimeMVR,
    MoFedSAM,
    SGDm,
)
from lightning_fed.settings.method_checks import check_method
from lightning_fed.settings.method_rehearsal import rehearse
from tests.helpers.training import fit


class ReturnsNothing(Algorithm):
    def correct(self, g: Tensor, y: Tensor, step: Any) -> Any:
        pass


class ReturnsANorm(Algorithm):
    def correct(self, g: Tensor, y: Tensor, step: Any) -> Tensor:
        return g.norm()


class Normalized(Algorithm):
    def correct(self, g: Tensor, y: Tensor, step: Any) -> Tensor:
        return g / g.norm()


class Averaged(Algorithm):
    reduces = {"delta": "mean"}


class TakesLess(Algorithm):
    def advance(self, g: Tensor, step: Any) -> Any:
        return {}


class Drops(Algorithm):
    def update_server(self, x: Any, server: Any, mean: Any, cohort: Any) -> Any:
        return mean["delta"]


class Counts(Algorithm):
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def finish(self, y: Any, run: Any) -> Any:
        self.count += 1
        return super().finish(y, run)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (ReturnsNothing(), r"ReturnsNothing.correct\(\) must return the direction .*found a NoneType.*Return g"),
        (ReturnsANorm(), r"ReturnsANorm.correct\(\) must return .*found shape \(\)"),
        (Normalized(), r"Normalized.correct\(\) is not elementwise.*gradient_clip_on='corrected'"),
        (Averaged(), r"Averaged.reduces\['delta'\] must be one of .*found 'mean'"),
        (TakesLess(), r"TakesLess.advance\(.* must take \(g, y, step\): too many positional arguments"),
        (Drops(), r"Drops.update_server\(\) must return a direction and the server state, found a Tensor"),
        (Counts(), r"Counts has changed its attribute 'count' in a round"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Algorithm) else "",
)
def test_a_method_that_cannot_be_right_is_refused(algorithm: Algorithm, message: str, engine: str) -> None:
    with pytest.raises(FederatedError, match=message):
        fit(algorithm=algorithm, engine=engine)


class Misspelt(Algorithm):
    def corect(self, g: Tensor, y: Tensor, step: Any) -> Tensor:
        return -g


def test_a_name_that_is_nearly_a_hooks_is_told_of() -> None:
    with pytest.warns(UserWarning, match="Misspelt.corect is not a hook of a method.*Did you mean correct"):
        check_method(Misspelt())


class Noisy(Algorithm):
    def correct(self, g: Tensor, y: Tensor, step: Any) -> Tensor:
        return g + torch.randn_like(g)


class OfTheModel(Algorithm):
    def __init__(self) -> None:
        self.mask = torch.ones(1000)

    def correct(self, g: Tensor, y: Tensor, step: Any) -> Tensor:
        return g * self.mask


@pytest.mark.filterwarnings("error")
def test_what_may_be_right_passes() -> None:
    makes: dict[Any, Any] = {
        CMime: lambda: CMime(SGDm()),
        **{cls: partial(cls, ["head.*"]) for cls in (FedPer, FedRep, LGFedAvg)},
        FedSpeed: lambda: FedSpeed(2.0, 0.1),
        MimeMVR: lambda: MimeMVR(0.3),
        MoFedSAM: lambda: MoFedSAM(0.1, 0.3),
    }
    names = [getattr(algorithms, name) for name in algorithms.__all__]
    methods = [cls for cls in names if issubclass(cls, Algorithm)]
    for cls in [*methods, Noisy, OfTheModel]:
        try:
            algorithm = makes.get(cls, cls)()
        except TypeError:
            algorithm = cls(0.3)
        before = torch.get_rng_state()
        check_method(algorithm)
        rehearse(algorithm)
        assert torch.equal(before, torch.get_rng_state())
    assert FedAvg in methods


class Momentum(Algorithm):
    def update_server(self, x: Any, server: Any, mean: Any, cohort: Any) -> Any:
        self._m = 0.5 * getattr(self, "_m", 0) + mean["delta"]
        return self._m, server


class Cached(Algorithm):
    def update_server(self, x: Any, server: Any, mean: Any, cohort: Any) -> Any:
        self._ones = torch.ones_like(x)
        return mean["delta"] * self._ones, server


def test_a_private_attribute_that_holds_a_state_is_told_of() -> None:
    with pytest.warns(UserWarning, match="Momentum has changed its attribute '_m' again.*keep what changes"):
        fit(algorithm=Momentum(), max_rounds=2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*has changed its attribute.*")
        fit(algorithm=Cached(), max_rounds=3)
