"""Batches that are rows of tensors: shared ones, many small ones side by side, or each client's own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lightning_fed import FederatedDataModule, FederatedError
from lightning_fed.algorithms import FedAvg, Mime, Scaffold, SGDm
from lightning_fed.data.batches.batches import LoaderBatches, TensorBatches
from lightning_fed.data.batches.settings import BatchSettings
from lightning_fed.engines.device_data import DeviceData
from lightning_fed.engines.vectorized import batches
from lightning_fed.engines.vectorized.batches import RowLookup, rows_of_one_kind
from lightning_fed.engines.vectorized.full_gradients import FullGradients
from tests.helpers.engines import Ordinary, assert_agree, run
from tests.helpers.training import classification, clients, trainer

SIZES = (13, 8, 21, 5, 16, 9)


def tensors(n: int, seed: int = 0, dtype: torch.dtype = torch.float32, width: int = 2) -> tuple[Tensor, ...]:
    stream = torch.Generator().manual_seed(seed)
    return torch.randn(n, width, generator=stream, dtype=dtype), torch.arange(n) + 100 * seed


def kept(own: tuple[Tensor, ...], rows: Sequence[int] | None = None, **options: Any) -> TensorBatches:
    return TensorBatches(own, None if rows is None else torch.tensor(rows), BatchSettings(4, **options))


SHARED = tensors(9)
COHORTS: dict[str, Callable[[], list[TensorBatches]]] = {
    "shared": lambda: [kept(SHARED, [0, 4, 8]), kept(SHARED, [1, 2, 3]), kept(SHARED)],
    "own": lambda: [kept(tensors(3, 1)), kept(tensors(5, 2)), kept(tensors(4, 3), [3, 1, 0])],
    "two sources": lambda: [kept(SHARED, [7, 4, 0]), kept(tensors(5, 2)), kept(SHARED, [2, 1, 8])],
}


@pytest.mark.parametrize("joined", [2**25, 0], ids=["side by side", "one by one"])
@pytest.mark.parametrize("name", COHORTS)
def test_rows_match_each_client(name: str, joined: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_JOINED", joined)
    cohort, run_of = COHORTS[name](), trainer()
    lookup = RowLookup(run_of, cohort, DeviceData(torch.device("cpu")))
    expected = [b.pick(torch.arange(3)) for b in cohort]
    for members in ([0, 1, 2], [1, 2], [0], [1], [2]):
        (found,) = lookup.in_order([[(i, cohort[i].stored_rows()[:3]) for i in members]])
        for rows, *parts in zip(found, *(expected[i] for i in members), strict=True):
            assert torch.equal(rows, torch.cat(parts))


@pytest.mark.parametrize("joined", [2**25, 0], ids=["side by side", "one by one"])
@pytest.mark.parametrize("ahead", [0, 100, 2**22], ids=["each step by itself", "some", "all"])
@pytest.mark.parametrize("name", COHORTS)
def test_rows_of_several_steps_are_returned_in_order(
    name: str, ahead: int, joined: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_JOINED", joined)
    monkeypatch.setattr(batches, "_AHEAD", ahead)  # a row takes 16 bytes
    cohort = COHORTS[name]()
    lookup = RowLookup(trainer(), cohort, DeviceData(torch.device("cpu")))
    steps = [[(0, [0, 1]), (2, [2, 0])], [(1, [1])], [(0, [2]), (1, [0]), (2, [1])], [(1, [2, 2, 1])]]
    found = lookup.in_order([[(i, cohort[i].stored_rows()[rows]) for i, rows in step] for step in steps])
    for batch, step in zip(found, steps, strict=True):
        parts = [cohort[i].pick(torch.tensor(rows)) for i, rows in step]
        for rows_of_all, *column in zip(batch, *parts, strict=True):
            assert torch.equal(rows_of_all, torch.cat(column))


def test_only_rows_of_similar_tensors_are_of_one_kind() -> None:
    one = kept(tensors(3, 1))
    cohort = [one, kept(tensors(5, 2)), kept(SHARED, [1])]
    assert rows_of_one_kind(cohort) == cohort
    for other in (
        kept(tensors(3, 2, torch.float64)),
        kept(tensors(3, 2, width=3)),
        kept(tensors(3, 2)[:1]),
        kept(tensors(3, 2), transform=lambda batch: batch),
        LoaderBatches(TensorDataset(*tensors(3, 2)), BatchSettings(4)),
    ):
        assert not rows_of_one_kind([one, other])
    assert not rows_of_one_kind([])


def own(sizes: Sequence[int] = SIZES) -> FederatedDataModule:
    """Return clients with their own tensors."""
    sets = [classification(n, seed=i) for i, n in enumerate(sizes)]
    return FederatedDataModule(sets, batch_size=4, val=classification(20, 7))


def some_shared() -> FederatedDataModule:
    """Return clients, some of them cut from the same tensors."""
    whole = classification(40, 5)
    sets: list[Dataset[Any]] = [Subset(whole, range(0, 13)), classification(21, 1), Subset(whole, range(20, 36))]
    return FederatedDataModule([*sets, classification(5, 2)], batch_size=4, val=classification(20, 7))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("joined", "data", "algorithm"),
    [
        pytest.param(joined, data, algorithm, id=f"{how}-{data.__name__}-{type(algorithm).__name__}")
        for how, joined in (("side by side", 2**25), ("one by one", 0))
        for data in (own, some_shared)
        for algorithm in (FedAvg(), Scaffold(), Mime(SGDm()))
    ],
)
def test_result_matches_sequential_engine(
    joined: int, data: Any, algorithm: Any, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_JOINED", joined)
    options = {"datamodule": data, "algorithm": algorithm, "local_epochs": 2}
    assert_agree(run("sequential", **options), run("vectorized", **options))
    assert max(steps) > 1


@pytest.mark.thorough
def test_full_batch_gradients_of_equal_size_clients_are_batched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    of_many = FullGradients.of_many

    def note(self: FullGradients, point: Any, batch: Any) -> Any:
        calls.append(len(batch[0]))
        return of_many(self, point, batch)

    monkeypatch.setattr(FullGradients, "of_many", note)
    options = {"datamodule": partial(own, (8,) * 6), "algorithm": Mime(SGDm())}
    assert_agree(run("sequential", **options), run("vectorized", **options))
    assert calls == [4, 4, 4]


@pytest.mark.thorough
def test_clients_with_different_tensor_types_still_run_together(steps: list[int]) -> None:
    def mixed() -> FederatedDataModule:
        sets: list[Dataset[Any]] = [classification(n, seed=i) for i, n in enumerate(SIZES)]
        sets[1] = ConcatDataset([sets[1]])
        return FederatedDataModule(sets, batch_size=4, val=classification(20, 7))

    assert_agree(run("sequential", datamodule=mixed), run("vectorized", datamodule=mixed))
    assert not steps


@pytest.mark.thorough
def test_transformed_batches_are_moved_without_lightning_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    def transformed() -> FederatedDataModule:
        sets = [classification(n, seed=i) for i, n in enumerate(SIZES)]
        return FederatedDataModule(
            sets, batch_size=4, val=classification(20, 7), transform=lambda batch: [2.0 * batch[0], batch[1]]
        )

    expected = run("sequential", datamodule=transformed)
    monkeypatch.setattr(batches, "prepare_batch", None)
    assert_agree(expected, run("vectorized", datamodule=transformed))


@dataclass(slots=True)
class Example:
    """A batch in a class of its own."""

    x: Tensor
    y: Tensor


class TakesExamples(Ordinary):
    def training_step(self, batch: Example, batch_idx: int) -> Tensor:
        return super().training_step((batch.x, batch.y), batch_idx)


def examples() -> FederatedDataModule:
    def collate(rows: list[tuple[Tensor, ...]]) -> Example:
        return Example(*map(torch.stack, zip(*rows, strict=True)))

    return FederatedDataModule(clients((8, 8, 12, 4)), batch_size=4, collate_fn=collate)


@pytest.mark.thorough
def test_registered_dataclass_is_a_batch() -> None:
    advice = r"found an Example\. Register its class: torch\.export\.register_dataclass\(Example\)"
    with pytest.raises(FederatedError, match=advice):
        run("vectorized", TakesExamples, examples)
    torch.export.register_dataclass(Example)
    sequential, vectorized = (run(engine, TakesExamples, examples) for engine in ("sequential", "vectorized"))
    assert_agree(sequential, vectorized)


class Rows:
    """A batch that is an object, not a collection."""

    def __init__(self, batch: list[Any]) -> None:
        self.x, self.y = map(torch.stack, zip(*batch, strict=True))


@pytest.mark.parametrize(
    ("collate", "advice"),
    [
        (Rows, r"found a Rows\. Return a tuple, list or dict of tensors from collate_fn"),
        (lambda batch: [Rows(batch)], r"found a Rows in one\. Leave it out of the batch"),
    ],
    ids=["whole", "part"],
)
def test_batch_with_an_object_is_refused_with_advice(collate: Any, advice: str) -> None:
    def data() -> FederatedDataModule:
        return FederatedDataModule(clients((8, 8, 12, 4)), batch_size=4, collate_fn=collate)

    with pytest.raises(FederatedError, match=advice):
        run("vectorized", TakesExamples, data)
