import pytest
import torch

from lightning_fed.algorithms import SGD, Mime, MimeMVR
from lightning_fed.core.errors import FederatedError
from tests.helpers import Round, play, quadratic

X = torch.zeros(1, dtype=torch.float64)
GRAD = quadratic((1.0, 2.0), (-2.0, 4.0))
ROUNDS = [Round({0: (0, 1), 1: (0, 1)}), Round({0: (0,), 1: (0,)})]


@pytest.mark.parametrize(
    ("anchor", "v_mean"),
    [
        # at x_1 = -0.203125 with x_prev = 0 and m = 0.5: g(y) - g(A) + (g(C) + m) / 2
        ("eq15", 0.5 * 1.0 + 0.25),
        ("lemma9", 1.5 * -0.203125 + 0.5 * 1.0 + 0.25),
        ("current", 0.5 * 0.6953125 + 0.25),
    ],
)
def test_two_rounds_match_hand_computed_values(anchor, v_mean):
    played = play(MimeMVR(a=0.5, anchor=anchor, m0="zeros"), GRAD, (1, 1), X, ROUNDS)
    # round 1, c = 1, m = 0, both points at x: v = 0.5 twice, then 0.375 for client 0 and 0.25 for client 1
    assert played.x[0].item() == -0.203125
    assert played.server[0]["m"].item() == 0.5
    assert played.server[0]["x_prev"].item() == 0.0
    assert played.x[1].item() == -0.203125 - 0.25 * v_mean
    # m = 0.5 g + 0.5 m + 0.5 (g - 1) with g = 1.5 x_1 + 1 = 0.6953125
    assert played.server[1]["m"].item() == 0.34765625 + 0.25 - 0.15234375
    assert played.server[1]["x_prev"].item() == -0.203125


def test_m_starts_at_first_cohort_gradient():
    # v = 0.5 + 0.5 for both, then 0.875 - ... : -0.25 + 1 and -0.5 + 1
    played = play(MimeMVR(a=0.5), GRAD, (1, 1), X, ROUNDS[:1])
    assert played.x[0].item() == (-0.25 - 0.25 * 0.75 - 0.25 - 0.25 * 0.5) / 2
    assert played.server[0]["m"].item() == 1.0


def test_current_anchor_with_a_one_matches_mime():
    rounds = [*ROUNDS, Round({1: (0, 1)})]
    ours, theirs = (play(a, GRAD, (1, 3), X, rounds).x for a in (MimeMVR(a=1, anchor="current"), Mime(SGD())))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=0)


def test_x_prev_is_a_copy():
    x, algorithm = X + 3, MimeMVR(a=0.5)
    server = algorithm.init_server(x)
    assert server["x_prev"].item() == 3.0
    assert server["x_prev"].data_ptr() != x.data_ptr()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MimeMVR(a=1.5), r"MimeMVR\(a=1.5\): a must be a finite number in \[0, 1\]"),
        (lambda: MimeMVR(a=0.5, anchor="eq14"), r"anchor must be 'eq15' or 'lemma9' or 'current'"),
        (lambda: MimeMVR(a=0.5, m0="zero"), r"m0 must be 'grad' or 'zeros'"),
    ],
)
def test_invalid_hyperparameters_are_rejected(make, message):
    with pytest.raises(FederatedError, match=message):
        make()
