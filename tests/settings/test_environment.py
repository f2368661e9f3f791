"""``PL_TRAINER_*`` variables of the environment mean what they mean for Lightning's own Trainer."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import yaml

from lightning_fed import FederatedError, FederatedTrainer
from lightning_fed.algorithms import FedProx
from lightning_fed.cli.main import main

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")
QUIET = {"enable_progress_bar": False, "accelerator": "cpu", "enable_checkpointing": False}


def trainer(**options: Any) -> FederatedTrainer:
    return FederatedTrainer(**{"local_epochs": 1, **QUIET, **options})


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
def test_they_mean_what_they_mean_for_a_plain_trainer(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    untouched = trainer()
    monkeypatch.setenv(f"PL_TRAINER_{name.upper()}", text)
    read = "loggers" if name == "logger" else name
    found, expected = getattr(trainer(), read), getattr(pl.Trainer(**QUIET), read)
    assert found == expected
    assert found != getattr(untouched, read)


def test_they_set_arguments_of_our_own(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name, text in {"MAX_ROUNDS": "3", "LOCAL_STEPS": "5", "CLIENTS_PER_ROUND": "0.5", "ENGINE": "auto"}.items():
        monkeypatch.setenv(f"PL_TRAINER_{name}", text)
    made = FederatedTrainer(**QUIET)
    settings = made.fit_loop.settings
    assert (made.max_rounds, settings.local_steps, settings.engine) == (3, 5, "auto")
    assert "from the environment (PL_TRAINER_...): " in caplog.text
    assert "max_rounds=3" in caplog.text


@pytest.mark.parametrize("variable", ["PL_TRAINER_MAX_ROUNDS", "PL_TRAINER_MAX_EPOCHS"])
@pytest.mark.parametrize("name", ["max_rounds", "max_epochs"])
def test_what_the_code_says_goes_before(variable: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "3")
    assert trainer(**{name: 5}).max_rounds == 5
    assert trainer().max_rounds == 3


def test_a_wrong_value_is_refused_with_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_MAX_ROUNDS", "many")
    with pytest.raises(FederatedError, match=r"found 'many'.* \(PL_TRAINER_...\) sets max_rounds='many'"):
        trainer(algorithm=FedProx(mu=1))


def test_on_the_command_line_they_are_the_defaults(
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
    config = printed("--config", QUICKSTART)  # a configuration goes before the environment
    assert [config[name] for name in ("max_rounds", "logger", "local_epochs")] == [50, False, 2]
