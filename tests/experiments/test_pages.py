"""The pages of the papers' results say what their published files give, and nothing else."""

import json
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


def scale_of(page: str) -> str:
    (scale,) = set(re.findall(r"^At (?:the scale `(\w+)`|(?=full scale))", page, re.MULTILINE))
    return scale or "full"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_number_and_verdict_of_a_page_follows_from_what_is_published(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    experiment = read_experiment(PAPERS / f"{path.stem}.yaml")
    grid = Grid(experiment, scale_of(text))
    assert page(Results(grid, PublishedCells(grid, FOLDER))) == text, f"lightning-fed reproduce {path.stem} --published"
    files = [*FOLDER.glob(f"{path.stem}_cells.csv"), *FOLDER.glob(f"{path.stem}_rounds.csv.gz")]
    assert sum(file.stat().st_size for file in files) <= 200_000
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert (FOLDER / picture).is_file(), picture


NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_numbers_of_a_text_stand_elsewhere_on_its_page_or_in_its_settings(path: Path) -> None:
    rest, experiment = path.read_text(encoding="utf-8"), read_experiment(PAPERS / f"{path.stem}.yaml")
    texts = [found for claim in experiment.claims if (found := " ".join(claim.found.split())) and found in rest]
    for text in texts:
        rest = rest.replace(text, "")
    grid = Grid(experiment, scale_of(rest))
    cells = (cell for point in grid.points for cell in grid.cells(point, grid.tuned(point)[0], range(1)))
    settings = json.dumps([grid.config(cell) for cell in cells])
    shown = [float(number.replace(",", "")) for number in NUMBER.findall(rest + settings)]
    for text in texts:
        for number in NUMBER.findall(text):
            value, decimals = float(number.replace(",", "")), len(number.partition(".")[2])
            assert any(abs(other - value) <= 0.5000001 * 10**-decimals for other in shown), f"{number} in: {text}"


@pytest.mark.parametrize("path", sorted(PAPERS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_papers_experiment_has_three_seeds_where_anything_is_random(path: Path) -> None:
    experiment = read_experiment(path)
    for scale in experiment.scales:
        assert not experiment.is_random or Grid(experiment, scale).seeds >= 3, scale
    assert len({claim.says for claim in experiment.claims}) == len(experiment.claims)
