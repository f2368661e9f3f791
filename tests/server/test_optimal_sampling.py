"""Optimal Client Sampling: an unbiased estimate of least variance in every engine, and the bytes of the senders."""

import itertools
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_fed import FederatedError, FederatedTrainer
from lightning_fed.algorithms import Ditto, FedExP, Mime, Scaffold
from lightning_fed.core.errors import ClientError
from lightning_fed.core.seeds import Purpose, derive_seed
from lightning_fed.deploy import InProcess, RemoteClients
from lightning_fed.server import QSGD, OptimalClientSampling, TopK, UpdateNormSampler
from tests.helpers.aggregation import X, add_one, cohort
from tests.helpers.engines import SIZES, Ordinary, Record, assert_agree, run, state_of
from tests.helpers.training import QUIET, parameters, same, trainer

ROWS = np.random.default_rng(0).standard_normal((4, 3)) * np.array([[1.0], [0.2], [5.0], [0.7]])
EXAMPLES = [4, 9, 1, 6]


def water_filling(u: np.ndarray, m: float) -> np.ndarray:
    """Return the p that minimizes sum u_i^2 / p_i with p_i <= 1 and sum p_i = m: min(1, s u_i), s by bisection."""
    if m >= len(u):
        return np.ones(len(u))
    low, high = 0.0, m / float(u.min())
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(1, middle * u).sum() < m else (low, middle)
    return np.minimum(1, high * u)


def drawn(round: int, m: int = 2, **options: Any) -> tuple[frozenset[int], np.ndarray, list[float]]:
    """Return the senders of a round, the estimate, and the weights."""
    options = {"weighting": "examples", "members": cohort(EXAMPLES), "rows": ROWS, **options}
    aggregator = OptimalClientSampling(m)
    aggregation = aggregator.of_round(
        {"delta": "weighting"}, options["weighting"], options["members"], 10, seed=0, round=round
    )
    for i, row in enumerate(torch.from_numpy(options["rows"])):
        add_one(aggregation, i, 1, {"delta": row}, X + row)
    found, models = aggregation.compute(X)
    assert models is None
    assert aggregation.senders is not None
    return frozenset(aggregation.senders), found["delta"].numpy(), aggregation.weights(range(4), "weighting")


@pytest.mark.thorough
@pytest.mark.parametrize(("m", "weighting"), [(2, "examples"), (1, "uniform"), (3, "examples")])
def test_estimate_is_unbiased_with_minimal_variance(m: int, weighting: str) -> None:
    w = np.array(EXAMPLES) / sum(EXAMPLES) if weighting == "examples" else np.full(4, 0.25)
    u = w * np.linalg.norm(ROWS, axis=1)
    p, rounds = water_filling(u, m), 400
    found = [drawn(r, m, weighting=weighting) for r in range(rounds)]
    for i in range(4):  # clients send independently, with their probabilities
        times = sum(i in who for who, _, _ in found)
        assert abs(times - p[i] * rounds) <= 5 * math.sqrt(p[i] * (1 - p[i]) * rounds)
        for j in range(i):
            both = sum({i, j} <= who for who, _, _ in found)
            assert abs(both - p[i] * p[j] * rounds) <= 5 * math.sqrt(p[i] * p[j] * rounds)
    outcomes = {who: (estimate, weights) for who, estimate, weights in found}
    mean, variance, missed = np.zeros(3), 0.0, 0.0
    for size in range(5):
        for who in map(frozenset, itertools.combinations(range(4), size)):
            chance = math.prod(p[i] if i in who else 1 - p[i] for i in range(4))
            expected = sum((w[i] / p[i] * ROWS[i] for i in who), np.zeros(3))
            if who in outcomes:
                estimate, weights = outcomes[who]
                np.testing.assert_allclose(estimate, expected, rtol=1e-12, atol=1e-12)
                np.testing.assert_allclose(weights, [w[i] / p[i] if i in who else 0.0 for i in range(4)], rtol=1e-12)
            else:
                missed, estimate = missed + chance, expected
            mean += chance * estimate
            variance += chance * float(np.sum((estimate - w @ ROWS) ** 2))
    assert missed < 0.02
    np.testing.assert_allclose(mean, w @ ROWS, rtol=1e-12, atol=1e-12)
    assert variance == pytest.approx(sum((1 - p) / p * u**2), rel=1e-9)
    assert variance < 0.8 * sum((4 / m - 1) * u**2)  # the variance of m uniform draws


def test_repeated_draws_add_weight_and_senders_are_capped() -> None:
    rows = ROWS * np.array([[1], [1], [0], [1]])  # one client does not move
    who, estimate, weights = drawn(0, m=9, weighting="uniform", members=cohort(EXAMPLES, [1, 3, 1, 1]), rows=rows)
    assert who == {0, 1, 2, 3}
    assert weights == pytest.approx([1 / 6, 3 / 6, 1 / 6, 1 / 6], rel=1e-12)
    np.testing.assert_allclose(estimate, np.array(weights) @ rows, rtol=1e-12)


class Alone:
    """One of two processes. The test adds up their sums."""

    rank, size = 0, 2

    def sum(self, tensors: Any) -> None:
        pass


