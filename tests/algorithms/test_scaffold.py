import pytest
import torch

from lightning_fed.algorithms import FedAvg, Scaffold
from lightning_fed.core.errors import FederatedError
from tests.helpers import Round, play, quadratic

X = torch.zeros(1, dtype=torch.float64)
GRAD = quadratic((1.0, 2.0, 0.0, 0.0), (-2.0, 4.0, 0.0, 0.0))
SIZES = (1, 3, 5, 7)
ROUNDS = [Round({0: (0, 1), 1: (0, 1)}), Round({0: (0,)})]


def test_option_ii_matches_hand_computed_values():
    played = play(Scaffold(), GRAD, SIZES, X, ROUNDS)
    # round 1: y = 0.875 and -1.5, paths -1.75 and 3. The means are uniform, and c moves by |S|/N = 1/2 of the mean
    assert played.x[0].item() == -0.3125
    assert {i: s["c_i"].item() for i, s in played.clients[0].items()} == {0: -1.75, 1: 3.0}
    assert played.server[0]["c"].item() == 0.3125
    # round 2: v = -2.3125 - c_0 + c = -0.25; c_0 becomes the gradient at x, client 1 keeps its own
    assert played.x[1].item() == -0.25
    assert {i: s["c_i"].item() for i, s in played.clients[1].items()} == {0: -2.3125, 1: 3.0}
    assert played.server[1]["c"].item() == 0.3125 + (-2.3125 + 1.75) / 4


def test_option_i_matches_hand_computed_values():
    played = play(Scaffold(option="i"), GRAD, SIZES, X, ROUNDS)
    assert played.x[0].item() == -0.3125
    assert {i: s["c_i"].item() for i, s in played.clients[0].items()} == {0: -2.0, 1: 4.0}
    assert played.server[0]["c"].item() == 0.5
    # round 2: v = -2.3125 + 2 + 0.5 = 0.1875; c moves by a quarter of the change of c_0, from -2 to -2.3125
    assert played.x[1].item() == -0.3125 - 0.25 * 0.1875
    assert {i: s["c_i"].item() for i, s in played.clients[1].items()} == {0: -2.3125, 1: 4.0}
    assert played.server[1]["c"].item() == 0.5 - 0.3125 / 4


def test_gradient_initialization_matches_hand_computed_values():
    played = play(Scaffold(initial="gradient"), GRAD, SIZES, X, ROUNDS)
    # round 1: c_0 = -2, c_1 = 4 and c = (-2 + 4) / 4; v is c in the first step, then 0.5 + a_i (y - x)
    first = {0: 0.5 - 0.125, 1: 0.5 - 0.25}
    assert played.x[0].item() == -0.25 * (0.5 + sum(first.values()) / 2)
    # c_i becomes the mean of the client's own gradients, and c becomes the sum of all c_i over N
    own = {0: (-2.0 - 2.125) / 2, 1: (4.0 + 3.75) / 2}
    assert {i: s["c_i"].item() for i, s in played.clients[0].items()} == own
    assert played.server[0]["c"].item() == sum(own.values()) / 4
    # round 2 computes no initial gradients: it continues as from any start
    v = played.x[0].item() - 2.0 - own[0] + played.server[0]["c"].item()
    assert played.x[1].item() == played.x[0].item() - 0.25 * v


def test_clients_joining_later_start_at_zero():
    played = play(Scaffold(initial="gradient"), GRAD, SIZES, X, [Round({0: (0,)}), Round({2: (0,)})])
    # client 2 has the gradient 0 everywhere, so it steps along c only
    assert played.x[1].item() == played.x[0].item() - 0.25 * played.server[0]["c"].item()


def test_options_include_initial_only_if_not_default():
    # older checkpoints have no "initial" and must still resume
    assert Scaffold().options() == {"option": "ii"}
    assert Scaffold("i", "gradient").options() == {"option": "i", "initial": "gradient"}


@pytest.mark.parametrize("initial", ["zero", "gradient"])
def test_server_variate_is_the_mean_of_client_variates(initial):
    generator = torch.Generator().manual_seed(0)
    cohorts = [torch.randperm(4, generator=generator)[:2].tolist() for _ in range(6)]
    rounds = [Round(dict.fromkeys(cohort, (0, 1))) for cohort in cohorts]
    played = play(Scaffold(initial=initial), GRAD, SIZES, X, rounds)
    for server, clients in zip(played.server, played.clients, strict=True):
        want = sum(state["c_i"] for state in clients.values()) / 4
        torch.testing.assert_close(server["c"], want, rtol=1e-10, atol=1e-14)


def test_single_client_matches_fedavg():
    grad, rounds = quadratic((2.0,), (3.0,)), [Round({0: (0, 1, 2)})] * 4
    ours, theirs = (play(a, grad, (5,), X, rounds, lr=0.125).x for a in (Scaffold(), FedAvg()))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_reaches_joint_optimum_where_fedavg_does_not():
    grad, rounds = quadratic((1.0, 3.0), (-4.0, 0.0)), [Round({0: (0,) * 8, 1: (0,) * 8})] * 200
    ours, theirs = (play(a, grad, (1, 1), X, rounds, lr=0.0625).x[-1].item() for a in (Scaffold(), FedAvg()))
    assert ours == pytest.approx(1.0, rel=1e-10)
    assert abs(theirs - 1.0) > 0.05


def test_unknown_initial_is_rejected():
    with pytest.raises(FederatedError, match=r"Scaffold\(initial='gradients'\): initial must be 'zero' or 'gradient'"):
        Scaffold(initial="gradients")


def test_unknown_option_is_rejected():
    with pytest.raises(FederatedError, match=r"Scaffold\(option='II'\): option must be 'ii' or 'i'"):
        Scaffold(option="II")
