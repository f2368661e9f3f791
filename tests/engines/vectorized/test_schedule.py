"""Clients that do not wait for each other: each takes its own steps in order, with the same result as alone."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, TensorDataset

from lightning_fed import FederatedDataModule, FederatedError
from lightning_fed.algorithms import FedAvg, Mime, Scaffold, SGDm
from lightning_fed.engines.vectorized import schedule
from lightning_fed.engines.vectorized.batches import BatchGroup
from lightning_fed.engines.vectorized.local_steps import LocalSteps
from lightning_fed.engines.vectorized.schedule import RecurringShapes, interleaved
from lightning_fed.server import SystemsHeterogeneity
from lightning_fed.tracing import traces
from lightning_fed.tracing.traces import Traces
from tests.behaviour.test_contract import METHODS
from tests.helpers.engines import Ordinary, Record, assert_agree, run, state_of
from tests.helpers.selection import covering
from tests.helpers.training import CLASSES, classification, same

SIZES = (13, 8, 21, 3, 16, 9, 34)  # batches of four: no full one (3), a smaller last one (13), or only full ones (8)
WHOLE = (12, 8, 20, 4, 16, 8, 32)
LOCAL = [name for name, method in METHODS.items() if method.algorithm.local_work]


def cut(sizes: Sequence[int] = SIZES, spoil: int | None = None, **options: Any) -> FederatedDataModule:
    """Return clients of these sizes, cut from the same tensors."""
    x, y = classification(sum(sizes), 5).tensors
    rows = [part.numpy() for part in torch.arange(sum(sizes)).split(list(sizes))]
    if spoil is not None:
        x = x.clone()
        x[rows[spoil][-1]] = math.nan
    options = {"batch_size": 4, "val": classification(20, 7), **options}
    return FederatedDataModule(train=TensorDataset(x, y), partition=lambda _: rows, **options)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record each step's number of clients, and its first row in the chunk."""
    found: list[tuple[int, int]] = []

    def noted(sizes: Any, full: int) -> Any:
        for step in interleaved(sizes, full):
            if full > 1:  # 1 if all clients step together
                found.append((len(step.at), step.clients.start))
            yield step

    monkeypatch.setattr(schedule, "interleaved", noted)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "sizes"),
    [pytest.param(name, sizes, id=f"{name}-{sizes[0]}") for name in LOCAL for sizes in (SIZES, WHOLE)],
)
def test_every_method_matches_sequential_engine(name: str, sizes: Any, taken: list[Any]) -> None:
    method, datamodule = METHODS[name], partial(cut, sizes)
    options = {"algorithm": method.algorithm, "local_epochs": 2, "clients_per_round": 5, "max_rounds": 2}
    options["datamodule"] = datamodule
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


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("work", "algorithm"),
    [
        pytest.param(work, algorithm, id=f"{work}-{type(algorithm).__name__}")
        for work in WORK
        for algorithm in (FedAvg(), Scaffold(), Mime(SGDm()))
    ],
)
def test_engines_agree_on_work_of_any_length(work: str, algorithm: Any, taken: list[Any]) -> None:
    options = {"local_epochs": 3, "clients_per_round": 6, "max_rounds": 2, "algorithm": algorithm, **WORK[work]}
    options["datamodule"] = cut
    rtol = options.pop("rtol", 1e-12)
    one = run("sequential", **{k: v for k, v in options.items() if k != "chunk_size"})
    assert_agree(one, run("vectorized", **options), rtol, metrics=max(rtol, 1e-6))
    assert {count for count, _ in taken} > {1}
    assert any(start > 0 for _, start in taken)


@pytest.mark.thorough
@pytest.mark.parametrize("size", [16, 7])  # 16: only full batches, 7: one smaller batch each
def test_clients_with_equal_examples_take_every_step_together(size: int, taken: list[Any]) -> None:
    options = {"datamodule": partial(cut, (size,) * 6), "algorithm": Scaffold(), "local_epochs": 2}
    assert_agree(run("sequential", **options), run("vectorized", **options))
    assert set(taken) == {(4, 0)}


