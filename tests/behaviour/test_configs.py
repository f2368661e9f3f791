"""Each configuration changes only its own part, and builds the part that it names."""

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import yaml
from torch.utils.data import DataLoader

from lightning_fed import FederatedTrainer, algorithms
from lightning_fed.cli.main import FederatedCLI
from lightning_fed.core.errors import FederatedError
from lightning_fed.data import Digits
from lightning_fed.models import MLPClassifier
from tests.helpers.command_line import built
from tests.helpers.selection import few

CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"
SECTIONS = {
    "data": {"data"},
    "model": {"model"},
    "schedule": {"optimizer", "lr_scheduler", "trainer"},
    **{folder: {"trainer"} for folder in ("aggregation", "algorithm", "asynchronous", "measures", "participation")},
}
STACKED = sorted(path for path in CONFIGS.rglob("*.yaml") if path != QUICKSTART and path.parent.name != "tasks")
METHODS = sorted(
    name
    for name in algorithms.__all__
    if issubclass(cls := getattr(algorithms, name), algorithms.Algorithm) and cls is not algorithms.Algorithm
)


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def stacked(*paths: Path) -> FederatedCLI:
    """Return the command line built from the quickstart's configuration with others on top."""
    return built(*(word for path in (QUICKSTART, *paths) for word in ("--config", str(path))))


def check(value: Any, config: Any) -> None:
    """Check that an object has the class and the arguments that a configuration names."""
    if not isinstance(config, dict) or "class_path" not in config:
        assert value == config or repr(value) == repr(config)  # a wrapped argument keeps its original's repr
        return
    assert type(value).__name__ == config["class_path"].rpartition(".")[2]
    for name, argument in config.get("init_args", {}).items():
        if isinstance(value, pl.LightningModule):
            check(value.hparams[name], argument)
        elif name == "alpha" and isinstance(value, Digits):
            check(value.partition.alpha, argument)
        else:
            check(getattr(value, name), argument)


