"""The provenance of a cell."""

import gzip
import hashlib
import re
from pathlib import Path

import numpy as np
import pytest

from lightning_fed import FederatedError
from lightning_fed.lab.provenance import checksums, commit, files_read
from tests.helpers.lab import Write, run


def test_commit_matches_the_repository() -> None:
    found = commit()
    assert found is None or re.fullmatch(r"[0-9a-f]{12}(-dirty)?", found)
    inside = (Path(__file__).parents[2] / ".git").exists()
    assert inside == (found is not None)


def test_checksums_cover_exactly_the_data_files_that_were_read(tmp_path: Path) -> None:
    root = tmp_path / "data"
    (root / "raw").mkdir(parents=True)
    (root / "raw" / "packed.gz").write_bytes(gzip.compress(b"numbers"))
    np.savez(root / "archive.npz", x=np.ones(3))
    (root / "unused.txt").write_text("not read")
    (tmp_path / "elsewhere.txt").write_text("not data")
    with files_read(str(root)) as files:
        with gzip.open(root / "raw" / "packed.gz") as file:
            file.read()
        np.load(root / "archive.npz")["x"]
        (tmp_path / "elsewhere.txt").read_text()
    (root / "unused.txt").read_text()
    found = checksums(files, str(root))
    assert found == {
        name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in ("archive.npz", "raw/packed.gz")
    }


@pytest.mark.thorough
def test_every_cell_has_checksums_of_its_data(write: Write, tmp_path: Path) -> None:
    table = "\n".join(",".join(str((i * j) % 7) for j in range(1, 10)) for i in range(40))
    (tmp_path / "concrete").mkdir()
    (tmp_path / "concrete" / "Concrete_Data.csv").write_text(",".join("abcdefghi") + "\n" + table)
    base = {
        "model": {"class_path": "lightning_fed.models.LinearRegression", "init_args": {"in_features": 8, "lr": 0.01}},
        "data": {
            "class_path": "lightning_fed.data.Concrete",
            "init_args": {"root": str(tmp_path), "num_clients": 2, "batch_size": 4},
        },
        "trainer": {"max_rounds": 1, "clients_per_round": 1.0, "local_steps": 1, "engine": "sequential"},
    }
    results, ran = run(write(base=base, metrics={"val_loss": {"mode": "min"}}), tmp_path / "out")
    assert len(ran) == 2
    file = tmp_path / "concrete" / "Concrete_Data.csv"
    known = hashlib.sha256(file.read_bytes()).hexdigest()
    for point in results.grid.points:
        (record,) = results.records(point)
        assert dict(record.data) == {"concrete/Concrete_Data.csv": known}
    before = file.read_text()
    file.write_text(before.replace("6", "5"))
    with pytest.raises(FederatedError, match=r"was run before .*Concrete_Data.csv was changed: .*with --out"):
        run(write(base=base, metrics={"val_loss": {"mode": "min"}}), tmp_path / "out")
    file.write_text(before)
    assert run(write(base=base, metrics={"val_loss": {"mode": "min"}}), tmp_path / "out")[1] == []