@pytest.mark.thorough
def test_drop_last_leaves_only_small_clients_with_separate_batches(taken: list[Any]) -> None:
    options = {"datamodule": partial(cut, drop_last=True), "clients_per_round": 7, "max_rounds": 1}
    assert_agree(run("sequential", **options), run("vectorized", **options))
    # 34, 21, 16, 13, 9, 8 and 3 examples: 8, 5, 4, 3, 2, 2 and 0 full batches. The last client keeps its only batch.
    assert taken == [
        (1, 6), (6, 0), (6, 0), (4, 0), (3, 0), (2, 0), (1, 0), (1, 0), (1, 0),
    ]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["FedAvg", "Scaffold ii", "Mime SGDm"])
def test_resumed_run_has_identical_bits(name: str, tmp_path: Any) -> None:
    options = {"datamodule": cut, "algorithm": METHODS[name].algorithm, "precision": "32-true", "clients_per_round": 6}
    whole = run("vectorized", max_rounds=4, **options)
    half = run("vectorized", max_rounds=2, **options)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed = run("vectorized", max_rounds=4, ckpt_path=tmp_path / "half.ckpt", **options)
    assert same(state_of(whole), state_of(resumed))


def test_untraced_steps_match_sequential_engine(monkeypatch: pytest.MonkeyPatch, taken: list[Any]) -> None:
    options = {"datamodule": cut, "algorithm": Scaffold(), "local_epochs": 2, "clients_per_round": 6, "max_rounds": 2}
    one = run("sequential", **options)
    monkeypatch.setattr(LocalSteps, "_bind", lambda *_: None)
    assert_agree(one, run("vectorized", **options))
    assert taken


class Logs(Ordinary):
    """Logs a parameter, and an element of one, which change with the next step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("bias", self.head.bias[0])
        self.log("scale", self.scale)
        return loss + 0.1 * self.scale.square()

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))


@pytest.mark.thorough
@pytest.mark.parametrize(("dropout", "chunk_size"), covering([0.0, 1e-9], [6, 1]))  # 0.0 is traced, 1e-9 is not
def test_logged_parameter_has_its_value_during_the_step(dropout: float, chunk_size: int) -> None:
    options = {"datamodule": partial(cut, WHOLE), "clients_per_round": 6, "max_rounds": 1}
    make = partial(Logs, dropout=dropout)
    runs = [run("sequential", make, **options), run("vectorized", make, chunk_size=chunk_size, **options)]
    for name in ("bias", "scale"):
        assert float(runs[1].callback_metrics[name]) == pytest.approx(float(runs[0].callback_metrics[name]), rel=1e-6)


@pytest.mark.thorough
def test_failing_client_is_named_and_dropped(taken: list[Any]) -> None:
    options = {"datamodule": partial(cut, WHOLE, spoil=2), "clients_per_round": 7, "max_rounds": 1}
    with pytest.raises(FederatedError, match="Client 2 "):
        run("vectorized", **options)
    record = Record()
    dropped = run("vectorized", on_client_error="drop", callbacks=[record], **options)
    assert list(record.rounds[0].failed) == [2]
    assert_agree(run("sequential", on_client_error="drop", **options), dropped)
    assert taken


@given(st.lists(st.lists(st.integers(1, 5), max_size=8), min_size=1, max_size=6))
def test_every_client_takes_every_step_once_and_in_order(batches: list[list[int]]) -> None:
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


def group(length: int, examples: int = 4, dtype: torch.dtype = torch.float32) -> BatchGroup:
    """Return two clients' batches, with examples of this length."""
    return BatchGroup((0, 1), [torch.zeros(2, examples, length, dtype=dtype)], list, examples, 0, kind=length)


def noted(lengths: Sequence[int], **options: Any) -> list[bool]:
    recurring = RecurringShapes(batch_size=4)
    return [recurring.note([group(length, **options)]) for length in lengths]


