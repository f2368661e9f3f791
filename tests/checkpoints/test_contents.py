"""Checkpoints load without running code, whatever a module, its data or a callback adds to them."""

import argparse
import enum
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import yaml
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from torch import nn

from lightning_fed import FederatedDataModule, FederatedError, FederatedTrainer
from lightning_fed.checkpoints.contents import SafeContents
from lightning_fed.cli.main import main
from tests.helpers.training import QUIET, Net, clients, parameters, same, seeded, trainer


class Mode(enum.Enum):
    FAST = 1


class Speed:
    """A user's class. It is not an enum, since Python 3.11.2 saves enums through getattr, which cannot be allowed."""

    def __init__(self, value: int) -> None:
        self.value = value


class Other(Net):
    """A third-party module, which keeps all its arguments as hyperparameters."""

    def __init__(self, lr: float = 0.1, loss: nn.Module | None = None, extra: Any = None, names: Any = ()) -> None:
        loss = nn.CrossEntropyLoss() if loss is None else loss
        super().__init__()
        self.save_hyperparameters()
        self.hparams.update(dropout=0.0, momentum=0.0, weight_decay=0.0)
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self(batch[0]), batch[1])


class Data(FederatedDataModule):
    def __init__(self, transform: Any = None, folder: Any = None) -> None:
        val = clients((20,))[0]
        super().__init__(clients=clients(), val=val, test=val, batch_size=4)
        self.save_hyperparameters()


class Keeps(pl.Callback):
    def __init__(self, state: Any) -> None:
        self.state, self.loaded = state, None

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state_dict: Any) -> None:
        self.loaded = state_dict


def run(
    folder: Path, model: Any, data: Any = None, rounds: int = 2, ckpt_path: Any = None, **options: Any
) -> tuple[FederatedTrainer, list[str]]:
    """Fit with checkpoints, and return the warnings about what they leave out."""
    keep = ModelCheckpoint(folder, save_last=True, monitor="val_loss")
    options = {"enable_checkpointing": True, "max_rounds": rounds, **options}
    t = trainer(**{**options, "callbacks": [keep, *options.get("callbacks", ())]})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        t.fit(model, Data() if data is None else data, ckpt_path=ckpt_path)
    return t, [str(w.message) for w in caught if "without running code" in str(w.message)]


def test_unsafe_entries_are_left_out_with_one_warning(tmp_path: Path) -> None:
    model = seeded(Other, extra={"deep": [nn.ReLU()]}, names=["a"])
    data = Data(transform=lambda x: x, folder=Path("there"))
    _, told = run(tmp_path, model, data, rounds=3, callbacks=[Keeps({"hook": print, "n": 1})])
    (told,) = told
    for name in ("loss (CrossEntropyLoss)", "extra (ReLU)", "transform (function)", "folder (PosixPath)"):
        assert name in told
    assert "callback Keeps (builtin_function_or_method)" in told
    assert "names" not in told
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["hyper_parameters"]["names"] == ["a"]
    assert saved["hyper_parameters"]["lr"] == 0.1
    assert not {"loss", "extra"} & saved["hyper_parameters"].keys()
    assert not {"transform", "folder"} & saved["datamodule_hyper_parameters"].keys()
    assert "Keeps" not in saved["callbacks"]
    assert {"loss", "extra"} <= model.hparams.keys()  # the module keeps its own


class Typed(torch.optim.SGD):
    """Has an option, or statistics, of a user's class."""

    def __init__(self, params: Any, lr: float, option: Any = None) -> None:
        super().__init__(params, lr, momentum=0.9)
        self.param_groups[0]["norm"] = option

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for p in self.param_groups[0]["params"] if self.param_groups[0]["norm"] is None else ():
            self.state[p]["speed"] = Speed(1)


class LocalTyped(Net):
    def configure_optimizers(self) -> Any:
        return Typed(self.parameters(), 0.1, Speed(1))


@pytest.mark.parametrize("where", ["local optimizer", "server_optimizer"])
def test_optimizer_that_cannot_be_loaded_is_rejected_at_the_first_save(tmp_path: Path, where: str) -> None:
    is_local = where == "local optimizer"
    model = seeded(LocalTyped if is_local else Net, dropout=0.0)
    options = {} if is_local else {"server_optimizer": partial(Typed, lr=1.0)}
    with pytest.raises(FederatedError, match=f"option of (the )?{where} holds Speed, which does not load"):
        run(tmp_path, model, **options)
    assert not list(tmp_path.glob("*.ckpt"))


UNSAFE: dict[str, Any] = {
    "layer": nn.ReLU(),
    "class": nn.ReLU,
    "function": torch.relu,
    "partial": partial(torch.relu),
    "path": Path("a"),
    "enum": Mode.FAST,
    "namespace": argparse.Namespace(a=1),
    "array": np.zeros(2),
    "list": [1, nn.ReLU()],
    "dict": {"a": {"b": print}},
    "range": range(3),
}


class Many(Net):
    def __init__(self, **kinds: Any) -> None:
        super().__init__(dropout=0.0)
        self.save_hyperparameters()
        self.hparams["kept"] = {"a": [1, 2.0, None, "b"]}


