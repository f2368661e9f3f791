"""The state that outlives a round is committed, saved and loaded as a whole, or refused by name."""

import copy
import io
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fed.algorithms import Algorithm, FedAvg, FedDyn, FedProx, Mime, Scaffold, SGDm
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.flat import Layout
from lightning_fed.core.rounds import Cohort
from lightning_fed.server.server import Server, plain_sgd, resolve_weighting
from tests.helpers.training import same

IDS = ["a", "b", "c", "d"]
MOMENTUM = partial(torch.optim.SGD, lr=0.5, momentum=0.5)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def server(
    algorithm: Algorithm | None = None,
    x: Tensor | None = None,
    ids: Sequence[Any] = IDS,
    seed: int = 3,
    build: Any = MOMENTUM,
    schedule: Any = None,
) -> Server:
    x = vector(1.0, 2.0) if x is None else x
    return Server(Scaffold() if algorithm is None else algorithm, x, Layout([x.shape]), build, schedule, ids, seed)


def close(s: Server, delta: float, delta_c: float, models: Tensor | None = None) -> float:
    """Close a round of SCAFFOLD in which client 1 took part."""
    s.clients.stage(1, {"c_i": vector(delta_c, delta_c)})
    mean = {"delta": vector(delta, delta), "delta_c": vector(delta_c, delta_c)}
    norm = s.close_round(mean, models, s.state, Cohort(1, 4, s.round), {"count": torch.tensor(s.round + 1)})
    s.count([1], bytes_up=10, bytes_down=20)
    return norm


# ------------------------------------------------------------------ a round


def test_round_updates_model_states_and_buffers_together() -> None:
    s = server()
    assert s.round == 0
    norm = close(s, delta=2.0, delta_c=3.0)
    assert s.x.tolist() == [2.0, 3.0]  # rate 1/2
    assert norm == pytest.approx(2**0.5, rel=1e-12)
    assert s.state["c"].tolist() == [3.0, 3.0]
    assert s.client_state(1)["c_i"].tolist() == [3.0, 3.0]
    assert int(s.buffers["count"]) == 1
    assert s.round == 1
    close(s, delta=2.0, delta_c=-1.0)
    assert s.x.tolist() == [3.5, 4.5]  # the momentum is 2 + 0.5 * 2
    assert s.state["c"].tolist() == [2.0, 2.0]
    assert s.round == 2


def test_client_states_are_committed_when_the_round_closes() -> None:
    s = server()
    before = copy.deepcopy(s.state_dict())
    s.clients.stage(1, {"c_i": vector(9.0, 9.0)})
    assert s.client_state(1)["c_i"].tolist() == [0.0, 0.0]
    s.clients.discard()
    assert same(s.state_dict(), before)
    close(s, delta=1.0, delta_c=1.0)
    assert not same(s.state_dict(), before)


def test_client_without_state_gets_a_fresh_state() -> None:
    s = server()
    fresh = s.client_state(2)["c_i"]
    assert fresh.tolist() == [0.0, 0.0]
    fresh.fill_(7.0)
    assert s.client_state(2)["c_i"].tolist() == [0.0, 0.0]
    assert len(s.clients) == 0


def test_empty_round_is_counted_and_changes_nothing() -> None:
    s = server()
    close(s, delta=1.0, delta_c=1.0)
    before = copy.deepcopy(s.state_dict())
    assert s.close_round({}, None, s.state, Cohort(0, 4, 1), s.buffers) == 0.0
    assert s.round == 2
    assert same({**s.state_dict(), "round": 1}, before)


def test_empty_round_advances_the_server_schedule() -> None:
    s = server(schedule=partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5))
    s.close_round({}, None, s.state, Cohort(0, 4, 0), s.buffers)
    close(s, delta=2.0, delta_c=0.0)
    assert s.x.tolist() == [1.5, 2.5]  # at rate 1/4, not 1/2


