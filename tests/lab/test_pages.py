"""The pages of the papers' results match their published files exactly."""

import json
import re
from pathlib import Path

import pytest

from lightning_fed.lab.grid import Grid
from lightning_fed.lab.published import PublishedCells
from lightning_fed.lab.reading import PAPERS
from lightning_fed.lab.reproducing import page
from lightning_fed.lab.results import Results
from lightning_fed.lab.verdict import read_claims, write_claims
from tests.helpers.lab import of_paper
from tests.helpers.selection import few

FOLDER = Path(__file__).parents[2] / "docs" / "papers"
PAGES = sorted(FOLDER / path.name.replace("_cells.csv", ".md") for path in FOLDER.glob("*_cells.csv"))


def scale_of(page: str) -> str:
    (scale,) = set(re.findall(r"At (?:the scale `(\w+)`|(?=full scale))", page))
    return scale or "full"


SMALL = [path for path in PAGES if path.stem in ("fedprox_fig3", "scaffold_clients", "scaffold_methods")]


@pytest.mark.parametrize("path", few(PAGES, SMALL), ids=lambda path: path.stem)
def test_pages_match_the_published_results(path: Path, tmp_path: Path) -> None:
    text, details = (FOLDER / f"{path.stem}{part}.md" for part in ("", "_details"))
    grid = Grid(of_paper(path.stem), scale_of(text.read_text(encoding="utf-8")))
    results = Results(grid, PublishedCells(grid, FOLDER))
    found = tuple(file.read_text(encoding="utf-8") for file in (text, details))
    assert page(results) == found, f"lightning-fed reproduce {path.stem} --published"
    assert "was not run" not in found[1]
    assert len(found[0].splitlines()) <= 150
    write_claims(tmp_path / "claims.csv", results)
    published = [row for row in read_claims(FOLDER / "claims.csv") if row["experiment"] == path.stem]
    assert read_claims(tmp_path / "claims.csv") == published
    files = [*FOLDER.glob(f"{path.stem}_cells.csv"), *FOLDER.glob(f"{path.stem}_rounds.csv.gz")]
    assert sum(file.stat().st_size for file in files) <= 200_000
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", found[0]):
        assert (FOLDER / picture).is_file(), picture


@pytest.mark.parametrize("path", few(PAGES, PAGES[::4]), ids=lambda path: path.stem)
def test_published_accuracies_are_multiples_of_one_test_case(path: Path) -> None:
    grid = Grid(of_paper(path.stem), scale_of(path.read_text(encoding="utf-8")))
    published = PublishedCells(grid, FOLDER)
    names = [metric.name for metric in grid.experiment.metrics.values() if metric.factor == 100]
    for name, point in ((name, point) for name in names for point in grid.points):
        if (cases := grid.cases(name, point)) is None:
            continue
        cells = grid.cells(point, grid.tuned(point)[0], range(grid.seeds))
        records = [record for cell in cells if (record := published.record(cell)) is not None]
        right = [value * cases for record in records for value in record.series[name].values() if value == value]
        assert all(abs(number - round(number)) < 4e-7 * cases for number in right), point  # the rounding of float32


NUMBER = re.compile(r"\d(?:[\d,]*\d)?(?:\.\d+)?(?:e[+-]?\d+)?")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_numbers_in_claim_texts_match_the_claim_or_the_page(path: Path) -> None:
    experiment = of_paper(path.stem)
    page = "".join((FOLDER / f"{path.stem}{part}.md").read_text(encoding="utf-8") for part in ("", "_details"))
    texts = [text for claim in experiment.claims if (text := " ".join(claim.found.split())) and text in page]
    grid = Grid(experiment, scale_of(page))
    cells = (cell for point in grid.points for cell in grid.cells(point, grid.tuned(point)[0], range(1)))
    rest = page + json.dumps([grid.config(cell) for cell in cells])
    for text in texts:
        rest = rest.replace(text, "")
    values = {float(number.replace(",", "")) for number in NUMBER.findall(rest)}
    claims = re.split(r"\n(?=### )", page.partition("## Claims")[2].partition("\n## ")[0])
    for text in texts:
        own = "".join(claim.replace(text, "") for claim in claims if text in claim)
        for number in NUMBER.findall(re.sub(r"Figure \d+", "", text)):
            value, decimals = float(number.replace(",", "")), len(number.partition(".")[2])
            near = (abs(float(n.replace(",", "")) - value) <= 0.5000001 * 10**-decimals for n in NUMBER.findall(own))
            assert any(near) or value in values, f"{number} in: {text}"


@pytest.mark.parametrize("path", sorted(PAPERS.glob("*.yaml")), ids=lambda path: path.stem)
def test_paper_experiments_with_randomness_have_three_seeds(path: Path) -> None:
    experiment = of_paper(path.stem)
    for scale in experiment.scales:
        assert not experiment.is_random or Grid(experiment, scale).seeds >= 3, scale
    assert len({claim.says for claim in experiment.claims}) == len(experiment.claims)
