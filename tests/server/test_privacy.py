"""Differential privacy: clipping, the noise and its account, released values, and settings that would void it."""

import importlib
import math
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn

from lightning_fed import FederatedCallback, FederatedError
from lightning_fed.algorithms import FedAvg, FedCM, FedDane, FedDyn, FedNova, FedProx, Mime, Scaffold, ServerOnly, SGDm
from lightning_fed.callbacks import ClientAccuracy, LocalDrift, RunSummary, SimulatedTime, SplitPicture, TargetMetric
from lightning_fed.core.seeds import Purpose, derive_seed
from lightning_fed.server import (
    BernoulliSampler,
    DifferentialPrivacy,
    FedAdam,
    SystemsHeterogeneity,
    UniformSampler,
)
from lightning_fed.server.aggregation.mean import Aggregation
from lightning_fed.server.participation import Participant
from lightning_fed.server.privacy import gaussian_noise
from tests.helpers.aggregation import add_one
from tests.helpers.engines import Ordinary, assert_close, state_of
from tests.helpers.training import data, parameters, seeded, trainer

SIZES = (13, 8, 21, 5, 16, 9)


@pytest.fixture(autouse=True, scope="module")
def _sums_are_computed_once() -> Iterator[None]:
    """Cache Opacus's sums, which have thousands of terms for each order. This saves 0.1 s per trainer."""
    rdp = pytest.importorskip("opacus.accountants.analysis.rdp", reason="no Opacus, which accounts for privacy")
    once = cache(rdp.compute_rdp)

    def computed(*, orders: Sequence[float], **given: Any) -> Any:
        return once(orders=tuple(orders), **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rdp, "compute_rdp", computed)
        yield


def bound(probability: float = 0.5, max_norm: float = 2.0, z: float = 1e-12, delta: float = 1e-5) -> Any:
    """Return an aggregator that is bound to a run, with negligible noise by default."""
    return DifferentialPrivacy(max_norm, z, delta).for_run(FedAvg(), None, BernoulliSampler(probability))


def of_round(aggregator: Any, clients: int, population: int = 10) -> Aggregation:
    cohort = [Participant(f"c{i}", i, 100 * (i + 1), 1, 1) for i in range(clients)]
    return aggregator.of_round({"delta": "weighting"}, "uniform", cohort, population)


def private(**kwargs: Any) -> Any:
    options = {"aggregator": DifferentialPrivacy(1.0, 1.0, 1e-5), "clients_per_round": None, **kwargs}
    options.setdefault("sampler", BernoulliSampler(0.5))
    return trainer(**options)


# ------------------------------------------------------------------ the sum


def test_mean_divides_clipped_sums_by_the_expected_clients() -> None:
    aggregation = of_round(bound(probability=0.5, max_norm=2.0), clients=3)
    x = torch.zeros(2, dtype=torch.float64)
    for i, message in enumerate(([6.0, 8.0], [0.0, 1.0], [-30.0, 40.0])):  # the norms are 10, 1, 50
        add_one(aggregation, i, 1, {"delta": torch.tensor(message, dtype=torch.float64)})
    want = torch.tensor([1.2 + 0.0 - 1.2, 1.6 + 1.0 + 1.6], dtype=torch.float64) / (0.5 * 10)
    means, models = aggregation.compute(x)
    torch.testing.assert_close(means["delta"], want, rtol=1e-10, atol=1e-10)
    assert models is None


def test_client_contribution_is_bounded() -> None:
    x, stream = torch.zeros(50, dtype=torch.float64), torch.Generator().manual_seed(0)
    for length in (1e-3, 1.0, 1e6):
        message = length * torch.randn(50, generator=stream, dtype=torch.float64)
        found = []
        for count in (1, 2):
            aggregation = of_round(bound(probability=0.1, max_norm=0.5), clients=2)
            for i in range(count):
                add_one(aggregation, i, 1, {"delta": x + 1 if i == 0 else message})
            found.append(aggregation.compute(x)[0]["delta"] * (0.1 * 10))
        assert float((found[1] - found[0]).norm()) <= 0.5 * (1 + 1e-9)


@pytest.mark.parametrize("clients", [0, 1, 4])
def test_noise_scale_is_independent_of_the_number_of_clients(clients: int) -> None:
    x = torch.zeros(200_000, dtype=torch.float64)
    aggregation = of_round(bound(probability=0.25, max_norm=3.0, z=1.0), clients)
    for i in range(clients):
        add_one(aggregation, i, 1, {"delta": x})
    noise = aggregation.compute(x)[0]["delta"] * (0.25 * 10)
    assert float(noise.std()) == pytest.approx(1.0 * 3.0, rel=0.01)  # six standard errors
    assert abs(float(noise.mean())) < 6 * 3.0 / math.sqrt(len(x))