def test_plain_sgd_uses_the_mean_model_only_for_raw_directions() -> None:
    class Half(Scaffold):
        def update_server(self, x: Tensor, server: Any, mean: Any, cohort: Any) -> Any:
            direction, state = super().update_server(x, server, mean, cohort)
            return 0.5 * direction, state

    for method, want in ((Scaffold(), 50.0), (Half(), 2.0)):
        s = server(method, build=plain_sgd)
        close(s, delta=2.0, delta_c=0.0, models=vector(50.0, 50.0))
        assert float(s.x[0]) == want


def test_server_states_are_detached() -> None:
    class Grown(FedAvg):
        def init_server(self, x: Tensor) -> dict[str, Tensor]:
            return {"m": torch.zeros_like(x)}

        def update_server(self, x: Tensor, server: Any, mean: Any, cohort: Any) -> Any:
            return mean["delta"], {"m": (2 * x.clone().requires_grad_())}

    s = server(Grown())
    s.close_round({"delta": vector(1.0, 1.0)}, None, s.state, Cohort(1, 4, 0), {})
    assert s.state["m"].tolist() == [2.0, 4.0]
    assert not s.state["m"].requires_grad


def test_initial_state_does_not_alias_the_parameters() -> None:
    class Keeps(FedAvg):
        def init_server(self, x: Tensor) -> dict[str, Tensor]:
            return {"first": x}

    x = vector(1.0, 2.0)
    s = server(Keeps(), x)
    s.close_round({"delta": vector(1.0, 1.0)}, None, s.state, Cohort(1, 4, 0), {})
    assert s.state["first"].tolist() == [1.0, 2.0]
    assert x.tolist() == [1.0, 2.0]


def test_method_chooses_the_evaluated_model() -> None:
    class Doubled(FedAvg):
        def evaluate_at(self, x: Tensor, server: Any) -> Tensor:
            return 2 * x

    assert torch.equal(server().evaluation_x(), server().x)
    assert server(Doubled()).evaluation_x().tolist() == [2.0, 4.0]


def test_totals_count_distinct_clients_and_all_bytes() -> None:
    s = server()
    s.count([0, 2], bytes_up=5, bytes_down=7)
    s.count([2, 3], bytes_up=1, bytes_down=2)
    s.count([], bytes_up=0, bytes_down=0)
    assert (s.seen, s.bytes_up, s.bytes_down) == (3, 6, 9)


# ------------------------------------------------------------------ saved and loaded


def saved(s: Server) -> dict[str, Any]:
    """Return the state after a round trip through a file with only plain containers and tensors."""
    file = io.BytesIO()
    torch.save(s.state_dict(), file)
    file.seek(0)
    return dict(torch.load(file, weights_only=True))


@pytest.mark.parametrize("ids", [IDS, range(4), [3, "x", 1, 0]], ids=str)
def test_loaded_server_continues_with_identical_bits(ids: Sequence[Any]) -> None:
    straight, first, second = (server(ids=ids) for _ in range(3))
    for r in range(4):
        close(straight, r + 1.0, r - 2.0)
    for r in range(2):
        close(first, r + 1.0, r - 2.0)
    close(second, 100.0, 100.0)
    second.clients.stage(0, {"c_i": vector(5.0, 5.0)})
    second.load_state_dict(saved(first))
    assert same(saved(second), saved(first))
    for r in range(2, 4):
        close(second, r + 1.0, r - 2.0)
    assert same(saved(second), saved(straight))
    assert second.seen == 1
    assert second.clients.get(0) is None


def test_optimizer_statistics_of_another_dtype_are_loaded_unrounded() -> None:
    """NAdam multiplies numbers in float32, and PyTorch loads them in the parameters' dtype."""
    build = partial(torch.optim.NAdam, lr=0.1)
    straight, first, second = (server(build=build) for _ in range(3))
    for r in range(5):
        close(straight, r + 1.0, 0.0)
    for r in range(2):
        close(first, r + 1.0, 0.0)
    second.load_state_dict(saved(first))
    for r in range(2, 5):
        close(second, r + 1.0, 0.0)
    assert same(saved(second), saved(straight))


