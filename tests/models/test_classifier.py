"""The base class by hand: losses, accuracies over unequal batches, hyper-parameters of subclasses."""

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.core.mixins.hparams_mixin import _given_hyperparameters_context
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed.models import Classifier, MLPClassifier
from tests.helpers.training import QUIET

LOGITS = torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 1.0], [5.0, 4.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
LABELS = torch.tensor([0, 1, 1, 2, 2])  # rows 0, 1 and 3 are right


def test_evaluation_counts_every_example_once_for_any_batches():
    model, run = Classifier(nn.Identity(), num_classes=3), pl.Trainer(**QUIET)
    loader = DataLoader(TensorDataset(LOGITS, LABELS), batch_size=2)
    loss = pytest.approx(F.cross_entropy(LOGITS, LABELS).item())
    for _ in range(2):  # the second pass starts from zero
        assert run.validate(model, loader, verbose=False) == [{"val_loss": loss, "val_acc": pytest.approx(0.6)}]
        assert run.test(model, loader, verbose=False) == [{"test_loss": loss, "test_acc": pytest.approx(0.6)}]


def test_label_of_minus_100_is_ignored():
    labels = torch.tensor([0, 1, 1, 2, -100])
    model, run = Classifier(nn.Identity(), num_classes=3), pl.Trainer(**QUIET)
    (logged,) = run.test(model, DataLoader(TensorDataset(LOGITS, labels), batch_size=5), verbose=False)
    assert logged == {
        "test_loss": pytest.approx(F.cross_entropy(LOGITS[:4], labels[:4]).item()),
        "test_acc": pytest.approx(0.75),
    }


def test_labels_can_have_any_integer_type():
    model = MLPClassifier(3, 3, hidden=[])
    losses = {model.training_step((LOGITS, LABELS.to(t)), 0).item() for t in (torch.uint8, torch.int32, torch.int64)}
    assert len(losses) == 1


def test_state_dict_has_the_network_and_no_metrics():
    assert list(MLPClassifier(hidden=[8, 4]).state_dict()) == [
        f"net.{layer}.{name}" for layer in (1, 4, 7) for name in ("weight", "bias")
    ]


def test_hyper_parameters_equal_the_arguments():
    assert dict(MLPClassifier(in_features=4, hidden=[8, 4], lr=0.3).hparams) == {
        "in_features": 4,
        "num_classes": 10,
        "hidden": [8, 4],
        "dropout": 0.0,
        "lr": 0.3,
        "momentum": 0.0,
        "weight_decay": 0.0,
    }


class Own(Classifier):
    """A user's subclass, with a fixed learning rate and its own argument."""

    def __init__(self, width: int = 4) -> None:
        super().__init__(nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 3)), num_classes=3, lr=0.5)


def trained(model, path):
    run = pl.Trainer(**QUIET, max_epochs=1)
    run.fit(model, DataLoader(TensorDataset(LOGITS, LABELS), batch_size=5))
    run.save_checkpoint(path)
    return model


def test_subclass_loads_from_its_checkpoint_path_alone(tmp_path):
    model = trained(Own(width=6), tmp_path / "own.ckpt")
    again = Own.load_from_checkpoint(tmp_path / "own.ckpt", weights_only=True)
    assert torch.equal(again(LOGITS), model(LOGITS))
    assert again.configure_optimizers().defaults["lr"] == 0.5


def test_subclass_from_the_command_line_keeps_its_optimizer():
    with _given_hyperparameters_context({"width": 6}, "pytorch_lightning.cli.instantiate_module"):
        model = Own(width=6)
    assert model.configure_optimizers().defaults["lr"] == 0.5


def test_network_passed_as_argument_is_passed_again_on_loading(tmp_path):
    model = trained(Classifier(nn.Linear(3, 3), num_classes=3, lr=0.25), tmp_path / "given.ckpt")
    again = Classifier.load_from_checkpoint(tmp_path / "given.ckpt", net=nn.Linear(3, 3), weights_only=True)
    assert torch.equal(again(LOGITS), model(LOGITS))
    assert again.hparams["lr"] == 0.25
    assert "net" not in again.hparams


def test_dropout_follows_each_hidden_layer_and_is_off_in_evaluation():
    model = MLPClassifier(3, 3, hidden=[64, 64], dropout=0.5)
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.5, 0.5]
    assert not torch.equal(model(LOGITS), model(LOGITS))
    model.eval()
    assert torch.equal(model(LOGITS), model(LOGITS))


def test_logistic_regression_is_a_single_affine_map():
    model = MLPClassifier(in_features=60, hidden=[])
    assert [tuple(p.shape) for p in model.parameters()] == [(10, 60), (10,)]


def test_mime_emnist_network_has_the_expected_size():
    model = MLPClassifier(in_features=784, num_classes=62, hidden=[300, 100])
    assert sum(p.numel() for p in model.parameters()) == 271_862
