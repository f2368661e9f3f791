"""Every example runs, and its ``main`` returns the accuracy it reached."""

import ast
import importlib.util
import math
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lightning_fed.algorithms import FedAvg
from lightning_fed.cli.main import main as command_line
from tests.helpers import Round, play, quadratic
from tests.helpers.command_line import one_stage
from tests.helpers.selection import few

FOLDER = Path(__file__).parents[2] / "examples"
STARTED_SEVERAL_TIMES = FOLDER / "two_processes.py"
EXAMPLES = sorted(set(FOLDER.glob("*.py")) - {STARTED_SEVERAL_TIMES})


RUN_BELOW = {"finetune_torchvision", "per_client"}  # they have their own tests


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def new_algorithm() -> Any:
    (path,) = [p for p in EXAMPLES if p.stem == "new_algorithm"]
    return load(path)


@pytest.mark.parametrize("path", few(EXAMPLES, [p for p in EXAMPLES if p.stem not in RUN_BELOW]), ids=lambda p: p.stem)
def test_example_runs_for_two_rounds(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # undone after the test, even if ``seed_everything`` changes it
    accuracy = load(path).main(max_rounds=2)
    assert math.isfinite(accuracy)
    assert 0.1 < accuracy <= 1.0, "ten classes: no better than one answer for all"
    assert re.search(r"^  rounds +2$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.thorough
def test_notebook_runs_and_shows_the_expected_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="no nbformat, which reads notebooks")
    nbclient = pytest.importorskip("nbclient", reason="no nbclient, which runs notebooks")
    pytest.importorskip("ipykernel", reason="no ipykernel, which notebooks run in")
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(FOLDER / "notebook.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = "".join(output["text"] for output in outputs if output.get("name") == "stdout")
    fits = shown.split("Federated run finished")[:-1]
    assert len(fits) == 4
    for fit in fits:
        bars = [line.strip() for line in re.split(r"[\r\n]+", fit) if "%|" in line]
        assert all(bar.startswith("Rounds") for bar in bars)
        assert "100%" in bars[-1]
    results = [output["data"]["text/plain"] for output in outputs if output["output_type"] == "execute_result"]
    _, accuracy, forked, resumed = map(ast.literal_eval, results)
    assert accuracy["Scaffold"] > accuracy["FedAvg"] + 0.03, "the notebook shows what SCAFFOLD is for"
    assert forked == (40, pytest.approx(accuracy["Scaffold"], abs=0.01))
    assert resumed[0] == 50


def environment() -> dict[str, str]:
    """Return an environment that finds the package, for processes with one thread each."""
    # without variables of distributed runs that other tests left
    kept = {k: v for k, v in os.environ.items() if "RANK" not in k and not k.startswith("MASTER_")}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER.parent)}


