"""Clients that do not wait for each other: every one takes its own steps in order, and ends where it ends alone."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule, FederatedError
from lightning_fed.algorithms import FedAvg, Mime, Scaffold, SGDm
from lightning_fed.engines.vectorized import schedule
from lightning_fed.engines.vectorized.local_steps import LocalSteps
from lightning_fed.engines.vectorized.schedule import interleaved
from lightning_fed.server import SystemsHeterogeneity
from tests.behaviour.test_contract import METHODS
from tests.helpers.engines import Ordinary, Record, assert_agree, run, state_of
from tests.helpers.selection import covering, few
from tests.helpers.training import classification, same

SIZES = (13, 8, 21, 3, 16, 9, 34)  # in batches of four: none full, a smaller last one, none smaller
LOCAL = [name for name, method in METHODS.items() if method.algorithm.local_work]


def cut(sizes: Sequence[int] = SIZES, spoil: int | None = None, **options: Any) -> FederatedDataModule:
    """Return clients of these sizes that are cut out of the same tensors."""
    x, y = classification(sum(sizes), 5).tensors
    rows = [part.numpy() for part in torch.arange(sum(sizes)).split(list(sizes))]
    if spoil is not None:
        x = x.clone()
        x[rows[spoil][-1]] = math.nan
    options = {"batch_size": 4, "val": classification(20, 7), **options}
    return FederatedDataModule(train=TensorDataset(x, y), partition=lambda _: rows, **options)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many clients took each step, and from which row of the chunk on."""
    found: list[tuple[int, int]] = []

    def noted(sizes: Any, full: int) -> Any:
        for step in interleaved(sizes, full):
            if full > 1:  # it is 1 where all step together
                found.append((len(step.at), step.clients.start))
            yield step

    monkeypatch.setattr(schedule, "interleaved", noted)
    return found


@pytest.mark.parametrize("name", few(LOCAL, ["FedAvg", "FedDyn", "CMime SGDm"]))
def test_every_method_agrees_with_the_sequential_engine(name: str, taken: list[Any]) -> None:
    method = METHODS[name]
    options = {"algorithm": method.algorithm, "local_epochs": 2, "clients_per_round": 5, "datamodule": cut}
    make = partial(Ordinary, method.optimizer)
    at_once = run("vectorized", make, **options)
    assert_agree(run("sequential", make, **options), at_once)
    engine = at_once.fit_loop.clients.engine
    assert bool(taken) == engine.optimizer.plan_of(engine.algorithm).is_bare


WORK: dict[str, dict[str, Any]] = {
    "chunks": {"chunk_size": 3},
    "steps": {"local_epochs": None, "local_steps": 7},
    "stragglers": {"heterogeneity": SystemsHeterogeneity(stragglers=0.7)},
    "float32": {"precision": "32-true", "rtol": 1e-5},
}


@pytest.mark.parametrize(
    ("work", "algorithm"),
    few(
        [
            pytest.param(work, algorithm, id=f"{work}-{type(algorithm).__name__}")
            for work in WORK
            for algorithm in (FedAvg(), Scaffold(), Mime(SGDm()))
        ],
        ["chunks-Mime", "steps-FedAvg", "stragglers-Scaffold"],
    ),
)
def test_work_of_any_length_agrees(work: str, algorithm: Any, taken: list[Any]) -> None:
    options = {"local_epochs": 3, "clients_per_round": 6, "datamodule": cut, "algorithm": algorithm, **WORK[work]}
    rtol = options.pop("rtol", 1e-12)
    one = run("sequential", **{k: v for k, v in options.items() if k != "chunk_size"})
    assert_agree(one, run("vectorized", **options), rtol, metrics=max(rtol, 1e-6))
    assert {count for count, _ in taken} > {1}
    assert any(start > 0 for _, start in taken)


@pytest.mark.parametrize("size", few([16, 7], [7]))  # full batches; a smaller one each
def test_clients_with_as_many_examples_take_every_step_together(size: int, taken: list[Any]) -> None:
    options = {"datamodule": partial(cut, (size,) * 6), "algorithm": Scaffold(), "local_epochs": 2}
    assert_agree(run("sequential", **options), run("vectorized", **options))
    assert set(taken) == {(4, 0)}


