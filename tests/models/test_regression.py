"""The regression modules: losses and metrics by hand, as ordinary LightningModules."""

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed.core.errors import FederatedError
from lightning_fed.models import LinearRegression, Quadratic
from tests.helpers.training import QUIET

X = torch.tensor([[1.0, 2.0], [3.0, -1.0]])
Y = torch.tensor([[5.0], [-1.0]])
ROWS = TensorDataset(torch.tensor([2.0, 0.0]), torch.tensor([10.0, -10.0]))


def test_linear_regression_starts_at_zero_with_half_mean_squared_error():
    model = LinearRegression(2)
    assert not torch.cat([p.flatten() for p in model.parameters()]).any()
    loss = model._loss((X, Y))
    assert loss.item() == (25 + 1) / 4
    loss.backward()
    assert model.linear.weight.grad.tolist() == [[(-5 * 1 + 1 * 3) / 2, (-5 * 2 - 1 * 1) / 2]]
    assert model.linear.bias.grad.tolist() == [(-5 + 1) / 2]


def test_linear_regression_without_bias_and_with_several_outputs():
    model = LinearRegression(in_features=4, out_features=3, bias=False)
    assert [p.shape for p in model.parameters()] == [(3, 4)]
    assert model(torch.ones(5, 2, 2)).shape == (5, 3)


def test_optimizer_receives_its_settings():
    (group,) = LinearRegression(2, lr=0.3, weight_decay=0.01).configure_optimizers().param_groups
    assert (group["lr"], group["weight_decay"], group["momentum"]) == (0.3, 0.01, 0)
    (group,) = Quadratic(lr=0.7).configure_optimizers().param_groups
    assert group["lr"] == 0.7


@pytest.mark.parametrize(
    ("model", "rows", "both", "distance"),
    [
        (LinearRegression(2, optimum=[3.0, 4.0, 12.0]), TensorDataset(X, Y), {"loss": 6.5, "mae": 3.0}, 13.0),
        (LinearRegression(2), TensorDataset(X, Y), {"loss": 6.5, "mae": 3.0}, None),
        (Quadratic(x0=3.0, optimum=-1.0), ROWS, {"loss": 4.5}, 4.0),  # the rows' losses are 39 and -30
        (Quadratic(x0=3.0), ROWS, {"loss": 4.5}, None),
    ],
)
def test_validation_and_test_log_loss_and_distance(model, rows, both, distance):
    trainer = pl.Trainer(**QUIET)
    loader = DataLoader(rows, batch_size=1)
    (val,) = trainer.validate(model, loader, verbose=False)
    named = {stage: {f"{stage}_{name}": value for name, value in both.items()} for stage in ("val", "test")}
    assert val == named["val"] | ({} if distance is None else {"val_distance": distance})
    assert trainer.test(model, loader, verbose=False) == [named["test"]]


def test_linear_regression_trains_without_federation():
    trainer = pl.Trainer(**QUIET, max_epochs=40)
    model = LinearRegression(2, lr=0.2, bias=False)
    trainer.fit(model, DataLoader(TensorDataset(X, Y), batch_size=2))
    assert model.linear.weight.tolist() == [pytest.approx([3 / 7, 16 / 7], rel=1e-5)]  # both targets are met
    assert trainer.callback_metrics["train_loss"] < 1e-10


def test_one_step_of_quadratic_matches_a_hand_computation():
    trainer, model = pl.Trainer(**QUIET, max_epochs=1), Quadratic(x0=3.0, lr=0.5)
    trainer.fit(model, DataLoader(ROWS, batch_size=2))
    assert model.x.item() == 3 - 0.5 * 3  # the rows' gradients are 16 and -10
    assert model.x.dtype == torch.float64


def test_hyper_parameters_are_restored_from_a_checkpoint(tmp_path):
    model = LinearRegression(2, lr=0.3, optimum=[1.0, 2.0, 3.0])
    trainer = pl.Trainer(**QUIET, max_epochs=1)
    trainer.fit(model, DataLoader(TensorDataset(X, Y)))
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    again = LinearRegression.load_from_checkpoint(tmp_path / "model.ckpt")
    assert dict(again.hparams) == dict(model.hparams)
    assert torch.equal(again.linear.weight, model.linear.weight)


def test_invalid_arguments_and_shapes_are_rejected():
    with pytest.raises(FederatedError, match="holds 2 numbers and the model has 3 parameters"):
        LinearRegression(2, optimum=[1.0, 2.0])
    with pytest.raises(FederatedError, match=r"targets of shape \[2\] for predictions of shape \[2, 1\]"):
        LinearRegression(2).training_step((X, Y[:, 0]), 0)
    with pytest.raises(FederatedError, match=r"LinearRegression\(lr=-1\)"):
        LinearRegression(2, lr=-1)
    with pytest.raises(FederatedError, match=r"LinearRegression\(in_features=0\)"):
        LinearRegression(0)
    with pytest.raises(FederatedError, match=r"Quadratic\(lr=nan\)"):
        Quadratic(lr=float("nan"))
    for x0, rows in ((1.0, torch.ones(3, 2)), ([1.0, 2.0], torch.ones(2)), ([1.0, 2.0], torch.ones(3, 3))):
        with pytest.raises(FederatedError, match="give x0 as many numbers"):
            Quadratic(x0=x0)(rows, rows)
    with pytest.raises(FederatedError, match="Quadratic.*x0"):
        Quadratic(x0=[1.0, "far"])
