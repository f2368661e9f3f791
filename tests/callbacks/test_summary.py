"""What is printed at the end of a run."""

from typing import Any

import pytest
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_fed import FederatedDataModule
from lightning_fed.callbacks import RunSummary
from tests.helpers.training import clients, fit


@pytest.mark.parametrize(
    ("monitored", "names_a_best"), [({}, False), ({"monitor": "val_acc", "mode": "max"}, True)], ids=["none", "val_acc"]
)
def test_a_checkpoint_is_the_best_only_where_something_says_what_is_best(
    monitored: dict[str, Any], names_a_best: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(callbacks=[RunSummary(), ModelCheckpoint(**monitored)], enable_checkpointing=True, max_rounds=2)
    shown = capsys.readouterr().out
    assert ("best checkpoint" in shown) == names_a_best
    assert "last checkpoint" in shown
    assert "resume" in shown


@pytest.mark.parametrize("validated", [True, False])
def test_a_run_without_validation_shows_the_training_loss(validated: bool, capsys: pytest.CaptureFixture[str]) -> None:
    data = FederatedDataModule(clients=clients(), val=clients()[0] if validated else None)
    fit(None, data, callbacks=RunSummary(), max_rounds=1)
    shown = capsys.readouterr().out
    assert ("client/loss" in shown) != validated
    assert ("val_loss" in shown) == validated
