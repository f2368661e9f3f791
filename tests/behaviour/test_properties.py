"""Properties of all cohorts, sizes, local steps, weights and schedules, drawn at random, through the real trainer."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from lightning_fed import FederatedDataModule
from lightning_fed.algorithms import Algorithm, FedAvg, FedDyn, FedNova, FedProx, Scaffold
from lightning_fed.server import FedAdam, FedAvgM
from tests.behaviour.test_contract import METHODS, Method, classifier, trainer
from tests.helpers import least_squares
from tests.helpers.least_squares import LeastSquares
from tests.helpers.training import Trajectory, data, parameters, same

LR, MOST_STEPS = 0.1, 3


def few(examples: int) -> Callable[[Any], Any]:
    """Draw a third of ``examples`` in the default run, and several times ``examples`` in the thorough one."""
    # all examples of a test may share its working directory
    unchecked = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=max(1, examples * settings().max_examples // 75), suppress_health_check=unchecked)


@dataclass(frozen=True)
class Plan:
    """The random choices of a run.

    Attributes:
        sizes: Every client's examples.
        cohorts: The ids of every round, in the order in which they are trained.
        steps: The local steps by round and client; None marks a lost client.
        rates: The factor of the local rate by round, with one more entry than rounds.
        batch_size: The local batch size.
    """

    sizes: tuple[int, ...]
    cohorts: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[int | None, ...], ...]
    rates: tuple[float, ...]
    batch_size: int

    def settings(self, algorithm: Algorithm) -> dict[str, Any]:
        """Return the plan as arguments of a method's trainer."""

        def heterogeneity(seed: int, round: int, clients: Any, epochs: Any, steps: Any) -> list[int | None]:
            return [self.steps[round][i] for i in clients]

        given: dict[str, Any] = {
            "sampler": lambda seed, round: list(self.cohorts[round]),
            "local_steps": MOST_STEPS,
            "max_rounds": len(self.cohorts),
        }
        if algorithm.local_work:
            given["heterogeneity"] = heterogeneity
        if algorithm.grad_cohort == "own":
            given["gradient_sampler"] = lambda seed, round: list(self.cohorts[round][::-1])
        return given


@st.composite
def plans(draw: st.DrawFn, losses: bool = False, repeats: bool = False) -> Plan:
    """Draw a plan. Clients are lost or drawn several times in a round only if ``losses`` or ``repeats`` is set."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=2, max_size=5))
    rounds, clients = draw(st.integers(2, 4)), st.integers(0, len(sizes) - 1)
    cohort = st.lists(clients, min_size=1, max_size=len(sizes), unique=not repeats).map(tuple)
    counts = st.integers(1, MOST_STEPS)
    steps = st.tuples(*[st.none() | counts if losses else counts] * len(sizes))
    rates = st.tuples(*[st.sampled_from([1.0, 0.5, 0.3])] * (rounds + 1))
    return Plan(
        tuple(sizes), draw(st.tuples(*[cohort] * rounds)), draw(st.tuples(*[steps] * rounds)), draw(rates),
        draw(st.integers(1, 4)),
    )  # fmt: skip


def run(plan: Plan, method: Method, ckpt_path: Path | None = None, **kwargs: Any) -> tuple[Any, Trajectory]:
    """Run least squares in float64, and return the trainer and its trajectory."""
    seen = Trajectory()
    arguments = {**plan.settings(method.algorithm), "callbacks": seen, "precision": "64-true", **kwargs}
    made = trainer(method, **arguments)
    model = LeastSquares(partial(method.optimizer, lr=LR), lambda r: plan.rates[r])
    made.fit(model, least_squares.data(plan.sizes, batch_size=plan.batch_size), ckpt_path=ckpt_path)
    return made, seen


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


_WITH_LAYERS = ("FedPer", "FedRep", "LGFedAvg")  # least squares lacks the layers that these name
methods = st.sampled_from(sorted(set(METHODS) - set(_WITH_LAYERS))).map(METHODS.__getitem__)
with_client_state = st.sampled_from([Scaffold("i"), Scaffold("ii"), FedDyn(0.5), FedDyn(0.5, "inverse_size")])


# ---------------------------------------------------------------------- independent clients


@pytest.mark.thorough
@few(20)
@given(plan=plans(losses=True), algorithm=with_client_state)
def test_kept_state_changes_only_when_its_client_takes_part(plan: Plan, algorithm: Algorithm) -> None:
    _, seen = run(plan, Method(algorithm))
    before: dict[int, Any] = {}
    for r, after in enumerate(seen.states):
        took_part = {i for i in plan.cohorts[r] if plan.steps[r][i]}
        assert set(seen.cohorts[r]) == took_part
        assert after.keys() == before.keys() | took_part
        for i in after:
            assert same(after[i], before.get(i)) == (i not in took_part)
        before = after


@few(10)
@given(plan=plans())
def test_kept_local_optimizer_steps_only_with_its_client(plan: Plan) -> None:
    adam = Method(FedAvg(), optimizer=torch.optim.Adam)
    _, seen = run(plan, adam, local_optimizer_state="keep")
    counts = dict.fromkeys(range(len(plan.sizes)), 0)
    for r, states in enumerate(seen.states):
        for i in plan.cohorts[r]:
            counts[i] += plan.steps[r][i] or 0
        assert {i: int(state["solver.0.step"]) for i, state in states.items()} == {i: n for i, n in counts.items() if n}


@few(12)
@given(
    plan=plans(),
    algorithm=st.sampled_from([FedAvg(), FedProx(0.5), FedNova(), FedDyn(0.5)]),
    client=st.integers(0, 1),
)
def test_client_training_is_independent_of_other_clients(plan: Plan, algorithm: Algorithm, client: int) -> None:
    def ends(cohorts: Any) -> list[Tensor]:
        # the server's model stays constant, so only a leak could make a client depend on the others
        still, seen = partial(torch.optim.SGD, lr=0.0), Trajectory()
        method, arguments = Method(algorithm), replace(plan, cohorts=tuple(cohorts)).settings(algorithm)
        made = trainer(method, **arguments, server_optimizer=still, callbacks=seen)
        made.fit(classifier(method), data(plan.sizes, batch_size=plan.batch_size))
        return [models[client] for models in seen.ends]

    joint = [(*(i for i in cohort if i != client), client) for cohort in plan.cohorts]
    assert same(ends(joint), ends([(client,)] * len(joint)))


class Watched(LeastSquares):
    """Records the order of the rows and a random number of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.orders: list[tuple[float, ...]] = []
        self.numbers: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.orders.append(tuple(batch[0][:, 0].tolist()))
        self.numbers.append(float(torch.rand(())))
        return super().training_step(batch, batch_idx)


