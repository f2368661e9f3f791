"""Every argument of Lightning's Trainer, with a value of every accepted type: supported, or rejected by name."""

from collections import UserDict, UserList
from datetime import timedelta
from inspect import signature
from pathlib import Path
from types import FunctionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import pytorch_lightning as pl
import yaml
from lightning_fabric.plugins.environments import LightningEnvironment
from pytorch_lightning.callbacks import EarlyStopping, LambdaCallback
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.profilers import SimpleProfiler

from lightning_fed import FederatedError, FederatedTrainer
from lightning_fed.algorithms import FedProx
from lightning_fed.cli.main import main
from lightning_fed.compat.private import MisconfigurationException
from tests.helpers.training import QUIET, classification, data, seeded

SWITCH = (True, False)
MAYBE = (None, *SWITCH)
LIMIT = (None, 1, 1.0, 0, 0.5)
TIME = (None, "00:00:10:00", timedelta(minutes=10), {"minutes": 10})
TRUE = ("64-true", "32-true", "16-true", "bf16-true")
PLUGINS = (pl.plugins.TorchCheckpointIO(), pl.plugins.DoublePrecision(), pl.plugins.TorchSyncBatchNorm())

TAKEN: dict[str, tuple[Any, ...]] = {
    "accelerator": ("cpu", "auto", pl.accelerators.CPUAccelerator()),
    "strategy": ("auto", "clients", "ddp", "single_device", pl.strategies.SingleDeviceStrategy("cpu")),
    "devices": (1, "1", "auto"),
    "num_nodes": (1,),
    "precision": (None, 64, 32, 16, "64", "32", "16", "bf16", *TRUE, "16-mixed", "bf16-mixed"),
    "logger": (None, *SWITCH, lambda: CSVLogger("."), lambda: [CSVLogger("a"), CSVLogger("b")], lambda: iter([])),
    "callbacks": (None, pl.Callback(), [pl.Callback()]),
    "fast_dev_run": (*SWITCH, 2),
    "max_epochs": (None, 1, 0),
    "min_epochs": (None, 1),
    "max_steps": (-1, 3),
    "min_steps": (None, 3),
    "max_time": TIME,
    "limit_train_batches": LIMIT,
    "limit_val_batches": LIMIT,
    "limit_test_batches": LIMIT,
    "limit_predict_batches": LIMIT,
    "overfit_batches": (0.0, 1, 0.5),
    "val_check_interval": (*TIME, 1, 1.0),
    "check_val_every_n_epoch": (1, 2),
    "num_sanity_val_steps": (None, 0, 1, -1),
    "log_every_n_steps": (None, 1, 0),
    "enable_checkpointing": MAYBE,
    "enable_progress_bar": MAYBE,
    "enable_model_summary": MAYBE,
    "accumulate_grad_batches": (1, 2),
    "gradient_clip_val": (None, 1, 0.5),
    "gradient_clip_algorithm": (None, "norm", "value"),
    "deterministic": (*MAYBE, "warn"),
    "benchmark": MAYBE,
    "inference_mode": SWITCH,
    "use_distributed_sampler": SWITCH,
    "profiler": (None, "simple", "advanced", "pytorch", SimpleProfiler()),
    "detect_anomaly": SWITCH,
    "barebones": SWITCH,
    "plugins": (None, [], *PLUGINS, [pl.plugins.AsyncCheckpointIO()], LightningEnvironment()),
    "sync_batchnorm": SWITCH,
    "reload_dataloaders_every_n_epochs": (0, 1),
    "default_root_dir": (None, ".", Path()),
    "enable_autolog_hparams": SWITCH,
    "model_registry": (None, "name"),
}
"""Values that a run on one CPU accepts, by argument. A function makes a value that only one trainer can use."""