def test_saved_state_does_not_change_with_the_run() -> None:
    s = server()
    close(s, 1.0, 1.0)
    kept = s.state_dict()
    before = copy.deepcopy(kept)
    close(s, 2.0, 2.0)
    assert same(kept["state"], before["state"])
    assert same(kept["client_states"], before["client_states"])
    assert same(kept["step"]["x"], before["step"]["x"])
    assert same(kept["seen"], before["seen"])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"algorithm": FedProx(mu=0.1)}, "checkpoint's method is 'Scaffold', this run's is 'FedProx'"),
        ({"algorithm": Scaffold(option="i")}, "method options is {'option': 'ii'}, this run's is {'option': 'i'}"),
        ({"ids": ["a", "b", "c"]}, r"client list is \['a', 'b', 'c', 'd'\], this run's is \['a', 'b', 'c'\]"),
        ({"ids": ["b", "a", "c", "d"]}, "client list is"),
        ({"ids": range(4)}, r"client list is \['a', 'b', 'c', 'd'\], this run's is 4"),
        ({"seed": 4}, "seed is 3, this run's is 4"),
        ({"x": torch.zeros(1234, dtype=torch.float64)}, "holds 2 trainable parameters, the model has 1,234"),
    ],
    ids=["method", "options", "fewer", "order", "range", "seed", "size"],
)
def test_checkpoint_of_another_run_is_rejected(other: dict[str, Any], message: str) -> None:
    checkpoint = saved(server())
    s = server(**other)
    before = copy.deepcopy(s.state_dict())
    with pytest.raises(FederatedError, match=message):
        s.load_state_dict(checkpoint)
    assert same(s.state_dict(), before)  # nothing is half loaded


def test_checkpoint_with_other_base_optimizer_options_is_rejected() -> None:
    checkpoint = saved(server(Mime(base=SGDm(beta=0.9))))
    with pytest.raises(FederatedError, match="method options"):
        server(Mime(base=SGDm(beta=0.8))).load_state_dict(checkpoint)
    server(Mime(base=SGDm(beta=0.9))).load_state_dict(checkpoint)


def test_saved_seed_is_used_if_none_is_given() -> None:
    s = server(seed=0)
    s.load_state_dict(saved(server(seed=3)), any_seed=True)
    assert s.seed == 3


def test_any_seed_still_rejects_other_mismatches() -> None:
    with pytest.raises(FederatedError, match="client list"):
        server(ids=range(4)).load_state_dict(saved(server()), any_seed=True)


def test_long_client_lists_are_abbreviated_in_errors() -> None:
    ids = [f"client {i}" for i in range(1000)]
    with pytest.raises(FederatedError, match=r"'client 4.*\.\.\., this run's is") as error:
        server().load_state_dict(saved(server(ids=ids)))
    assert len(str(error.value)) < 500


# ------------------------------------------------------------------ weighting


@pytest.mark.parametrize(
    ("algorithm", "weighting", "want"),
    [
        (FedAvg(), None, "examples"),
        (FedAvg(), "uniform", "uniform"),
        (FedAvg(), "steps", "steps"),
        (Scaffold(), None, Scaffold().default_weighting),
    ],
    ids=str,
)
def test_weighting_defaults_to_that_of_the_method(algorithm: Algorithm, weighting: Any, want: str) -> None:
    assert resolve_weighting(algorithm, weighting) == want


@pytest.mark.parametrize("weighting", ["size", "", 3, FedAvg])
def test_unknown_weighting_is_rejected(weighting: Any) -> None:
    class Unweighted(FedAvg):
        default_weighting = weighting

    for algorithm, given in ((FedAvg(), weighting), (Unweighted(), None)):
        with pytest.raises(FederatedError, match=r"one of \('examples', 'uniform', 'steps'\) or a function.*found"):
            resolve_weighting(algorithm, given)


@pytest.mark.parametrize("algorithm", [Scaffold(), FedDyn(alpha=0.1)], ids=repr)
def test_methods_with_fixed_averages_reject_a_weighting(algorithm: Algorithm) -> None:
    name = type(algorithm).__name__
    with pytest.raises(FederatedError, match=f"weighting='examples' does not apply to {name}: .*has no weighted form"):
        resolve_weighting(algorithm, "examples")