def test_shape_recurs_from_its_second_occurrence() -> None:
    assert noted([5] * 4) == [False, True, True, True]
    assert noted([5, 6] * 3) == [False, False, True, True, True, True]


def test_rare_shape_does_not_recur() -> None:
    lengths = [*range(100, 120), 5, 5, 5]
    assert noted(lengths) == [False] * 22 + [True]  # 3 of 23 is more than one in eight


def test_smaller_last_batches_count_as_full_batches() -> None:
    recurring = RecurringShapes(batch_size=4)
    assert [recurring.note([group(5, examples)]) for examples in (4, 3, 2, 4)] == [False, True, True, True]


def test_shapes_of_different_types_are_distinct() -> None:
    recurring = RecurringShapes(batch_size=4)
    assert not recurring.note([group(5)])
    assert not recurring.note([group(5, dtype=torch.float64)])


def test_all_batches_of_a_step_are_counted() -> None:
    recurring = RecurringShapes(batch_size=4)
    assert not recurring.note([group(5), group(6)])
    assert recurring.note([group(6)])
    assert recurring.note([group(5)])


def test_recurring_shapes_are_reset_every_round() -> None:
    recurring = RecurringShapes(batch_size=4)
    recurring.note([group(5)])
    recurring.begin_round()
    assert not recurring.note([group(5)])


def test_rows_of_tensors_are_traced_from_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecurringShapes, "note", None)
    assert len(run("vectorized", chunk_size=1, max_rounds=1).fit_loop.clients.engine.step.traces) > 0


class Texts(Dataset[Any]):
    """Texts of random lengths, or of one length."""

    def __init__(self, seed: int, longest: int) -> None:
        stream = torch.Generator().manual_seed(seed)
        lengths = torch.randint(longest // 2, longest + 1, (24,), generator=stream).tolist()
        self.items = [torch.randint(0, 9, (n if longest > 8 else longest,), generator=stream) for n in lengths]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.items[i], int(self.items[i][0]) % CLASSES


def padded(items: Sequence[tuple[Tensor, int]]) -> list[Tensor]:
    return [pad_sequence([text for text, _ in items], batch_first=True), torch.tensor([label for _, label in items])]


class Reader(Ordinary):
    def __init__(self, momentum: float = 0.0) -> None:
        super().__init__()
        self.momentum = momentum
        self.table, self.body = nn.Embedding(9, 6), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.table(x).mean(1))))

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=self.momentum)


def texts(longest: int) -> FederatedDataModule:
    own = [Texts(seed, longest) for seed in range(4)]
    return FederatedDataModule(own, batch_size=4, collate_fn=padded)


TRACES = {4000: (0, 1), 8: (1, 4)}  # minimum and maximum number of traces, by the longest text


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("longest", "momentum", "algorithm", "chunk_size"),
    covering(list(TRACES), [0.0, 0.9], [FedAvg(), Scaffold()], [None, 1]),
)
def test_padded_texts_agree_and_are_traced_when_lengths_recur(
    longest: int, momentum: float, algorithm: Any, chunk_size: int | None
) -> None:
    make = partial(Reader, momentum)
    options: dict[str, Any] = {"algorithm": algorithm, "datamodule": partial(texts, longest)}
    one, other = run("sequential", make, **options), run("vectorized", make, chunk_size=chunk_size, **options)
    assert_agree(one, other, metrics=1e-5)
    least, most = TRACES[longest]
    assert least <= len(other.fit_loop.clients.engine.step.traces) <= most


@pytest.mark.thorough
def test_many_shapes_do_not_accumulate_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_MOST", 2)
    monkeypatch.setattr(RecurringShapes, "note", lambda self, groups: True)
    options: dict[str, Any] = {"make": Reader, "datamodule": partial(texts, 400), "max_rounds": 1}
    options |= {"local_epochs": None, "local_steps": 2}
    t = run("vectorized", chunk_size=1, **options)
    assert len(t.fit_loop.clients.engine.step.traces) <= 2
    assert_agree(run("sequential", **options), t, metrics=1e-5)


