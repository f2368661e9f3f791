"""Parts shared by all engines: vector parts that corrections read, chunk results, and clients' gradients."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.wrappers import ClasswiseWrapper

from lightning_fed import FederatedCallback
from lightning_fed.algorithms import FedAvg, Mime
from lightning_fed.core.flat import Layout
from lightning_fed.core.rounds import ClientReport, Step
from lightning_fed.core.tracked_state import TrackedState
from lightning_fed.engines.base import ChunkResult, per_parameter
from lightning_fed.server.participation import Participant
from tests.helpers.engines import Ordinary, run
from tests.helpers.training import clients

X = torch.arange(10.0)


def test_per_parameter_steps_are_sliced_and_track_reads() -> None:
    server = TrackedState({"c": X + 10, "d": X}, set())
    mean = TrackedState({"x": X + 20}, set())
    rates = torch.cat([torch.full((6,), 0.1), torch.full((4,), 0.2)])
    whole = Step(X, server, {"v": X + 30}, {"k": torch.tensor(2.0)}, None, {"x": X + 40}, mean, 5.0, 4.0, rates)
    first, second = per_parameter(whole, Layout([torch.Size([2, 3]), torch.Size([4])]))
    assert (server.read, mean.read) == (set(), set())
    assert torch.equal(first.x, X[:6].view(2, 3))
    assert torch.equal(second.x, X[6:])
    assert torch.equal(first.server["c"], X[:6].view(2, 3) + 10)
    assert torch.equal(first.cohort_grad["x"], X[:6].view(2, 3) + 20)
    assert torch.equal(second.client["v"], X[6:] + 30)
    assert torch.equal(second.full_grad["x"], X[6:] + 40)
    assert float(second.local["k"]) == 2.0
    assert torch.equal(torch.as_tensor(second.lr), rates[6:])
    assert (second.num_examples, second.mean_examples) == (5.0, 4.0)
    assert (server.read, mean.read) == ({"c"}, {"x"})


def chunk(**options: Any) -> ChunkResult:
    """Return a result of two clients, each with three shared parameters and a personal one."""
    y = torch.arange(8.0).view(2, 4)
    members = [Participant(f"c{i}", i, 5, 1, 2) for i in range(2)]
    reports = [ClientReport(who.client_id, 5, 2, 0.5, {}, 1.0, 0.0) for who in members]
    return ChunkResult(members, y, y[:, :3] - 1, {}, sends_delta=True, reports=reports, asked=[0, 1], **options)


def test_kept_client_states_do_not_hold_the_chunk() -> None:
    states = torch.arange(6.0).view(2, 3)
    result = chunk(keep={"c": states})
    kept = result.new_states()
    states.zero_()
    assert [own["c"].tolist() for own in kept] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert {own["c"].untyped_storage().nbytes() for own in kept} == {3 * 4}
    assert chunk(keep={}).new_states() == [{}, {}]


def test_personal_parameters_are_not_exchanged() -> None:
    assert chunk(keep={}).shared.tolist() == [[0.0, 1.0, 2.0], [4.0, 5.0, 6.0]]


class WithMetric(Ordinary):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.mean = MeanMetric()

    def on_train_epoch_start(self) -> None:
        self.mean = MeanMetric()


class Asks(FederatedCallback):
    """Asks the engine for a client's gradients and losses, and undoes a client's side effects."""

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        state = trainer.fit_loop.run_state
        self.engine, self.x = state.engine, trainer.fit_loop.state.x.clone()
        batches = trainer.datamodule.client_batches(1)
        with state.preserving_module():
            self.gradients = [self.engine.gradient_at(self.x, batches, 0, index) for index in (1, 1, 2)]
            with self.engine.losses_at(self.x, 0) as loss_of:
                self.losses = [loss_of(batches, 1) for _ in range(2)]
        undo = self.engine.savepoint()
        pl_module.mean.update(3.0)
        pl_module._current_fx_name = "elsewhere"
        self.engine.flat.params[0].grad = torch.ones_like(self.engine.flat.params[0])
        undo()
        self.left = pl_module.mean.update_count, pl_module._current_fx_name, self.engine.flat.params[0].grad


@pytest.fixture(scope="module")
def asked() -> dict[float, Asks]:
    """Return the engine's answers by dropout rate."""
    found = {}
    for dropout in (0.0, 0.5):
        found[dropout] = Asks()
        run("sequential", lambda dropout=dropout: WithMetric(dropout=dropout), max_rounds=2, callbacks=found[dropout])
    return found


def of_client(x: Tensor) -> tuple[Tensor, float]:
    """Return client 1's gradient and summed loss at a point, computed by hand."""
    model = Ordinary().double()
    torch.nn.utils.vector_to_parameters(x, model.parameters())
    inputs, labels = clients()[1].tensors
    loss = F.cross_entropy(model(inputs.double()), labels)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([g.flatten() for g in gradients]) + 0.01 * x, float(loss) * len(labels)  # with weight decay


def test_client_gradient_and_loss_cover_all_its_examples(asked: dict[float, Asks]) -> None:
    found = asked[0.0]
    gradient, loss = of_client(found.x)
    torch.testing.assert_close(found.gradients[0], gradient, rtol=1e-11, atol=1e-13)
    assert found.losses[0] == pytest.approx(loss, rel=1e-12)


def test_random_layers_use_a_stream_per_round_and_client(asked: dict[float, Asks]) -> None:
    first, again, other = asked[0.5].gradients
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert asked[0.5].losses[0] == asked[0.5].losses[1] == pytest.approx(of_client(asked[0.5].x)[1]), "in eval mode"


def test_side_effects_of_a_failed_client_are_undone(asked: dict[float, Asks]) -> None:
    count, hook, gradient = asked[0.0].left
    assert (count, gradient) == (0, None)
    assert hook != "elsewhere"


class WithGraphs(Ordinary):
    """Gives its metrics a loss with its graph, and does not reset them."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = MetricCollection({"mean": MeanMetric(), "all": CatMetric()})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.metrics(loss)
        return loss


def test_metrics_that_hold_a_graph_are_copied() -> None:
    """The drop of a client that fails, and a second fit, copy the metrics of the clients before."""
    model = WithGraphs()
    steps = []
    for algorithm in (FedAvg(), Mime()):
        run("sequential", lambda: model, max_rounds=1, algorithm=algorithm, on_client_error="drop")
        assert model.metrics["all"].value[-1].requires_grad
        steps.append(model.metrics["mean"].update_count)
    assert steps[1] == 2 * steps[0] == len(model.metrics["all"].value)


class Classwise(Ordinary):
    """Counts per class, with a wrapper that passes on the states of the metric inside."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = MetricCollection({"class": ClasswiseWrapper(MulticlassAccuracy(2, average=None))})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.metrics.update(torch.tensor([0, 1]), torch.tensor([0, 0]))
        return super().training_step(batch, batch_idx)


def test_wrappers_of_metrics_are_copied() -> None:
    """A second gradient of Mime leaves the metric inside a wrapper as the step left it."""
    steps = []
    for algorithm in (FedAvg(), Mime()):
        model = Classwise()
        run("sequential", lambda model=model: model, max_rounds=1, algorithm=algorithm, on_client_error="drop")
        steps.append(int(model.metrics["class"].metric.tp.sum() + model.metrics["class"].metric.fn.sum()))
        assert model.metrics["class"].metric.update_count == steps[-1] / 2
    assert steps[1] == steps[0] > 0
