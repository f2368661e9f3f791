"""Record-level privacy: its settings, the methods it covers, and the privacy that clients spend."""

import copy
import math
from typing import Any

import pytest
import torch

from lightning_fed import FederatedError
from lightning_fed.algorithms import (
    APFL,
    CMime,
    Ditto,
    FedACG,
    FedAvg,
    FedCM,
    FedDane,
    FedDyn,
    FedExP,
    FedNova,
    FedProx,
    FedProxVR,
    FedRep,
    FedSAM,
    FedSpeed,
    Mime,
    MimeLite,
    MimeMVR,
    MoFedSAM,
    PFedMe,
    Scaffnew,
    Scaffold,
    ScaffoldM,
    ServerOnly,
    SGDm,
)
from lightning_fed.server import ClientPrivacy, FedBuff, OortSampler, PowerOfChoiceSampler, UpdateNormSampler
from lightning_fed.server.privacy import PrivacyLedger
from tests.helpers.optional import needs_opacus
from tests.helpers.training import trainer

pytestmark = needs_opacus

PRIVATE = ClientPrivacy(noise_multiplier=1.1, max_grad_norm=0.7, delta=1e-3)
SHUFFLED = ClientPrivacy(noise_multiplier=1.1, max_grad_norm=0.7, delta=1e-3, sampling="shuffle")