REFUSED: dict[str, tuple[tuple[Any, str], ...]] = {
    "accelerator": (("hpu", "invalid accelerator name"),),
    "strategy": (("fsdp", "The strategy fsdp is not supported"),),
    "devices": (([0], "should be an int > 0"),),
    "precision": (("transformer-engine", "transformer_engine"), ("transformer-engine-float16", "transformer_engine")),
    "val_check_interval": ((2, "val_check_interval=2"), (0.5, "val_check_interval=0.5")),
    "check_val_every_n_epoch": ((None, "check_val_every_n_epoch=None"),),
    "gradient_clip_algorithm": (("max", "gradient_clip_algorithm"),),
    "profiler": (("xla", "torch_xla"),),
}
"""Values that a run on one CPU rejects, by argument, and a part of the error."""

REFUSALS = (FederatedError, MisconfigurationException, ModuleNotFoundError)
HINTS = get_type_hints(pl.Trainer.__init__)


def made(value: Any) -> Any:
    """Return a value, or make it."""
    return value() if isinstance(value, FunctionType) else value


def run(name: str, value: Any) -> None:
    """Run a round."""
    rounds = {} if name == "max_epochs" else {"max_rounds": 1}
    quiet = {key: given for key, given in QUIET.items() if key != name}
    if name == "barebones":
        quiet = {"accelerator": "cpu"}
    made = FederatedTrainer(**{**quiet, **rounds, "local_epochs": 1, "clients_per_round": 2, "seed": 0, name: value})
    made.fit(seeded(), data(val=classification(64, 77), batch_size=2, eval_batch_size=16))


def kinds(hint: Any) -> list[Any]:
    """Return the parts of an annotation: types, containers and single literals."""
    if get_origin(hint) is Union:
        return [kind for part in get_args(hint) for kind in kinds(part)]
    return list(get_args(hint)) if get_origin(hint) is Literal else [hint]


def is_of(value: Any, kind: Any) -> bool:
    """Return whether a value is an example of a part of an annotation."""
    kind = get_origin(kind) or kind
    if not isinstance(kind, type):  # a literal
        return type(value) is type(kind) and value == kind
    return type(value) is kind if kind in (int, float, bool, str) else isinstance(value, kind)


class ListOfHydra(UserList[Any]):
    """A sequence that is not a list, such as Hydra's ``ListConfig``."""

    def __repr__(self) -> str:
        return repr(self.data)


def test_callbacks_may_be_any_sequence() -> None:
    callback = EarlyStopping("val_loss")
    made = trainer(callbacks=ListOfHydra([callback]))
    assert callback in made.callbacks
    for wrong in ("", b"", {}, ListOfHydra([EarlyStopping])):
        with pytest.raises(FederatedError, match="callbacks must be a Callback or a list of"):
            trainer(callbacks=wrong)


@pytest.mark.parametrize(
    ("name", "value"), [("devices", ListOfHydra([0])), ("max_time", UserDict(minutes=1)), ("logger", ListOfHydra())]
)
def test_list_and_dict_lookalikes_are_rejected_with_their_class(name: str, value: Any) -> None:
    with pytest.raises(FederatedError, match=f"{name} must be .*, found a {type(value).__name__}"):
        trainer(**{name: value})


def test_every_argument_has_examples_of_all_accepted_types() -> None:
    names = [name for name in signature(pl.Trainer.__init__).parameters if name != "self"]
    assert list(TAKEN) == names
    missing = {
        (name, kind)
        for name in names
        for kind in kinds(HINTS[name])
        if not any(is_of(value, kind) for value in [*map(made, TAKEN[name]), *(v for v, _ in REFUSED.get(name, ()))])
    }
    assert missing == set()


@pytest.mark.thorough
@pytest.mark.parametrize("name", TAKEN)
def test_valid_values_are_accepted(name: str) -> None:
    for value in TAKEN[name]:
        run(name, made(value))


