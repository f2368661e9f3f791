"""Buffers outside the parameter vector: reading, writing, averaging."""

from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_fed.core.buffers import BufferMean, Buffers
from lightning_fed.core.errors import FederatedError


class Counting(nn.Module):
    """A module with a floating-point, an integer and a boolean buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([1.0, 2.0]))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("seen", torch.tensor([True, False]))


def buffers(mode: str = "average") -> tuple[Counting, Buffers]:
    module = Counting()
    return module, Buffers({f"net.{name}": (module, name) for name in ("mean", "count", "seen")}, mode)


def state(mean: float, count: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {"mean": torch.tensor([mean, -mean], dtype=dtype), "count": torch.tensor(count)}


def test_server_buffers_are_copies_of_the_initial_ones() -> None:
    module, b = buffers()
    module.mean.zero_()
    assert torch.equal(b.server["net.mean"], torch.tensor([1.0, 2.0]))
    read = b.read()
    module.mean.fill_(5.0)
    assert torch.equal(read["net.mean"], torch.zeros(2))


def test_write_updates_the_module_tensors_in_place() -> None:
    module, b = buffers()
    held = module.mean
    b.write(
        {"net.mean": torch.tensor([4.0, 5.0]), "net.count": torch.tensor(9), "net.seen": torch.tensor([False, True])}
    )
    assert module.mean is held
    assert module.mean.tolist() == [4.0, 5.0]
    assert int(module.count) == 9
    assert module.seen.tolist() == [False, True]


def test_reassigned_buffer_is_found() -> None:
    module, b = buffers()
    module.mean = torch.tensor([7.0, 8.0])
    assert b.read()["net.mean"].tolist() == [7.0, 8.0]
    b.write(b.server)
    assert module.mean.tolist() == [1.0, 2.0]


def test_floats_are_averaged_and_integers_come_from_the_largest_client() -> None:
    mean = BufferMean()
    mean.update(state(1.0, count=10), size=1, index=0)
    mean.update(state(5.0, count=20), size=3, index=1)
    mean.update(state(-2.0, count=30), size=2, index=2)
    out = mean.compute(state(99.0, count=99))
    # (1 * 1 + 3 * 5 + 2 * (-2)) / 6 = 2
    assert out["mean"].tolist() == [2.0, -2.0]
    assert int(out["count"]) == 20


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_equally_large_clients_take_integers_from_the_smallest_index(order: tuple[int, ...]) -> None:
    mean = BufferMean()
    for index in order:
        mean.update(state(0.0, count=10 * index), size=4, index=index)
    assert int(mean.compute(state(0.0))["count"]) == 0


def test_client_drawn_twice_counts_twice_but_is_not_larger() -> None:
    mean = BufferMean()
    mean.update(state(1.0, count=10), size=3, index=0, count=2)
    mean.update(state(5.0, count=20), size=4, index=1)
    out = mean.compute(state(0.0))
    # (2 * 3 * 1 + 4 * 5) / (2 * 3 + 4)
    assert out["mean"][0] == pytest.approx(2.6)
    assert int(out["count"]) == 20


@pytest.mark.parametrize("split", range(5))
def test_mean_does_not_depend_on_the_split_across_processes(split: int) -> None:
    parts = [BufferMean(), BufferMean()]
    for i, size in enumerate((3, 4, 2, 4)):
        parts[int(i < split)].update(state(float(i), count=i), size, index=i)
    mean = BufferMean()
    mean.merge(parts)
    out = mean.compute(state(0.0))
    # (3 * 0 + 4 * 1 + 2 * 2 + 4 * 3) / 13
    assert out["mean"][0] == pytest.approx(20 / 13)
    assert int(out["count"]) == 1


def test_all_integers_come_from_the_same_largest_client() -> None:
    mean = BufferMean()
    mean.update({"a": torch.tensor(1), "b": torch.tensor([True])}, size=1, index=0)
    mean.update({"a": torch.tensor(2), "b": torch.tensor([False])}, size=2, index=1)
    out = mean.compute({"a": torch.tensor(0), "b": torch.tensor([True])})
    assert int(out["a"]) == 2
    assert not bool(out["b"])


def test_server_buffers_are_kept_without_clients() -> None:
    server = state(3.0, count=4)
    assert BufferMean().compute(server) is server


def test_buffer_that_no_client_sent_is_kept() -> None:
    mean = BufferMean()
    mean.update({"mean": torch.tensor([2.0, 2.0])}, size=1, index=0)
    out = mean.compute(state(1.0, count=4))
    assert out["mean"].tolist() == [2.0, 2.0]
    assert int(out["count"]) == 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_mean_has_the_server_dtype_and_is_summed_in_float64(dtype: torch.dtype) -> None:
    mean = BufferMean()
    for _ in range(3000):  # in half precision the sum would stop growing at 2048 or overflow
        mean.update(state(1.0, dtype=dtype), size=100, index=0)
    out = mean.compute(state(0.0, dtype=dtype))["mean"]
    assert out.dtype == dtype
    assert out.tolist() == [1.0, -1.0]


def test_sent_messages_are_not_modified() -> None:
    first, second, mean = state(1.0), state(3.0), BufferMean()
    mean.update(first, size=1, index=0)
    mean.update(second, size=1, index=1)
    assert mean.compute(state(0.0))["mean"].tolist() == [2.0, -2.0]
    assert first["mean"].tolist() == [1.0, -1.0]
    assert second["mean"].tolist() == [3.0, -3.0]


@given(st.lists(st.tuples(st.floats(-1e3, 1e3, width=32), st.integers(1, 1000)), min_size=1, max_size=6))
def test_mean_is_weighted_by_examples(clients: list[tuple[float, int]]) -> None:
    mean = BufferMean()
    for i, (value, size) in enumerate(clients):
        mean.update(state(value, count=size, dtype=torch.float64), size, index=i)
    out = mean.compute(state(0.0, dtype=torch.float64))
    want = sum(v * n for v, n in clients) / sum(n for _, n in clients)
    torch.testing.assert_close(out["mean"][0], torch.tensor(want, dtype=torch.float64), rtol=1e-10, atol=1e-9)
    assert int(out["count"]) == max(n for _, n in clients)


def test_buffer_with_overlapping_elements_is_written() -> None:
    module = nn.Module()
    module.register_buffer("rows", torch.arange(3.0)[None].expand(4, 3))
    buffers = Buffers({"rows": (module, "rows")}, "average")
    buffers.write(buffers.read())
    assert torch.equal(module.rows, torch.arange(3.0).repeat(4, 1))
    buffers.write({"rows": torch.eye(4)[:, :3]})
    assert torch.equal(module.rows, torch.eye(4)[:, :3])


def test_complex_buffers_are_averaged() -> None:
    mean, server = BufferMean(), {"phase": torch.zeros(1, dtype=torch.complex64)}
    mean.update({"phase": torch.tensor([1 + 2j])}, size=3, index=0)
    mean.update({"phase": torch.tensor([5 - 2j])}, size=1, index=1)
    found = mean.compute(server)["phase"]
    assert found.dtype == torch.complex64
    assert found.tolist() == [2 + 1j]


def test_buffer_of_another_shape_is_rejected_and_can_be_restored() -> None:
    module, b = buffers()
    module.mean = torch.zeros(3)
    with pytest.raises(FederatedError, match=r"'net\.mean' has changed its shape from \[2\] to \[3\]"):
        b.read()
    b.write(b.server)
    assert module.mean.tolist() == [1.0, 2.0]
