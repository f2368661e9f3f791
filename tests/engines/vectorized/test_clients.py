"""The clients of a chunk as a unit: their tensors, their logged values, and the chunk size."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lightning_fed import FederatedDataModule
from lightning_fed.algorithms import Scaffold
from lightning_fed.core.devices import Memory
from lightning_fed.core.flat import Layout
from lightning_fed.engines.vectorized import clients as chunks
from lightning_fed.engines.vectorized.clients import (
    ChunkMeans,
    ChunkMemory,
    Clients,
    default_chunk_size,
    of_each,
    stack_states,
)
from lightning_fed.server.client_states.state import Stacked
from tests.helpers.training import classification, clients, fit, parameters, seeded


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [(4,) * 8 + (40,), (13, 8, 21, 5, 16, 9)])
def test_result_matches_sequential_engine(sizes: tuple[int, ...]) -> None:
    found = {}
    for engine in ("sequential", "auto"):
        model, own = seeded(dropout=0.0), clients(sizes)
        n = [len(d) for d in own]
        whole = torch.utils.data.TensorDataset(*(torch.cat([d.tensors[j] for d in own]) for j in (0, 1)))
        cut = [part.numpy() for part in torch.arange(sum(n)).split(n)]
        data = FederatedDataModule(
            train=whole, partition=lambda _, cut=cut: cut, val=classification(10, 7), batch_size=4
        )
        fit(model, data, engine=engine, algorithm=Scaffold(), max_rounds=2, clients_per_round=len(n) - 1)
        found[engine] = parameters(model)
    assert float((found["auto"] - found["sequential"]).norm() / found["sequential"].norm()) < 1e-5


@pytest.mark.parametrize(
    ("numel", "step_bytes", "expected"),
    [
        (2**20, 0, 128),  # each client takes 16 vectors plus its gradient
        (2**20, 2**25, 64),
        (2**20, 2**25 + 2**20, 64),  # another version of PyTorch takes a little more
        (10, 2**20, 1024),
        (10**9, 0, 1),
        (10, 2**40, 1),
        (10, 0, 1024),
    ],
)
def test_chunk_size_uses_half_of_total_accelerator_memory(
    numel: int, step_bytes: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    y = SimpleNamespace(device=SimpleNamespace(type="cuda"), numel=lambda: numel, element_size=lambda: 4)
    for free in (0, 2**34):
        monkeypatch.setattr(chunks, "memory_of", lambda device, free=free: Memory(free, 2**34))
        assert default_chunk_size(y, step_bytes) == expected


def test_accelerator_of_unknown_size_defaults_to_8_gb(monkeypatch: pytest.MonkeyPatch) -> None:
    y = SimpleNamespace(device=SimpleNamespace(type="mps"), numel=lambda: 2**20, element_size=lambda: 4)
    monkeypatch.setattr(chunks, "memory_of", lambda device: None)
    assert default_chunk_size(y) == 64


LAYOUT = Layout([torch.Size([2, 2]), torch.Size([3])])


def test_subset_of_a_chunk_reads_and_writes_its_own_rows() -> None:
    y = torch.arange(28.0).view(4, 7)
    states = torch.arange(4.0)
    for rows in (range(1, 3), [3, 0], [2]):
        whole, numbers = y.clone(), states.clone()
        some = Clients(whole, rows, LAYOUT)
        at = rows[0] if some.is_one else list(rows)
        assert (some.count, some.is_one) == (len(rows), len(rows) == 1)
        assert torch.equal(some.y, y[at])
        assert [v.shape for v in some.views] == [
            (*(() if some.is_one else (len(rows),)), *shape) for shape in LAYOUT.shapes
        ]
        assert torch.equal(some.of([numbers])[0], states[at])
        some.put(whole, [-view for view in some.views])
        numbers[some.at] += 10
        others = [i for i in range(4) if i not in rows]
        assert torch.equal(whole[at], -y[at])
        assert torch.equal(numbers[at], states[at] + 10)
        assert torch.equal(whole[others], y[others])
        assert torch.equal(numbers[others], states[others])


def test_function_of_one_client_maps_over_all_clients() -> None:
    def one(state: dict[str, Tensor], y: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return {"c": state["c"] + y}, y.sum()

    states, y = {"c": torch.arange(6.0).view(3, 2)}, torch.ones(3, 2)
    for count in (3, 1):
        found, sums = of_each(one, ({"c": states["c"][:count]}, y[:count]), count)
        assert torch.equal(found["c"], states["c"][:count] + 1)
        assert sums.tolist() == [2.0] * count


def test_states_are_stacked_in_the_given_order() -> None:
    states = [{"c": torch.full((2,), float(i)), "n": torch.tensor(i)} for i in range(3)]
    together = Stacked({name: torch.stack([state[name] for state in states]) for name in ("c", "n")})
    for given in (states, together):
        for order in ([2, 0, 1], [0, 1, 2]):
            found = stack_states(given, order)
            assert found["n"].tolist() == order
            assert found["c"].tolist() == [[float(i)] * 2 for i in order]
    assert stack_states([{}, {}], [1, 0]) == {}
    assert stack_states(states[:1], [0])["c"].shape == (1, 2)


def test_chunks_share_the_same_memory() -> None:
    memory = ChunkMemory(LAYOUT, 3, torch.zeros(7, dtype=torch.float64))
    some = memory.clients(range(2))
    assert memory.clients(range(2)) is some
    memory.y.fill_(2.0)
    assert bool((some.y == 2).all())
    assert memory.y.dtype == memory.delta.dtype == torch.float64


def test_chunk_means_are_weighted_by_examples_or_given_batch_size() -> None:
    means, loss = ChunkMeans(3), torch.tensor([1.0, 2.0])
    means.add([0, 2], 4, loss, {"loss": loss, "own": 10 * loss}, {"loss": None, "own": 1})
    means.add([0], 2, torch.tensor(4.0), {"loss": torch.tensor(4.0)}, {"loss": None})
    losses, logged = means.of_clients()
    assert losses[0] == (4 * 1 + 2 * 4) / 6
    assert losses[2] == 2.0
    assert losses[1] != losses[1], "a client without a step has no loss"
    assert logged == [{"loss": 2.0, "own": 10.0}, {}, {"loss": 2.0, "own": 20.0}]
    assert means.losses_of(0) == [1.0, 4.0]
    assert means.losses_of(1) == []
    sums: dict[str, tuple[float, float]] = {"loss": (1.0, 1)}
    means.add_to(sums, without=[2])
    assert sums == {"loss": (1 + 12.0, 1 + 6), "own": (10.0, 1)}
