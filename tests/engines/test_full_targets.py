"""Steps on batches all of whose targets count leave out the counting, and give the same bits; others do count."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.algorithms import Algorithm, FedAvg, Mime, Scaffold, SGDm
from lightning_fed.engines import row_batches
from lightning_fed.engines.batch_groups import Lookup
from lightning_fed.engines.full_targets import where_all_count
from lightning_fed.engines.stacked_losses import use_nll_kernels
from lightning_fed.engines.traces import TracedStep
from tests.engines.test_stacked_losses import CLASSES, Loss, batch, stacked, traced
from tests.helpers.engines import Ordinary, assert_agree, run
from tests.helpers.selection import few
from tests.helpers.training import classification

aten = torch.ops.aten


def step_of(loss: Loss) -> fx.GraphModule:
    """Return a trace of losses and gradients as steps have it."""
    module = traced(stacked(loss), *batch())
    use_nll_kernels(module.graph)
    module.recompile()
    return module


@pytest.mark.parametrize(
    ("loss", "ignored"),
    [
        (F.cross_entropy, -100),
        (lambda s, t: F.cross_entropy(s, t, ignore_index=9), 9),
        (lambda s, t: 0.5 * F.cross_entropy(s, t) + s.square().mean(), -100),
        (lambda s, t: F.cross_entropy(s, t) + 0.5 * F.cross_entropy(2.0 * s, t), -100),
        (lambda s, t: F.cross_entropy(s, t).square(), -100),
    ],
)
def test_the_results_are_the_same_bits(loss: Loss, ignored: int) -> None:
    module, given = step_of(loss), batch()
    found = where_all_count(module.graph)
    assert found is not None
    assert (found.place, found.ignored) == (1, ignored)
    found.step.lint()
    full = fx.GraphModule(module, found.step)
    for ours, theirs in zip(full(*given), module(*given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert len(found.step.nodes) < len(module.graph.nodes)
    assert aten.ne.Scalar not in {node.target for node in found.step.nodes}


@pytest.mark.parametrize(
    "loss",
    [
        lambda s, t: F.cross_entropy(s, t, reduction="sum"),
        lambda s, t: F.cross_entropy(s, t, weight=torch.arange(1.0, CLASSES + 1)),
        lambda s, t: F.cross_entropy(s, t, label_smoothing=0.1),
        lambda s, t: F.cross_entropy(s, t) * (t != -100).sum(),
        lambda s, t: F.cross_entropy(s, t) + (s[:, 0] * (t != -100)).mean(),
        lambda s, t: (s[:, 0] * t).mean(),
    ],
    ids=["sum", "weights", "smoothing", "count", "mask", "no mask"],
)
def test_steps_that_do_not_just_count_targets_stay_as_they_are(loss: Loss) -> None:
    assert where_all_count(step_of(loss).graph) is None


def test_only_what_is_in_the_batch_may_be_targets() -> None:
    graph = step_of(F.cross_entropy).graph
    found = where_all_count(graph, 1)
    assert found is not None
    assert found.place == 0
    assert where_all_count(graph, 2) is None
    lookup = Lookup([torch.tensor([0, 3])])
    assert [lookup.lacks(place, 3) for place in range(2)] == [False, False]
    assert [lookup.lacks(place, 1) for place in range(2)] == [True, False]


class Ignores(Ordinary):
    """A class is nobody's target, to its loss."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], ignore_index=1)


def without(*clients: int) -> FederatedDataModule:
    """Return clients cut out of the same tensors; but for some, none has an example that is ignored."""
    sizes = (8, 13, 8, 16, 9)
    x, y = classification(sum(sizes), 5).tensors
    rows = [part.numpy() for part in torch.arange(sum(sizes)).split(list(sizes))]
    y = torch.where(y == 1, 0, y)
    for client in clients:
        y[rows[client][:3]] = 1  # not a whole batch
    return FederatedDataModule(train=TensorDataset(x, y), partition=lambda _: rows, batch_size=4)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of its two graphs each step of several clients took."""
    found: list[str] = []
    init = TracedStep.__init__

    def noting(self: TracedStep, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        for name in ("run", "run_full") if self.full_targets is not None else ():
            setattr(self, name, partial(note, name, getattr(self, name)))

    def note(name: str, function: Callable[..., Any], *given: Any) -> Any:
        found.append(name)
        return function(*given)

    monkeypatch.setattr(TracedStep, "__init__", noting)
    return found


METHODS = [FedAvg(), Scaffold(), Mime(SGDm())]


@pytest.mark.parametrize("algorithm", few(METHODS, METHODS[:1]), ids=["FedAvg", "Scaffold", "Mime"])
@pytest.mark.parametrize(
    ("clients", "ahead", "graphs"),
    [
        pytest.param((), 2**22, {"run_full"}, marks=pytest.mark.thorough),
        pytest.param((3,), 2**22, {"run"}, marks=pytest.mark.thorough),
        ((3,), 0, {"run", "run_full"}),
    ],
    ids=["none", "one", "one, step by step"],
)
def test_targets_that_are_ignored_do_not_count(
    algorithm: Algorithm,
    clients: tuple[int, ...],
    ahead: int,
    graphs: set[str],
    taken: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_batches, "_AHEAD", ahead)
    options: dict[str, Any] = {"algorithm": algorithm, "clients_per_round": 5, "local_epochs": 2}
    options["datamodule"] = lambda: without(*clients)
    expected = run("sequential", Ignores, **options)
    assert not taken
    assert_agree(expected, run("vectorized", Ignores, **options))
    assert set(taken) == graphs
