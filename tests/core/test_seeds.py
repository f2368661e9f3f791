"""Random streams as functions of (seed, purpose, round, client), and the global generators."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed.core.seeds import (
    KeyedStream,
    Purpose,
    capture_random_state,
    derive_seed,
    generator,
    preserved_random_state,
    seed_global,
)
from tests.helpers.selection import few

key = st.tuples(
    st.integers(0, 2**63), st.sampled_from(list(Purpose)), st.integers(0, 10**6), st.integers(0, 10**9)
)  # fmt: skip


def draws() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def draw_and_fail() -> None:
    draws()
    raise RuntimeError("inside")


@given(key)
def test_seed_has_63_bits_and_depends_only_on_its_key(k: tuple[int, Purpose, int, int]) -> None:
    assert 0 <= derive_seed(*k) < 2**63
    torch.rand(3)
    assert derive_seed(*k) == derive_seed(*k)
    assert torch.equal(torch.rand(4, generator=generator(*k)), torch.rand(4, generator=generator(*k)))


@given(key, key)
def test_different_keys_have_different_seeds(
    a: tuple[int, Purpose, int, int], b: tuple[int, Purpose, int, int]
) -> None:
    assert (derive_seed(*a) == derive_seed(*b)) == (a == b)


def test_neighboring_keys_do_not_collide() -> None:
    # a key written without separators would mix round 1, client 11 with round 11, client 1
    keys = [(s, p, r, c) for s in (0, 1, 11) for p in Purpose for r in (0, 1, 11, 111) for c in (0, 1, 11, 111)]
    assert len({derive_seed(*k) for k in keys}) == len(keys)


def test_seed_values_never_change_across_versions() -> None:
    # checkpoints of older versions resume with the cohorts they would have had
    assert derive_seed(0, Purpose.COHORT) == 6929971993531640619
    assert derive_seed(7, Purpose.BATCHES, 3, 5) == 6051488708998418504
    assert [p.value for p in Purpose] == [1, 2, 3, 4, 5, 6, *range(8, 26)]


@pytest.mark.parametrize("purpose", few(list(Purpose)[1:], list(Purpose)[1::5]))
def test_streams_of_different_purposes_are_uncorrelated(purpose: Purpose) -> None:
    n = 2000
    a, b = (
        torch.stack([torch.rand((), generator=generator(0, p, r)) for r in range(n)]) for p in (Purpose.COHORT, purpose)
    )
    correlation = float(torch.corrcoef(torch.stack([a, b]))[0, 1])
    assert abs(correlation) < 5 / n**0.5
    assert abs(float(b.mean()) - 0.5) < 5 * (1 / 12 / n) ** 0.5


def test_seed_global_seeds_torch_python_and_numpy() -> None:
    seed_global(2**62 + 5)
    first = draws()
    seed_global(2**62 + 5)
    assert draws() == first
    seed_global(2**62 + 6)
    assert all(a != b for a, b in zip(draws(), first, strict=True))


def test_seed_global_matches_library_seeds_except_for_numpy() -> None:
    seed_global(11)
    ours = draws()
    torch.manual_seed(11)
    random.seed(11)
    assert (float(torch.rand(())), random.random()) == ours[:2]
    np.random.seed(11)
    assert float(np.random.rand()) != ours[2]


def test_global_generators_draw_independently() -> None:
    """Two coins agree half of the time. The tolerance is 6 standard errors, or 0.04."""
    n, agree = 100, np.zeros(3)
    for client in range(n):
        seed_global(derive_seed(0, Purpose.TRAINING, 0, client))
        a, b = torch.randint(2, (50,)).numpy(), np.random.randint(2, size=50)
        c = np.array([random.getrandbits(1) for _ in range(50)])
        agree += [(a == b).mean() / n, (a == c).mean() / n, (b == c).mean() / n]
    assert abs(agree - 0.5).max() < 6 * 0.5 / (50 * n) ** 0.5


def test_captured_state_can_be_restored_repeatedly() -> None:
    seed_global(3)
    draws()
    restore = capture_random_state()
    first = draws()
    assert draws() != first
    for _ in range(2):
        restore()
        assert draws() == first


def test_preserved_state_is_restored_even_after_an_error() -> None:
    seed_global(3)
    expected = draws()
    seed_global(3)
    with preserved_random_state():
        assert draws() == expected  # entry does not seed anything
        draws()
    assert draws() == expected
    seed_global(3)
    with pytest.raises(RuntimeError, match="inside"), preserved_random_state():
        draw_and_fail()
    assert draws() == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_generator_is_seeded_and_restored() -> None:
    device = torch.device("cuda")
    seed_global(3, device)
    first = torch.rand(3, device=device)
    seed_global(3, device)
    with preserved_random_state(device):
        assert torch.equal(torch.rand(3, device=device), first)
    assert torch.equal(torch.rand(3, device=device), first)


def test_keyed_streams_repeat_and_differ_by_key_and_draw() -> None:
    one, same = KeyedStream(2**127 + 3, 18, 0, 5), KeyedStream(2**127 + 3, 18, 0, 5)
    first = one(64)
    assert first == same(64)
    assert one(64) == same(64) != first
    others = [KeyedStream(2**127 + 4, 18, 0, 5), KeyedStream(2**127 + 3, 18, 0, 15), KeyedStream(2**127 + 3, 18, 5, 0)]
    assert len({first, *(other(64) for other in others)}) == 4


def test_keyed_streams_are_uniform() -> None:
    found = KeyedStream(0).uniform(100_000)
    assert found.dtype == torch.float64
    assert bool(((found >= 0) & (found < 1)).all())
    assert float(found.mean()) == pytest.approx(0.5, abs=0.005)
    assert float(found.var()) == pytest.approx(1 / 12, rel=0.02)
    assert KeyedStream(0).uniform(0).shape == (0,)
