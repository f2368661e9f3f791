"""Local work on stacked parameters, without a module: the steps, and the values that methods read at the end."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_fed.algorithms import Algorithm, FedAvg, FedNova, Mime, Scaffold
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.flat import FlatParameters
from lightning_fed.core.rounds import Run, Update
from lightning_fed.core.torch_optimizers import without_coupled_decay
from lightning_fed.core.tracked_state import TrackedState
from lightning_fed.engines.base import OnlySequentialError, RoundInputs
from lightning_fed.engines.optimizer import FederatedOptimizer
from lightning_fed.engines.vectorized.chunk_work import ChunkWork, Clipping, StackedOptimizer
from lightning_fed.engines.vectorized.clients import ChunkMemory, Clients
from lightning_fed.server.participation import Participant
from tests.helpers.engines import Ordinary, assert_agree, full_batches, refused, run
from tests.helpers.selection import covering

STEPS = (3, 3, 1)  # per client
P = 10


class Reads(Algorithm):
    """Sends all values that a method can read at the end of the local work."""

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
    """Return the work of clients with these numbers of steps."""
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
    """Move clients along random directions, and return the mean direction of each."""
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
def test_clients_move_by_their_rates_and_path_is_mean_direction(
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


def test_path_with_another_optimizer_follows_the_directions() -> None:
    work = work_of(Reads(), partial(sgd, momentum=0.9))
    mean = moved(work)
    delta, send, _ = work.finish()
    torch.testing.assert_close(send["path"], mean, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(delta[:2], -0.3 * mean[:2]), "momentum moves further"


def test_single_client_matches_its_result_in_a_chunk() -> None:
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


def test_work_reports_the_messages_a_method_can_omit() -> None:
    work = work_of(Scaffold())
    moved(work)
    work.finish()
    assert work.implied == ("delta_c",)


def test_step_is_bare_when_it_only_moves_parameters() -> None:
    assert work_of(FedAvg()).is_bare
    assert not work_of(FedAvg(), partial(sgd, momentum=0.9)).is_bare


def test_undeclared_path_gradient_is_rejected() -> None:
    class Undeclared(Reads):
        uses_path_gradient = False

    work = work_of(Undeclared())
    moved(work)
    with pytest.raises(FederatedError, match="Undeclared reads run.path_gradient, but declares uses_path_gradient=Fal"):
        work.finish()


def test_finish_that_reads_values_requires_sequential_engine() -> None:
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


ENGINES = ("sequential", "vectorized")
OPTIMIZERS = {
    "SGD momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD dampened": partial(torch.optim.SGD, lr=0.05, momentum=0.5, dampening=0.5),
    "Adam": partial(torch.optim.Adam, lr=0.01, weight_decay=0.01),
    "Adam amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "Adamax": partial(torch.optim.Adamax, lr=0.01),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "RAdam": partial(torch.optim.RAdam, lr=0.01),
}


METHODS = [FedAvg(), Scaffold(), FedNova()]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("optimizer", "algorithm"),
    [pytest.param(o, a, id=f"{o}-{type(a).__name__}") for o in OPTIMIZERS for a in METHODS],
)
def test_engines_agree_with_every_local_optimizer(optimizer: str, algorithm: Any) -> None:
    options = {"make": partial(Ordinary, OPTIMIZERS[optimizer]), "algorithm": algorithm, "max_rounds": 2}
    options["local_epochs"] = 2
    assert_agree(*(run(engine, datamodule=full_batches, **options) for engine in ENGINES))


class Stepping:
    """Three parameters of several clients, one of them a scalar: stacked, and separate for each client.

    Args:
        optimizer: Makes the local optimizer.
        count: The number of clients.
    """

    def __init__(self, optimizer: Any, count: int) -> None:
        torch.manual_seed(0)
        model = nn.Module()
        for name, shape in (("a", (3, 2)), ("b", (4,)), ("c", ())):
            model.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.float64)))
        wrapped = FederatedOptimizer(optimizer(model.parameters()), FlatParameters(list(model.named_parameters())))
        self.wrapped, layout = wrapped, wrapped.flat.layout
        self.stacked = StackedOptimizer(wrapped)
        self.y = torch.randn(count, layout.numel, dtype=torch.float64)
        self.own = [[nn.Parameter(v.clone()) for v in layout.views(row)] for row in self.y]
        self.alone = [optimizer(own) for own in self.own]
        self.clients: dict[int, Clients] = {}

    def step(self, count: int, skipped: frozenset[int] = frozenset(), solver: Any = None) -> None:
        """Let the first clients take a step along random directions."""
        layout = self.wrapped.flat.layout
        clients = self.clients.setdefault(count, Clients(self.y, range(count), layout))
        directions = torch.randn(count, layout.numel, dtype=torch.float64)
        columns = layout.views(directions[0]) if count == 1 else layout.stacked_views(directions)
        self.stacked.step(clients.views, columns, solver, skipped)
        for i in range(count):
            for k, (p, direction) in enumerate(zip(self.own[i], layout.views(directions[i]), strict=True)):
                p.grad = None if k in skipped else direction
                if solver is not None:
                    self.alone[i].state[p] = {name: value.clone() for name, value in solver[k].items()}
            with without_coupled_decay(self.alone[i]):
                self.alone[i].step()

    def assert_same(self) -> None:
        for row, own in zip(self.y, self.own, strict=True):
            expected = torch.cat([p.detach().reshape(-1) for p in own])
            torch.testing.assert_close(row, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_step_of_stacked_parameters_matches_each_client(optimizer: str) -> None:
    stepping = Stepping(OPTIMIZERS[optimizer], 4)
    for count in (4, 4, 3, 2, 2, 1, 1):  # clients with fewer steps end first
        stepping.step(count)
    stepping.assert_same()


def test_parameter_without_gradient_is_unchanged() -> None:
    stepping = Stepping(partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5), 2)
    before = stepping.y.clone()
    stepping.step(2, frozenset([1]))
    assert torch.equal(stepping.y[:, 6:10], before[:, 6:10])
    stepping.step(2)
    stepping.assert_same()


def test_method_statistics_are_loaded_only_for_each_step() -> None:
    stepping = Stepping(partial(torch.optim.SGD, lr=0.1, momentum=0.9), 3)
    shapes = stepping.wrapped.flat.layout.shapes
    solver = [{"momentum_buffer": torch.full(shape, 0.5, dtype=torch.float64)} for shape in shapes]
    for _ in range(3):
        stepping.step(3, solver=solver)
    stepping.assert_same()


def test_step_counts_are_not_mistaken_for_scalar_parameter_state() -> None:
    stepping = Stepping(partial(torch.optim.NAdam, lr=0.1), 3)
    solver = []
    for shape in stepping.wrapped.flat.layout.shapes:  # one of them is the shape of a scalar
        own = {name: torch.full(shape, 0.5, dtype=torch.float64) for name in ("exp_avg", "exp_avg_sq")}
        solver.append({**own, "step": torch.tensor(2.0), "mu_product": torch.tensor(0.7)})
    for count in (3, 2, 1):
        stepping.step(count, solver=solver)
    stepping.assert_same()


def test_gradients_are_clipped_by_total_norm_or_by_value() -> None:
    grads = [torch.tensor([3.0, 0.0]), torch.tensor([[-4.0]])]
    by_norm = Clipping(1.0, "norm", corrected=False)(grads)
    torch.testing.assert_close(torch.cat([g.flatten() for g in by_norm]), torch.tensor([0.6, 0.0, -0.8]))
    by_value = Clipping(3.5, "value", corrected=False)(grads)
    assert [g.tolist() for g in by_value] == [[3.0, 0.0], [[-3.5]]]
    assert all(map(torch.equal, Clipping(6.0, "norm", corrected=False)(grads), grads))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("on", "clip", "chunk_size"),
    covering(
        ["gradient", "corrected"],
        [{"gradient_clip_val": 0.05}, {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}],
        [None, 1],
    ),
)
def test_engines_agree_with_gradient_clipping(on: str, clip: dict[str, Any], chunk_size: int | None) -> None:
    options = {"algorithm": Scaffold(), "gradient_clip_on": on, "datamodule": full_batches, "max_rounds": 2, **clip}
    assert_agree(run("sequential", **options), run("vectorized", chunk_size=chunk_size, **options))


def test_engines_agree_with_per_group_learning_rates() -> None:
    def groups(params: Any) -> torch.optim.Optimizer:
        params = list(params)
        return torch.optim.SGD([{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.0}], weight_decay=0.1)

    make = partial(Ordinary, groups)
    assert_agree(*(run(engine, make, full_batches, algorithm=Scaffold()) for engine in ENGINES))


class Scaled(Ordinary):
    """Has a scalar parameter."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", [torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adam])
