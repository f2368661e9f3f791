"""User-defined server optimizers, samplers, compressors and other parts give right numbers or are refused by name."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fed import FederatedError
from lightning_fed.algorithms import Algorithm
from lightning_fed.server import Compressor, FedBuff, SystemsHeterogeneity
from tests.helpers.engines import Ordinary, Record, assert_close, full_batches, run, state_of
from tests.helpers.training import data, fit, seeded, trainer


class Noisy(torch.optim.SGD):
    """Adds noise to the mean gradient."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.grad = p.grad + 0.1 * torch.randn_like(p)
        return super().step()


class NoisyMethod(Algorithm):
    def update_server(self, x: Any, server: Any, mean: Any, cohort: Any) -> Any:
        return mean["delta"] + 0.1 * torch.randn_like(x), server


@pytest.mark.parametrize(
    "options", [{"server_optimizer": partial(Noisy, lr=1.0)}, {"algorithm": NoisyMethod()}], ids=len
)
def test_server_random_draws_match_in_every_engine(options: Any) -> None:
    one, other = (
        state_of(run(engine, Ordinary, full_batches, max_rounds=1, **options))
        for engine in ("sequential", "vectorized")
    )
    assert_close(one, other)


class Counting(torch.optim.SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1.0)
        self.t = 0

    def step(self, closure: Any = None) -> Any:
        self.t += 1
        self.param_groups[0]["lr"] = 1 / self.t
        return super().step()


def test_server_optimizer_counting_in_an_attribute_is_rejected() -> None:
    with pytest.raises(FederatedError, match="server_optimizer Counting changes its attribute 't' as it steps"):
        fit(server_optimizer=Counting, max_rounds=1)


class Turns:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, seed: int, round: int, population: Any) -> list[Any]:
        self.calls += 1
        return [population[self.calls % len(population)]]


@pytest.mark.parametrize(
    "sampler", [Turns(), lambda seed, round, population: random.sample(list(population), 4)], ids=["own", "global"]
)
def test_sampler_not_determined_by_seed_and_round_is_rejected(sampler: Any) -> None:
    random.seed(0)
    with pytest.raises(FederatedError, match=r"The sampler drew \[.*\] in round 0, and \[.*\] when it was asked again"):
        fit(sampler=sampler, max_rounds=1)


class Half(Compressor):
    """Sends the first half, and keeps the rest as residual."""

    error_feedback = True

    def __init__(self, in_place: bool) -> None:
        self.in_place = in_place

    def __call__(self, message: Tensor, stream: torch.Generator) -> tuple[Tensor, int]:
        sent = message if self.in_place else message.clone()
        sent[len(sent) // 2 :] = 0
        return sent, 2 * len(sent)


def test_compressor_may_modify_its_message_in_place() -> None:
    done = []
    for in_place in (True, False):
        t = trainer(compression=Half(in_place), callbacks=[record := Record()])
        t.fit(seeded(), data())
        done.append({**state_of(t), "drift": torch.tensor([report.drift for report in record.rounds])})
    assert_close(*done, rtol=0.0)


def returning(found: Any) -> Compressor:
    return type("Own", (Compressor,), {"__call__": lambda self, message, stream: found(message)})()


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (lambda m: m, "found a Tensor"),
        (lambda m: None, "found a NoneType"),
        (lambda m: (m[:3], 4), r"found shape \[3\] and 4"),
        (lambda m: (m, -4), r"found shape \[\d+\] and -4"),
        (lambda m: (m, 4.5), r"found shape \[\d+\] and 4.5"),
    ],
    ids=["message", "none", "shape", "negative", "float"],
)
def test_invalid_compressor_output_is_rejected(found: Any, text: str) -> None:
    with pytest.raises(FederatedError, match=f"Own must return the message .* and the bytes sent, an integer, {text}"):
        fit(compression=returning(found), max_rounds=1)


class Own(SystemsHeterogeneity):
    def __init__(self, found: Any) -> None:
        super().__init__()
        self.found = found

    def __call__(self, seed: int, round: int, clients: Any, epochs: Any, steps: Any) -> Any:
        return self.found(steps)


@pytest.mark.parametrize(
    "found", [lambda s: None, lambda s: s[:1], lambda s: [-1 for _ in s], lambda s: [1.5 for _ in s]]
)
def test_invalid_heterogeneity_steps_are_rejected(found: Any) -> None:
    with pytest.raises(FederatedError, match="Own must return a list with the local steps of each of 3 clients"):
        fit(heterogeneity=Own(found), max_rounds=1)


class Weighs(FedBuff):
    def __init__(self, found: Any) -> None:
        super().__init__(2, 3)
        self.found = found

    def weight(self, staleness: int) -> float:
        return self.found


@pytest.mark.parametrize("found", [-1.0, float("nan"), None])
def test_invalid_asynchronous_server_weight_is_rejected(found: Any) -> None:
    with pytest.raises(FederatedError, match=r"Weighs.weight\(0\) must be a finite number of at least 0, found"):
        fit(asynchronous=Weighs(found), max_rounds=1, clients_per_round=None)


@pytest.mark.parametrize("found", [None, "a", -1.0])
def test_invalid_client_weight_is_rejected(found: Any) -> None:
    with pytest.raises(FederatedError, match=f"weighting must give finite weights >= 0, found {found!r} for client"):
        fit(weighting=lambda client_id, size, steps: found, max_rounds=1)


def test_server_noise_continues_in_a_resumed_run(tmp_path: Path) -> None:
    options = {"server_optimizer": partial(Noisy, lr=1.0)}
    half = trainer(max_rounds=1, **options)
    half.fit(seeded(), data())
    half.save_checkpoint(tmp_path / "half.ckpt")
    assert torch.equal(fit(max_rounds=2, ckpt_path=tmp_path / "half.ckpt", **options), fit(max_rounds=2, **options))
