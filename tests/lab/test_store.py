"""Only one command works in a grid's folder, and the folder never contains a partial cell."""

from pathlib import Path

import pytest

from lightning_fed import FederatedError
from lightning_fed.lab.store import Store
from tests.helpers.lab import Write, run


def test_only_one_command_at_a_time_can_use_a_folder(tmp_path: Path) -> None:
    with (
        Store(tmp_path / "out"),
        pytest.raises(FederatedError, match="Another command works in"),
        Store(tmp_path / "out"),
    ):
        pass
    with Store(tmp_path / "out"):
        pass


@pytest.mark.thorough
def test_partial_cells_are_removed_and_corrupt_cells_are_named(write: Write, tmp_path: Path) -> None:
    results, _ = run(write(), tmp_path / "out")
    cells = tmp_path / "out" / "cells"
    (cells / ".half").mkdir()
    (cells / ".half" / "rounds.csv").write_text("round,")
    key = results.records(results.grid.points[0])[0].folder.name
    (cells / key / "cell.json").write_text("{")
    with pytest.raises(FederatedError, match=f"{key} is damaged.*Delete it"):
        run(write(), tmp_path / "out")[0].records(results.grid.points[0])
    assert not (cells / ".half").exists()