def test_scalar_statistics_are_not_mistaken_for_per_client_ones(optimizer: Any) -> None:
    make = partial(Scaled, partial(optimizer, lr=0.01))
    assert_agree(*(run(engine, make, full_batches, algorithm=Mime()) for engine in ENGINES))


class MySgd(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        """Move against the gradient, normalized for each parameter."""
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= group["lr"] * p.grad / p.grad.norm()


class Tuned(torch.optim.SGD):
    """Not known to be elementwise, though it is."""


def hooked_sgd(where: str, params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params, lr=0.1)
    getattr(optimizer, f"register_step_{where}_hook")(lambda *_: None)
    return optimizer


NOT_ELEMENTWISE: dict[str, tuple[Callable[..., Any], str]] = {
    "of the user's own": (MySgd, "the step of MySgd is not elementwise"),
    "a subclass": (partial(Tuned, lr=0.1), "the step of Tuned is not elementwise, or not known to be"),
    "Adafactor": (torch.optim.Adafactor, "the step of Adafactor is not elementwise"),
    "a hook before the step": (partial(hooked_sgd, "pre"), "step hooks"),
    "a hook after the step": (partial(hooked_sgd, "post"), "step hooks"),
}


@pytest.mark.parametrize("name", NOT_ELEMENTWISE)
def test_local_optimizers_that_mix_clients_are_rejected(name: str) -> None:
    make, reason = NOT_ELEMENTWISE[name]
    refused(partial(Ordinary, make), reason)


def test_global_optimizer_step_hooks_are_rejected() -> None:
    hook = register_optimizer_step_post_hook(lambda *_: None)
    try:
        refused(Ordinary, "step hooks")
    finally:
        hook.remove()


def test_accumulated_gradients_are_rejected() -> None:
    refused(Ordinary, "accumulate_grad_batches=2", accumulate_grad_batches=2)
