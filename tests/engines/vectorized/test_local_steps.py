"""Local steps are traced as a whole if possible, and match the method's."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fed import FederatedCallback
from lightning_fed.algorithms import Algorithm, FedAvg, FedDane, FedProx, Mime, MimeMVR, Scaffold, ServerOnly, SGDm
from lightning_fed.engines.vectorized.full_gradients import FullGradients
from lightning_fed.tracing.traces import Trace
from tests.helpers.engines import Ordinary, assert_agree, full_batches, run
from tests.helpers.training import data

UNEVEN = partial(data, (14, 7, 11, 6, 10, 9))  # last batches of 1 to 3 examples
ENGINES: list[tuple[str, dict[str, Any]]] = [("sequential", {}), ("vectorized", {"chunk_size": 1})]
DECAYED = partial(torch.optim.SGD, lr=0.05, weight_decay=0.01)


@pytest.fixture
def steps_taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the numbers of examples of traced batches, in order."""
    sizes: list[int] = []
    call = Trace.__call__

    def count(self: Trace, *arguments: Any) -> Any:
        sizes.append(max(len(a) for a in arguments if isinstance(a, Tensor) and a.dtype == torch.int64))
        return call(self, *arguments)

    monkeypatch.setattr(Trace, "__call__", count)
    return sizes


METHODS = [FedAvg(), Scaffold(), FedProx(mu=0.1), Mime(SGDm()), MimeMVR(a=0.5), FedDane(mu=0.1), ServerOnly()]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("algorithm", "chunk_size", "optimizer"),
    [
        pytest.param(algorithm, n, optimizer, id=f"{type(algorithm).__name__}-{n}-{decay}")
        for algorithm in METHODS
        for n in (1, 64)
        for decay, optimizer in (("plain", partial(torch.optim.SGD, lr=0.05)), ("decayed", DECAYED))
    ],
)
def test_correction_is_part_of_the_trace(
    algorithm: Algorithm, chunk_size: int, optimizer: Any, steps_taken: list[int]
) -> None:
    local = {"local_epochs": 2} if algorithm.local_work else {"local_epochs": None}
    options = {"algorithm": algorithm, "datamodule": UNEVEN, **local}
    runs = [
        run(engine, partial(Ordinary, optimizer), **more, **options)
        for engine, more in (("sequential", {}), ("vectorized", {"chunk_size": chunk_size}))
    ]
    assert steps_taken
    assert_agree(*runs)


@pytest.mark.thorough
def test_smaller_batches_are_traced_when_the_graph_is_the_same(steps_taken: list[int]) -> None:
    runs = [run(engine, datamodule=UNEVEN, algorithm=Scaffold(), **more) for engine, more in ENGINES]
    assert set(steps_taken) == {1, 2, 3, 4}
    assert_agree(*runs)


class Reshaping(Ordinary):
    """Reshapes batches to shapes that contain the number of examples."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([x.view(len(x), 2, 3), x.new_zeros(len(x), 1, 3)], 1).flatten(1)[:, :6])


RESHAPED: list[Algorithm] = [Scaffold(option="i"), FedAvg(), FedDane(mu=0.1), MimeMVR(a=0.5)]


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", RESHAPED, ids=repr)
def test_smaller_batches_are_traced_when_only_batch_size_differs(algorithm: Algorithm, steps_taken: list[int]) -> None:
    runs = [run(engine, Reshaping, datamodule=UNEVEN, algorithm=algorithm, **more) for engine, more in ENGINES]
    assert {2, 3, 4} <= set(steps_taken)
    assert_agree(*runs)


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record whether each full-batch gradient was traced."""
    found: list[bool] = []
    of_one = FullGradients.of_one

    def note(self: FullGradients, *arguments: Any) -> Any:
        gradient = of_one(self, *arguments)
        found.append(gradient is not None)
        return gradient

    monkeypatch.setattr(FullGradients, "of_one", note)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("full", [3, 64])
def test_full_batches_are_traced_when_only_batch_size_differs(full: int, passed: list[bool]) -> None:
    batches = partial(data, (14, 8, 11, 6, 9, 5), full_batch_size=full)  # no batch has a single example
    options = {"make": Reshaping, "datamodule": batches, "algorithm": FedDane(mu=0.1)}
    runs = [run(engine, **options, **more) for engine, more in ENGINES]
    assert passed
    assert all(passed)
    assert_agree(*runs)