def test_with_drop_last_no_client_has_a_batch_of_its_own_but_the_small_ones(taken: list[Any]) -> None:
    options = {"datamodule": partial(cut, drop_last=True), "clients_per_round": 7, "max_rounds": 1}
    assert_agree(run("sequential", **options), run("vectorized", **options))
    # 34, 21, 16, 13, 9, 8 and 3 examples: 8, 5, 4, 3, 2, 2 and 0 full batches, and the last one's only batch
    assert taken == [
        (1, 6), (6, 0), (6, 0), (4, 0), (3, 0), (2, 0), (1, 0), (1, 0), (1, 0),
    ]  # fmt: skip


@pytest.mark.thorough  # the default run has such a one in test_counts.py
@pytest.mark.parametrize("name", ["FedAvg", "Scaffold ii", "Mime SGDm"])
def test_a_resumed_run_has_the_same_bits(name: str, tmp_path: Any) -> None:
    options = {"datamodule": cut, "algorithm": METHODS[name].algorithm, "precision": "32-true", "clients_per_round": 6}
    whole = run("vectorized", max_rounds=4, **options)
    half = run("vectorized", max_rounds=2, **options)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed = run("vectorized", max_rounds=4, ckpt_path=tmp_path / "half.ckpt", **options)
    assert same(state_of(whole), state_of(resumed))


def test_untraced_steps_agree(monkeypatch: pytest.MonkeyPatch, taken: list[Any]) -> None:
    options = {"datamodule": cut, "algorithm": Mime(SGDm()), "local_epochs": 2, "clients_per_round": 6}
    one = run("sequential", **options)
    monkeypatch.setattr(LocalSteps, "_bind", lambda *_: None)
    assert_agree(one, run("vectorized", **options))
    assert taken


class Logs(Ordinary):
    """Logs a parameter, and a part of one, which change with the next step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("bias", self.head.bias[0])
        self.log("scale", self.scale)
        return loss + 0.1 * self.scale.square()

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))


@pytest.mark.parametrize(("dropout", "chunk_size"), covering([0.0, 1e-9], [6, 1]))  # traced, and not
def test_a_logged_parameter_is_what_it_was_in_the_step(dropout: float, chunk_size: int) -> None:
    options = {"datamodule": cut, "clients_per_round": 6, "max_rounds": 1}
    make = partial(Logs, dropout=dropout)
    runs = [run("sequential", make, **options), run("vectorized", make, chunk_size=chunk_size, **options)]
    for name in ("bias", "scale"):
        assert float(runs[1].callback_metrics[name]) == pytest.approx(float(runs[0].callback_metrics[name]), rel=1e-6)


def test_a_client_that_fails_is_named_and_left_out(taken: list[Any]) -> None:
    options = {"datamodule": partial(cut, spoil=2), "clients_per_round": 7, "max_rounds": 1}
    with pytest.raises(FederatedError, match="Client 2 "):
        run("vectorized", **options)
    record = Record()
    dropped = run("vectorized", on_client_error="drop", callbacks=[record], **options)
    assert list(record.rounds[0].failed) == [2]
    assert_agree(run("sequential", on_client_error="drop", **options), dropped)
    assert taken


@given(st.lists(st.lists(st.integers(1, 5), max_size=8), min_size=1, max_size=6))
def test_everybody_takes_every_step_once_and_in_order(batches: list[list[int]]) -> None:
    full = 5
    batches.sort(key=lambda sizes: -sizes.count(full))

    found: list[list[int]] = [[] for _ in batches]
    for clients, at in interleaved(batches, full):
        members = range(clients.start, clients.stop)
        sizes = {batches[client][k] for client, k in zip(members, at, strict=True)}
        assert sizes == {full} or len(members) == 1 or all(own == batches[0] for own in batches)
        for client, k in zip(members, at, strict=True):
            found[client].append(k)
    assert found == [list(range(len(sizes))) for sizes in batches]
