"""The command line, as a user types it."""

import contextlib
import io
import logging
import re
import runpy
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pytorch_lightning.loggers.logger import DummyLogger

from lightning_fed._version import __version__
from lightning_fed.cli.main import FederatedCLI, main
from lightning_fed.compat.package import NAMES, USED
from lightning_fed.compat.private import SIGTERMException
from lightning_fed.data import Digits
from lightning_fed.models import MLPClassifier
from tests.helpers.command_line import one_stage
from tests.helpers.selection import few

thorough = partial(pytest.param, marks=pytest.mark.thorough)


CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART = str(CONFIGS / "quickstart.yaml")
SMALL = ["--trainer.max_rounds", "2", "--trainer.accelerator", "cpu", "--trainer.enable_model_summary", "false"]


def run(*words: str) -> None:
    """Run one of Lightning's commands, without the time to add the others to the parser."""
    with one_stage(words[0]):
        main(list(words))


def fit(*args: str, config: str = QUICKSTART) -> None:
    run("fit", "--config", config, *SMALL, *args)


def version(n: int, method: str = "Scaffold") -> Path:
    return Path("lightning_logs") / f"version_{n}_{method}"


def last(n: int, method: str = "Scaffold") -> str:
    return str(version(n, method) / "checkpoints" / "last.ckpt")


