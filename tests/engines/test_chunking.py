"""Which clients ``auto`` runs at once: a function of their work, that leaves nobody out."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Subset, TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.algorithms import Scaffold
from lightning_fed.data.batch_settings import BatchSettings
from lightning_fed.data.batches import ClientBatches, LoaderBatches, TensorBatches
from lightning_fed.engines.base import WorkPlan
from lightning_fed.engines.vectorized.chunking import chunks_that_pay, default_chunk_size
from lightning_fed.server.aggregation import Participant
from tests.helpers.selection import few
from tests.helpers.training import classification, clients, fit, parameters, seeded

X = (torch.zeros(20_000, 1),)
BATCH = 10


def plans(sizes: Sequence[int], kind: str = "shared") -> list[WorkPlan]:
    """Return the work of clients with so many examples, one epoch of batches of ten."""
    out = []
    settings = BatchSettings(BATCH)
    for i, n in enumerate(sizes):
        steps = -(-n // BATCH)
        batches: ClientBatches
        if kind == "loaders":
            batches = LoaderBatches(Subset(TensorDataset(*X), range(n)), settings)
        else:
            own = X if kind == "shared" else (X[0][:n].clone(),)
            batches = TensorBatches(own, torch.arange(n), settings)
        out.append(WorkPlan(Participant(i, i, n, steps=steps), batches, (steps,)))
    return out


def groups(sizes: Sequence[int], most: int = 128, kind: str = "shared", numel: int = 610) -> list[list[int]]:
    chunks = chunks_that_pay(plans(sizes, kind), most, numel)
    return [[plan.participant.size for plan in chunk] for chunk in chunks]


def test_many_clients_with_as_many_steps_are_run_at_once() -> None:
    assert groups([50] * 20) == [[50] * 20]


def test_no_more_than_the_most() -> None:
    assert groups([50] * 20, most=8) == [[50] * 8, [50] * 8, [50] * 4]


def test_a_client_with_many_more_steps_is_run_alone() -> None:
    assert groups([50] * 30 + [9000]) == [[9000], [50] * 30]


def test_a_few_clients_with_work_of_different_length_are_run_one_by_one() -> None:
    assert groups([105, 87, 20]) == [[105], [87], [20]]


def test_clients_are_sorted_by_the_steps_that_they_can_share() -> None:
    assert groups([91, 95, 100, 30] * 5) == [[100] * 5 + [95] * 5 + [91] * 5 + [30] * 5]


def test_large_models_gain_less() -> None:
    assert len(groups([205, 195] * 3, numel=610)) == 1
    assert groups([205, 195] * 3, numel=100_000) == [[205]] * 3 + [[195]] * 3


def test_clients_of_tensors_of_their_own_are_run_at_once_like_others() -> None:
    sizes = [91, 95, 100, 30] * 5 + [9000]
    assert groups(sizes, kind="own") == groups(sizes)


def test_clients_whose_batches_are_no_rows_are_run_at_once_for_a_few_steps_only() -> None:
    assert groups([10] * 20, kind="loaders") == [[10] * 20]
    assert groups([500] * 20, kind="loaders") == [[500]] * 20


@given(st.lists(st.integers(1, 4000), max_size=40), st.integers(2, 50))
def test_every_client_is_in_one_group_of_at_most_so_many(sizes: list[int], most: int) -> None:
    found = [[plan.participant.index for plan in chunk] for chunk in chunks_that_pay(plans(sizes), most, 1000)]
    assert sorted(i for chunk in found for i in chunk) == list(range(len(sizes)))
    assert all(1 <= len(chunk) <= most for chunk in found)


@pytest.mark.parametrize("sizes", few([(4,) * 8 + (90,), (13, 8, 21, 5, 16, 9)], [(4,) * 8 + (90,)]))
def test_the_result_is_that_of_the_sequential_engine(sizes: tuple[int, ...]) -> None:
    found = {}
    for engine in ("sequential", "auto"):
        model, own = seeded(dropout=0.0), clients(sizes)
        n = [len(d) for d in own]
        whole = torch.utils.data.TensorDataset(*(torch.cat([d.tensors[j] for d in own]) for j in (0, 1)))
        cut = [part.numpy() for part in torch.arange(sum(n)).split(n)]
        data = FederatedDataModule(
            train=whole, partition=lambda _, cut=cut: cut, val=classification(10, 7), batch_size=4
        )
        fit(model, data, engine=engine, algorithm=Scaffold(), max_rounds=3, clients_per_round=len(n) - 1)
        found[engine] = parameters(model)
    assert float((found["auto"] - found["sequential"]).norm() / found["sequential"].norm()) < 1e-5


@pytest.mark.parametrize(("total", "numel", "expected"), [(2**34, 2**20, 128), (2**34, 10**9, 1), (2**34, 10, 1024)])
def test_a_gpu_runs_as_many_at_once_whatever_happens_to_be_free(
    total: int, numel: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    y = SimpleNamespace(device=SimpleNamespace(type="cuda"), numel=lambda: numel, element_size=lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=total))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: pytest.fail("differs from run to run"))
    assert default_chunk_size(y) == expected