def test_every_client_and_round_has_its_own_random_streams() -> None:
    (twin,) = least_squares.clients((20,))
    model, datamodule = Watched(), FederatedDataModule(clients=[twin, twin, twin], batch_size=20)
    trainer(Method(FedAvg()), local_epochs=2, max_rounds=3, precision="64-true").fit(model, datamodule)
    assert len(set(model.orders)) == len(set(model.numbers)) == 3 * 3 * 2
    assert len({tuple(sorted(order)) for order in model.orders}) == 1


@few(24)
@given(plan=plans(), method=methods, data=st.data())
def test_result_is_independent_of_cohort_order(plan: Plan, method: Method, data: st.DataObject) -> None:
    shuffled = tuple(tuple(data.draw(st.permutations(cohort))) for cohort in plan.cohorts)
    one, other = (run(p, method)[1] for p in (plan, replace(plan, cohorts=shuffled)))
    close(torch.stack(one.models), torch.stack(other.models))
    for states, others in zip(one.states, other.states, strict=True):
        assert states.keys() == others.keys()
        for i, state in states.items():
            for name, value in state.items():
                close(value, others[i][name])


# ---------------------------------------------------------------------- averages


@pytest.mark.parametrize("weighting", ["examples", "uniform", "steps", "own"])
@few(8)
@given(plan=plans(repeats=True), weights=st.lists(st.floats(0.1, 10), min_size=5, max_size=5))
def test_server_model_is_the_weighted_mean_of_its_clients(weighting: str, plan: Plan, weights: list[float]) -> None:
    def weight(client_id: int, size: int, steps: int) -> float:
        return {"examples": size, "uniform": 1, "steps": steps, "own": weights[client_id]}[weighting]

    _, seen = run(plan, Method(FedProx(0.5)), weighting=weight if weighting == "own" else weighting)
    for r, ends in enumerate(seen.ends):
        drawn = plan.cohorts[r]  # a client drawn twice counts twice
        w = torch.tensor([weight(i, plan.sizes[i], plan.steps[r][i]) for i in drawn], dtype=torch.float64)
        close(seen.models[r], (w / w.sum()) @ torch.stack([ends[i] for i in drawn]))


@few(12)
@given(plan=plans())
def test_normalized_changes_are_divided_by_per_client_step_rates(plan: Plan) -> None:
    seen = {name: run(plan, METHODS[name])[1] for name in ("FedAvg normalized", "FedNova")}
    for name, trajectory in seen.items():
        x = torch.zeros(least_squares.WIDTH, dtype=torch.float64)
        for r, ends in enumerate(trajectory.ends):
            sizes = torch.tensor([float(plan.sizes[i]) for i in ends], dtype=torch.float64)
            counts = torch.tensor([float(plan.steps[r][i] or 0) for i in ends], dtype=torch.float64)
            p, rates = sizes / sizes.sum(), LR * plan.rates[r] * counts
            mean_gradient = p @ torch.stack([(x - y) / rate for y, rate in zip(ends.values(), rates, strict=True)])
            x = x - (p @ rates if name == "FedNova" else 1.0) * mean_gradient
            close(trajectory.models[r], x)
            x = trajectory.models[r]


@few(15)
@given(plan=plans(losses=True), algorithm=with_client_state)
def test_server_variate_is_the_mean_over_the_population(plan: Plan, algorithm: Algorithm) -> None:
    made, seen = run(plan, Method(algorithm))
    server, client = ("c", "c_i") if isinstance(algorithm, Scaffold) else ("d", "d_i")
    total = sum((state[client] for state in seen.states[-1].values()), torch.zeros(least_squares.WIDTH).double())
    close(made.fit_loop.server[server], total / len(plan.sizes))


# ---------------------------------------------------------------------- resume


@few(18)
@given(
    plan=plans(losses=True),
    method=methods,
    server=st.sampled_from([None, partial(FedAvgM, lr=0.5), partial(FedAdam, lr=0.05)]),
    data=st.data(),
)
def test_resumed_run_equals_the_uninterrupted_one(plan: Plan, method: Method, server: Any, data: st.DataObject) -> None:
    whole, seen = run(plan, method, server_optimizer=server)
    done = data.draw(st.integers(1, len(plan.cohorts) - 1), label="rounds before the checkpoint")
    half, _ = run(plan, method, server_optimizer=server, max_rounds=done)
    half.save_checkpoint("half.ckpt")
    rest, seen_after = run(plan, method, Path("half.ckpt"), server_optimizer=server)
    assert same(seen_after.models, seen.models[done:])
    assert same(rest.fit_loop.state.state_dict(), whole.fit_loop.state.state_dict())
    assert torch.equal(parameters(rest.lightning_module), parameters(whole.lightning_module))
