"""Compression: the messages that the server gets, the residuals that clients keep, and the counted bytes."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_fed import FederatedError
from lightning_fed.algorithms import Algorithm, FedAvg, FedDyn, FedNova, Mime, Scaffold, SGDm
from lightning_fed.server import (
    QSGD,
    BernoulliSampler,
    Compressor,
    CoordinateMedian,
    DifferentialPrivacy,
    TopK,
)
from lightning_fed.server.aggregation.compression import compress
from tests.helpers.engines import Ordinary, Record, assert_agree, assert_close, full_batches, results_of, run, state_of
from tests.helpers.optional import needs_opacus
from tests.helpers.selection import covering
from tests.helpers.training import data, parameters, same, seeded, trainer

P = 155  # parameters of Ordinary


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(count: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, generator=stream(seed), dtype=dtype)


# ------------------------------------------------------------------ the largest entries


def test_largest_entries_are_sent_unchanged() -> None:
    sent, size = TopK(0.4)(torch.tensor([1.0, -5.0, 0.1, 3.0, 2.0]), stream())
    assert sent.tolist() == [0.0, -5.0, 0.0, 3.0, 0.0]
    assert size == 2 * (4 + 4)


@pytest.mark.parametrize(("share", "count", "k"), [(1e-9, 10, 1), (0.01, 1000, 10), (1.0, 7, 7), (0.26, 10, 3)])
def test_top_k_sends_the_expected_count_and_bytes(share: float, count: int, k: int) -> None:
    sent, size = TopK(share)(normal(count), stream())
    assert int((sent != 0).sum()) == k
    assert size == k * (8 + 4)


@given(share=st.floats(0.01, 1.0), seed=st.integers(0, 99), rounds=st.integers(1, 6))
def test_sent_and_residual_add_up_to_the_message(share: float, seed: int, rounds: int) -> None:
    residuals: dict[str, Tensor] = {}
    total, sent = torch.zeros(20, dtype=torch.float64), torch.zeros(20, dtype=torch.float64)
    for i in range(rounds):
        message = normal(20, seed + 100 * i)
        got, residuals, _ = compress(TopK(share), {"delta": message}, residuals, stream())
        total, sent = total + message, sent + got["delta"]
    torch.testing.assert_close(sent + residuals["delta"], total, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------ quantization

thorough = partial(pytest.param, marks=pytest.mark.thorough)


@pytest.mark.thorough
@pytest.mark.parametrize(("levels", "bucket_size"), [(1, 4), (3, 7), thorough(7, 512), thorough(127, 5)])
def test_quantization_is_unbiased_with_the_variance_of_the_paper(levels: int, bucket_size: int) -> None:
    message, many, coins = normal(23), 3000, stream()
    q = QSGD(levels, bucket_size)
    made = torch.stack([q(message, coins)[0] for _ in range(many)])
    norms = torch.cat([part.norm().expand(len(part)) for part in message.split(bucket_size)])
    unit = norms / levels
    where = (message.abs() / unit) % 1
    std = unit * (where * (1 - where)).sqrt()  # one coin flip between two levels
    error = (made.mean(dim=0) - message).abs()
    assert bool((error <= 6 * std / math.sqrt(many) + 1e-12).all())
    torch.testing.assert_close(made.std(dim=0), std, rtol=0.3, atol=0.05 * float(unit.max()))


def test_quantized_entries_are_levels_of_their_bucket_norm() -> None:
    message = normal(10)
    sent, _ = QSGD(levels=5, bucket_size=4)(message, stream())
    for part, own in zip(sent.split(4), message.split(4), strict=True):
        level = part / own.norm() * 5
        torch.testing.assert_close(level, level.round(), atol=1e-9, rtol=0)
        assert bool((level.abs() <= 5).all())
        assert bool(((part == 0) | (part.sign() == own.sign())).all())


def test_single_entries_and_zeros_are_exact() -> None:
    for dtype in (torch.float32, torch.float64):
        message = torch.tensor([0.0, 0.0, -0.3, 0.0, 0.0, 0.0], dtype=dtype)
        for seed in range(200):
            torch.testing.assert_close(QSGD(3, 3)(message, stream(seed))[0], message)


def test_norm_that_overflows_float16_is_rejected() -> None:
    message = torch.tensor([60_000.0, -60_000.0, 100.0])
    assert QSGD(levels=1)(message, stream())[0].isfinite().all()
    with pytest.raises(FederatedError, match=r"a norm of 8.* in a message of float16.*65504"):
        QSGD(levels=1)(message.half(), stream())


@pytest.mark.parametrize(
    ("levels", "bucket_size", "dtype", "size"),
    [
        (1, 512, torch.float32, 250 + 2 * 4),  # 1,000 entries of 2 bits, 2 norms
        (3, 1000, torch.float32, 375 + 4),  # 3 bits
        (7, 100, torch.float64, 500 + 10 * 8),
        (127, 512, torch.float32, 1000 + 2 * 4),
        (128, 512, torch.float32, 1125 + 2 * 4),  # 257 codes take 9 bits
    ],
)
def test_bits_of_entries_and_norms_are_counted(levels: int, bucket_size: int, dtype: Any, size: int) -> None:
    assert QSGD(levels, bucket_size)(normal(1000, dtype=dtype), stream())[1] == size


# ------------------------------------------------------------------ messages


def test_scalars_are_sent_unchanged_and_shared_messages_once() -> None:
    vector, other, number = normal(100), normal(100, 1), torch.tensor(3.0, dtype=torch.float64)
    got, kept, size = compress(TopK(0.1), {"a": vector, "b": vector, "c": other, "n": number}, {}, stream())
    assert torch.equal(got["a"], got["b"])
    assert got["n"] is number
    assert sorted(kept) == ["a", "c"]
    assert size == 2 * 10 * 12 + 8


def test_messages_are_not_modified() -> None:
    for compressor in (TopK(0.1), QSGD()):
        message = normal(100)
        compress(compressor, {"delta": message}, {"delta": normal(100, 1)}, stream())
        assert torch.equal(message, normal(100))


# ------------------------------------------------------------------ in a run

METHODS: list[Algorithm] = [FedAvg(), Scaffold(), FedDyn(1.0), FedNova(), Mime(SGDm())]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("compression", "algorithm"),
    [pytest.param(c, a, id=f"{c!r}-{type(a).__name__}") for c in (TopK(0.2), QSGD(7)) for a in METHODS],
)
def test_engines_and_chunks_agree(algorithm: Algorithm, compression: Compressor) -> None:
    options: dict[str, Any] = {"algorithm": algorithm, "compression": compression, "limit_val_batches": 0}
    options |= {"datamodule": full_batches, "max_rounds": 2}
    one = run("sequential", **options)
    assert_agree(one, run("vectorized", chunk_size=3, **options), rtol=1e-9)


@pytest.mark.thorough
def test_sending_everything_matches_no_compression() -> None:
    for algorithm in METHODS[1:]:
        options: dict[str, Any] = {"algorithm": algorithm, "limit_val_batches": 0, "max_rounds": 2}
        plain, whole = (
            state_of(run("sequential", **options)),
            state_of(run("sequential", compression=TopK(1.0), **options)),
        )
        residuals = {name: value for name, value in whole.items() if "residual" in name}
        assert residuals
        assert all(float(value.abs().max()) == 0 for value in residuals.values())
        assert_close(plain, {name: value for name, value in whole.items() if name not in residuals}, rtol=1e-9)


class Grouped(Ordinary):
    """A network whose parameter groups have different rates."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.body.parameters()}, {"params": self.head.parameters(), "lr": 0.05}]
        return torch.optim.SGD(groups, lr=0.1)


