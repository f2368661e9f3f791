"""The pages of the papers' results say what their published files give, and nothing else."""

import re
from pathlib import Path

import pytest

from lightning_fed.experiments.grid import Grid
from lightning_fed.experiments.published import PublishedCells
from lightning_fed.experiments.reading import PAPERS, read_experiment
from lightning_fed.experiments.reproduce import page
from lightning_fed.experiments.results import Results

FOLDER = Path(__file__).parents[2] / "docs" / "papers"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name != "index.md")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_number_and_verdict_of_a_page_follows_from_what_is_published(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    (scale,) = set(re.findall(r"^At (?:the scale `(\w+)`|(?=full scale))", text, re.MULTILINE))
    experiment = read_experiment(PAPERS / f"{path.stem}.yaml")
    grid = Grid(experiment, scale or "full")
    assert page(Results(grid, PublishedCells(grid, FOLDER))) == text, f"lightning-fed reproduce {path.stem} --published"
    files = [*FOLDER.glob(f"{path.stem}_cells.csv"), *FOLDER.glob(f"{path.stem}_rounds.csv.gz")]
    assert sum(file.stat().st_size for file in files) <= 200_000
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert (FOLDER / picture).is_file(), picture


@pytest.mark.parametrize("path", sorted(PAPERS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_papers_experiment_has_three_seeds_where_anything_is_random(path: Path) -> None:
    experiment = read_experiment(path)
    for scale in experiment.scales:
        assert not experiment.is_random or Grid(experiment, scale).seeds >= 3, scale
    assert len({claim.says for claim in experiment.claims}) == len(experiment.claims)
