"""One bar of rounds on a terminal, and lines elsewhere."""

import io
import itertools
import logging
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from pytorch_lightning.callbacks import RichProgressBar, TQDMProgressBar

from lightning_fed import FederatedError, RoundProgressBar
from lightning_fed.callbacks import RoundLines, progress
from lightning_fed.compat.package import pl
from tests.helpers.training import Net, data, seeded, trainer


@pytest.mark.parametrize("kind", [None, TQDMProgressBar, RichProgressBar])
def test_progress_bars(kind: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", "", raising=False)  # as in a notebook: it overwrites lines like a terminal
    if kind is RichProgressBar:
        pytest.importorskip("rich", reason="no rich, which draws this bar")
    bar = None if kind is None else kind()
    run = trainer(enable_progress_bar=True, callbacks=bar, max_rounds=2, enable_model_summary=True)
    run.fit(seeded(), data())
    out = capsys.readouterr().out
    if bar is None:
        assert "Rounds: 100%" in out
        assert "2/2" in out
        assert "val_acc=" in out
        assert "Validation" not in out
        assert "s/round" not in out
        assert "Federated run finished" in out
        assert re.search(r"val_loss +\d\.\d+ \(lowest .*, highest .*\)", out)
    run.validate(run.lightning_module, data())


@pytest.mark.parametrize("stream", [None, object()], ids=["no console", "no isatty"])
def test_no_bar_is_drawn_if_the_stream_is_not_a_terminal(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", stream)
    assert not RoundProgressBar().is_enabled


def test_unencodable_metric_name_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Named(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("précision", 1.0, prog_bar=True)

    output = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", output)
    trainer(max_rounds=1).fit(Named(), data())
    output.seek(0)
    shown = output.read()
    assert "round 1/1  pr\\xe9cision 1 " in shown
    assert re.search(r"^  pr\\xe9cision +1\.0000", shown, re.MULTILINE)


@pytest.mark.parametrize("options", [{"refresh_rate": -1}, {"process_position": 0.5}, {"leave": "no"}], ids=str)
def test_progress_bar_rejects_invalid_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(FederatedError, match=next(iter(options))):
        RoundProgressBar(**options)


LINE = re.compile(r"round (\d+)/(\d+)  val_loss \S+  val_acc \S+  \S+ s/round")


@pytest.mark.thorough
@pytest.mark.parametrize("bar", [True, False], ids=["no terminal", "no bar"])
def test_run_without_a_bar_prints_lines_and_a_summary(bar: bool, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(enable_progress_bar=bar, max_rounds=20).fit(seeded(), data())
    out = capsys.readouterr().out
    lines, _, summary = out.partition("\nFederated run finished\n")
    found = [LINE.fullmatch(line) for line in lines.splitlines()]
    assert [one and one[1] for one in found] == [str(n) for n in range(2, 21, 2)]
    assert re.search(r"^  rounds +20$", summary, re.MULTILINE)
    assert "\r" not in out


def test_line_is_printed_after_a_long_pause(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = RoundLines(every_n_rounds=100)
    clock = itertools.count(0, 10)  # read at the start of the first round, and after each round
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    trainer(max_rounds=7, limit_val_batches=0, callbacks=lines).fit(seeded(), data())
    shown = capsys.readouterr().out.partition("\nFederated")[0]
    line = r"round {}/7  client/loss \S+  10 s/round\n"
    assert re.fullmatch(line.format(3) + line.format(6), shown)


def test_first_round_has_a_line_if_every_round_does(capsys: pytest.CaptureFixture[str]) -> None:
    trainer(max_rounds=2, limit_val_batches=0).fit(seeded(), data())
    shown = capsys.readouterr().out.partition("\nFederated")[0]
    assert re.findall(r"^round (\d)/2  client/loss \S+  \S+ s/round$", shown, re.MULTILINE) == ["1", "2"]


def test_run_is_quiet_if_lightning_is(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger(pl.__name__)
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        trainer(max_rounds=1).fit(seeded(), data())
    finally:
        logger.setLevel(level)
    assert not capsys.readouterr().out


@pytest.mark.parametrize("options", [{"seconds": -1}, {"every_n_rounds": 0}], ids=str)
def test_round_lines_reject_invalid_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(FederatedError, match=next(iter(options))):
        RoundLines(**options)