@pytest.mark.thorough
def test_every_kind_of_hyperparameter_trains_logs_and_resumes(tmp_path: Path) -> None:
    def fitted(folder: str, rounds: int, **options: Any) -> tuple[Any, list[str]]:
        loggers = [TensorBoardLogger(tmp_path / folder), CSVLogger(tmp_path / folder)]
        model = seeded(Many, **UNSAFE)
        return model, run(tmp_path / folder, model, rounds=rounds, logger=loggers, **options)[1]

    straight, _ = fitted("a", 2)
    _, (told,) = fitted("b", 1)
    for name in UNSAFE:
        assert f"{name} (" in told
    assert "kept" not in told
    last = tmp_path / "b" / "last.ckpt"
    assert not UNSAFE.keys() & torch.load(last, weights_only=True)["hyper_parameters"].keys()
    resumed, _ = fitted("b", 2, ckpt_path=last)
    assert torch.equal(parameters(resumed), parameters(straight))


def test_numpy_numbers_are_kept_as_numbers(tmp_path: Path) -> None:
    def made() -> Any:
        return seeded(Other, lr=np.float64(0.07), loss=nn.CrossEntropyLoss(), names=[np.int64(3)])

    options = {"server_optimizer": partial(torch.optim.SGD, lr=np.float64(0.9))}
    straight, resumed = made(), made()
    run(tmp_path / "a", straight, **options)
    _, (told,) = run(tmp_path / "b", made(), rounds=1, **options)
    assert "lr" not in told
    saved = torch.load(tmp_path / "b" / "last.ckpt", weights_only=True)
    assert type(saved["hyper_parameters"]["lr"]) is float
    assert saved["hyper_parameters"]["names"] == [3]
    run(tmp_path / "b", resumed, ckpt_path=tmp_path / "b" / "last.ckpt", **options)
    assert torch.equal(parameters(resumed), parameters(straight))


@pytest.mark.thorough
def test_load_from_checkpoint_uses_defaults_or_keywords(tmp_path: Path) -> None:
    model = seeded(Other, loss=nn.CrossEntropyLoss(label_smoothing=0.1), lr=0.05)
    t, _ = run(tmp_path, model)
    best = t.checkpoint_callback.best_model_path
    again = Other.load_from_checkpoint(best, weights_only=True)
    assert again.hparams.lr == 0.05
    assert again.loss.label_smoothing == 0
    again = Other.load_from_checkpoint(best, loss=nn.CrossEntropyLoss(label_smoothing=0.2), weights_only=True)
    assert again.loss.label_smoothing == 0.2
    saved = torch.load(best, weights_only=True)["state_dict"]
    assert all(torch.equal(saved[name], value) for name, value in again.state_dict().items())


def test_user_allowed_types_are_kept(tmp_path: Path) -> None:
    with torch.serialization.safe_globals([Speed]):
        _, (told,) = run(tmp_path, seeded(Other, extra=Speed(3)))
        assert "extra" not in told
        assert torch.load(tmp_path / "last.ckpt", weights_only=True)["hyper_parameters"]["extra"].value == 3


def test_callbacks_with_omitted_state_start_fresh(tmp_path: Path) -> None:
    run(tmp_path, seeded(Other), rounds=1, callbacks=[Keeps({"hook": print})])
    callback = Keeps({"n": 2})
    _, told = run(tmp_path, seeded(Other), callbacks=[callback], ckpt_path=tmp_path / "last.ckpt")
    assert callback.loaded is None
    assert "Keeps" not in told[0]
    later = Keeps({"n": 3})
    run(tmp_path, seeded(Other), rounds=3, callbacks=[later], ckpt_path=tmp_path / "last.ckpt")
    assert later.loaded == {"n": 2}


class Special(Other):
    """Adds modules to its checkpoints and expects them back, as pytorch-forecasting's models do."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        special = {"loss": self.loss, "plain": 3}
        checkpoint["special"] = special
        checkpoint["scaler"] = nn.Tanh()
        checkpoint["hyper_parameters"].update(special)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["special"]
        self.scaler = checkpoint.get("scaler")


@pytest.mark.thorough
def test_omitted_module_entries_come_from_the_module_on_resume(tmp_path: Path) -> None:
    straight, first, resumed = seeded(Special), seeded(Special), seeded(Special)
    run(tmp_path / "a", straight)
    _, (told,) = run(tmp_path / "b", first, rounds=1)
    assert "special.loss (CrossEntropyLoss)" in told
    assert "scaler (Tanh)" in told
    last = tmp_path / "b" / "last.ckpt"
    assert torch.load(last, weights_only=True)["special"] == {"plain": 3}
    assert Special.load_from_checkpoint(last, weights_only=True).loaded == {"plain": 3}
    run(tmp_path / "b", resumed, ckpt_path=last)
    assert resumed.loaded["loss"] is resumed.loss
    assert isinstance(resumed.scaler, nn.Tanh)
    assert torch.equal(parameters(resumed), parameters(straight))
    t = trainer()
    t.validate(resumed, Data(), ckpt_path=last, verbose=False)


class Schedule(torch.optim.lr_scheduler.StepLR):
    """Holds a function, which StepLR's own state would include."""

    def __init__(self, optimizer: Any) -> None:
        self.told = lambda: None
        super().__init__(optimizer, 1, 0.5)


