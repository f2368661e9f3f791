"""The settings are the trainer's arguments, checked and completed."""

import re
from dataclasses import FrozenInstanceError, fields
from inspect import signature
from typing import Any, Literal, get_origin, get_type_hints

import pytest

from lightning_fed import FederatedError, FederatedTrainer
from lightning_fed.algorithms import (
    Algorithm,
    Ditto,
    FedACG,
    FedAvg,
    FedCM,
    FedDane,
    FedDyn,
    FedExP,
    FedNova,
    FedPer,
    FedProx,
    Mime,
    PFedMe,
    Scaffold,
)
from lightning_fed.server import (
    CoordinateMedian,
    FedBuff,
    RoundRobinSampler,
    SignFlipAttack,
    TopK,
    UniformSampler,
    UpdateNormSampler,
)
from lightning_fed.server.server import plain_sgd
from lightning_fed.settings.settings import Settings

ARGUMENTS = signature(FederatedTrainer).parameters
DO_MORE: list[Algorithm] = [
    FedAvg(pseudo_grad="normalized"),
    FedProx(0.1, adaptive=True),
    FedNova(),
    FedExP(),
    FedDyn(0.1),
    FedACG(),
    Ditto(0.1),
    PFedMe(15.0),
]
OTHERS = {"max_rounds", "max_epochs", "callbacks", "kwargs"}  # Lightning takes these


def settings(**given: Any) -> Settings:
    return Settings.of({name: one.default for name, one in ARGUMENTS.items()} | {"local_epochs": 1} | given)


def test_settings_match_trainer_arguments_in_order_and_choices() -> None:
    own = [one for one in fields(Settings) if one.init]
    assert [one.name for one in own] == [name for name in ARGUMENTS if name not in OTHERS]
    hints = get_type_hints(FederatedTrainer.__init__)
    choices = {one.name: one.type for one in own if get_origin(one.type) is Literal}
    assert choices == {name: hint for name, hint in hints.items() if get_origin(hint) is Literal}


def test_unset_settings_get_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    found = settings()
    assert isinstance(found.algorithm, FedAvg)
    assert found.server_optimizer is plain_sgd
    assert isinstance(found.sampler, UniformSampler)
    assert found.gradient_sampler is found.sampler
    assert (found.weighting, found.personal, found.seed, found.seed_is_given) == ("examples", (), 7, False)
    assert (settings(seed=3).seed, settings(seed=3).seed_is_given) == (3, True)


def test_samplers_and_aggregators_determine_related_settings() -> None:
    two, three = RoundRobinSampler(2), RoundRobinSampler(3)
    found = settings(algorithm=FedDane(0.1), sampler=two, gradient_sampler=three)
    assert (found.sampler, found.gradient_sampler) == (two, three)
    assert settings(aggregator=CoordinateMedian()).weighting == "uniform"
    found = settings(asynchronous=FedBuff(size=2, concurrency=4))
    assert isinstance(found.aggregator, FedBuff)
    assert found.sampler is found.gradient_sampler is found.aggregator


def test_settings_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        settings().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"aggregator": CoordinateMedian()}, r"aggregator=CoordinateMedian\(\) changes it"),
        ({"asynchronous": FedBuff(size=2, concurrency=4)}, r"asynchronous=FedBuff\(.* changes it"),
        ({"compression": TopK(0.1)}, r"compression=TopK\(share=0.1\) changes it"),
        ({"attack": SignFlipAttack(0.1)}, "attack=SignFlipAttack.* changes what clients send"),
        (
            {"sampler": UpdateNormSampler(2), "clients_per_round": None},
            "sampler=UpdateNormSampler.* makes an estimate of it",
        ),
        *(({"algorithm": method}, re.escape(f"{method!r} does more")) for method in DO_MORE),
    ],
)
def test_exact_adapters_require_the_mean_of_the_models(given: dict[str, Any], told: str) -> None:
    with pytest.raises(FederatedError, match=f"lora='exact' needs a server that only takes the mean .*{told}"):
        settings(lora="exact", **given)
    settings(lora="frozen_a", **given)


@pytest.mark.parametrize("method", [FedProx(0.1), Scaffold(), FedDane(0.1), FedCM(0.1), Mime(), FedPer(["head.*"])])
def test_exact_adapters_support_methods_with_a_mean_model(method: Algorithm) -> None:
    assert settings(lora="exact", algorithm=method).lora == "exact"