class Doubling(Compressor):
    """Doubles every entry, so that tests can recognize compressed messages."""

    def __call__(self, message: Tensor, stream: torch.Generator) -> tuple[Tensor, int]:
        return 2 * message, 1


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_fednova_rates_are_not_compressed_when_groups_differ(engine: str) -> None:
    options: dict[str, Any] = {"algorithm": FedNova(), "max_rounds": 1, "limit_val_batches": 0}
    options |= {"make": Grouped, "datamodule": full_batches}
    record = Record()
    torch.manual_seed(3)
    start = parameters(Grouped().double())
    plain = run(engine, **options).fit_loop.state.x
    doubled = run(engine, compression=Doubling(), callbacks=record, **options).fit_loop.state.x
    torch.testing.assert_close(doubled - start, 2 * (plain - start), rtol=1e-9, atol=1e-12)
    assert record.rounds[0].bytes_up == 4 * (1 + P * 8)  # the rates are a float64 vector


class Deltas(FedAvg):
    """FedAvg that records the updates before compression."""

    sent: list[Tensor] = []

    def finish(self, y: Tensor, run: Any) -> Any:
        self.sent.append(run.delta.clone())
        return super().finish(y, run)


def test_sent_and_residual_add_up_over_a_run() -> None:
    Deltas.sent.clear()
    torch.manual_seed(3)
    model = Ordinary().double()
    before = parameters(model).clone()
    options: dict[str, Any] = {"clients_per_round": 1.0, "precision": "64-true", "max_rounds": 4}
    t = trainer(algorithm=Deltas(), compression=TopK(0.1), weighting="uniform", **options)
    t.fit(model, data())
    # below, [1:] skips the update of the rehearsal
    left = sum(own["residual.delta"] for own in t.fit_loop.state.clients.state_dict().values())
    moved = parameters(model) - before  # the sum of all sent messages, divided by 6 clients
    torch.testing.assert_close(6 * moved + left, torch.stack(Deltas.sent[1:]).sum(dim=0), rtol=1e-9, atol=1e-12)