class SizedLoss(Ordinary):
    """Its loss depends on the number of examples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y, reduction="sum") / (len(y) + 1)
        self.log("train_loss", loss)
        return loss


@pytest.mark.thorough
def test_smaller_batches_run_untraced_when_the_graph_differs(steps_taken: list[int]) -> None:
    runs = [run(engine, SizedLoss, datamodule=UNEVEN, algorithm=Mime(SGDm()), **more) for engine, more in ENGINES]
    assert set(steps_taken) == {1, 4}  # a batch of one example has a different graph
    assert_agree(*runs)


class SizedPenalty(Ordinary):
    """Its gradient at the anchor has a part that depends only on the number of examples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        penalty = torch.stack([p.square().sum() for p in self.parameters()]).sum()
        loss = F.cross_entropy(self(x), y) + penalty / len(y)
        self.log("train_loss", loss)
        return loss


@pytest.mark.thorough
def test_step_constants_are_kept_per_batch_size() -> None:
    batches = partial(data, (7, 11, 7, 15, 8, 11))  # batches of four and of three examples
    options = {"datamodule": batches, "algorithm": Mime(SGDm()), "local_epochs": 2}
    runs = [run(engine, SizedPenalty, **options, **more) for engine, more in ENGINES]
    assert_agree(*runs)


class Threshold(Ordinary):
    """Its loss differs for large batches, which small ones do not show."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y) * (2.0 if len(y) > 6 else 1.0)
        self.log("train_loss", loss)
        return loss


@pytest.mark.filterwarnings("ignore:.*gives another loss than when it was traced")
def test_size_that_changes_the_loss_is_detected_when_first_seen() -> None:
    runs = [run(engine, Threshold, datamodule=UNEVEN, algorithm=Mime(SGDm()), **more) for engine, more in ENGINES]
    assert_agree(*runs)


class Shifted(Algorithm):
    """A correction with a hyperparameter."""

    def __init__(self, shift: float = 0.1) -> None:
        self.shift = shift

    def correct(self, g: Tensor, y: Tensor, step: Any) -> Tensor:
        return g + self.shift * (y - step.x)


class Raise(FederatedCallback):
    def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
        trainer.fit_loop.settings.algorithm.shift = 0.1 * (1 + round)


@pytest.mark.thorough
def test_hyper_parameter_change_between_rounds_takes_effect() -> None:
    runs = [
        run(engine, datamodule=full_batches, algorithm=Shifted(), max_rounds=2, callbacks=[Raise()], **more)
        for engine, more in ENGINES
    ]
    assert_agree(*runs)


class LooksAtNumbers(Algorithm):
    """A correction that reads a number from a tensor, which a trace cannot record."""

    def correct(self, g: Tensor, y: Tensor, step: Any) -> Tensor:
        return g * (2.0 if float(step.lr) > 0 else 0.5)


@pytest.mark.filterwarnings("ignore:Local steps run untraced")
def test_correction_that_cannot_be_traced_runs_untraced(steps_taken: list[int]) -> None:
    runs = [run(engine, algorithm=LooksAtNumbers(), **more) for engine, more in ENGINES]
    assert not steps_taken
    assert_agree(*runs)


class Spare(Ordinary):
    """Cannot be traced, and has an unused layer that momentum and decay must not change."""

    def __init__(self) -> None:
        super().__init__(partial(torch.optim.SGD, lr=0.1, momentum=0.5, weight_decay=0.1))
        self.spare = torch.nn.Linear(3, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1.0 + 0.1 * batch_idx)


def test_unused_parameters_are_unchanged_by_untraced_steps() -> None:
    sequential, at_once = (run(engine, Spare, max_rounds=2) for engine in ("sequential", "vectorized"))
    assert_agree(sequential, at_once)
    spare = torch.cat([p.flatten() for p in at_once.lightning_module.spare.parameters()])
    torch.manual_seed(3)
    assert torch.equal(spare.float(), torch.cat([p.detach().flatten() for p in Spare().spare.parameters()]))


@pytest.mark.thorough
def test_compiled_network_runs_for_several_clients_at_once() -> None:
    class Compiled(Ordinary):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.compile(self.body, backend="eager")

    torch.compiler.reset()
    assert_agree(run("sequential", Compiled, max_rounds=1), run("vectorized", Compiled, max_rounds=1))


@pytest.mark.thorough
def test_compiled_layer_warns_why_it_is_not_traced() -> None:
    class Compiled(Ordinary):
        def __init__(self) -> None:
            super().__init__()
            self.head.compile(backend="eager")

    with pytest.warns(UserWarning, match=r"run untraced, which is slower: .*dynamo-optimized function"):
        found = run("vectorized", Compiled)
    assert_agree(run("sequential", Compiled), found)
