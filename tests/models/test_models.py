"""Properties of every classifier: rounds, precisions, gradients of several clients at once, checkpoints."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LambdaCallback
from pytorch_lightning.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import FederatedDataModule, models
from lightning_fed.algorithms import FedAvg, Scaffold
from lightning_fed.core.errors import FederatedError
from lightning_fed.models import (
    CharLSTM,
    CifarCNN,
    Classifier,
    ConvNet,
    EmnistCNN,
    MLPClassifier,
    MnistCNN,
    ResNet,
    SentimentLSTM,
)
from tests.helpers.selection import few
from tests.helpers.training import QUIET, parameters, same, trainer

DOCS = Path(__file__).parents[2] / "docs" / "models.md"


@dataclass
class Case:
    """A model without dropout, and functions that draw its inputs and labels."""

    make: Callable[[], Classifier]
    inputs: tuple[int, ...]
    classes: int
    codes: int = 0
    labels: tuple[int, ...] = ()

    def draw(self, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        stream = torch.Generator().manual_seed(seed)
        y = torch.randint(self.classes, (n, *self.labels), generator=stream)
        if self.codes:
            return torch.randint(self.codes, (n, *self.inputs), generator=stream, dtype=torch.uint8), y
        return torch.rand(n, *self.inputs, generator=stream), y


CASES = {
    "logistic": Case(lambda: MLPClassifier(6, 3, hidden=[]), (6,), 3),
    "mlp": Case(lambda: MLPClassifier(6, 3, hidden=[5, 4]), (2, 3), 3),
    "convnet": Case(lambda: ConvNet(8, 2, 3, channels=[3, 4], padding="same", hidden=[5]), (2, 8, 8), 3),
    "emnist": Case(lambda: EmnistCNN(num_classes=5, conv_dropout=0.0, dropout=0.0), (28, 28), 5),
    "mnist": Case(MnistCNN, (1, 28, 28), 10),
    "cifar": Case(CifarCNN, (3, 32, 32), 10),
    "resnet18": Case(lambda: ResNet(18, num_classes=4), (3, 4, 4), 4),
    "resnet20": Case(lambda: ResNet(20, num_classes=4, in_channels=1, groups=4), (8, 8), 4),
    "next character": Case(lambda: CharLSTM(hidden_size=7), (9,), 80, codes=80),
    "every character": Case(lambda: CharLSTM(hidden_size=7), (9,), 80, codes=80, labels=(9,)),
    "sentiment": Case(lambda: SentimentLSTM(20, 4, 6), (5,), 2, codes=20),
    "frozen": Case(lambda: SentimentLSTM(20, 4, 6, num_layers=1, freeze_embedding=True), (5,), 2, codes=20),
}
BATCH_NORM = Case(lambda: ResNet(20, num_classes=4, in_channels=1, norm="batch"), (8, 8), 4)
SMALL = {name: case for name, case in CASES.items() if name != "resnet18"}
PAPERS = ("emnist", "mnist", "cifar")  # the case "convnet" with other sizes, which are slow
SOME = [name for name in SMALL if name not in PAPERS]


def seeded(case: Case) -> Classifier:
    torch.manual_seed(0)
    return case.make()


def trainable(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def fit(case: Case, **kwargs: Any) -> tuple[Classifier, Any]:
    model, run = seeded(case), trainer(**{"max_rounds": 1, **kwargs})
    clients = [TensorDataset(*case.draw(n, seed=n)) for n in (4, 3, 2)]
    run.fit(model, FederatedDataModule(clients=clients, val=TensorDataset(*case.draw(5, seed=9)), batch_size=2))
    return model, run


class Step(nn.Module):
    """``training_step`` as ``forward``, for ``functional_call``."""

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.model.training_step((x, y), 0)


@pytest.mark.parametrize("algorithm", few([FedAvg, Scaffold], [Scaffold]))
@pytest.mark.parametrize("name", few([*SMALL, "batch norm"], [*SOME, "batch norm"]))
def test_round_trains_and_logs(name: str, algorithm: type) -> None:
    case = BATCH_NORM if name == "batch norm" else SMALL[name]
    model, run = fit(case, algorithm=algorithm())
    logged = {name: value for name, value in run.callback_metrics.items() if "/" not in name}
    assert set(logged) == {"train_loss", "val_loss", "val_acc"}
    assert all(value.isfinite() for value in logged.values())
    before = dict(seeded(case).named_parameters())
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) != p.requires_grad, name


def has_lstm(dtype: torch.dtype) -> bool:
    """Return whether PyTorch can run an LSTM under autocast here. This depends on the processor's instructions."""
    try:
        with torch.autocast("cpu", dtype):
            nn.LSTM(2, 2)(torch.zeros(1, 1, 2))
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize(
    ("precision", "name"),
    few(
        [pytest.param(p, name, id=f"{p}-{name}") for p in ("64-true", "bf16-mixed") for name in SMALL],
        [
            *("64-true-sentiment", "bf16-mixed-resnet20"),
            *(f"bf16-mixed-{name}" for name, case in SMALL.items() if case.codes),  # those with an LSTM
        ],
    ),
)
def test_training_works_in_every_precision(precision: Any, name: str) -> None:
    case, dtype = SMALL[name], torch.float64 if precision == "64-true" else torch.float32
    recurrent = any(isinstance(layer, nn.LSTM) for layer in case.make().modules())
    if precision == "bf16-mixed" and recurrent and not has_lstm(torch.bfloat16):
        with pytest.raises(FederatedError, match="precision='bf16-mixed' cannot run the LSTM of"):
            fit(case, precision=precision, algorithm=Scaffold())
        return
    model, run = fit(case, precision=precision, algorithm=Scaffold())
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert run.callback_metrics["train_loss"].isfinite()
    plain, _ = fit(case, algorithm=Scaffold())
    difference = (parameters(model.double()) - parameters(plain.double())).abs().max()
    assert 0 < difference < (1e-4 if precision == "64-true" else 0.1)