def test_messages_that_start_at_one_place_are_compressed_each() -> None:
    numbers = torch.arange(8.0)
    got, _, _ = compress(TopK(1.0), {"half": numbers[:4], "even": numbers[::2]}, {}, torch.Generator())
    assert got["half"].tolist() == [0, 1, 2, 3]
    assert got["even"].tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("algorithm", "compression", "per_client"),
    [
        (FedAvg(), TopK(0.1), 16 * 12),
        (Scaffold(), TopK(0.1), 2 * 16 * 12),
        (FedDyn(1.0), TopK(0.1), 16 * 12),  # one message under two names
        (FedNova(), QSGD(7, 512), 78 + 8 + 8),  # 155 * 4 bits, a norm, a scalar
        (Mime(SGDm()), QSGD(7, 100), 78 + 2 * 8 + P * 8),  # the gradient at x is sent as it is
    ],
    ids=repr,
)
def test_bytes_up_match_the_bytes_sent(algorithm: Algorithm, compression: Compressor, per_client: int) -> None:
    record = Record()
    t = run("sequential", algorithm=algorithm, compression=compression, callbacks=record, limit_val_batches=0)
    assert t.fit_loop.state.x.numel() == P
    assert [r.bytes_up for r in record.rounds] == [4 * per_client] * 3
    assert results_of(t)["metrics"]["comm/bytes_up"] == 4 * per_client


@pytest.mark.thorough
@pytest.mark.parametrize(("compression", "client_states"), covering([TopK(0.1), QSGD(3)], ["disk", "memory"]), ids=repr)
def test_resumed_run_has_identical_bits(compression: Compressor, client_states: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"algorithm": Scaffold(), "compression": compression, "client_states": client_states}
    options["enable_checkpointing"] = True
    saver = ModelCheckpoint(tmp_path / "part", save_last=True)
    run("sequential", max_rounds=2, callbacks=saver, **options)
    resumed = run(
        "sequential",
        max_rounds=4,
        ckpt_path=saver.last_model_path,
        callbacks=ModelCheckpoint(tmp_path / "part"),
        **options,
    )
    whole = run("sequential", max_rounds=4, callbacks=ModelCheckpoint(tmp_path / "whole"), **options)
    assert same(state_of(whole)["x"], state_of(resumed)["x"])
    assert same(state_of(whole)["server.c"], state_of(resumed)["server.c"])


def test_resume_with_another_compression_is_rejected(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, save_last=True)
    run("sequential", compression=TopK(0.1), callbacks=saver, enable_checkpointing=True, max_rounds=1)
    with pytest.raises(FederatedError, match=r"checkpoint's compression is TopK\(share=0.1\), this run's is None"):
        run("sequential", max_rounds=2, ckpt_path=saver.last_model_path)


@pytest.mark.thorough
def test_error_feedback_learns_from_a_twentieth_of_the_entries() -> None:
    losses = {}
    for name, compression in (("plain", None), ("top", TopK(0.05)), ("coarse", QSGD(1, 16))):
        t = trainer(compression=compression, max_rounds=25, clients_per_round=1.0, limit_val_batches=1.0)
        t.fit(seeded(Ordinary), data())
        losses[name] = float(t.callback_metrics["val_loss"])
    start = trainer(max_rounds=1, limit_val_batches=1.0, server_optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    start.fit(seeded(Ordinary), data())
    first = float(start.callback_metrics["val_loss"])
    for name in ("top", "coarse"):
        assert first - losses[name] > 0.6 * (first - losses["plain"]), losses


def test_compression_supports_robust_aggregation() -> None:
    run("sequential", compression=TopK(0.5), aggregator=CoordinateMedian(), max_rounds=2)


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopK(0.0), r"share must be a finite number in \(0, 1\]"),
        (lambda: TopK(1.5), r"share must be a finite number in \(0, 1\]"),
        (lambda: TopK("a"), "share must be"),
        (lambda: QSGD(levels=0), "levels must be an integer of at least 1"),
        (lambda: QSGD(bucket_size=0), "bucket_size must be an integer of at least 1"),
        (lambda: trainer(compression="topk"), "compression must be a Compressor such as TopK.*found 'topk'"),
        (lambda: trainer(compression=TopK), "compression must be a Compressor"),
        pytest.param(
            lambda: trainer(
                compression=QSGD(),
                aggregator=DifferentialPrivacy(1.0, 1.0, 1e-5),
                sampler=BernoulliSampler(0.5),
                clients_per_round=None,
            ),
            "compression=QSGD.*cannot be combined with aggregator=DifferentialPrivacy",
            marks=needs_opacus,
        ),
    ],
)
def test_invalid_settings_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        make()


def test_compressor_repr_matches_its_constructor_call() -> None:
    assert [repr(c) for c in (TopK(0.01), QSGD())] == ["TopK(share=0.01)", "QSGD(levels=127, bucket_size=512)"]
