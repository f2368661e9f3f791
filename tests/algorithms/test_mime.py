import pytest
import torch

from lightning_fed.algorithms import SGD, Adam, CMime, FedAvg, Mime, MimeLite, RMSProp, SGDm
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import Cohort, Step
from tests.helpers import Round, play, quadratic

X = torch.zeros(1, dtype=torch.float64)
GRAD = quadratic((1.0, 2.0), (-2.0, 4.0))
TWICE = Round({0: (0, 1), 1: (0, 1)})
ROUNDS = [TWICE, Round({1: (0, 1, 2)}), TWICE]


@pytest.mark.parametrize(
    ("algorithm", "ys"),
    [
        # c = -2 / 4 + 3 * 4 / 4 = 2.5, m = 0 is frozen: directions are half of 2.5 and 2.1875, or of 2.5 and 1.875
        (Mime(SGDm(0.5)), (-0.25 * (1.25 + 1.09375), -0.25 * (1.25 + 0.9375))),
        # half of -2 and -1.75, or of 4 and 3
        (MimeLite(SGDm(0.5)), (0.25 * (1.0 + 0.875), -0.25 * (2.0 + 1.5))),
        # like Mime, but the second direction adds half of the updated m = 1.25
        (CMime(SGDm(0.5)), (-0.25 * (1.25 + 1.71875), -0.25 * (1.25 + 1.5625))),
    ],
    ids=repr,
)
def test_one_round_matches_hand_computed_values(algorithm, ys):
    played = play(algorithm, GRAD, (1, 3), X, [TWICE])
    assert played.x[0].item() == 0.25 * ys[0] + 0.75 * ys[1]
    assert played.server[0]["m"].item() == 1.25  # V uses c at the old x


def test_frozen_statistics_take_effect_in_the_next_round():
    # x_1 = -0.5390625, m = 1.25; one client, one step: half of g = 2 x_1 + 4 plus half of m
    played = play(MimeLite(SGDm(0.5)), GRAD, (1, 3), X, [TWICE, Round({1: (0,)})])
    assert played.x[0].item() == -0.5390625
    assert played.x[1].item() == -0.5390625 - 0.25 * (0.5 * 2.921875 + 0.5 * 1.25)


@pytest.mark.parametrize(("algorithm", "same"), [(MimeLite(SGD()), FedAvg()), (CMime(SGD()), Mime(SGD()))], ids=repr)
def test_sgd_base_equals_simpler_method(algorithm, same):
    ours, theirs = (play(a, GRAD, (1, 3), X, ROUNDS).x for a in (algorithm, same))
    assert ours == theirs


def test_warm_start_uses_first_cohort_gradient():
    # c = 2.5: v = 6.25 divides by 2.5 + eps in the first step. Later, only V updates v
    played = play(Mime(RMSProp(0.5, eps=0.5, v0="grad", stats="old")), GRAD, (1, 3), X, [Round({0: (0,), 1: (0,)})] * 2)
    x = -0.25 * 2.5 / 3.0
    assert played.x[0].item() == pytest.approx(x, rel=1e-14)
    assert played.server[0]["v"].item() == 6.25
    c = (1 * 0.25 + 2 * 0.75) * x + 2.5
    assert played.x[1].item() == pytest.approx(x - 0.25 * c / 3.0, rel=1e-14)


def test_user_optimizer_is_mimicked_without_base():
    seen = []

    def advance_solver(state, g, x):
        seen.append((dict(state), g.item(), x.item()))
        return {"solver.0.momentum_buffer": g.clone()}

    state = {"solver.0.momentum_buffer": torch.tensor([3.0])}
    cohort = Cohort(1, 1, 0, {"x": torch.tensor([2.5])}, advance_solver=advance_solver)
    step = Step(X, {}, {}, {}, torch.tensor([1.0]), {}, {"x": torch.tensor([2.5])}, 1, 1, 0.1)
    for algorithm, direction in ((Mime(), 3.5), (MimeLite(), 2.0)):
        assert algorithm.uses_solver_state
        assert algorithm.init_server(X) == {}
        assert algorithm.begin_round(X, state, cohort) is state
        assert algorithm.solver_state(state, {}) is state
        assert algorithm.correct(torch.tensor([2.0]), X, step).item() == direction
        delta, server = algorithm.update_server(X + 7, {}, {"delta": X}, cohort)
        assert delta is X
        assert server == {"solver.0.momentum_buffer": torch.tensor([2.5])}
    assert seen == [({}, 2.5, 7.0)] * 2


def test_user_optimizer_keeps_no_state_with_base():
    algorithm = Mime(SGDm())
    assert not algorithm.uses_solver_state
    assert algorithm.solver_state(algorithm.init_server(X), {}) == {}


def test_engine_without_user_optimizer_is_rejected():
    with pytest.raises(FederatedError, match=r"Mime\(\) mimics the optimizer .* Pass base=SGDm\(\)"):
        Mime().update_server(X, {}, {"delta": X}, Cohort(1, 1, 0, {"x": X}))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mime(base=Adam), r"Mime\(base=<class .*\): base must be an instance of SGD"),
        (lambda: MimeLite(base=torch.optim.SGD([X.clone().requires_grad_()])), "leave base out and return it"),
        (lambda: CMime(), r"CMime\(base=None\): .* Pass base=SGDm\(\)"),
    ],
)
def test_invalid_base_is_rejected(make, message):
    with pytest.raises(FederatedError, match=message):
        make()