class Float16(MixedPrecision):
    """Autocast to float16. Few processors support an LSTM in it."""

    def __init__(self) -> None:
        super().__init__("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0))


class OutsideAutocast(nn.LSTM):
    def forward(self, x: Tensor, *args: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float(), *args)


def test_unsupported_lstm_is_rejected_before_the_first_round() -> None:
    case, started = CASES["sentiment"], Mock()
    run = trainer(max_rounds=1, plugins=Float16(), callbacks=LambdaCallback(on_train_start=started))
    data = FederatedDataModule(clients=[TensorDataset(*case.draw(4))] * 3, batch_size=2)
    if has_lstm(torch.float16):
        run.fit(seeded(case), data)
        return
    with pytest.raises(
        FederatedError, match=r"the LSTM of SentimentLSTM \(.*\) on this processor.*Set precision='32-true'"
    ):
        run.fit(seeded(case), data)
    assert not started.called


def test_lstm_outside_autocast_runs_on_every_processor() -> None:
    case = CASES["sentiment"]
    model = seeded(case)
    for parent in list(model.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, nn.LSTM):
                setattr(
                    parent,
                    name,
                    OutsideAutocast(
                        layer.input_size, layer.hidden_size, layer.num_layers, batch_first=layer.batch_first
                    ),
                )
    run = trainer(max_rounds=1, plugins=Float16())
    run.fit(model, FederatedDataModule(clients=[TensorDataset(*case.draw(4))] * 3, batch_size=2))
    assert parameters(model).isfinite().all()


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # the CPU runs float32 LSTMs client by client
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float64) for name in SOME),
        *(pytest.param(name, torch.float64, marks=pytest.mark.thorough) for name in PAPERS),
        *(pytest.param(name, torch.float32, marks=pytest.mark.thorough) for name in CASES),
    ],
)
def test_gradients_of_three_clients_at_once_match_a_loop(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    base = seeded(case).to(dtype)
    base.log = lambda *_, **__: None
    step = Step(base)
    stacked = {
        f"model.{k}": torch.stack([p * (1 + 0.1 * i) for i in range(3)]).detach() for k, p in trainable(base).items()
    }
    x, y = (torch.stack(rows) for rows in zip(*(case.draw(4, seed=i) for i in range(3)), strict=True))
    x = x.to(dtype) if x.is_floating_point() else x
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4

    def loss(own: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional_call(step, own, (x, y))

    at_once = vmap(grad(loss))(stacked, x, y)
    for i in range(3):
        for name, p in trainable(base).items():
            p.data.copy_(stacked[f"model.{name}"][i])
        expected = torch.autograd.grad(step(x[i], y[i]), list(trainable(base).values()))
        assert sum(g.abs().sum() for g in expected) > 0
        for name, g in zip(trainable(base), expected, strict=True):
            assert (at_once[f"model.{name}"][i] - g).norm() <= tolerance * g.norm(), name


@pytest.mark.parametrize("case", few([*SMALL.values(), BATCH_NORM], [BATCH_NORM]), ids=[*SMALL, "batch norm"])
def test_checkpoint_loads_from_its_path_alone(case: Case, tmp_path) -> None:
    model = case.make()
    run = pl.Trainer(**QUIET, max_epochs=0)
    run.fit(model, DataLoader(TensorDataset(*case.draw(4)), batch_size=2))
    run.save_checkpoint(tmp_path / "model.ckpt")
    again = type(model).load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    assert same(dict(again.state_dict()), dict(model.state_dict()))
    assert dict(again.hparams) == dict(model.hparams)
    x, _ = case.draw(3)
    assert torch.equal(again.eval()(x), model.eval()(x))


@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_predictions_are_classes(case: Case) -> None:
    model, (x, y) = case.make(), case.draw(3)
    predicted = model.predict_step(x, 0)
    assert predicted.shape == (3,)
    assert torch.equal(predicted, model(x).argmax(1))
    assert torch.equal(predicted, model.predict_step((x, y), 0))


@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_invalid_labels_are_rejected(case: Case) -> None:
    model, (x, y) = case.make(), case.draw(3)
    name = type(model).__name__
    for wrong in (y[..., None], y[:2], y.float()):
        with pytest.raises(FederatedError, match=f"{name} got labels of shape"):
            model.training_step((x, wrong), 0)
    for wrong in (torch.full_like(y, case.classes), -torch.ones_like(y)):
        with pytest.raises(FederatedError, match=f"{name} got a label outside 0, ..., {case.classes - 1}"):
            model.training_step((x, wrong), 0)
    for batch in (x, (x, y, y), {"x": x, "y": y}):
        with pytest.raises(FederatedError, match=f"{name} got a batch of type .* expects a pair of tensors"):
            model.training_step(batch, 0)


@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_inputs_of_invalid_shape_or_type_are_rejected(case: Case) -> None:
    model, (x, _) = case.make(), case.draw(2)
    wrong = [x.flatten(), x.to(torch.float32 if case.codes else torch.uint8)]
    wrong += [] if case.codes else [x.double()]
    wrong += [] if isinstance(model, MLPClassifier) else [x[..., None, None]]  # an MLP flattens its examples
    wrong += [] if case.codes or isinstance(model, ResNet) else [x[..., :-1]]  # these take any length and size
    for inputs in wrong:
        with pytest.raises(FederatedError, match=f"{type(model).__name__} got (inputs|images) of (shape|type)"):
            model(inputs)


def rows() -> list[tuple[str, str]]:
    """Return the models and parameter counts in the documentation."""
    return re.findall(r"^\| `([A-Z].*?)` \| [^|]*\| ([\d,]+) \|", DOCS.read_text(), flags=re.M)


@pytest.mark.parametrize(("code", "count"), rows())
def test_documented_parameter_counts_are_correct(code: str, count: str) -> None:
    model = eval(code, vars(models).copy())
    assert f"{sum(p.numel() for p in model.parameters()):,}" == count


def test_documentation_names_every_model() -> None:
    assert {code.partition("(")[0] for code, _ in rows()} == set(models.__all__) - {"Classifier", "Quadratic"}


SETTINGS = {"lr": 0.25, "momentum": 0.5, "weight_decay": 0.125}


def test_optimizer_receives_its_settings() -> None:
    sentiment = partial(SentimentLSTM, 5, 2, 3)
    for make in (MLPClassifier, ConvNet, EmnistCNN, MnistCNN, CifarCNN, partial(ResNet, 20), CharLSTM, sentiment):
        (group,) = make(**SETTINGS).configure_optimizers().param_groups
        assert {key: group[key] for key in SETTINGS} == SETTINGS, make
        for setting in SETTINGS:
            with pytest.raises(FederatedError, match=rf"\({setting}=-0.1\): {setting} must be a finite number"):
                make(**{setting: -0.1})


@pytest.mark.parametrize("setting", SETTINGS)
def test_invalid_optimizer_settings_are_rejected(setting: str) -> None:
    for wrong in (float("nan"), "0.1", True):
        with pytest.raises(FederatedError, match=rf"\({setting}={wrong!r}\): {setting} must be a finite number"):
            MLPClassifier(**{setting: wrong})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Classifier(nn.Linear(2, 1), num_classes=1), r"Classifier\(num_classes=1\).*integer of at least 2"),
        (lambda: MLPClassifier(num_classes=0), r"MLPClassifier\(num_classes=0\)"),
        (lambda: MLPClassifier(in_features=2.0), r"in_features=2.0\): in_features must be an integer"),
        (lambda: MLPClassifier(hidden=[8, 0]), r"hidden\[1\]=0"),
        (lambda: MLPClassifier(hidden=8), r"hidden=8\): hidden must be a list"),
        (lambda: MLPClassifier(dropout=1.0), r"dropout=1.0\): dropout must be a finite number in \[0, 1\)"),
        (lambda: ConvNet(channels=[0]), r"channels\[0\]=0"),
        (lambda: ConvNet(kernel_size=0), r"kernel_size=0"),
        (lambda: ConvNet(in_channels=0), r"in_channels=0"),
        (lambda: ConvNet(hidden="64"), r"hidden='64'"),
        (lambda: ConvNet(padding="full"), r"padding must be 'valid' or 'same'"),
        (lambda: ConvNet(pool=True), r"pool must be 'each' or 'last'"),
        (lambda: ConvNet(conv_dropout=-0.1), r"conv_dropout=-0.1"),
        (lambda: ConvNet(dropout=2), r"dropout=2"),
        (lambda: ConvNet(image_size=8), r"image_size=8\): images of 8 x 8 have no pixels left after 2 convolutions"),
        (lambda: EmnistCNN(num_classes=1), r"EmnistCNN\(num_classes=1\)"),
        (lambda: ResNet(depth=50), r"ResNet\(depth=50\): depth must be 18 or 20"),
        (lambda: ResNet(groups=3), r"groups=3\): the 64 channels of ResNet-18"),
        (lambda: ResNet(depth=20, groups=32), r"groups=32\): the 16 channels of ResNet-20"),
        (lambda: ResNet(groups=0), r"groups=0"),
        (lambda: ResNet(norm="layer"), r"norm must be 'group' or 'batch'"),
        (lambda: ResNet(in_channels=0), r"in_channels=0"),
        (lambda: CharLSTM(vocab_size=1), r"CharLSTM\(vocab_size=1\)"),
        (lambda: CharLSTM(hidden_size=0), r"CharLSTM\(hidden_size=0\)"),
        (lambda: CharLSTM(num_layers=0), r"num_layers=0"),
        (lambda: CharLSTM(embedding_dim=0), r"embedding_dim=0"),
        (lambda: SentimentLSTM(0), r"SentimentLSTM\(vocab_size=0\)"),
        (lambda: SentimentLSTM(9, num_classes=1), r"SentimentLSTM\(num_classes=1\)"),
    ],
)
def test_invalid_arguments_are_rejected(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(FederatedError, match=said):
        make()