def test_noise_is_gaussian_and_independent() -> None:
    noise = gaussian_noise(400_001, 1.0)
    assert noise.shape == (400_001,)
    assert noise.dtype == torch.float64
    for power, want in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        spread = math.sqrt({1: 1, 2: 2, 3: 15, 4: 96}[power] / len(noise))
        assert float((noise**power).mean()) == pytest.approx(want, abs=6 * spread)
    for lag in (1, 200_000, 200_001):  # the two numbers of a pair, and neighbors
        assert abs(float((noise[lag:] * noise[:-lag]).mean())) < 6 / math.sqrt(len(noise) - lag)
    within = [float((noise.abs() < bound).double().mean()) for bound in (0.5, 1.0, 2.0, 3.0)]
    want = [math.erf(bound / math.sqrt(2)) for bound in (0.5, 1.0, 2.0, 3.0)]
    assert within == pytest.approx(want, abs=5e-3)


def test_noise_does_not_depend_on_any_seed() -> None:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        made.append(gaussian_noise(10, 1.0))
        assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(*made)
    assert gaussian_noise(0, 1.0).shape == (0,)


def test_noise_is_added_once_if_the_mean_is_computed_twice() -> None:
    aggregation, x = of_round(bound(z=1.0), 0), torch.zeros(5)
    assert torch.equal(aggregation.compute(x)[0]["delta"], aggregation.compute(x)[0]["delta"])


# ------------------------------------------------------------------ the account


def exact_epsilon(sigma: float, delta: float) -> float:
    """Return the epsilon of one Gaussian mechanism of sensitivity 1 (Balle and Wang, 2018, Theorem 8), by bisection."""

    def spent(epsilon: float) -> float:
        phi = torch.distributions.Normal(0.0, 1.0).cdf
        a, b = torch.tensor(0.5 / sigma, dtype=torch.float64), torch.tensor(epsilon * sigma, dtype=torch.float64)
        return float(phi(a - b) - math.exp(epsilon) * phi(-a - b))

    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) > delta else (low, middle)
    return high


@pytest.mark.parametrize(("z", "rounds"), [(1.0, 1), (4.0, 10), (10.0, 200)])
def test_epsilon_with_full_participation_is_near_the_exact_value(z: float, rounds: int) -> None:
    exact = exact_epsilon(z / math.sqrt(rounds), 1e-5)
    assert exact <= bound(probability=1.0, z=z).epsilon(rounds) <= 1.15 * exact


@pytest.mark.parametrize(("q", "z", "rounds"), [(0.01, 1.1, 1000), (0.1, 2.0, 50), (1.0, 3.0, 7)])
def test_epsilon_matches_opacus(q: float, z: float, rounds: int) -> None:
    accountant = importlib.import_module("opacus.accountants").RDPAccountant()
    for _ in range(rounds):
        accountant.step(noise_multiplier=z, sample_rate=q)
    assert bound(probability=q, z=z).epsilon(rounds) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)


