"""Help in the order of use, and errors that suggest the intended name."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_fed.cli.main import main
from tests.helpers.command_line import one_stage
from tests.helpers.selection import few

thorough = partial(pytest.param, marks=pytest.mark.thorough)


CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART = str(CONFIGS / "quickstart.yaml")
SMALL = ["--trainer.max_rounds", "2", "--trainer.accelerator", "cpu", "--trainer.enable_model_summary", "false"]


def fit(*args: str, config: str = QUICKSTART) -> None:
    with one_stage("fit"):
        main(["fit", "--config", config, *SMALL, *args])


@pytest.mark.parametrize(
    ("args", "meant"),
    [
        thorough(["--trainer.algorithm", "Scafold"], "Did you mean Scaffold instead of Scafold?"),
        (["--trainer.clients_per_rounds", "3"], "Did you mean --trainer.clients_per_round instead of"),
        thorough(["--trainer.callbacks", "EarlyStoping"], "Did you mean EarlyStopping instead of EarlyStoping?"),
        (["--trainer.max_rounds", "x"], "Expected a <class 'int'>. Got value: x"),
        (["--model.widht", "3"], "There are the options in_features, num_classes, hidden, "),
        thorough(["--data", "Digit"], "Did you mean Digits instead of Digit?"),
        thorough(["--trainer.algorithm", "SCAFFOLD"], "Did you mean Scaffold instead of SCAFFOLD?"),
        thorough(["--trainer.algorithm", "fedavg"], "Did you mean FedAvg instead of fedavg?"),
        thorough(["--trainer.algorithm", "mime"], "Did you mean Mime instead of mime?"),
        thorough(["--trainer.algorithm", "Fedavgg"], "Did you mean FedAvg instead of Fedavgg?"),
        thorough(["--trainer.algorithm", "Digits"], "There are APFL, CMime, Ditto, "),
        thorough(
            ["--trainer.algorithm", "lightning_fed.algorithms.FedProxx"], "Did you mean FedProx instead of FedProxx?"
        ),
        (["--trainer.algorithm", "lightning_fed.algorithms.Unknown"], "There are APFL, CMime, Ditto, "),
        thorough(["--trainer.algorithm", "torch.optim.NotThere"], "has no attribute 'NotThere'"),
        thorough(["--data.partition", "foo"], "There are BalancedDirichlet, ByKey, "),
        thorough(["--model.lrr", "0.2"], "Did you mean lr instead of lrr?"),
        thorough(["--data.num_client", "3"], "Did you mean num_clients instead of num_client?"),
        (["--trainer.algorithm", "FedProx", "--trainer.algorithm.muu", "3"], "Did you mean mu instead of muu?"),
        (["--trainer.algorithm", "FedProx"], "Add --trainer.algorithm.mu VALUE. --trainer.algorithm.help FedProx desc"),
        thorough(
            ["--data", "ClientTable"], "Add --data.path VALUE --data.client VALUE --data.target VALUE. --data.help "
        ),
        thorough(
            ["--data.partition", "Shards", "--data.partition.num_client", "3"], "Did you mean num_clients instead of"
        ),
    ],
)
def test_mistaken_argument_suggests_the_likely_one(
    args: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        fit(*args)
    answer = capsys.readouterr().err
    assert meant in answer
    assert answer.startswith("usage: lightning-fed fit --config FILE [--OPTION VALUE ...]\n")
    assert len(answer.splitlines()) < 12
    assert not re.search("Traceback|NoneType|NestedArg", answer)


@pytest.mark.parametrize(
    ("config", "meant"),
    [
        thorough({"trainer": {"max_round": 3}}, "Did you mean trainer.max_rounds instead of trainer.max_round?"),
        ({"trainr": {"max_rounds": 3}}, "Did you mean trainer.max_rounds instead of trainr.max_rounds?"),
        ({"model": {"class_path": "ResNet", "init_args": {"detph": 8}}}, "Did you mean depth instead of detph?"),
    ],
)
def test_mistaken_entry_in_a_file_suggests_the_likely_one(
    config: dict[str, Any], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mistaken.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit):
        fit("--config", "mistaken.yaml")
    assert meant in capsys.readouterr().err


@pytest.mark.parametrize(("text", "line"), [("{}\n{}", 3), ("a: &a {{x: 1}}\nb:\n  <<: *a\n  x: 2\n{}\n{}", 7)])
@pytest.mark.parametrize("option", ["--config={}", thorough("--config {}"), thorough("-c {}")])
def test_duplicate_key_in_a_file_is_rejected(
    text: str, line: int, option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("twice.yaml").write_text(text.format("trainer:\n  max_rounds: 3", "trainer: {max_rounds: 5}"))
    with pytest.raises(SystemExit):
        fit(*option.format("twice.yaml").split())
    assert f"twice.yaml, line {line}: the key 'trainer' comes twice." in capsys.readouterr().err


def test_non_utf_8_file_raises_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("latin.yaml").write_bytes("trainer: {max_rounds: 3}  # Größe".encode("latin-1"))
    with pytest.raises(SystemExit):
        fit("--config", "latin.yaml")
    assert "latin.yaml is not UTF-8, as its byte 30 shows" in capsys.readouterr().err


def test_invalid_yaml_file_raises_and_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("torn.yaml").write_text("trainer:\n  max_rounds: 3\n algorithm: FedAvg\n")
    words = ["fit", "--config", QUICKSTART, "--config", "torn.yaml"]
    monkeypatch.setattr("sys.argv", ["lightning-fed", *words])
    with pytest.raises(SystemExit):
        main()
    answer = capsys.readouterr().err
    assert "line 3, column 2" in answer
    assert "The file is torn.yaml." in answer


@pytest.mark.parametrize("args", [[], thorough(["fitt"])], ids=["none", "unknown"])
def test_unknown_command_lists_the_known_ones(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(args)
    answer = capsys.readouterr().err
    assert answer.startswith("usage: lightning-fed COMMAND --config FILE")
    assert "fit" in answer


def test_fit_without_arguments_names_the_required_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit"])
    answer = capsys.readouterr().err
    assert "--config FILE" in answer
    named = re.search(r"--model MLPClassifier --data Digits [\w.\s-]*?(?=\. `)", answer)
    assert named is not None
    with one_stage("fit"):
        main(["fit", *named[0].split(), "--trainer.fast_dev_run", "true", "--trainer.accelerator", "cpu"])
    assert "required: --data, --model" in answer
    assert "lightning-fed fit --help" in answer


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        thorough("ft", "fit"),
        ("swep", "sweep"),
        thorough("compar", "compare"),
        thorough("dta", "data"),
        thorough("diagnos", "diagnose"),
        thorough("reproduc", "reproduce"),
    ],
)
def test_mistyped_command_lists_all_and_suggests_the_likely_one(
    word: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([word])
    answer = capsys.readouterr().err
    assert (
        "'fit', 'validate', 'test', 'predict', 'new', 'data', 'diagnose', 'deploy', 'reproduce', 'sweep', 'compare',"
        " 'completion'" in answer
    )
    assert f"Did you mean {meant} instead of {word}?" in answer


@pytest.mark.parametrize("command", ["data", "diagnose", "reproduce", "sweep", "compare"])
def test_help_shows_type_names(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "(type: str, default: " in shown
    assert not re.search("<function|PositiveInt|NonNegativeInt|not used|[a-z]-[a-z]+ [A-Z]{2}", shown)


@pytest.mark.parametrize("command", few(["fit", "validate", "test", "predict"], ["fit"]))
def test_help_follows_the_order_of_use_without_markup(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    assert re.findall(r"^(\S.*):$", shown, re.MULTILINE) == [
        "Options",
        "The rounds",
        "The data of the clients",
        "The model",
        "The clients' optimizer, in place of the model's own",
        "Its schedule",
        "Lightning's arguments of a Trainer",
        *([] if command == "fit" else ["Others"]),  # such as verbose
    ]
    own, _, lightnings = shown.partition("Lightning's arguments of a Trainer:")
    assert "--trainer.max_rounds" in own
    assert "--trainer.max_time" in lightnings
    assert not re.search(r":\w+:`|``", shown)
    assert not re.search("resolver|Unknown<|training epoch", shown)
    assert ("initial" in " ".join(shown.split())) is (command != "fit")


def test_class_help_shows_formulas_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fit("--trainer.algorithm.help", "FedProx")
    assert "mu >= 0; " in capsys.readouterr().out


@pytest.mark.parametrize("in_file", [True, False])
def test_list_of_callbacks_replaces_the_previous_list(
    in_file: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By jsonargparse's default, EarlyStopping would keep the ``mode: max`` of the quickstart's ModelCheckpoint."""
    parts = [{"class_path": "EarlyStopping", "init_args": {"monitor": "val_loss"}}]
    later = tmp_path / "later.yaml"
    later.write_text(yaml.safe_dump({"trainer": {"callbacks": parts}}), encoding="utf-8")
    with pytest.raises(SystemExit):
        fit(*(["--config", str(later)] if in_file else [f"--trainer.callbacks={parts}"]), "--print_config")
    (stopping,) = yaml.safe_load(capsys.readouterr().out)["trainer"]["callbacks"]
    assert (stopping["init_args"]["monitor"], stopping["init_args"]["mode"]) == ("val_loss", "min")
