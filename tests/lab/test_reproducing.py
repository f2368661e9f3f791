"""``lightning-fed reproduce`` on the command line."""

import gzip
import json
from pathlib import Path

import pytest

from lightning_fed.cli.main import main
from lightning_fed.lab.grid import Grid
from lightning_fed.lab.published import PublishedCells
from lightning_fed.lab.reading import read_experiment
from lightning_fed.lab.results import Results
from lightning_fed.lab.verdict import read_claims
from tests.helpers.lab import Write
from tests.helpers.optional import needs_matplotlib

LR = {"key": "model.init_args.lr", "values": [0.1, 1e200]}  # the second overflows
TUNE = {"by": "final", "grid": {"lr": LR}}


@pytest.mark.thorough
@needs_matplotlib
def test_command_writes_all_outputs(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    axes = {"G": {"key": "data.init_args.G", "values": [1, 10]}}
    claims = [
        {
            "says": "SCAFFOLD wins.",
            "source": "Table 1",
            "claim": "SCAFFOLD < FedAvg",
            "quantity": "final",
            "at": {"G": 10},
        },
        {
            "says": "FedAvg wins.",
            "source": "Table 1",
            "claim": "FedAvg < SCAFFOLD",
            "quantity": "final",
            "at": {"G": 10},
        },
    ]
    figures = {"curves": {"columns": "G", "log": ["y"]}, "by_G": {"x": "G", "y": "final"}}
    tables = {"final": {"columns": "G", "value": ["final", "rounds to 0.5"]}}
    base_rounds = {"full": {"overrides": {"trainer.max_rounds": 10}}}
    path = write(axes=axes, claims=claims, figures=figures, tables=tables, tune=TUNE, scales=base_rounds, seeds=2)
    main(["reproduce", str(path), "--out", str(tmp_path / "out"), "--jobs", "0", "--seeds", "1"])
    out = tmp_path / "out"
    text = (out / "tiny.md").read_text()
    assert text in capsys.readouterr().out
    for part in (
        "SCAFFOLD wins.",
        "| holds |",
        "| **does not hold** |",
        "| seeds |  | 1, where the file has 2 | the command's --seeds |",
        "lightning-fed reproduce tiny.yaml --seeds 1",
    ):
        assert part in text, part
    details = (out / "tiny_details.md").read_text()
    assert "in final distance: holds." in details
    assert "## Diverged" in details
    assert str(tmp_path) not in text + details
    assert [row["verdict"] for row in read_claims(out / "claims.csv")] == ["holds", "does not hold"]
    for name in ("tiny_curves.png", "tiny_by_G.png"):
        assert (out / name).read_bytes()[:4] == b"\x89PNG"
        assert 5_000 < (out / name).stat().st_size < 200_000
        assert f"({name})" in text
    rows = gzip.decompress((out / "tiny_rounds.csv.gz").read_bytes()).decode().splitlines()
    assert rows[0] == "cell,round,val_distance"
    assert sum(row.split(",")[1] == "10" for row in rows) == 4
    configs = json.loads(gzip.decompress((out / "tiny_configurations.json.gz").read_bytes()))
    assert [config["trainer"]["max_rounds"] for config in configs.values()] == [10] * 8
    assert {config["seed_everything"] for config in configs.values()} == {0}
    cells = (out / "tiny_cells.csv").read_text().splitlines()
    assert [row.split('"')[2].split(",")[1] for row in cells[1:]] == list(configs)  # by the column settings
    assert cells[0].startswith("cell,name,settings,status,cause,")
    assert sum(",finished," in row for row in cells) == sum(",diverged," in row for row in cells) == 4
    choices = (out / "tiny_choices.csv").read_text().splitlines()
    assert len(choices) == 1 + 8
    assert sum(row.endswith(",yes") for row in choices) == 4


@pytest.mark.thorough
@needs_matplotlib
def test_page_is_rebuilt_from_published_results_without_running(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claim = {"says": "So it is.", "source": "Table 1", "claim": "SCAFFOLD < FedAvg", "quantity": "final"}
    settings = {"figures": {"curves": {}}, "tables": {"final": {"value": "final"}}}
    args = ["reproduce", str(write(claims=[claim], **settings)), "--jobs", "0", "--out"]
    main([*args, str(tmp_path / "out")])
    text = (tmp_path / "out" / "tiny.md").read_text()
    again = [*args, str(tmp_path / "again"), "--published", str(tmp_path / "out")]
    main(again)
    assert (tmp_path / "again" / "tiny.md").read_text() == text
    assert not (tmp_path / "again" / "cells").exists()
    main([*again, "--tex", "--figures", "pdf"])
    assert (tmp_path / "again" / "tiny_final.tex").read_text().count(r"\textbf") == 1
    first = (tmp_path / "again" / "tiny_curves.pdf").read_bytes()
    assert first.startswith(b"%PDF")
    assert (tmp_path / "again" / "tiny_curves.png").is_file()
    main([*again, "--figures", "pdf"])
    assert (tmp_path / "again" / "tiny_curves.pdf").read_bytes() == first
    write(claims=[{**claim, "says": "It is otherwise."}], **settings)
    main(again)
    assert (tmp_path / "again" / "tiny.md").read_text() == text.replace("So it is.", "It is otherwise.")
    write(claims=[claim], seeds=2, **settings)  # seed 1 was never run
    main(again)
    assert "- method FedAvg, seed 1: not run" in (tmp_path / "again" / "tiny_details.md").read_text()
    capsys.readouterr()
    with pytest.raises(SystemExit, match="Nothing of tiny is published in .*nowhere"):
        main([*args, str(tmp_path / "again"), "--published", str(tmp_path / "nowhere")])
    (tmp_path / "out" / "tiny_rounds.csv.gz").write_bytes(b"no gzip")
    with pytest.raises(SystemExit, match="The published cells of tiny .* are damaged: Not a gzipped file"):
        main(again)


@pytest.mark.thorough
@needs_matplotlib
def test_inconsistent_or_unwritable_results_raise(write: Write, tmp_path: Path) -> None:
    path = write(tune={"by": "final", "grid": {"lr": {"key": "model.init_args.lr", "values": [0.1, 0.2]}}})
    published, out = tmp_path / "published", tmp_path / "out"
    published.mkdir()
    args = ["reproduce", str(path), "--published", str(published), "--out", str(out)]
    head = "cell,name,settings,status,cause,seconds,cpu_seconds\n"
    rounds = gzip.compress(b"cell,round,val_distance\n0,1,0.5\n")
    for cells, curves, message in (
        (head, rounds, "are damaged: tiny_cells.csv lacks cell 0, which has curves"),
        (f"{head}1,a,00,finished,,1,1\n", rounds, "are damaged: cell 1 is finished and has no curves"),
    ):
        (published / "tiny_cells.csv").write_text(cells)
        (published / "tiny_rounds.csv.gz").write_bytes(curves)
        with pytest.raises(SystemExit, match=message):
            main(args)
    (published / "tiny_cells.csv").write_text(f"{head}0,a,00,finished,,1,1\n")
    out.mkdir()
    (out / "claims.csv").write_text("hello\nworld\n")
    with pytest.raises(SystemExit, match=r"claims.csv is not a table of claims\. Move it away"):
        main(args)
    (out / "claims.csv").unlink()
    main(args)  # the settings differ from the published ones
    grid = Grid(read_experiment(path))
    results = Results(grid, PublishedCells(grid, published))
    assert results.by is not None
    estimate = results.estimate(grid.points[0], results.by)
    assert estimate.missing.startswith("no tuned value has a result: method FedAvg, lr 0.1, seed 0 was not run")
    (out / "tiny.md").unlink()
    (out / "tiny.md").mkdir()
    with pytest.raises(SystemExit, match="The results cannot be written to .*out: Is a directory. Make room"):
        main(args)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["scaffold_quadratic"], "Did you mean 'scaffold_quadratics'"),
        ([], "name an experiment"),
        (["scaffold_quadratics", "--scale", "ful"], "Did you mean 'full'"),
        (["nowhere.yaml"], "nowhere.yaml cannot be read"),
    ],
    ids=str,
)
def test_invalid_arguments_are_rejected(args: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        main(["reproduce", *args])