def test_processes_draw_senders_by_the_steps_of_all_clients() -> None:
    def made(*indices: int) -> Any:
        aggregation = OptimalClientSampling(2).of_round(
            {"delta": "weighting"}, "steps", cohort(EXAMPLES), 10, seed=0, round=3
        )
        for i in indices:
            add_one(aggregation, i, 1 + 2 * i, {"delta": torch.from_numpy(ROWS[i])}, X)
        return aggregation

    whole, parts = made(0, 1, 2, 3), [made(0, 1), made(2, 3)]
    wanted, _ = whole.compute(X)
    partials = [part.partial() for part in parts]
    for part in parts:
        part.merge(partials, Alone(), X)
        assert part.senders == whole.senders
    found = sum(part.compute(X)[0]["delta"] for part in parts)
    torch.testing.assert_close(found, wanted["delta"], rtol=1e-12, atol=1e-14)


def test_non_finite_update_raises_an_error_naming_the_client() -> None:
    aggregation = OptimalClientSampling(2).of_round(
        {"delta": "weighting"}, "uniform", cohort([1, 1]), 2, seed=0, round=0
    )
    with pytest.raises(ClientError, match="'c1' sent a message 'delta' that is not finite"):
        add_one(aggregation, 1, 1, {"delta": X + math.inf})


# ------------------------------------------------------------------ in a run

MOMENTUM = partial(torch.optim.SGD, lr=1.0, momentum=0.5)
FEW_SEND = partial(run, aggregator=OptimalClientSampling(1), server_optimizer=MOMENTUM, max_rounds=5)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[FederatedTrainer, Record, Any]:
    folder = tmp_path_factory.mktemp("whole")
    keep = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    t = FEW_SEND("sequential", callbacks=[record := Record(), keep], enable_checkpointing=True)
    return t, record, sorted(folder.glob("*.ckpt"))[1]


def test_run_matches_the_loop_of_the_paper(whole: Any) -> None:
    _, record, _ = whole
    torch.manual_seed(3)
    x = parameters(Ordinary()).double().numpy()
    momentum = np.zeros_like(x)
    ends, counts = iter(zip(record.reports, record.models, strict=True)), []
    for number, report in enumerate(record.rounds):
        updates = {own.client_id: y.numpy() - x for own, y in (next(ends) for _ in report.cohort)}
        w = {i: SIZES[i] / sum(SIZES[j] for j in report.cohort) for i in report.cohort}
        p = water_filling(np.array([w[i] * np.linalg.norm(updates[i]) for i in report.cohort]), 1)
        step, senders = np.zeros_like(x), 0
        for i, chance in zip(report.cohort, p, strict=True):
            stream = torch.Generator().manual_seed(derive_seed(0, Purpose.SENDERS, number, i))
            is_sender = float(torch.rand((), generator=stream, dtype=torch.float64)) < chance
            assert report.weights[i] == pytest.approx(w[i] / chance if is_sender else 0.0, rel=1e-9)
            step, senders = step + report.weights[i] * updates[i], senders + is_sender
        momentum = 0.5 * momentum + step  # a round without senders takes a step too
        np.testing.assert_allclose(record.x[number].numpy(), x + momentum, rtol=1e-12, atol=1e-12)
        x = record.x[number].numpy()
        assert report.bytes_up == senders * x.nbytes + 4 * 8
        assert report.bytes_down == 4 * x.nbytes + 4 * 8
        counts.append(senders)
    assert 0 in counts
    assert max(counts) > 1


@pytest.mark.thorough
def test_engines_agree_and_resumed_run_has_identical_bits(whole: Any) -> None:
    t, _, half = whole
    assert_agree(t, FEW_SEND("vectorized"))
    assert same(state_of(FEW_SEND("sequential", ckpt_path=half)), state_of(t))


def test_clients_that_send_nothing_keep_their_personal_models() -> None:
    with_all = run("sequential", algorithm=Ditto(0.5), max_rounds=1)
    with_few = run("sequential", algorithm=Ditto(0.5), max_rounds=1, aggregator=OptimalClientSampling(1))
    one, other = (t.fit_loop.state.clients.state_dict() for t in (with_all, with_few))
    assert len(one) == 4
    assert same(one, other)
    assert not same(state_of(with_all), state_of(with_few))


def test_uploaded_bytes_count_compressed_messages_of_senders() -> None:
    record = Record()
    run("sequential", aggregator=OptimalClientSampling(2), compression=QSGD(7), max_rounds=1, callbacks=[record])
    (report,) = record.rounds
    whole_message = math.ceil(4 * record.x[0].numel() / 8) + 8  # 4 bits for each number, and a norm
    senders = sum(weight > 0 for weight in report.weights.values())
    assert 0 < senders < 4
    assert report.bytes_up == senders * whole_message + 4 * 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": Scaffold()}, r"Scaffold.* clients send \['delta', 'delta_c'\].*Use a method such as FedAvg"),
        ({"algorithm": FedExP()}, r"FedExP.*\['delta', 'square'\]"),
        ({"algorithm": Mime()}, r"Mime.*\['delta', 'x'\]"),
        ({"compression": TopK(0.1)}, r"compression=TopK\(.* to take back the residual .*such as QSGD"),
        ({"sampler": UpdateNormSampler(2)}, "aggregator=OptimalClientSampling.*Leave it unset"),
    ],
)
def test_incompatible_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        FederatedTrainer(**{**QUIET, "local_epochs": 1, "aggregator": OptimalClientSampling(2), **options})


def test_remote_clients_are_rejected() -> None:
    remote = RemoteClients(InProcess({}), ["a", "b"])
    with pytest.raises(FederatedError, match=r"cannot be combined with RemoteClients: .* Pass sampler=UpdateNorm"):
        trainer(aggregator=OptimalClientSampling(2)).fit(Ordinary(), remote)