@pytest.mark.thorough
def test_resumed_run_traces_the_same_steps(tmp_path: Any) -> None:
    options: dict[str, Any] = {"make": Reader, "datamodule": partial(texts, 8), "chunk_size": 1}
    whole, half = (run("vectorized", max_rounds=rounds, **options) for rounds in (4, 2))
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed = run("vectorized", max_rounds=4, ckpt_path=tmp_path / "half.ckpt", **options)
    assert same(state_of(whole), state_of(resumed))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of clients with which each trace of several clients is made."""
    found: list[int] = []
    split = Traces._split

    def noted(self: Traces, function: Any, tensors: Any, *args: Any, **options: Any) -> Any:
        if tensors[0].ndim == 3:  # stacked weights of several clients
            found.append(len(tensors[0]))
        return split(self, function, tensors, *args, **options)

    monkeypatch.setattr(Traces, "_split", noted)
    return found


FALLING = (30, 28, 26, 24, 22, 20, 18, 16, 14)  # in batches of four: 7, 7, 6, 6, 5, 5, 4, 4 and 3 full ones
BARE = [FedAvg(), Scaffold(), Mime(SGDm())]
OPTIONS = {"datamodule": partial(cut, FALLING), "clients_per_round": 9}


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", BARE, ids=["FedAvg", "Scaffold", "Mime"])
def test_one_trace_serves_any_number_of_clients(algorithm: Any, made: list[int], steps: list[int]) -> None:
    assert_agree(*(run(engine, algorithm=algorithm, **OPTIONS) for engine in ("sequential", "vectorized")))
    assert made == [5, 7]
    assert {9, 8, 6, 4, 2} <= set(steps)
    assert len(steps) == 3 * (7 + 5)  # per round: 7 steps of full batches, and 5 of smaller ones


@pytest.mark.thorough
def test_clients_with_a_single_smaller_batch_run_together(made: list[int], steps: list[int]) -> None:
    options = {**OPTIONS, "datamodule": partial(cut, (3,) * 9), "local_epochs": 2, "algorithm": Scaffold()}
    assert_agree(*(run(engine, **options) for engine in ("sequential", "vectorized")))
    assert made == [5, 7]
    assert steps == [9] * 6


@pytest.mark.thorough
def test_clients_with_different_smaller_batches_never_run_together(made: list[int], steps: list[int]) -> None:
    options = {**OPTIONS, "datamodule": partial(cut, (3, 2, 1, 3, 2, 3, 1, 2, 3))}
    assert_agree(*(run(engine, **options) for engine in ("sequential", "vectorized")))
    assert not made
    assert set(steps) == {1}


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", BARE, ids=["FedAvg", "Scaffold", "Mime"])
def test_only_full_chunk_steps_are_traced_without_a_general_trace(
    algorithm: Any, made: list[int], steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run("vectorized", algorithm=algorithm, **OPTIONS)
    made.clear()
    steps.clear()
    monkeypatch.setattr(traces, "generalize", lambda *args: False)
    assert_agree(expected, run("vectorized", algorithm=algorithm, **OPTIONS))
    assert made == [5, 7, 9]  # the general trace is tried only once, with 5 and 7 clients
    assert max(steps) == 9


@pytest.mark.thorough
def test_resumed_run_has_identical_bits_with_another_first_chunk(tmp_path: Any) -> None:
    options = {"datamodule": partial(cut, (*WHOLE, 28, 24)), "clients_per_round": 5, "precision": "32-true"}
    whole, first = (run("vectorized", max_rounds=rounds, **options) for rounds in (4, 2))
    first.save_checkpoint(tmp_path / "half.ckpt")
    resumed = run("vectorized", max_rounds=4, ckpt_path=tmp_path / "half.ckpt", **options)
    assert same(state_of(whole), state_of(resumed))
