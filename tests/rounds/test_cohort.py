"""The cohort of a round: drawn by seed and round, cut to the work that clients complete, and checked for the method."""

from collections.abc import Mapping, Sequence
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_fed import FederatedError, FederatedTrainer
from lightning_fed.algorithms import Algorithm, FedAvg, FedDane, Mime, Scaffnew
from lightning_fed.rounds.cohort import CohortSampling, DrawnCohort, secret_seed
from lightning_fed.server import DifferentialPrivacy, PowerOfChoiceSampler, RoundRobinSampler, UpdateNormSampler
from lightning_fed.server.participation import Participant, Population
from lightning_fed.settings.settings import Settings

IDS = ["ann", "bob", "cy", "dee", "eve"]
DEFAULTS = {name: one.default for name, one in signature(FederatedTrainer).parameters.items()}


def sampling(algorithm: Algorithm | None = None, seed: int = 5, **options: Any) -> CohortSampling:
    local = {"local_steps": 4} if "local_steps" in options else {"local_epochs": 1}
    given = {"algorithm": algorithm or FedAvg(), "seed": 0, "clients_per_round": 3, **local, **options}
    return CohortSampling(Settings.of({**DEFAULTS, **given}), Population(IDS, lambda _: 8, [8] * 5), seed)


def everybody(drawn: Mapping[Any, int]) -> Sequence[Participant]:
    return [Participant(name, IDS.index(name), 8, count, 4) for name, count in drawn.items()]


def names(members: Sequence[Participant]) -> list[Any]:
    return [member.client_id for member in members]


def test_cohort_depends_only_on_seed_and_round() -> None:
    drawn, again = ([sampling(seed=s).draw(r, everybody) for s in (5, 6) for r in range(6)] for _ in range(2))
    assert drawn == again
    assert len({tuple(names(cohort.members)) for cohort in drawn}) > 3
    assert {len(cohort.members) for cohort in drawn} == {3}


def test_client_drawn_twice_is_one_member_that_counts_twice() -> None:
    twice = sampling(sampler=lambda seed, round: ["cy", "ann", "cy"], clients_per_round=None)
    assert [(who.client_id, who.count) for who in twice.draw(0, everybody).members] == [("cy", 2), ("ann", 1)]


def test_unavailable_clients_are_dropped_in_the_order_drawn() -> None:
    def some(drawn: Mapping[Any, int]) -> Sequence[Participant]:
        return [who for who in everybody(drawn) if who.client_id != "ann"]

    def cut(seed: int, round: int, clients: Any, epochs: Any, steps: Any) -> list[int | None]:
        return [None if IDS[client] == "dee" else 1 + client for client in clients]

    options = {"sampler": lambda seed, round: ["dee", "bob", "ann", "eve"], "clients_per_round": None}
    cohort = sampling(heterogeneity=cut, **options).draw(0, some)
    assert [(who.client_id, who.steps) for who in cohort.members] == [("bob", 2), ("eve", 5)]
    assert list(cohort.dropped) == ["dee", "ann"]


def test_gradients_use_the_same_cohort_or_a_separately_drawn_one() -> None:
    same = sampling(Mime()).draw(0, everybody)
    assert same.gradient_members == same.members
    other = sampling(FedDane(0.1), gradient_sampler=RoundRobinSampler(2)).draw(1, everybody)
    assert names(other.gradient_members) == ["cy", "dee"]
    assert len(other.members) == 3
    assert sampling().draw(0, everybody).gradient_members == ()


def test_sampler_losses_are_measured_once_for_both_cohorts() -> None:
    asked: list[Any] = []

    def losses_of(clients: Sequence[Any]) -> Mapping[Any, float]:
        asked.extend(clients)
        return {client_id: float(IDS.index(client_id)) for client_id in clients if client_id != "eve"}

    one = sampling(FedDane(0.1), sampler=PowerOfChoiceSampler(2, 5), clients_per_round=None)
    cohort = one.draw(0, everybody, losses_of)
    assert asked == [*IDS, "eve"]  # a client without an answer is asked again
    assert list(cohort.measured) == IDS[:4]
    assert names(cohort.members) == names(cohort.gradient_members) == ["cy", "dee"]


def test_members_drawn_with_probabilities_have_their_share() -> None:
    cohort = sampling(sampler=UpdateNormSampler(5), clients_per_round=None).draw(0, everybody)
    assert [who.share for who in cohort.members] == [0.2] * 5


def test_empty_gradient_cohort_leaves_no_members() -> None:
    def once(seed: int, round: int) -> list[str]:
        return []

    assert sampling(FedDane(0.1), gradient_sampler=once).draw(0, everybody).members == ()


def test_method_that_needs_all_clients_rejects_partial_participation() -> None:
    method, options = Scaffnew(prob=0.5), {"local_steps": 4, "local_epochs": None}
    whole = sampling(method, clients_per_round=1.0, **options).draw(0, everybody)
    assert len(whole.members) == 5
    with pytest.raises(FederatedError, match="Scaffnew needs all clients.*in round 2 there are 4 of 5, with 4 to 4 st"):
        sampling(method, clients_per_round=4, **options).draw(2, everybody)
    with pytest.raises(FederatedError, match="leave on_client_error at 'raise'"):
        sampling(method, clients_per_round=1.0, on_client_error="drop", **options).draw(0, everybody)


def test_private_seed_is_broadcast_and_differs_each_time() -> None:
    said: list[int] = []
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(broadcast=lambda value: said.append(value) or 42))
    population = Population(IDS, lambda _: 8, [8] * 5)
    private = DifferentialPrivacy(1.0, 1.0, 1e-5)
    assert [secret_seed(trainer, private, population) for _ in range(2)] == [42, 42]
    assert said[0] != said[1]
    with pytest.warns(UserWarning, match="delta=0.5 is not below 1/N = 0.2"):
        secret_seed(trainer, DifferentialPrivacy(1.0, 1.0, 0.5), population)


def test_empty_cohort() -> None:
    assert DrawnCohort() == DrawnCohort((), (), ())
