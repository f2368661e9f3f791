"""Results of the papers' theory for the clients' constants."""

import math

import pytest

from lightning_fed.lab.diagnosis.theory import mime_mvr, suggest
from tests.helpers.measured import of_quadratics


def test_mime_mvr_uses_the_smallest_of_the_three_bounds() -> None:
    given = {"F": 1.0, "G": 1.0, "delta": 0.1, "L": 1.0, "K": 10, "S": 10, "T": 100}
    rate, a = mime_mvr(**given)
    assert rate == pytest.approx((10 / (100 * 0.01)) ** (1 / 3) / 150)
    assert a == pytest.approx(1536 * rate**2)  # delta K = 1
    assert mime_mvr(**{**given, "L": 1e3})[0] == 1e-3
    assert mime_mvr(**{**given, "G": 1e-9}) == (pytest.approx(1 / 40), pytest.approx(0.96))
    assert mime_mvr(**{**given, "delta": 0.0}) == (1.0, 0.0)


def test_theory_matches_quadratics() -> None:
    t = suggest(of_quadratics(), K=4, S=1, T=100, best_loss=-8.0)
    assert (t.useful_steps, t.ceiling, t.client_ceiling) == pytest.approx((2.0, 0.5, 1 / 3))
    assert t.batches == pytest.approx(2.0 / 2)  # 4 steps of 1 client
    assert t.drawing == pytest.approx(11.0)  # 1 of 2 clients
    assert t.lower_bound == pytest.approx(11.0**2 / (2 * 100**2))
    assert (t.mvr_rate, t.mvr_a) == pytest.approx(mime_mvr(F=9, G=11, delta=1, L=2, K=4, S=1, T=100))
    assert math.isnan(suggest(of_quadratics(), 4, 1, None, 0.0).mvr_a)