@pytest.fixture(autouse=True)
def _command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pass only a test's own arguments, and restore the environment that ``seed_everything`` changes."""
    monkeypatch.setattr(sys, "argv", ["lightning-fed"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")


def test_stackable_config_changes_only_its_own_section() -> None:
    assert not [path for path in STACKED if set(read(path)) != SECTIONS[path.parent.name]]


def test_every_method_has_a_config() -> None:
    named = {read(path)["trainer"]["algorithm"]["class_path"] for path in CONFIGS.glob("algorithm/*.yaml")}
    assert {f"lightning_fed.algorithms.{method}" for method in METHODS} <= named


def unknown(config: Any) -> Iterator[str]:
    """Yield a configuration's classes and arguments that do not exist, at any depth."""
    if isinstance(config, list):
        for part in config:
            yield from unknown(part)
    elif isinstance(config, dict):
        if "class_path" in config:
            module, _, name = config["class_path"].rpartition(".")  # a short name is one of Lightning's callbacks
            try:
                inspect.signature(
                    getattr(importlib.import_module(module or f"{pl.__name__}.callbacks"), name)
                ).bind_partial(**config.get("init_args", {}))
            except (AttributeError, ImportError, TypeError) as error:
                yield f"{config['class_path']}: {error}"
        for part in config.values():
            yield from unknown(part)


def test_every_config_uses_only_existing_names() -> None:
    found = {}
    for path in (QUICKSTART, *STACKED):
        config = read(path)
        options = {name.removesuffix("+") for name in config.get("trainer", {})}
        found[path.stem] = [*unknown(config), *(options - set(inspect.signature(FederatedTrainer).parameters))]
    assert not {name: faults for name, faults in found.items() if faults}


@pytest.mark.thorough
@pytest.mark.parametrize("path", [QUICKSTART, *STACKED], ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_config_builds_the_parts_it_names(path: Path) -> None:
    config = read(path)
    cli = stacked(path)
    settings = cli.trainer.fit_loop.settings
    for name, value in (("model", cli.model), ("data", cli.datamodule)):
        if name in config:
            check(value, config[name])
    parts = {"aggregator", "algorithm", "compression", "heterogeneity", "sampler", "weighting"}
    for name in parts & set(config.get("trainer", {})):
        check(getattr(settings, name), config["trainer"][name])
    own = config.get("trainer", {}).get("callbacks+", [])
    for named in [*own, *read(QUICKSTART)["trainer"]["callbacks"]]:  # a stacked config adds callbacks and replaces none
        (callback,) = [c for c in cli.trainer.callbacks if type(c).__name__ == named["class_path"].rpartition(".")[2]]
        if named in own:
            check(callback, named)
    if named := config.get("trainer", {}).get("server_optimizer"):
        optimizer = settings.server_optimizer(cli.model.parameters())
        assert type(optimizer).__name__ == named["class_path"].rpartition(".")[2]
        assert optimizer.defaults["lr"] == named["init_args"]["lr"]
    for name in {"max_rounds", "clients_per_round", "local_epochs"} & set(config.get("trainer", {})):
        assert cli.config["trainer"][name] == config["trainer"][name]


ALGORITHMS = sorted((CONFIGS / "algorithm").glob("*.yaml"))


@pytest.mark.parametrize(
    "path",
    few(
        [path for path in ALGORITHMS if path.stem != "fedbn"],
        [p for p in ALGORITHMS if p.stem in ("scaffnew",)],
    ),
    ids=lambda p: p.stem,
)
def test_every_method_trains_on_unmodified_quickstart(path: Path) -> None:
    cli = stacked(path)
    cli.trainer.fit_loop.max_epochs = 1
    cli.trainer.fit(cli.model, cli.datamodule)
    assert cli.trainer.fit_loop.epoch_progress.current.completed == 1
    assert torch.isfinite(cli.trainer.callback_metrics["val_loss"])


class Rates(pl.Callback):
    """Records the local optimizer's rate after each round."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


@pytest.mark.thorough
def test_configured_schedule_with_local_schedule_is_per_step() -> None:
    words = [word for path in (QUICKSTART, CONFIGS / "schedule" / "warm_up.yaml") for word in ("--config", str(path))]
    work = ["--trainer.local_steps", "3", "--trainer.local_epochs", "null", "--trainer.max_rounds", "1"]
    cli, noted = built(*words, *work), Rates()
    cli.trainer.callbacks.append(noted)
    cli.trainer.fit(cli.model, cli.datamodule)
    assert noted.rates == pytest.approx([0.02 + 0.18 * 3 / 100])


def test_fedbn_rejects_quickstart_model_without_batch_norm() -> None:
    cli = stacked(CONFIGS / "algorithm" / "fedbn.yaml")
    with pytest.raises(FederatedError, match="BatchNorm layers .* MLPClassifier has none"):
        cli.trainer.fit(cli.model, cli.datamodule)


def test_lora_rejects_quickstart_model_without_adapters() -> None:
    cli = stacked(CONFIGS / "aggregation" / "lora.yaml")
    assert cli.trainer.fit_loop.settings.lora == "exact"
    with pytest.raises(FederatedError, match="LoRA layers of peft, and MLPClassifier has none"):
        cli.trainer.fit(cli.model, cli.datamodule)


def test_logistic_regression_has_one_layer() -> None:
    assert [p.shape for p in stacked(CONFIGS / "model" / "logistic.yaml").model.parameters()] == [(10, 64), (10,)]


@pytest.mark.thorough
def test_quickstart_model_and_data_train_without_federation() -> None:
    data, model = Digits(num_clients=1), seeded_model()
    trainer = pl.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(model, DataLoader(data.client_dataset(0), batch_size=16, shuffle=True))
    (metrics,) = trainer.test(model, data, verbose=False)
    assert set(metrics) == {"test_loss", "test_acc"}
    assert metrics["test_acc"] > 0.8
    predicted = trainer.predict(model, data)
    assert predicted is not None
    labels = torch.stack([label for _, label in data.test])
    assert (torch.cat(predicted) == labels).float().mean() == pytest.approx(metrics["test_acc"])


def seeded_model() -> MLPClassifier:
    torch.manual_seed(0)
    return MLPClassifier()
