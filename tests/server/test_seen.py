import inspect
import io
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed.algorithms import FedAvg
from lightning_fed.core.flat import Layout
from lightning_fed.server.participation import Seen
from lightning_fed.server.server import Server
from lightning_fed.server.step import plain_sgd


@given(st.integers(1, 70).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.lists(st.integers(0, n - 1))))))
def test_it_is_a_set(case: tuple[int, list[list[int]]]) -> None:
    num_clients, rounds = case
    seen, wanted = Seen(num_clients), set[int]()
    for indices in rounds:
        seen.add(indices)
        wanted.update(indices)
        assert len(seen) == len(wanted)
    bits = np.unpackbits(seen.bits().numpy(), bitorder="little")
    assert np.flatnonzero(bits).tolist() == sorted(wanted)
    again = Seen(num_clients)
    again.load(seen.bits())
    assert len(again) == len(wanted)
    other = Seen(num_clients)
    other.load(seen.saved())
    assert torch.equal(other.bits(), seen.bits())
    assert seen.saved().nbytes <= seen.bits().nbytes
    assert torch.equal(again.bits(), seen.bits())
    seen.add(range(num_clients))
    assert len(again) == len(wanted), "what was loaded is a copy"


@pytest.mark.parametrize("clients", [10**5, pytest.param(10**6, marks=pytest.mark.thorough)])
def test_a_client_takes_a_bit(clients: int) -> None:
    tracemalloc.start()
    seen = Seen(clients)
    for start in range(0, clients, 10**4):
        seen.add(range(start, start + 10**4))
    own = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, inspect.getfile(Seen))])
    tracemalloc.stop()
    held = sum(trace.size for trace in own.traces)  # other threads of the process take memory too
    assert len(seen) == clients
    assert 0.12 * clients < held < 0.13 * clients


@pytest.mark.parametrize("index", [-1, 8, 10**12])
def test_a_client_that_there_is_not_is_no_member(index: int) -> None:
    with pytest.raises(IndexError):
        Seen(8).add([index])


@pytest.mark.parametrize(
    "bits",
    [
        torch.zeros(1, dtype=torch.uint8),
        torch.zeros(3, dtype=torch.uint8),
        torch.zeros(2, 1, dtype=torch.uint8),
        torch.zeros(2, dtype=torch.int64),
        torch.tensor([3, 12]),
        torch.tensor([-1, 3]),
        torch.tensor([0, 16], dtype=torch.uint8),
    ],
)
def test_bits_of_other_clients_are_refused(bits: torch.Tensor) -> None:
    seen = Seen(12)
    seen.add([3, 11])
    with pytest.raises(ValueError, match="12 clients"):
        seen.load(bits)
    assert len(seen) == 2


@pytest.mark.parametrize("clients", [10**4, pytest.param(10**6, marks=pytest.mark.thorough)])
def test_a_checkpoint_holds_a_bit_of_each_client(clients: int) -> None:
    server = Server(FedAvg(), torch.zeros(2), Layout([torch.Size([2])]), plain_sgd, None, range(clients), 0)
    empty = io.BytesIO()
    torch.save(server.state_dict(), empty)
    server.count(range(clients), 0, 0)
    full = io.BytesIO()
    torch.save(server.state_dict(), full)
    assert len(empty.getvalue()) < 5000
    assert len(full.getvalue()) < clients / 8 + 5000
    other = Server(FedAvg(), torch.zeros(2), Layout([torch.Size([2])]), plain_sgd, None, range(clients), 0)
    full.seek(0)
    other.load_state_dict(torch.load(full, weights_only=True))
    assert other.seen == clients
