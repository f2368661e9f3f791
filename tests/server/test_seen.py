import inspect
import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed.server.seen import Seen


@given(st.integers(1, 70).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.lists(st.integers(0, n - 1))))))
def test_it_is_a_set(case: tuple[int, list[list[int]]]) -> None:
    num_clients, rounds = case
    seen, wanted = Seen(num_clients), set[int]()
    for indices in rounds:
        seen.add(indices)
        wanted.update(indices)
        assert len(seen) == len(wanted)
    assert seen.indices().tolist() == sorted(wanted)
    assert seen.indices().dtype == torch.int64


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