def ledger(privacy: ClientPrivacy = PRIVATE) -> PrivacyLedger:
    """Return the account of clients with batches of 4 examples, and at most 3 batches in an epoch."""
    return PrivacyLedger(privacy, lambda index, size: -(-size // 4), lambda batches: min(batches, 3))


# ------------------------------------------------------------------ spending


@pytest.mark.parametrize(("size", "steps"), [(16, 1), (16, 30), (100, 200), (3, 5)])
def test_poisson_accounting_matches_opacus(size: int, steps: int) -> None:
    from opacus.accountants import RDPAccountant

    theirs, ours = RDPAccountant(), ledger()
    theirs.history = [(1.1, 1 / -(-size // 4), steps)]
    ours.add(5, size, steps)
    assert ours.epsilons() == {5: pytest.approx(theirs.get_epsilon(1e-3), rel=1e-2)}  # Opacus uses other orders


def test_epsilon_bounds_the_exact_gaussian_mechanism() -> None:
    # Balle and Wang, ICML 2018, Theorem 8: the exact delta of a Gaussian mechanism of multiplier z
    epsilon, z = PRIVATE.epsilon({1: 1}), 1.1

    def phi(t: float) -> float:
        return 0.5 * (1 + math.erf(t / math.sqrt(2)))

    delta = phi(0.5 / z - epsilon * z) - math.exp(epsilon) * phi(-0.5 / z - epsilon * z)
    assert delta <= PRIVATE.delta
    smaller = epsilon - 0.5
    assert phi(0.5 / z - smaller * z) - math.exp(smaller) * phi(-0.5 / z - smaller * z) > PRIVATE.delta


def test_rounds_accumulate_per_client() -> None:
    ours = ledger()
    for _ in range(3):
        ours.add(0, 16, 4)
        ours.add(7, 8, 2)
    once = ledger()
    once.add(0, 16, 12)
    once.add(7, 8, 6)
    assert ours.epsilons() == once.epsilons()
    assert list(ours.epsilons()) == [0, 7]
    before = ours.epsilons()[0]
    ours.add(0, 20, 4)  # with another number of batches
    assert ours.epsilons()[0] > before


def test_each_shuffled_epoch_counts_once() -> None:
    ours = ledger(SHUFFLED)
    ours.add(0, 16, 3)  # an epoch of 3 of its 4 batches
    ours.add(1, 16, 4)  # one epoch, and the first step of another
    assert ours.epsilons() == {0: SHUFFLED.epsilon({1: 1}), 1: SHUFFLED.epsilon({1: 2})}
    assert SHUFFLED.epsilon({1: 1}) > PRIVATE.epsilon({4: 4})  # sampling amplifies


def test_epsilon_is_infinite_without_noise_and_zero_without_work() -> None:
    assert ClientPrivacy(0.0, 1.0).epsilon({1: 1}) == math.inf
    assert ClientPrivacy(0.0, 1.0).epsilon({}) == 0.0
    assert PRIVATE.epsilon({4: 0}) == 0.0
    idle = ledger()
    idle.add(3, 16, 0)
    assert idle.epsilons() == {}


def test_noise_multiplier_is_immutable() -> None:
    privacy = copy.deepcopy(PRIVATE)
    with pytest.raises(FederatedError, match="noise_multiplier cannot change"):
        privacy.noise_multiplier = 0.1
    assert privacy.epsilon({1: 1}) == PRIVATE.epsilon({1: 1})


def test_counts_round_trip_through_a_checkpoint() -> None:
    ours, again = ledger(), ledger()
    ours.add(2, 16, 4)
    ours.add(2, 20, 4)
    ours.add(0, 8, 1)
    assert ours.saved().tolist() == [[0, 2, 1], [2, 4, 4], [2, 5, 4]]
    again.add(0, 16, 9)
    again.add(9, 16, 4)
    assert list(again.epsilons()) == [0, 9]
    again.load(ours.saved())  # replaces the earlier counts
    assert again.epsilons() == ours.epsilons()
    assert ledger().saved().shape == (0, 3)


@pytest.mark.parametrize(
    "bad", [None, torch.zeros(2, 3), torch.zeros(2, 2, dtype=torch.int64), torch.tensor([[0, 0, 1]])]
)
def test_invalid_counts_are_rejected(bad: Any) -> None:
    with pytest.raises(ValueError, match="the privacy that clients have spent"):
        ledger().load(bad)


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "algorithm",
    [
        FedAvg(),
        FedProx(0.1),
        Scaffold(),
        FedDyn(1.0),
        FedNova(),
        FedCM(0.1),
        FedExP(),
        FedACG(),
        ScaffoldM(0.5),
        Scaffnew(0.5),
    ],
    ids=repr,
)
def test_methods_with_one_gradient_per_step_are_supported(algorithm: Any) -> None:
    assert trainer(algorithm=algorithm, client_privacy=PRIVATE).fit_loop.settings.client_privacy is PRIVATE


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        (Scaffold(option="i"), "full-batch gradients, without noise"),
        (Scaffold(initial="gradient"), "full-batch gradients, without noise"),
        *(
            (method, "full-batch gradients, without noise")
            for method in (Mime(SGDm()), MimeLite(SGDm()), CMime(SGDm()))
        ),
        (FedDane(0.1), "full-batch gradients"),
        (FedProxVR(1.0), "full-batch gradients"),
        (MimeMVR(0.1), "full-batch gradients"),
        (FedProx(0.1, adaptive=True), "losses, without noise"),
        (ServerOnly(), "take no local steps"),
        *(
            (method, "a second gradient on every batch")
            for method in (FedSAM(0.1), MoFedSAM(0.1, 0.1), FedSpeed(0.1, 0.1))
        ),
        (APFL(0.5), "gradient on every batch"),
        (Ditto(1.0), "a second model"),
        (FedRep(["head.*"]), "a second model"),
        (PFedMe(1.0), "several steps on every batch"),
    ],
    ids=lambda value: repr(value) if not isinstance(value, str) else "",
)
def test_methods_with_other_data_access_are_rejected(algorithm: Any, reason: str) -> None:
    local = {} if algorithm.local_work else {"local_epochs": None}
    with pytest.raises(FederatedError, match=rf"cannot be combined with {type(algorithm).__name__}\(.*{reason}"):
        trainer(algorithm=algorithm, client_privacy=PRIVATE, **local)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ClientPrivacy(-1.0, 1.0), r"noise_multiplier must be a finite number in \[0, inf\)"),
        (lambda: ClientPrivacy(1.0, 0.0), r"max_grad_norm must be a finite number in \(0, inf\)"),
        (lambda: ClientPrivacy(1.0, 1.0, delta=1.0), r"delta must be a finite number in \(0, 1\)"),
        (lambda: ClientPrivacy(1.0, 1.0, sampling="bernoulli"), "sampling must be 'poisson' or 'shuffle'"),
        (lambda: ClientPrivacy(1.0, 1.0, examples_at_once=0), "examples_at_once must be an integer of at least 1"),
        (lambda: trainer(client_privacy=1.0), "client_privacy must be a ClientPrivacy.*found 1.0"),
        (lambda: trainer(client_privacy=PRIVATE, engine="vectorized"), "engine='vectorized', which runs no single"),
        (lambda: trainer(client_privacy=PRIVATE, on_client_error="drop"), "on_client_error='drop'.*'raise'"),
        (
            lambda: trainer(client_privacy=PRIVATE, asynchronous=FedBuff(2, 4), clients_per_round=None),
            "asynchronous=..., which does not count",
        ),
        *(
            (
                lambda sampler=sampler: trainer(client_privacy=PRIVATE, sampler=sampler, clients_per_round=None),
                rf"cannot be combined with sampler={type(sampler).__name__}\(.*to which no noise is added",
            )
            for sampler in (PowerOfChoiceSampler(2, 4), OortSampler(2), UpdateNormSampler(2))
        ),
    ],
)
def test_invalid_arguments_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        make()