@pytest.mark.thorough
@pytest.mark.parametrize("name", REFUSED)
def test_invalid_values_are_rejected(name: str) -> None:
    for value, said in REFUSED[name]:
        with pytest.raises(REFUSALS, match=said):
            run(name, value)


QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")
SILENT = {"enable_progress_bar": False, "accelerator": "cpu", "enable_checkpointing": False}


def trainer(**options: Any) -> FederatedTrainer:
    return FederatedTrainer(**{"local_epochs": 1, **SILENT, **options})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("limit_train_batches", "2"),
        ("limit_train_batches", "0.5"),
        ("max_epochs", "4"),
        ("log_every_n_steps", "7"),
        ("accumulate_grad_batches", "3"),
        ("logger", "False"),
        ("default_root_dir", "elsewhere"),
        ("check_val_every_n_epoch", "2"),
    ],
)
def test_environment_variables_match_a_plain_trainer(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    untouched = trainer()
    monkeypatch.setenv(f"PL_TRAINER_{name.upper()}", text)
    read = "loggers" if name == "logger" else name
    found, expected = getattr(trainer(), read), getattr(pl.Trainer(**SILENT), read)
    assert found == expected
    assert found != getattr(untouched, read)


def test_environment_variables_set_federated_arguments(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, text in {"MAX_ROUNDS": "3", "LOCAL_STEPS": "5", "CLIENTS_PER_ROUND": "0.5", "ENGINE": "auto"}.items():
        monkeypatch.setenv(f"PL_TRAINER_{name}", text)
    made = FederatedTrainer(**SILENT)
    settings = made.fit_loop.settings
    assert (made.max_rounds, settings.local_steps, settings.engine) == (3, 5, "auto")
    assert "from the environment (PL_TRAINER_...): " in caplog.text
    assert "max_rounds=3" in caplog.text


@pytest.mark.parametrize("variable", ["PL_TRAINER_MAX_ROUNDS", "PL_TRAINER_MAX_EPOCHS"])
@pytest.mark.parametrize("name", ["max_rounds", "max_epochs"])
def test_explicit_arguments_override_environment_variables(
    variable: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "3")
    assert trainer(**{name: 5}).max_rounds == 5
    assert trainer().max_rounds == 3


def test_invalid_environment_value_is_rejected_with_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_MAX_ROUNDS", "many")
    with pytest.raises(FederatedError, match=r"found 'many'.* \(PL_TRAINER_...\) sets max_rounds='many'"):
        trainer(algorithm=FedProx(mu=1))


def test_environment_variables_are_command_line_defaults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"MAX_EPOCHS": "3", "LOGGER": "False", "LOCAL_EPOCHS": "7", "ALGORITHM": "FedProx"}.items():
        monkeypatch.setenv(f"PL_TRAINER_{name}", text)

    def printed(*args: str) -> dict[str, Any]:
        with pytest.raises(SystemExit):
            main(["fit", *args, "--print_config"])
        config: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)["trainer"]
        return config

    Path("empty.yaml").write_text("seed_everything: 0")
    config = printed("--config", "empty.yaml")
    assert [config[name] for name in ("max_rounds", "logger", "local_epochs")] == [3, False, 7]
    assert config["algorithm"]["class_path"] == "lightning_fed.algorithms.FedProx"
    config = printed("--config", QUICKSTART)  # a configuration takes precedence over the environment
    assert [config[name] for name in ("max_rounds", "logger", "local_epochs")] == [50, False, 2]


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_stage_inside_a_fit_hook_is_rejected(stage: str) -> None:
    """Lightning would reset the trainer during the fit, which would end early or raise an unrelated error."""
    begin = LambdaCallback(on_train_end=lambda t, module: getattr(t, stage)(module, t.datamodule))
    run = FederatedTrainer(**QUIET, max_rounds=1, local_epochs=1, callbacks=begin)
    with pytest.raises(FederatedError, match=rf"FederatedTrainer.{stage} was called while this trainer runs fit"):
        run.fit(seeded(), data())