@pytest.fixture(scope="module")
def shown_of_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Run two rounds of the quickstart, resume them with the printed command, and run four at once.

    Returns:
        The folder, and the output of each run.
    """
    folder, shown = tmp_path_factory.mktemp("runs"), [io.StringIO() for _ in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with contextlib.redirect_stdout(shown[0]):
            main(["fit", "--config", QUICKSTART, *SMALL])
        command = re.search(r"resume \(round 2\) +lightning-fed (.*)", shown[0].getvalue())
        assert command is not None
        with contextlib.redirect_stdout(shown[1]):
            run(*command[1].split())
        with contextlib.redirect_stdout(shown[2]):
            fit("--trainer.max_rounds", "4")
    kept = folder.rename(folder.with_name("kept"))  # the paths in checkpoints are now outdated
    return kept, [one.getvalue() for one in shown]


@pytest.fixture
def runs(shown_of_runs: tuple[Path, list[str]]) -> list[str]:
    """Copy the finished runs into this test's folder, and return their output."""
    folder, shown = shown_of_runs
    shutil.copytree(folder, Path(), dirs_exist_ok=True)
    return shown


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["FedAvg", "Mime", "MimeLite"])
def test_quickstart_fit_with_another_method(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    fit("--trainer.algorithm", method)
    check_main_job(capsys.readouterr().out, method)


def test_quickstart_fit(runs: list[str]) -> None:
    check_main_job(runs[0])


def check_main_job(out: str, method: str = "Scaffold") -> None:
    for text in ("val_acc", "clients seen", "bytes up / down", "best checkpoint", "watch", "tensorboard --logdir"):
        assert text in out
    assert Path(last(0, method)).exists()
    assert list(version(0, method).glob("events.out.tfevents*"))
    assert MLPClassifier.load_from_checkpoint(last(0, method)).hparams["in_features"] == 64


def test_printed_resume_command_works(runs: list[str]) -> None:
    assert f"{last(0)} (round 2)" in runs[0].rpartition("Federated run finished")[2]
    assert re.search(r"^  rounds +4$", runs[1], re.MULTILINE)
    straight, resumed = (torch.load(last(n), weights_only=True)["state_dict"] for n in (1, 2))
    assert all(torch.equal(straight[k], resumed[k]) for k in straight)


@pytest.mark.thorough
def test_printed_resume_command_continues_after_max_steps(capsys: pytest.CaptureFixture[str]) -> None:
    fit("--trainer.max_steps", "1")
    command = re.search(r"resume \(round 1\) +lightning-fed (.*)", capsys.readouterr().out)
    assert command is not None
    run(*command[1].split())
    assert re.search(r"^  rounds +2$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.usefixtures("runs")
def test_validate_and_predict(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    for command in ("validate", "predict"):  # the test of a new project runs `test`
        run(command, "--config", QUICKSTART, "--ckpt_path", last(0), "--trainer.logger", "false")
    out = capsys.readouterr().out
    assert "val_acc" in out
    assert "No callback writes the predictions: add a subclass of BasePredictionWriter" in caplog.text


EVALUATIONS = few(["test", "validate", "predict"], ["test"])


@pytest.mark.thorough
@pytest.mark.parametrize("command", EVALUATIONS)
def test_evaluation_without_a_checkpoint_is_rejected(command: str, shown_of_runs: tuple[Path, list[str]]) -> None:
    with pytest.raises(
        SystemExit, match=f"lightning-fed: `{command}` needs a checkpoint.* None lies under .*ckpt_path PATH"
    ):
        run(command, "--config", QUICKSTART)
    shutil.copytree(shown_of_runs[0], Path(), dirs_exist_ok=True)
    with pytest.raises(SystemExit, match=r"--ckpt_path last for the newest one, .*last\.ckpt, --ckpt_path best"):
        run(command, "--config", QUICKSTART)
    run(command, "--config", QUICKSTART, "--ckpt_path", "initial")


@pytest.mark.thorough
@pytest.mark.parametrize("args", [[], thorough(["--trainer.logger", "false"])], ids=["logger", "none"])
@pytest.mark.usefixtures("runs")
def test_last_and_best_refer_to_the_newest_run(args: list[str], caplog: pytest.LogCaptureFixture) -> None:
    state = torch.load(last(2), weights_only=True)["callbacks"]
    best = next(Path(one["best_model_path"]) for one in state.values() if "best_model_path" in one)
    version(2).rename("lightning_logs/moved")
    for word, name in (("last", "last.ckpt"), ("best", best.name)):
        run("test", "--config", QUICKSTART, "--ckpt_path", word, *args)
        assert re.search(
            f"Loaded model weights from the checkpoint at .*moved.checkpoints.{re.escape(name)}", caplog.text
        )
    best = Path("lightning_logs/moved/checkpoints", best.name)
    best.unlink()
    with pytest.raises(
        SystemExit, match=f"lightning-fed: ckpt_path='best'.*{re.escape(best.name)}, is gone.*holds last.ckpt"
    ):
        run("test", "--config", QUICKSTART, "--ckpt_path", "best", *args)


@pytest.mark.parametrize("word", few(["last", "best"], ["best"]))
def test_missing_last_or_best_checkpoint_raises(word: str) -> None:
    with pytest.raises(SystemExit, match=f"lightning-fed: .*ckpt_path='{word}'.* found no checkpoint.* under "):
        run("test", "--config", QUICKSTART, "--ckpt_path", word)


@pytest.mark.thorough
@pytest.mark.usefixtures("runs")
def test_wrong_path_lists_the_existing_files() -> None:
    there = version(0) / "checkpoints"
    for path, answer in (
        (there / "lst.ckpt", "holds .*last.ckpt"),
        (version(0), "It is a folder. .*holds checkpoints/"),
        (Path("elsewhere/last.ckpt"), "holds lightning_logs/version_2_Scaffold/checkpoints/"),
    ):
        with pytest.raises(SystemExit, match=f"lightning-fed: There is no checkpoint {path}. .*{answer}.*newest one"):
            run("test", "--config", QUICKSTART, "--ckpt_path", str(path))


@pytest.mark.thorough
def test_print_config_round_trips(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as done:
        main(["fit", "--config", QUICKSTART, "--print_config"])
    assert not done.value.code
    text = capsys.readouterr().out
    config = yaml.safe_load(text)
    assert config["trainer"]["algorithm"]["class_path"] == "lightning_fed.algorithms.Scaffold"
    assert config["trainer"]["clients_per_round"] == 10
    (tmp_path / "printed.yaml").write_text(text)
    fit(config=str(tmp_path / "printed.yaml"))


NOT_STACKED = ("quickstart.yaml", "fedbn.yaml", "lora.yaml")  # test_configs.py checks that two need another model
STACKED = sorted(p for p in CONFIGS.rglob("*.yaml") if p.name not in NOT_STACKED and p.parent.name != "tasks")


@pytest.mark.thorough
@pytest.mark.parametrize("path", STACKED, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_config_runs_a_round_on_top_of_the_quickstart(path: Path) -> None:
    if path.stem == "private":
        pytest.importorskip("opacus", reason='no opacus: pip install "lightning_fed[privacy]"')
    fit("--config", str(path), "--trainer.max_rounds", "1", "--trainer.logger", "false")


SAMPLER = "{class_path: lightning_fed.server.UniformSampler, init_args: {clients_per_round: 4}}"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "args",
    [
        thorough(
            ["--trainer.server_optimizer", "lightning_fed.server.FedAdam", "--trainer.server_optimizer.lr", "0.03"]
        ),
        thorough(["--trainer.server_optimizer", "torch.optim.Adam", "--trainer.server_optimizer.lr", "0.01"]),
        thorough(["--trainer.sampler", SAMPLER, "--trainer.clients_per_round", "null"]),
        thorough(
            ["--trainer.algorithm", "Mime", "--trainer.algorithm.base", "SGDm", "--trainer.algorithm.base.beta", "0.8"]
        ),
        thorough(["--optimizer", "torch.optim.Adam", "--optimizer.lr", "0.01", "--trainer.algorithm", "MimeLite"]),
        thorough(["--trainer.clients_per_round", "0.2", "--trainer.precision", "64-true"]),
        thorough(["--data.partition", "Shards", "--data.partition.num_clients", "20"]),
        [
            *("--optimizer", "torch.optim.Adam", "--optimizer.lr", "0.01", "--trainer.algorithm", "MimeLite"),
            *("--trainer.server_optimizer", "torch.optim.Adam", "--trainer.server_optimizer.lr", "0.01"),
            *("--trainer.sampler", SAMPLER, "--trainer.clients_per_round", "null", "--trainer.precision", "64-true"),
            *("--data.partition", "Shards", "--data.partition.num_clients", "20"),
        ],
    ],
    ids=lambda a: " ".join(a)[:60],
)
def test_parts_can_be_set_by_class(args: list[str]) -> None:
    fit("--trainer.algorithm", "FedAvg", *args, "--trainer.logger", "false")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        thorough(["--trainer.algorithm", "FedAvgg"], "FedAvgg"),
        thorough(["--trainer.algorithm.nu", "1"], "nu"),
        thorough(["--trainer.max_round", "1"], "max_round"),
        thorough(["--trainer.engine", "warp"], "warp"),
        (["--trainer.clients_per_round", "many"], "many"),
        thorough(["--data.alfa", "1"], "alfa"),
        (["--trainer.clients_per_round", "31"], "clients_per_round=31 asks for more clients than the 30"),
        thorough(["--trainer.local_steps", "3"], "local_epochs or local_steps, not both"),
        thorough(["--data.alpha", "-1"], "alpha"),
    ],
    ids=lambda a: " ".join(a) if isinstance(a, list) else "",
)
def test_invalid_options_are_rejected(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    error: Any
    with pytest.raises((SystemExit, ValueError)) as error:
        fit(*args)
    assert message in capsys.readouterr().err + str(error.value)


@pytest.mark.thorough
@pytest.mark.usefixtures("runs")
def test_seed_everything_seeds_the_run() -> None:
    fit("--seed_everything", "1", "--trainer.limit_val_batches", "0")
    first, other = (torch.load(last(n), weights_only=True) for n in (0, 3))
    assert [one["loops"]["fit_loop"]["state_dict"]["seed"] for one in (first, other)] == [0, 1]
    pairs = [(first["state_dict"][name], other["state_dict"][name]) for name in first["state_dict"]]
    assert not all(torch.equal(one, two) for one, two in pairs)  # the resumed run above shows that runs repeat


def test_python_dash_m_lists_all_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["__main__.py", "--help"])
    with pytest.raises(SystemExit) as done:
        runpy.run_module("lightning_fed", run_name="__main__")
    assert not done.value.code
    shown = capsys.readouterr().out
    assert shown.startswith("usage: lightning-fed ")
    listed = shown.partition("Available subcommands:")[2]
    assert re.findall(r"^    (\w+)", listed, re.MULTILINE) == [
        *FederatedCLI.subcommands(),
        "new",
        "data",
        "diagnose",
        "deploy",
        "reproduce",
        "sweep",
        "compare",
        "completion",
    ]


LIGHT = """
import sys
from lightning_fed.cli.main import main
for words in (["--help"], ["--version"], ["new", "a_project"], ["compare", "log", "--metric", "val_acc"]):
    try:
        main(words)
    except SystemExit as end:
        assert not end.code, words
    assert "torch" not in sys.modules, words
"""


@pytest.mark.thorough  # .ci/run includes it in the checks
def test_commands_that_train_nothing_do_not_import_pytorch(capsys: pytest.CaptureFixture[str]) -> None:
    Path("log").mkdir()
    Path("log/metrics.csv").write_text("step,val_acc\n1,0.5\n2,0.75\n")
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True, timeout=120)
    assert f"lightning-fed {__version__}\n" in done.stdout
    assert "| log | 2 | 0.75 | 0.75 |" in done.stdout
    assert Path("a_project/config.yaml").is_file()


def test_closed_pipe_ends_a_command_without_a_traceback() -> None:
    Path("log").mkdir()
    Path("log/metrics.csv").write_text("step,val_acc\n1,0.5\n2,0.75\n")
    words = [sys.executable, "-m", "lightning_fed", "compare", "log", "--metric", "val_acc"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        command.stdout.close()
        assert command.stderr.read() == b""
    assert command.returncode == 141


def test_quiet_run_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    loggers = [logging.getLogger(name) for name in NAMES[USED]]
    levels = [logger.level for logger in loggers]
    try:
        with one_stage("fit"):  # the option may precede the command
            main(["-q", "fit", "--config", QUICKSTART, *SMALL[:4], "--trainer.logger", "false"])
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    assert not capfd.readouterr().out


@pytest.mark.thorough
def test_user_configuration_is_kept_without_a_logger(capsys: pytest.CaptureFixture[str]) -> None:
    written = "# mine\n" + Path(QUICKSTART).read_text()
    Path("config.yaml").write_text(written)
    for _ in range(2):
        fit("--trainer.logger", "false", config="config.yaml")
        assert Path("config.yaml").read_text() == written
        assert "--config ./config-v1.yaml --ckpt_path" in capsys.readouterr().out
    saved = yaml.safe_load(Path("config-v1.yaml").read_text())
    assert saved["trainer"]["max_rounds"] == 2
    assert not Path("config-v2.yaml").exists()


@pytest.mark.thorough
def test_evaluation_keeps_the_configuration_of_the_fit() -> None:
    logger = {"class_path": "TensorBoardLogger", "init_args": {"save_dir": "logs", "name": "", "version": "mine"}}
    Path("named.yaml").write_text(yaml.safe_dump({"trainer": {"logger": logger}}))
    fit("--config", "named.yaml")
    saved = Path("logs/mine/config.yaml").read_text()
    for command in ("test", "validate"):
        run(command, "--config", QUICKSTART, "--config", "named.yaml", "--ckpt_path", "last")
        assert Path("logs/mine/config.yaml").read_text() == saved
    checkpoint = "logs/mine/checkpoints/last.ckpt"
    run("fit", "--config", "logs/mine/config.yaml", "--ckpt_path", checkpoint, "--trainer.max_rounds", "3")
    assert yaml.safe_load(Path("logs/mine/config.yaml").read_text())["trainer"]["max_rounds"] == 3


class NoFolder(DummyLogger):
    """A logger without a folder, such as one that sends its values away."""


@pytest.mark.thorough
def test_configuration_goes_to_the_run_folder_if_the_logger_has_none() -> None:
    fit("--trainer.logger", f"{__name__}.NoFolder", "--trainer.default_root_dir", "root")
    assert yaml.safe_load(Path("root/config.yaml").read_text())["trainer"]["max_rounds"] == 2


@pytest.mark.thorough
def test_custom_command_line_supports_a_fixed_model_class(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own: dict[str, Any] = {"subclass_mode_model": False, "subclass_mode_data": False}
    words = ["--model.in_features", "64", "--model.num_classes", "10", "--trainer.local_epochs", "1"]
    monkeypatch.setattr(sys, "argv", ["my cli.py"])
    with one_stage("fit"):
        FederatedCLI(MLPClassifier, Digits, **own, args=["fit", *SMALL, *words])
    shown = capsys.readouterr().out
    assert "python 'my cli.py' fit --config lightning_logs/version_0_FedAvg/config.yaml --ckpt_path" in shown


def test_a_terminated_run_does_not_end_as_a_finished_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def terminated(*args: Any) -> None:
        raise SIGTERMException

    monkeypatch.setattr("lightning_fed.cli.stages.run", terminated)
    with pytest.raises(SystemExit) as stop:
        main(["fit"])
    assert stop.value.code == 143


@pytest.mark.thorough
def test_diverging_run_ends_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="Client .* parameters that are not finite"):
        fit("--model.lr", "1e30", "--trainer.logger", "false")
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.thorough
def test_rejected_run_leaves_no_folder_and_keeps_earlier_ones() -> None:
    with pytest.raises(SystemExit, match="clients_per_round=31"):
        fit("--trainer.clients_per_round", "31")
    assert not list(Path().rglob("version_*"))
    fit("--trainer.max_rounds", "1")
    with pytest.raises(SystemExit, match="more than max_rounds=0"):
        fit("--trainer.max_rounds", "0", "--ckpt_path", last(0))
    assert [path.name for path in Path("lightning_logs").iterdir()] == ["version_0_Scaffold"]


def test_interrupted_command_ends_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_fed.lab.diagnosis.command.diagnose", interrupted)
    with pytest.raises(SystemExit) as end:
        main(["diagnose", "--config", QUICKSTART])
    assert end.value.code == 130
    assert capsys.readouterr().err == "lightning-fed: interrupted.\n"


RESUMED = """
from lightning_fed.cli.main import main
LAST = "lightning_logs/version_0_Scaffold/checkpoints/last.ckpt"
for args in ([], ["--ckpt_path", LAST, "--trainer.max_rounds", "2"]):
    main(["fit", "--config", CONFIG, "--trainer.max_rounds", "1", "--trainer.accelerator", "cpu", *args])
"""


@pytest.mark.thorough
def test_lightning_tips_and_dirpath_warnings_are_hidden() -> None:
    code = RESUMED.replace("CONFIG", repr(QUICKSTART))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert "GPU available" in done.stderr
    assert not re.search("Tip|dirpath has changed", done.stderr + done.stdout)


@pytest.mark.thorough
def test_options_accept_hyphens() -> None:
    fit("--trainer.max-rounds", "1", "--trainer.logger=false", "--trainer.default-root-dir=hyphened-folder")
    assert list(Path("hyphened-folder").rglob("*.ckpt"))


@pytest.mark.thorough
def test_python_dash_m_works_in_a_separate_process() -> None:
    command = [sys.executable, "-m", "lightning_fed", "fit", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "--trainer.algorithm" in shown.stdout or "--trainer" in shown.stdout


MINE = """
from lightning_fed.models import MLPClassifier

class Mine(MLPClassifier):
    pass
"""


@pytest.mark.thorough
def test_class_in_the_current_folder_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("module_of_a_user.py").write_text(MINE)
    Path("json.py").write_text("raise AssertionError('a file of the user hides an installed module')")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    fit("--model", "module_of_a_user.Mine", "--trainer.max_rounds", "1")
    assert Path(last(0)).exists()


def test_lightning_errors_are_shown_on_one_line() -> None:
    Path("without_a_test.py").write_text("import pytorch_lightning as pl\nclass Untested(pl.LightningModule): pass\n")
    model = ["--model", "without_a_test.Untested"]
    with pytest.raises(SystemExit, match="^lightning-fed: No `test_step\\(\\)` method defined"):
        run("test", "--config", QUICKSTART, *model, "--ckpt_path", "initial", "--trainer.logger", "false")


def test_standalone_command_after_an_option_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty.yaml").write_text("{}")
    with pytest.raises(SystemExit):
        main(["--config", "empty.yaml", "compare"])
    assert "compare must be the first word: lightning-fed compare" in capsys.readouterr().err