def test_schedulers_with_functions_resume(tmp_path: Path) -> None:
    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
            return [optimizer], [Schedule(optimizer)]

    options: dict[str, Any] = {"server_lr_scheduler": Schedule}
    straight, resumed = seeded(Scheduled), seeded(Scheduled)
    run(tmp_path / "a", straight, rounds=3, **options)
    _, (told,) = run(tmp_path / "b", seeded(Scheduled), rounds=1, **options)
    assert told.count("told (function)") == 2
    assert torch.load(tmp_path / "b" / "last.ckpt", weights_only=True)["lr_schedulers"][0]["last_epoch"] == 1
    run(tmp_path / "b", resumed, rounds=3, ckpt_path=tmp_path / "b" / "last.ckpt", **options)
    assert torch.equal(parameters(resumed), parameters(straight))


def test_weights_only_and_manual_saves_omit_unsafe_entries(tmp_path: Path) -> None:
    t = trainer(max_rounds=1)
    t.fit(seeded(Other), Data())
    for weights_only in (False, True):
        t.save_checkpoint(tmp_path / "a.ckpt", weights_only=weights_only)
        assert "loss" not in torch.load(tmp_path / "a.ckpt", weights_only=True)["hyper_parameters"]


def test_forged_left_out_claims_are_ignored(tmp_path: Path) -> None:
    run(tmp_path, seeded(), rounds=1)
    content = torch.load(tmp_path / "last.ckpt", weights_only=True)
    for claim in ([["state_dict", "head.bias"]], [["loops"]], [[]], 3, [["nothing", "there"]], [[3]]):
        torch.save({**content, "left_out": claim}, tmp_path / "hostile.ckpt")
        resumed = seeded()
        run(tmp_path / "b", resumed, rounds=1, ckpt_path=tmp_path / "hostile.ckpt")
        assert same(resumed.state_dict(), content["state_dict"])


class Third(Other):
    """A third-party module with a module as a default argument."""

    def __init__(self, loss: nn.Module = nn.CrossEntropyLoss(), lr: float = 0.1) -> None:  # noqa: B008
        super().__init__(lr, loss)
        self.hparams["criterion"] = loss  # on the command line, "loss" is the configuration of a loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.training_step(batch, batch_idx))


CONFIG = """
model: {class_path: tests.checkpoints.test_contents.Third}
data:
  class_path: tests.checkpoints.test_contents.Data
trainer: {max_rounds: 2, local_epochs: 1, clients_per_round: 3}
"""


@pytest.mark.thorough
def test_command_line_tests_and_resumes_with_omitted_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = yaml.safe_load(CONFIG)
    config["trainer"] |= {k: v for k, v in QUIET.items() if k not in ("logger", "enable_checkpointing")}
    Path("run.yaml").write_text(yaml.safe_dump(config))
    with pytest.warns(UserWarning, match=r"without running code: hyper-parameters criterion \(CrossEntropyLoss\)"):
        main(["fit", "--config", "run.yaml"])
    (last,) = Path("lightning_logs").glob("version_0_*/checkpoints/*.ckpt")
    assert "criterion" not in torch.load(last, weights_only=True)["hyper_parameters"]
    main(["fit", "--config", "run.yaml", "--ckpt_path", "last", "--trainer.max_rounds", "3"])
    main(["test", "--config", "run.yaml", "--ckpt_path", "best"])
    main(["validate", "--config", "run.yaml", "--ckpt_path", "last"])


def test_safety_check_does_not_write_tensor_data(monkeypatch: pytest.MonkeyPatch) -> None:
    save, sizes = torch.save, []

    def counted(value: Any, stream: Any) -> None:
        save(value, stream)
        sizes.append(stream.tell())

    monkeypatch.setattr(torch, "save", counted)
    scores = {f"epoch={i}.ckpt": torch.tensor(float(i)) for i in range(100)}
    state = {"best_k_models": scores, "average": [torch.zeros(10**5), nn.Parameter(torch.zeros(3))]}
    found = SafeContents().of({"callbacks": {"kept": state, "lost": {"a": torch.zeros(3), "mode": Speed(1)}}}, Net())
    assert same(found["callbacks"], {"kept": state})
    assert sizes[0] < 10_000


@pytest.mark.parametrize("name", ["attribute", "subclass"])
def test_tensors_with_extra_content_are_checked_for_safety(name: str) -> None:
    value = torch.zeros(3)
    if name == "attribute":
        value.mode = Speed(1)
    else:
        value = value.as_subclass(Odd)
    with pytest.warns(UserWarning, match="leave out what cannot be loaded without running code"):
        found = SafeContents().of({"callbacks": {"lost": {"a": value}, "kept": {"b": 1}}}, Net())
    assert found["callbacks"] == {"kept": {"b": 1}}


class Odd(torch.Tensor):
    """A user's tensor class."""