def test_epsilon_matches_a_published_example() -> None:
    # 60,000 examples, batches of 256, z = 1.1, 60 epochs, delta = 1e-5: epsilon = 2.6 (TensorFlow Privacy's tutorial
    # gives 3.0 by the older, looser conversion)
    assert bound(probability=256 / 60_000, z=1.1).epsilon(60 * 60_000 // 256) == pytest.approx(2.6, abs=0.1)


def test_epsilon_starts_at_zero_and_grows() -> None:
    spent = [bound(z=1.0).epsilon(rounds) for rounds in (0, 1, 2, 10, 1_000)]
    assert spent[0] == 0.0
    assert spent == sorted(spent)
    assert bound(z=1e-3).epsilon(1) > 1e3


# ------------------------------------------------------------------ in a run


@pytest.mark.parametrize("engine", ["sequential", pytest.param("vectorized", marks=pytest.mark.thorough)])
def test_negligible_noise_matches_the_uniform_mean(engine: str) -> None:
    wide = DifferentialPrivacy(1e6, 1e-15, 1e-5)
    options: dict[str, Any] = {"precision": "64-true", "limit_val_batches": 0, "max_rounds": 2, "engine": engine}
    torch.manual_seed(3)
    one = private(aggregator=wide, sampler=BernoulliSampler(1.0), **options)
    one.fit(Ordinary(), data(SIZES))
    torch.manual_seed(3)
    other = trainer(clients_per_round=1.0, weighting="uniform", **options)
    other.fit(Ordinary(), data(SIZES))
    assert_close({"x": state_of(one)["x"]}, {"x": state_of(other)["x"]}, rtol=1e-6)


def test_huge_update_is_clipped_without_stopping_the_run() -> None:
    norms: list[float] = []

    class Norms(FederatedCallback):
        def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
            norms.append(client_report.update_norm)

    class Steep(Ordinary):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * (1e9 if len(norms) == 3 else 1.0)

    everybody = {"sampler": BernoulliSampler(1.0), "local_epochs": None, "local_steps": 1, "max_rounds": 1}
    private(callbacks=Norms(), engine="sequential", **everybody).fit(Steep(), data(SIZES))
    assert max(norms) > 1e6 * sorted(norms)[3]


def test_empty_round_still_adds_noise() -> None:
    model = seeded()
    before = torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
    t = private(aggregator=DifferentialPrivacy(1e-6, 1.0, 1e-5), sampler=BernoulliSampler(1e-6), max_rounds=1)
    t.fit(model, data(SIZES))
    moved = torch.cat([p.detach().flatten() for p in model.parameters()]) - before
    assert float(moved.std()) == pytest.approx(1 / 6, rel=0.3)  # 1e-6 divided by the expected 6e-6 clients
    assert t.fit_loop.round == 1


def test_only_privacy_safe_metrics_are_logged(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = ModelCheckpoint(tmp_path, monitor="privacy/epsilon", save_top_k=-1)
    t = private(callbacks=[RunSummary(), saved], enable_checkpointing=True, server_optimizer=None, max_rounds=3)
    t.fit(seeded(), data(SIZES))
    assert set(t.callback_metrics) == {"server/update_norm", "privacy/epsilon", "val_loss", "val_acc"}
    spent = bound(z=1.0).epsilon(3)
    assert float(t.callback_metrics["privacy/epsilon"]) == pytest.approx(spent, rel=1e-6)
    assert t.fit_loop.epsilon == pytest.approx(spent)
    shown = capsys.readouterr().out
    assert ["privacy", f"epsilon {spent:.4g} at delta 1e-05"] in [line.split(maxsplit=1) for line in shown.splitlines()]
    assert "bytes" not in shown
    assert "clients seen" not in shown


@pytest.mark.parametrize("engine", ["sequential", pytest.param("vectorized", marks=pytest.mark.thorough)])
def test_later_rounds_log_no_training_metrics(engine: str) -> None:
    t = private(engine=engine, max_rounds=3, sampler=BernoulliSampler(1.0))
    t.fit(seeded(dropout=0.0), data(SIZES))
    assert not [name for name in t.logged_metrics if "train" in name or "client" in name]


def test_cohorts_and_noise_do_not_depend_on_the_seed() -> None:
    ends = []
    for _ in range(2):
        model = seeded(dropout=0.0)
        private(sampler=BernoulliSampler(0.5), max_rounds=1, seed=0).fit(model, data((5,) * 40))
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert not torch.equal(*ends)


def test_cohorts_are_drawn_from_system_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = []

    def record(self: Any, secret: int, round: int, population: Any) -> list[Any]:
        secrets.append(secret)
        return list(population)

    monkeypatch.setattr(DifferentialPrivacy, "cohort", record)
    for _ in range(2):
        private(max_rounds=1, seed=7).fit(seeded(), data(SIZES))
    assert len(set(secrets)) == len(secrets) == 2
    assert min(secrets) >= 2**80  # almost certain for 128 bits


def test_cohorts_use_the_whole_secret_and_the_given_probability() -> None:
    one, other, everybody = 137268, 196107, range(1000)  # both secrets give a 32-bit generator the same seed
    assert len({derive_seed(secret, Purpose.COHORT, 0) % 2**32 for secret in (one, other)}) == 1
    aggregator = bound(probability=0.3)
    cohorts = [aggregator.cohort(secret, r, everybody) for secret in (one, other) for r in range(50)]
    assert cohorts[0] not in (cohorts[50], aggregator.cohort(one + 2**100, 0, everybody))
    assert cohorts[:3] == [aggregator.cohort(one, r, everybody) for r in range(3)]
    drawn = torch.zeros(100, 1000, dtype=torch.float64)
    for row, cohort in enumerate(cohorts):
        drawn[row, cohort] = 1.0
    assert float(drawn.mean()) == pytest.approx(0.3, abs=6 * math.sqrt(0.21 / 100_000))
    apart = (drawn - 0.3) / math.sqrt(0.21)
    for pairs in (apart[1:] * apart[:-1], apart[:, 1:] * apart[:, :-1]):  # rounds, and clients
        assert abs(float(pairs.mean())) < 6 / math.sqrt(pairs.numel())


def test_gradient_messages_are_clipped() -> None:
    moved = []
    for most in (1e-3, 1e-2):
        x0, model = parameters(seeded()), seeded()
        options: dict[str, Any] = {"algorithm": ServerOnly(), "local_epochs": None, "sampler": BernoulliSampler(1.0)}
        private(aggregator=DifferentialPrivacy(most, 1e-9, 1e-5), max_rounds=1, **options).fit(model, data(SIZES))
        moved.append(float((parameters(model) - x0).norm()))
    assert 0 < moved[0] <= 1e-3 * (1 + 1e-3)
    assert moved[1] == pytest.approx(10 * moved[0], rel=1e-2)


def test_server_optimizers_are_supported() -> None:
    private(server_optimizer=lambda params: FedAdam(params, lr=0.01), max_rounds=2).fit(seeded(), data(SIZES))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint of a private run after two rounds."""
    path = tmp_path_factory.mktemp("private") / "run.ckpt"
    t = private(max_rounds=2)
    t.fit(seeded(), data(SIZES))
    t.save_checkpoint(path)
    return path


def test_privacy_accounting_continues_after_a_resume(checkpoint: Path) -> None:
    t = private(max_rounds=3)
    t.fit(seeded(), data(SIZES), ckpt_path=checkpoint)
    assert t.fit_loop.epsilon == pytest.approx(bound(z=1.0).epsilon(3))


def test_resume_with_other_privacy_settings_is_rejected(checkpoint: Path) -> None:
    for options, message in (
        ({"aggregator": DifferentialPrivacy(1.0, 2.0, 1e-5)}, "aggregator is DifferentialPrivacy.*this run's is"),
        ({"sampler": BernoulliSampler(0.25)}, "privacy spent so far is accounted for with its probability"),
        ({"aggregator": None}, "this run's is None"),
    ):
        with pytest.raises(FederatedError, match=message):
            private(max_rounds=5, **options).fit(seeded(), data(SIZES), ckpt_path=checkpoint)


def test_resume_of_a_non_private_run_is_rejected(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, save_last=True)
    trainer(callbacks=saver, enable_checkpointing=True, max_rounds=1).fit(seeded(), data(SIZES))
    with pytest.raises(FederatedError, match="The checkpoint's aggregator is None"):
        private(max_rounds=2).fit(seeded(), data(SIZES), ckpt_path=saver.last_model_path)


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weighting": "examples"}, "weighting='examples' cannot be combined with aggregator=DifferentialPrivacy"),
        ({"weighting": "steps"}, "weighting='steps'"),
        ({"weighting": lambda i, n, k: 1.0}, "weighting=<function"),
        ({"sampler": UniformSampler(3)}, r"found UniformSampler\(3\). Pass sampler=BernoulliSampler"),
        ({"sampler": None, "clients_per_round": 3}, "Pass sampler=BernoulliSampler.*leave clients_per_round unset"),
        ({"sampler": BernoulliSampler(dict.fromkeys(range(6), 0.5))}, "with one probability"),
        ({"algorithm": Scaffold()}, r"Scaffold, whose clients send \['delta', 'delta_c'\]"),
        ({"algorithm": FedDyn(1.0)}, "FedDyn, whose clients send"),
        ({"algorithm": FedCM(0.5)}, "FedCM, whose clients send"),
        ({"algorithm": FedNova()}, "FedNova, whose clients send"),
        ({"algorithm": Mime(SGDm())}, "Mime, whose clients send full-batch gradients"),
        ({"algorithm": FedDane(0.1)}, "FedDane, whose clients send full-batch gradients"),
        ({"algorithm": FedProx(0.1, adaptive=True)}, "FedProx.*losses"),
        ({"heterogeneity": SystemsHeterogeneity(dropout=0.5)}, "heterogeneity=.*cannot be combined with"),
        ({"on_client_error": "drop"}, "on_client_error='drop' cannot be combined with"),
    ],
)
def test_settings_that_void_the_guarantee_are_rejected(options: Any, message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        private(**options)


def test_example_and_population_weighted_messages_are_rejected() -> None:
    class ByExamples(FedAvg):
        reduces = {"delta": "examples"}

    class OverAll(FedAvg):
        reduces = {"delta": "population"}

    for algorithm in (ByExamples(), OverAll()):
        with pytest.raises(FederatedError, match=f"aggregator=.*cannot be combined with {type(algorithm).__name__}"):
            private(algorithm=algorithm)


class Normalized(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(self.body, nn.BatchNorm1d(8))


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_averaged_and_local_buffers_are_rejected(buffers: str) -> None:
    with pytest.raises(FederatedError, match="buffers='server'"):
        private(buffers=buffers).fit(Normalized(), data(SIZES))


@pytest.mark.parametrize(
    "callback",
    [ClientAccuracy(on="train"), LocalDrift(), SimulatedTime(), SplitPicture(), TargetMetric("val_acc", 1)],
    ids=type,
)
def test_callbacks_that_measure_clients_are_rejected(callback: Any) -> None:
    with pytest.raises(FederatedError, match=f"The callback {type(callback).__name__} cannot be combined with"):
        private(callbacks=callback).fit(seeded(), data(SIZES))


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ({"max_steps": 100}, "shows how many they were"),
        ({"min_steps": 100}, "shows how many they were"),
        ({"max_update_ratio": 100}, "would show the client"),
    ],
    ids=str,
)
def test_stopping_conditions_that_reveal_clients_are_rejected(option: Any, why: str) -> None:
    (name,) = option
    with pytest.raises(FederatedError, match=f"{name}=100 cannot be combined with aggregator=.*{why}"):
        private(**option).fit(seeded(), data(SIZES))


def test_ddp_on_several_devices_is_rejected() -> None:
    with pytest.raises(FederatedError, match="cannot be combined with strategy='ddp' on 2 devices"):
        private(devices=2, strategy="ddp").fit(seeded(), data(SIZES))


def test_large_delta_warns() -> None:
    with pytest.warns(UserWarning, match=r"delta=0.5 is not below 1/N = 0.167"):
        private(aggregator=DifferentialPrivacy(1.0, 1.0, 0.5), max_rounds=1).fit(seeded(), data(SIZES))


def test_subclass_of_the_bernoulli_sampler_is_rejected() -> None:
    class Favorites(BernoulliSampler):
        def __call__(self, seed: int, round: int, population: Any) -> Any:
            return list(population)

    with pytest.raises(FederatedError, match="needs clients that take part independently with one probability"):
        private(sampler=Favorites(0.5))


def test_privacy_settings_are_immutable() -> None:
    run = private().fit_loop.settings.aggregator
    for name in ("noise_multiplier", "max_norm", "delta"):
        with pytest.raises(FederatedError, match=f"DifferentialPrivacy.*{name} cannot change.*accounted for with one"):
            setattr(run, name, 0.1)


def test_epsilon_is_zero_and_not_negative_with_large_noise() -> None:
    assert bound(z=1000.0, delta=0.1).epsilon(1) == 0.0


def test_epsilon_of_planned_rounds_is_available_before_fit() -> None:
    assert private().fit_loop.settings.aggregator.epsilon(rounds=3) == pytest.approx(bound(z=1.0).epsilon(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 1.0, 1e-5), "max_norm must be a finite"),
        ((1.0, 0.0, 1e-5), "noise_multiplier must be a finite"),
        ((1.0, math.inf, 1e-5), "noise_multiplier must be a finite"),
        ((1.0, 1.0, 0.0), "delta must be a finite"),
        ((1.0, 1.0, 1.0), r"delta must be a finite number in \(0, 1\)"),
        (("1", 1.0, 0.1), "max_norm must be"),
    ],
)
def test_invalid_arguments_are_rejected(arguments: Any, message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        DifferentialPrivacy(*arguments)


def test_missing_opacus_raises_with_install_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus.accountants.analysis.rdp", None)
    with pytest.raises(FederatedError, match=r'pip install "lightning_fed\[privacy\]"'):
        private()


def test_non_finite_message_is_rejected_naming_the_client() -> None:
    with pytest.raises(FederatedError, match="Client 'c0' sent a message 'delta' that is not finite"):
        add_one(of_round(bound(), 1), 0, 1, {"delta": torch.tensor([math.nan])})
