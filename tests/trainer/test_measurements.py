"""Measurements of clients by callbacks: the values, the absence of side effects, and rejections by name."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_fed import FederatedCallback, FederatedDataModule, FederatedError
from lightning_fed.algorithms import FedAvg, FedPer
from lightning_fed.core.errors import ClientError
from tests.helpers.training import Net, clients, parameters, seeded, trainer

SIZES = (12, 8, 9, 5)


class Measures(FederatedCallback):
    """Measures clients at the end of the last round, or of every round."""

    def __init__(self, all_rounds: bool = False) -> None:
        self.all_rounds = all_rounds

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        if round_report.round < 1 and not self.all_rounds:
            return
        loop = trainer.fit_loop
        self.x, point = loop.state.x.clone(), loop.state.x + 0.1
        self.gradients = [loop.full_gradient(i, point) for i in (2, 1, 2)]
        self.batches = list(loop.batch_gradients(2, point, 9))
        self.product = loop.hessian_vector(2, point, torch.ones_like(point))
        self.losses = loop.training_losses([2, 0])
        self.loss = loop.training_loss(0)
        self.evaluated = loop.evaluate_client(2, on="train")
        self.tuned = loop.evaluate_client(2, on="train", steps=3)
        self.of_each = loop.evaluate_clients([2, 1], on="val")
        self.own = loop.evaluate_client(2, on="train", own=True)
        before = parameters(pl_module).clone()
        with loop.showing_client_model(2):
            self.shown = parameters(pl_module).clone()
        assert torch.equal(parameters(pl_module), before)
        with pytest.raises(FederatedError, match="There is no client 9"):
            loop.full_gradient(9, point)
        with pytest.raises(FederatedError, match=r"full_gradient\(point=...\): point must be a vector of 155 floats"):
            loop.full_gradient(2, point[:-1])
        with pytest.raises(FederatedError, match=r"hessian_vector\(vector=...\): vector must be .*found list"):
            loop.hessian_vector(2, point, [1.0])
        with pytest.raises(FederatedError, match=r"evaluate_client\(on='all'\)"):
            loop.evaluate_client(2, on="all")


def fitted(callback: Any = None, **options: Any) -> Any:
    own = clients(SIZES)
    data = FederatedDataModule(own, client_val=dict(enumerate(own)), batch_size=4)
    given = {"algorithm": FedAvg(), "max_rounds": 2, "precision": "64-true", **options}
    run = trainer(callbacks=[] if callback is None else callback, **given)
    run.fit(seeded(dropout=0.0, weight_decay=0.5), data)
    return run


@pytest.fixture(scope="module")
def measured() -> Measures:
    fitted(found := Measures())
    return found


def of_client(client: int, point: Tensor) -> tuple[Tensor, float]:
    """Return a client's gradient, with weight decay, and its loss, computed by hand."""
    model = Net(dropout=0.0).double()
    torch.nn.utils.vector_to_parameters(point, model.parameters())
    inputs, labels = clients(SIZES)[client].tensors
    loss = F.cross_entropy(model(inputs.double()), labels)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([g.flatten() for g in gradients]) + 0.5 * point, float(loss)


def test_gradients_use_all_examples_of_the_client(measured: Measures) -> None:
    point = measured.x + 0.1
    for found, client in zip(measured.gradients, (2, 1, 2), strict=True):
        torch.testing.assert_close(found, of_client(client, point)[0], rtol=1e-11, atol=1e-12)
    assert torch.equal(measured.gradients[0], measured.gradients[2]), "whoever was measured in between"


def test_batch_gradients_average_to_the_full_gradient(measured: Measures) -> None:
    assert len(measured.batches) == 3
    mean = sum(n * g for n, g in zip((4, 4, 1), measured.batches, strict=True)) / 9
    torch.testing.assert_close(mean, measured.gradients[0], rtol=1e-11, atol=1e-12)


def test_hessian_vector_product_matches_finite_differences(measured: Measures) -> None:
    point, v, h = measured.x + 0.1, torch.ones_like(measured.x), 1e-5
    ahead, behind = (of_client(2, point + s * v)[0] for s in (h, -h))
    torch.testing.assert_close(measured.product, (ahead - behind) / (2 * h), rtol=1e-6, atol=1e-8)


def test_losses_and_evaluations_use_the_server_model(measured: Measures) -> None:
    for client, loss in measured.losses.items():
        assert loss == pytest.approx(of_client(client, measured.x)[1], rel=1e-10)
    assert measured.loss == measured.losses[0]
    assert measured.evaluated["val_loss"] == pytest.approx(measured.losses[2], rel=1e-6)
    assert list(measured.of_each) == [2, 1]
    assert measured.of_each[2] == pytest.approx(measured.evaluated, rel=1e-6), "its validation set is its training set"
    assert measured.tuned["val_loss"] != measured.evaluated["val_loss"]


def test_client_without_a_personal_model_uses_the_server_model(measured: Measures) -> None:
    assert torch.equal(measured.shown, measured.x)
    assert measured.own == measured.evaluated


def test_personal_model_has_the_clients_parameters() -> None:
    shown: dict[int, Tensor] = {}

    class Shows(FederatedCallback):
        def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
            for client in round_report.cohort:
                with trainer.fit_loop.showing_client_model(client):
                    shown[client] = parameters(pl_module.head).clone()

    run = fitted(Shows(), algorithm=FedPer(["head.*"]), max_rounds=1)
    kept = run.fit_loop.state.clients.state_dict()
    assert shown.keys() == kept.keys()
    for client, head in shown.items():
        assert torch.equal(head, kept[client]["personal.parameters"])


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_measurements_do_not_affect_the_run(engine: str) -> None:
    plain, watched = (fitted(callback, engine=engine) for callback in (None, Measures(all_rounds=True)))
    assert torch.equal(plain.fit_loop.state.x, watched.fit_loop.state.x)
    metrics = [{k: float(v) for k, v in run.callback_metrics.items() if "seconds" not in k} for run in (plain, watched)]
    assert metrics[0] == metrics[1]


def test_measurement_error_names_the_client_and_the_round() -> None:
    class Examples(TensorDataset):
        can_be_read = True

        def __getitem__(self, at: Any) -> Any:
            if not Examples.can_be_read:
                raise OSError("this example cannot be read")
            return super().__getitem__(at)

    class MeasuresTheUnreadable(FederatedCallback):
        def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
            loop, x, Examples.can_be_read = trainer.fit_loop, trainer.fit_loop.state.x, False
            for measure in (
                lambda: loop.evaluate_clients([1, 2], on="val"),
                lambda: loop.training_losses([1, 2]),
                lambda: loop.full_gradient(2, x),
                lambda: loop.hessian_vector(2, x, x),
                lambda: next(loop.batch_gradients(2, x, 1)),
            ):
                with pytest.raises(ClientError, match="Client 2 failed in its .* in round 1: OSError: this"):
                    measure()

    own = dict(enumerate(clients(SIZES)))
    own[2] = Examples(*own[2].tensors)
    data = FederatedDataModule(own, client_val=own, batch_size=4)
    trainer(callbacks=MeasuresTheUnreadable(), algorithm=FedAvg(), max_rounds=1).fit(seeded(dropout=0.0), data)


def test_showing_a_client_model_before_fit_raises() -> None:
    with pytest.raises(FederatedError, match="showing_client_model works while a fit is running"):
        trainer().fit_loop.showing_client_model(0).__enter__()