def run(*command: str) -> str:
    """Return a command's output."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def torchrun(*words: str) -> str:
    """Return the output of a script under torchrun. torchrun itself is forked to save the imports."""

    def launch() -> None:
        os.environ.clear()
        os.environ.update(environment())
        for stream in (1, 2):
            os.dup2(os.open(f"stream-{stream}", os.O_WRONLY | os.O_CREAT), stream)
        import torch.distributed.run

        torch.distributed.run.main(["--nproc-per-node", "2", *words])

    process = multiprocessing.get_context("fork").Process(target=launch)
    process.start()
    process.join(300)
    process.terminate()  # only if it hangs
    assert process.exitcode == 0, Path("stream-2").read_text()
    return Path("stream-1").read_text()


@pytest.mark.thorough
@pytest.mark.parametrize("launch", [pytest.param(run, id="lightning"), torchrun])
def test_two_processes_share_a_run(launch: Callable[..., str]) -> None:
    shown = launch(str(STARTED_SEVERAL_TIMES), "--max-rounds", "2", "--devices", "2")
    assert re.search(r"^val_acc 0\.\d+ after 2 rounds in 2 processes$", shown, flags=re.M)
    assert shown.count("Federated run finished") == 1


@pytest.mark.thorough
def test_custom_classes_work_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-fed"])
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.chdir(FOLDER / "cli")
    options = ["--trainer.max_rounds", "2", "--trainer.default_root_dir", str(tmp_path)]
    with one_stage("fit"):
        command_line(["fit", "--config", "run.yaml", *options])
    shown = capsys.readouterr().out
    assert re.search(r"^  rounds +2$", shown, re.MULTILINE)
    assert "val_acc" in shown
    assert list(tmp_path.rglob("last.ckpt"))
    assert not list((FOLDER / "cli").glob("lightning_logs"))


def test_personalization_is_shown_for_every_client(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0.1 < load(FOLDER / "per_client.py").main(max_rounds=2) <= 1.0
    table = capsys.readouterr().out.partition("gap\n")[2].splitlines()[:20]
    for row in table:
        before, after, gap = map(float, row.split()[2:])
        assert gap == pytest.approx(after - before, abs=2e-3)
    assert sorted(int(row.split()[0]) for row in table) == list(range(20))


@pytest.mark.thorough
def test_frozen_backbone_is_unchanged_and_not_sent(tmp_path: Path) -> None:
    finetune = load(FOLDER / "finetune_torchvision.py")
    saved = finetune.get_model("resnet18").state_dict()
    torch.save(saved, tmp_path / "weights.pth")
    model = finetune.FineTuned(num_classes=10, weights=str(tmp_path / "weights.pth"))
    trainer = finetune.FederatedTrainer(
        max_rounds=1, clients_per_round=2, local_steps=1, logger=False, enable_checkpointing=False
    )
    trainer.fit(model, finetune.data_of(num_clients=4))
    trained = {name: value for name, value in model.net.state_dict().items() if not name.startswith("fc.")}
    assert all(torch.equal(value, saved[name]) for name, value in trained.items())
    assert trainer.fit_loop.state.x.numel() == 10 * 512 + 10


def test_fully_trained_model_has_no_batch_statistics() -> None:
    finetune = load(FOLDER / "finetune_torchvision.py")
    model = finetune.FineTuned(num_classes=10, train_backbone=True)
    assert not list(model.net.buffers())
    assert all(p.requires_grad for p in model.parameters())
    with pytest.raises(ValueError, match="GroupNorm"):
        finetune.FineTuned(num_classes=10, weights="DEFAULT", train_backbone=True)


def test_index_lists_every_example() -> None:
    index = (FOLDER / "README.md").read_text()
    files = {p.relative_to(FOLDER).as_posix() for p in FOLDER.rglob("*") if p.suffix in (".ipynb", ".py", ".yaml")}
    assert set(re.findall(r"\]\(([\w/]+\.\w+)\)", index)) == files


def test_fedacg_matches_a_hand_computation() -> None:
    a, b, lam, beta, lr = [1.0, 0.5, 2.0], [-3.0, 1.0, 0.5], 0.75, 0.5, 0.25
    cohorts = [[0, 1], [2], [1, 2], [0, 2]]
    theta, m, want = 1.0, 0.0, []
    for cohort in cohorts:
        start, moved = theta + lam * m, []
        for i in cohort:
            y = start
            for _ in range(2):
                y -= lr * (a[i] * y + b[i] + beta * (y - start))
            moved.append(y - start)
        m = lam * m + sum(moved) / len(moved)
        theta += m
        want.append(theta)
    algorithm = new_algorithm().FedACG(lam=lam, beta=beta)
    rounds = [Round({i: [None, None] for i in cohort}) for cohort in cohorts]
    x = torch.tensor([1.0], dtype=torch.float64)
    played = play(algorithm, quadratic(a, b), [1, 1, 1], x, rounds, lr=lr)
    got = [algorithm.evaluate_at(x, server) for x, server in zip(played.x, played.server, strict=True)]
    torch.testing.assert_close(torch.cat(got), torch.tensor(want, dtype=torch.float64), rtol=1e-10, atol=0)


def test_fedacg_without_momentum_and_penalty_matches_fedavg() -> None:
    x, rounds = torch.ones(2, dtype=torch.float64), [Round({0: [None], 1: [None] * 3})] * 3
    problem = quadratic([1.0, 0.5], [-3.0, 1.0]), [5, 1], x, rounds
    ours = play(new_algorithm().FedACG(lam=0.0, beta=0.0), *problem).x
    fedavg = play(FedAvg(), *problem, weighting="uniform").x
    torch.testing.assert_close(torch.stack(ours), torch.stack(fedavg), rtol=1e-10, atol=0)
