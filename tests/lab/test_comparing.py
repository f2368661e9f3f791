"""Comparisons of runs, from the logs that any run writes."""

import csv
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger

from lightning_fed import FederatedError
from lightning_fed.algorithms import FedAvg, Mime, SGDm
from lightning_fed.cli.main import main
from lightning_fed.lab.comparing import read_log
from tests.helpers.optional import needs_matplotlib
from tests.helpers.training import fit


def logged(name: str, logger: Any, method: Any) -> str:
    made = logger(".", name=name, version="")
    fit(logger=made, max_rounds=4, algorithm=method)
    return name


@pytest.mark.thorough
@needs_matplotlib
def test_runs_of_both_loggers_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [logged("plain", TensorBoardLogger, FedAvg()), logged("mime", CSVLogger, Mime(base=SGDm()))]
    main(["compare", *runs, "--target", "0.0", "--out", "side"])
    head, plain, mime = csv.reader(Path("side/compare.csv").read_text().splitlines())
    assert head[2:4] == ["final val_acc", "best val_acc"]
    assert head[4:] == [f"{cost} to val_acc 0" for cost in ("rounds", "gradients", "bytes")]
    assert [plain[0], plain[1], plain[4]] == ["plain, FedAvg(pseudo_grad='raw')", "4", "1"]
    series = read_log(Path("mime"))
    assert int(mime[5]) == series["round/gradients"][1]
    assert int(mime[6]) == series["comm/bytes_up"][1] + series["comm/bytes_down"][1]
    assert int(mime[5]) > 2 * int(plain[5])  # two gradients a step, and the full-batch gradients
    assert Path("side/compare.png").stat().st_size > 5_000
    assert "| mime, Mime(base=SGDm(" in capsys.readouterr().out


@pytest.mark.thorough
def test_restarted_run_in_a_folder_replaces_the_previous_log() -> None:
    for rounds in (4, 2):
        time.sleep(1 - time.time() % 1)  # TensorBoard sorts files of the same second by name: 10 before 9
        fit(logger=TensorBoardLogger(".", name="again", version=""), max_rounds=rounds, algorithm=FedAvg())
    series = read_log(Path("again"))
    assert {tag: max(curve) for tag, curve in series.items()} == dict.fromkeys(series, 2)


@pytest.mark.thorough
@needs_matplotlib
def test_run_is_named_by_its_own_method_in_a_shared_folder() -> None:
    for method in (Mime(base=SGDm()), FedAvg()):
        time.sleep(1 - time.time() % 1)  # as above
        fit(logger=TensorBoardLogger(".", name="again", version=""), max_rounds=1, algorithm=method)
    main(["compare", "again"])
    assert "again, FedAvg(pseudo_grad='raw')" in Path("compared/compare.md").read_text()


def test_both_loggers_record_the_same_values(tmp_path: Path) -> None:
    both = [TensorBoardLogger(".", name="a", version=""), CSVLogger(".", name="b", version="")]
    fit(logger=both, max_rounds=3, algorithm=FedAvg())
    a, b = read_log(Path("a")), read_log(Path("b"))
    assert a["val_loss"] == pytest.approx(b["val_loss"])
    assert a["round/gradients"] == b["round/gradients"]


@needs_matplotlib
def test_run_without_gradients_omits_their_columns() -> None:
    Path("old").mkdir()
    Path("old/metrics.csv").write_text("epoch,step,val_acc\n0,1,0.5\n1,2,0.9\n")
    main(["compare", "old", "--target", "0.8"])
    row = Path("compared/compare.csv").read_text().splitlines()[1]
    assert row == "old,2,0.9,0.9,2"


@needs_matplotlib
def test_simulated_time_is_reported_only_for_runs_with_a_clock() -> None:
    for folder, text in {
        "timed": "step,val_acc,time/simulated\n1,0.5,3\n2,0.9,13\n",
        "old": "step,val_acc\n1,0.9\n",
    }.items():
        Path(folder).mkdir()
        (Path(folder) / "metrics.csv").write_text(text)
    main(["compare", "timed", "old", "--target", "0.8"])
    head, timed, old = csv.reader(Path("compared/compare.csv").read_text().splitlines())
    assert head[4:] == ["rounds to val_acc 0.8", "simulated seconds to val_acc 0.8"]
    assert (timed[4:], old[4:]) == (["2", "13"], ["1", "-"])


@pytest.mark.thorough
@needs_matplotlib
def test_log_of_a_resumed_run_reports_no_cost_to_target() -> None:
    rows = ["1,0.2,9,10,20,1", "2,0.8,9,10,20,1", "3,0.7,9,10,20,1", "4,0.9,9,10,20,1"]
    head = "step,val_acc,round/gradients,comm/bytes_up,comm/bytes_down,server/update_norm"
    for folder, kept in {"whole": rows, "resumed": rows[2:]}.items():
        Path(folder).mkdir()
        (Path(folder) / "metrics.csv").write_text("\n".join([head, *kept]))
    for target, of_whole in (("0.8", ["2", "18", "60"]), ("1.0", ["not reached"] * 3)):
        main(["compare", "whole", "resumed", "--target", target])
        _, whole, resumed = csv.reader(Path("compared/compare.csv").read_text().splitlines())
        assert whole == ["whole", "4", "0.9", "0.9", *of_whole]
        assert resumed == ["resumed", "3 to 4", "0.9", "0.9", "-", "-", "-"]


@needs_matplotlib
def test_nan_final_value_is_reported_as_not_finite() -> None:
    Path("run").mkdir()
    Path("run/metrics.csv").write_text("step,val_acc\n1,0.5\n2,nan\n")
    main(["compare", "run"])
    assert Path("compared/compare.csv").read_text().splitlines()[1] == "run,2,not finite,0.5"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere"], "nowhere is not a folder"),
        (["empty"], "neither events.out.tfevents"),
        (["log", "--metric", "val_ac", "--mode", "max"], "Did you mean 'val_acc'"),
        (["log", "--metric", "val_loss"], "--mode max if high values of val_loss are good"),
        (["log", "log"], "named twice"),
        (["log", "log/"], "named twice"),
        (["broken"], "metrics.csv, line 2"),
        pytest.param(
            ["log", "--mode", "max", "--out", "log/metrics.csv"],
            "metrics.csv cannot be made a folder: File exists",
            marks=needs_matplotlib,
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_arguments_are_rejected(args: list[str], message: str) -> None:
    for folder, text in {"empty": None, "log": "step,val_acc\n1,0.5\n", "broken": "step,val_acc\n1,many\n"}.items():
        Path(folder).mkdir()
        if text is not None:
            (Path(folder) / "metrics.csv").write_text(text)
    with pytest.raises(SystemExit, match=message):
        main(["compare", *args])


def test_table_does_not_require_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Path("log").mkdir()
    Path("log/metrics.csv").write_text("step,val_acc\n1,0.5\n")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match="matplotlib: pip install"):
        main(["compare", "log"])
    assert "| log | 1 | 0.5 | 0.5 |" in capsys.readouterr().out


def test_log_without_values_raises(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,val_acc\n")
    with pytest.raises(FederatedError, match="holds no values"):
        read_log(tmp_path)
