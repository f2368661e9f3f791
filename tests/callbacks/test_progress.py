"""One bar whose unit is the round."""

import re
from typing import Any

import pytest
from pytorch_lightning.callbacks import RichProgressBar, TQDMProgressBar

from lightning_fed import FederatedError, RoundProgressBar
from tests.helpers.training import data, seeded, trainer


@pytest.mark.parametrize("kind", [None, TQDMProgressBar, RichProgressBar])
def test_progress_bars(kind: Any, capsys: pytest.CaptureFixture[str]) -> None:
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
        assert "Federated run finished" in out
        assert re.search(r"val_loss +\d\.\d+ \(lowest .*, highest .*\)", out)
    run.validate(run.lightning_module, data())


@pytest.mark.parametrize("options", [{"refresh_rate": -1}, {"process_position": 0.5}, {"leave": "no"}], ids=str)
def test_arguments_that_are_not_allowed_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(FederatedError, match=next(iter(options))):
        RoundProgressBar(**options)
