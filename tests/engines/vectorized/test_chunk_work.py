"""Local work on stacked parameters: what moves them, and what methods read at its end, without a module."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fed.algorithms import Algorithm, FedAvg, Scaffold
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.flat import FlatParameters
from lightning_fed.core.rounds import Run, Update
from lightning_fed.core.tracked_state import TrackedState
from lightning_fed.engines.base import OnlySequentialError, RoundInputs
from lightning_fed.engines.optimizer import FederatedOptimizer
from lightning_fed.engines.vectorized.chunk_work import ChunkWork
from lightning_fed.engines.vectorized.clients import ChunkMemory
from lightning_fed.server.participation import Participant

STEPS = (3, 3, 1)  # of each client
P = 10


class Reads(Algorithm):
    """Sends what there is to read at the end of the local work."""

    reduces = {"delta": "weighting", "path": "weighting", "rates": "weighting", "n": "weighting"}
    uses_path_gradient = True

    def init_server(self, x: Tensor) -> Any:
        return {"c": torch.ones_like(x), "d": torch.zeros_like(x)}

    def finish(self, y: Tensor, run: Run) -> Update:
        numbers = torch.stack([torch.as_tensor(v) for v in (run.num_examples, run.num_steps)])
        sent = {"delta": run.delta, "path": run.path_gradient + 0 * run.server["c"], "rates": run.lr_sum + 0 * y}
        return Update({**sent, "n": numbers.to(y.dtype)}, {"last": y})


def sgd(parameters: Any, rates: Sequence[float] = (0.1, 0.1), **options: Any) -> torch.optim.Optimizer:
    groups = [{"params": [p], "lr": rate} for p, rate in zip(parameters, rates, strict=True)]
    return torch.optim.SGD(groups, lr=0.1, **options)


def work_of(algorithm: Algorithm, optimizer: Any = sgd, chunk: Sequence[int] = STEPS) -> ChunkWork:
    """Return the work of clients that take these many steps."""
    torch.manual_seed(0)
    model = nn.Module()
    for name, shape in (("a", (2, 3)), ("b", (4,))):
        model.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.float64)))
    wrapped = FederatedOptimizer(optimizer(model.parameters()), FlatParameters(list(model.named_parameters())))
    x = wrapped.flat.y.clone()
    server = TrackedState(algorithm.init_server(x), set())
    inputs = RoundInputs(0, x, server, {}, TrackedState({}, set()), 6.0)
    members = [Participant(f"c{i}", i, 5 + i, 1, steps) for i, steps in enumerate(chunk)]
    clients = {name: torch.stack([value] * len(chunk)) for name, value in algorithm.init_client(x).items()}
    memory = ChunkMemory(wrapped.flat.layout, len(chunk), x)
    return ChunkWork(algorithm, wrapped, wrapped.plan_of(algorithm), inputs, members, clients, memory, None)


def moved(work: ChunkWork, chunk: Sequence[int] = STEPS) -> Tensor:
    """Let clients take their steps along random directions, and return the mean direction of each."""
    sums = torch.zeros_like(work.y)
    for k in range(max(chunk)):
        count = sum(steps > k for steps in chunk)
        directions = torch.randn(count, P, dtype=torch.float64)
        sums[:count] += directions
        clients = work.memory.clients(range(count))
        columns = work.layout.views(directions[0]) if count == 1 else work.layout.stacked_views(directions)
        work.move(clients, columns, frozenset())
    return sums / torch.tensor(chunk, dtype=torch.float64)[:, None]


@pytest.mark.parametrize("rates", [(0.1, 0.1), (0.1, 0.3), (0.1, 0.0), (0.0, 0.0)])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.0}], ids=str)
def test_clients_move_by_their_rates_and_the_path_is_the_mean_direction(
    rates: tuple[float, float], options: dict[str, Any]
) -> None:
    work = work_of(Reads(), partial(sgd, rates=rates, **options))
    mean = moved(work)
    steps = torch.tensor(STEPS, dtype=torch.float64)[:, None]
    rate = torch.tensor([rates[0]] * 6 + [rates[1]] * 4, dtype=torch.float64)
    delta, send, keep = work.finish()
    torch.testing.assert_close(delta, -rate * steps * mean, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(send["path"], mean, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(send["rates"], (rate * steps).expand(3, P), rtol=1e-14, atol=0)
    assert send["n"].tolist() == [[5.0, 3.0], [6.0, 3.0], [7.0, 1.0]]
    assert work.sends_delta
    assert torch.equal(keep["last"], work.shared)
    assert work.inputs.server.read == {"c"}, "what is not read need not be sent"


def test_the_path_under_another_optimizer_is_that_of_the_directions() -> None:
    work = work_of(Reads(), partial(sgd, momentum=0.9))
    mean = moved(work)
    delta, send, _ = work.finish()
    torch.testing.assert_close(send["path"], mean, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(delta[:2], -0.3 * mean[:2]), "momentum moves further"


def test_one_client_alone_comes_to_what_it_does_among_others() -> None:
    for chunk in ((3,), (3, 3, 1)):
        work = work_of(Reads(), chunk=chunk)
        generator = torch.Generator().manual_seed(9)
        for k in range(3):
            direction = torch.randn(P, dtype=torch.float64, generator=generator)
            count = sum(steps > k for steps in chunk)
            columns = work.layout.views(direction)
            if count > 1:
                columns = work.layout.stacked_views(direction.expand(count, P).contiguous())
            work.move(work.memory.clients(range(count)), columns, frozenset())
        delta, send, _ = work.finish()
        if len(chunk) == 1:
            alone = delta[0].clone(), send["path"][0].clone()
    torch.testing.assert_close(delta[0], alone[0], rtol=1e-14, atol=0)
    torch.testing.assert_close(send["path"][0], alone[1], rtol=1e-13, atol=1e-15)


def test_what_a_method_may_leave_out_of_its_messages_is_told() -> None:
    work = work_of(Scaffold())
    moved(work)
    work.finish()
    assert work.implied == ("delta_c",)


def test_a_step_is_bare_where_parameters_move_and_nothing_else_happens() -> None:
    assert work_of(FedAvg()).is_bare
    assert not work_of(FedAvg(), partial(sgd, momentum=0.9)).is_bare


def test_a_path_that_was_not_declared_is_refused() -> None:
    class Undeclared(Reads):
        uses_path_gradient = False

    work = work_of(Undeclared())
    moved(work)
    with pytest.raises(FederatedError, match="Undeclared reads run.path_gradient, but declares uses_path_gradient=Fal"):
        work.finish()


def test_an_end_that_looks_at_values_is_left_to_the_sequential_engine() -> None:
    class Looks(FedAvg):
        def finish(self, y: Tensor, run: Run) -> Update:
            return Update({"delta": run.delta * (2.0 if float(y.sum()) > 0 else 1.0)}, {})

    work = work_of(Looks())
    moved(work)
    with pytest.raises(OnlySequentialError, match=r"cannot run Looks.finish for several clients at once"):
        work.finish()
    alone = work_of(Looks(), chunk=(3,))
    moved(alone, (3,))
    assert alone.finish()[1]["delta"].shape == (1, P)
