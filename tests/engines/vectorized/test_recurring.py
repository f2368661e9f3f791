"""Steps are traced where batches of their shape come again and again, and not where every batch has another."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from lightning_fed import FederatedDataModule
from lightning_fed.algorithms import FedAvg, Scaffold
from lightning_fed.engines.vectorized.batches import BatchGroup
from lightning_fed.engines.vectorized.schedule import RecurringShapes
from lightning_fed.tracing import traces
from tests.helpers.engines import Ordinary, assert_agree, run, state_of
from tests.helpers.selection import covering
from tests.helpers.training import CLASSES, same


def group(length: int, examples: int = 4, dtype: torch.dtype = torch.float32) -> BatchGroup:
    """Return two clients' batches of so many examples of a length."""
    return BatchGroup((0, 1), [torch.zeros(2, examples, length, dtype=dtype)], list, examples, 0, kind=length)


def noted(lengths: Sequence[int], **options: Any) -> list[bool]:
    recurring = RecurringShapes(batch_size=4)
    return [recurring.note([group(length, **options)]) for length in lengths]


def test_a_shape_recurs_from_the_second_time_on() -> None:
    assert noted([5] * 4) == [False, True, True, True]
    assert noted([5, 6] * 3) == [False, False, True, True, True, True]


def test_a_shape_that_is_rare_does_not() -> None:
    lengths = [*range(100, 120), 5, 5, 5]
    assert noted(lengths) == [False] * 22 + [True]  # the third of 23 is one in eight


def test_smaller_last_batches_count_as_full_ones() -> None:
    recurring = RecurringShapes(batch_size=4)
    assert [recurring.note([group(5, examples)]) for examples in (4, 3, 2, 4)] == [False, True, True, True]


def test_types_are_told_apart() -> None:
    recurring = RecurringShapes(batch_size=4)
    assert not recurring.note([group(5)])
    assert not recurring.note([group(5, dtype=torch.float64)])


def test_all_batches_of_a_step_are_counted() -> None:
    recurring = RecurringShapes(batch_size=4)
    assert not recurring.note([group(5), group(6)])
    assert recurring.note([group(6)])
    assert recurring.note([group(5)])


def test_every_round_begins_anew() -> None:
    recurring = RecurringShapes(batch_size=4)
    recurring.note([group(5)])
    recurring.begin_round()
    assert not recurring.note([group(5)])


def test_rows_of_tensors_are_traced_from_the_first_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
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


TRACES = {4000: (0, 1), 8: (1, 4)}  # how few and how many, by the longest text


@pytest.mark.parametrize(
    ("longest", "momentum", "algorithm", "chunk_size"),
    covering(list(TRACES), [0.0, 0.9], [FedAvg(), Scaffold()], [None, 1]),
)
def test_padded_texts_agree_and_are_traced_where_lengths_recur(
    longest: int, momentum: float, algorithm: Any, chunk_size: int | None
) -> None:
    make = partial(Reader, momentum)
    options: dict[str, Any] = {"algorithm": algorithm, "datamodule": partial(texts, longest)}
    one, other = run("sequential", make, **options), run("vectorized", make, chunk_size=chunk_size, **options)
    assert_agree(one, other, metrics=1e-5)
    least, most = TRACES[longest]
    assert least <= len(other.fit_loop.clients.engine.step.traces) <= most


def test_many_shapes_do_not_pile_up_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_MOST", 2)
    monkeypatch.setattr(RecurringShapes, "note", lambda self, groups: True)
    options: dict[str, Any] = {"make": Reader, "datamodule": partial(texts, 400), "max_rounds": 1}
    t = run("vectorized", chunk_size=1, **options)
    assert len(t.fit_loop.clients.engine.step.traces) <= 2
    assert_agree(run("sequential", **options), t, metrics=1e-5)


def test_a_resumed_run_takes_the_same_steps_traced(tmp_path: Any) -> None:
    whole = run("vectorized", Reader, partial(texts, 8), max_rounds=4)
    half = run("vectorized", Reader, partial(texts, 8), max_rounds=2)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed = run("vectorized", Reader, partial(texts, 8), max_rounds=4, ckpt_path=tmp_path / "half.ckpt")
    assert same(state_of(whole), state_of(resumed))
