import pytest
import torch

from lightning_fed.algorithms import FedDyn
from lightning_fed.core.errors import FederatedError
from tests.helpers import Round, play, quadratic

X = torch.zeros(1, dtype=torch.float64)
GRAD = quadratic((1.0, 2.0, 0.0, 0.0), (-2.0, 4.0, 0.0, 0.0))
ROUNDS = [Round({0: (0,), 1: (0,)}), Round({0: (0, 1)})]


@pytest.mark.parametrize("evaluate", ["theta", "mean"])
def test_two_rounds_match_hand_computed_values(evaluate):
    algorithm = FedDyn(alpha=0.5, evaluate=evaluate)
    played = play(algorithm, GRAD, (1, 3, 1, 1), X, ROUNDS)
    # round 1: y = 0.5 and -1, and d = (0.5 - 1) / N with N = 4. The mean is uniform
    assert {i: s["d_i"].item() for i, s in played.clients[0].items()} == {0: 0.5, 1: -1.0}
    assert played.server[0]["d"].item() == -0.125
    assert played.x[0].item() == -0.25 - 0.125
    # round 2: v = -2.375 + 0.25, then -1.84375 + 0.5 (0.53125 + 0.5)
    y = -0.375 + 0.25 * 2.125 + 0.25 * 1.328125
    assert played.clients[1][0]["d_i"].item() == 0.5 + y + 0.375
    assert played.server[1]["d"].item() == -0.125 + (y + 0.375) / 4
    assert played.x[1].item() == y - 0.125 + (y + 0.375) / 4
    shown = algorithm.evaluate_at(played.x[1], played.server[1]).item()
    assert shown == (y if evaluate == "mean" else played.x[1].item())


def test_evaluation_mean_starts_at_x_and_is_kept_on_request():
    assert FedDyn(alpha=1, evaluate="mean").init_server(X + 3)["mean"].item() == 3.0
    assert set(FedDyn(alpha=1).init_server(X)) == {"d"}


def test_inverse_size_scales_alpha():
    # the mean n is 2, client 0 has n = 1 and client 1 has n = 3: alpha = 1 and 1/3 instead of 0.5
    algorithm = FedDyn(alpha=0.5, alpha_scaling="inverse_size")
    assert algorithm.uses_mean_examples
    assert not FedDyn(alpha=0.5).uses_mean_examples
    played = play(algorithm, GRAD, (1, 3, 2, 2), X, [Round({0: (0, 1), 1: (0, 1)})])
    y_0 = 0.5 - 0.25 * (-1.5 + 1.0 * 0.5)
    y_1 = -1.0 - 0.25 * (2.0 + 1 / 3 * -1.0)
    assert {i: s["d_i"].item() for i, s in played.clients[0].items()} == pytest.approx({0: y_0, 1: y_1}, rel=1e-14)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedDyn(alpha=0), r"FedDyn\(alpha=0\): alpha must be a finite number in \(0, inf\)"),
        (lambda: FedDyn(alpha=1, alpha_scaling="size"), r"alpha_scaling must be 'none' or 'inverse_size'"),
        (lambda: FedDyn(alpha=1, evaluate="x"), r"evaluate must be 'theta' or 'mean'"),
    ],
)
def test_invalid_hyperparameters_are_rejected(make, message):
    with pytest.raises(FederatedError, match=message):
        make()
