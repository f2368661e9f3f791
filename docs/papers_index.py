"""Write docs/papers/index.md, and the list of experiments of the package: python docs/papers_index.py."""

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml

from lightning_fed.lab.catalogue import CATALOGUE, COLUMNS
from lightning_fed.lab.experiment import Experiment
from lightning_fed.lab.grid import Grid
from lightning_fed.lab.reading import PAPERS, read_experiment
from lightning_fed.lab.verdict import read_claims

FOLDER = Path(__file__).parent / "papers"
ITEMS = Path(__file__).parent / "papers_items.yaml"
KINDS = {"holds": "hold", "does not hold": "fail", "undecided": "undecided", "not judged": "not judged"}
INTRODUCTION = """\
# Results

`lightning-fed reproduce` computes the figures and tables of the papers again. Each page starts with its claims: the
paper's number, ours, the difference with its interval, and the verdict. Departures from the paper, tuned settings, the
command, versions and hardware follow. Two small files next to each page hold its data (`NAME_cells.csv` and
`NAME_rounds.csv.gz`), and a test computes all pages from them again. [claims.csv](claims.csv) lists every claim and
every one of our own comparisons, with their numbers. [Reproducing papers](../reproducing.md) describes the command and
its files.

Student's t over differences paired by seed decides a claim, two-sided at the 5 % level, with Holm's correction if the
claim is checked in several places. A claim holds if it holds in all of them, fails if it fails in one, and is undecided
otherwise. "Full" is the paper's scale without any departure. Most figures of the papers give no numbers. The column
"main number" then has only ours.
"""


@dataclass(frozen=True)
class Page:
    """The published results of an experiment.

    Args:
        experiment: The experiment.
        claims: Its rows of the table of claims.
    """

    experiment: Experiment
    claims: tuple[Mapping[str, str], ...]

    @property
    def name(self) -> str:
        """The name of the experiment."""
        return self.experiment.name

    @property
    def scale(self) -> str:
        """The scale that is published."""
        return self.claims[0]["scale"]

    @property
    def size(self) -> str:
        """The scale, with a word on departures."""
        departs = self.experiment.departures or self.experiment.scales["full"].departures
        return "full, with departures" if self.scale == "full" and departs else self.scale

    @property
    def counts(self) -> "Counter[str]":
        """The numbers of claims that hold, fail, are undecided or were not judged."""
        verdicts = {row["number"]: row["verdict"] for row in self.claims}
        return Counter(KINDS[verdict] for verdict in verdicts.values())

    @property
    def told(self) -> str:
        """The verdicts, as words."""
        return ", ".join(f"{self.counts[kind]} {kind}" for kind in KINDS.values() if self.counts[kind])

    @property
    def seeds(self) -> str:
        """The number of seeds."""
        return str(Grid(self.experiment, self.scale).seeds) if self.experiment.is_random else "-"

    @cached_property
    def hours(self) -> float:
        """The CPU hours that its cells took."""
        with (FOLDER / f"{self.name}_cells.csv").open(newline="", encoding="utf-8") as file:
            return sum(float(row["cpu_seconds"] or row["seconds"]) for row in csv.DictReader(file)) / 3600

    @property
    def main(self) -> str:
        """The numbers of the first claim that has a number from the paper, or else of the first claim."""
        row = next((row for row in self.claims if row["the paper's number"]), self.claims[0])
        where = f"{row['at']}: " if row["at"] else ""
        paper = row["the paper's number"]
        told = f" (the paper: {paper})" if paper else ""
        return f"{row['quantity']}: {where}{row['ours']}{told}".replace("|", "/")


def all_pages() -> dict[str, Page]:
    """Return the published results by experiment."""
    rows: dict[str, list[Mapping[str, str]]] = {}
    for row in read_claims(FOLDER / "claims.csv"):
        rows.setdefault(row["experiment"], []).append(row)
    return {name: Page(read_experiment(PAPERS / f"{name}.yaml"), tuple(found)) for name, found in rows.items()}


def index(pages: Mapping[str, Page]) -> str:
    """Return the page."""
    papers = yaml.safe_load(ITEMS.read_text(encoding="utf-8"))
    paper, own = ([page for page in pages.values() if page.experiment.is_own == is_own] for is_own in (False, True))
    parts = [INTRODUCTION, "Claims of papers:", "", _totals(paper), "", "Our own comparisons:", "", _totals(own)]
    for title, rows in papers.items():
        heads = ["item", "result", "main number", "verdicts", "scale"]
        parts += [f"\n## {title}\n", *_gallery(rows, pages), f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
        parts += [_row(row, pages) for row in rows]
    return "\n".join(parts) + "\n"


def _gallery(rows: Iterable[Mapping[str, str]], pages: Mapping[str, Page]) -> list[str]:
    """Return the first picture of each result that has one, with its title and verdicts."""
    shown = [pages[name] for name in dict.fromkeys(row.get("experiment", "") for row in rows) if name in pages]
    cards = []
    for page in shown:
        if pictures := sorted(FOLDER.glob(f"{page.name}_*.png"), key=lambda path: ("curves" not in path.stem, path)):
            title = page.experiment.title
            cards.append(
                f"- [![{title}]({pictures[0].name})]({page.name}.md)\n\n    [{title}]({page.name}.md): {page.told}\n"
            )
    return ['<div class="grid cards" markdown>\n', *cards, "</div>\n"] if cards else []


def _totals(pages: Iterable[Page]) -> str:
    scales = ("full", "full, with departures", "reduced")
    rows = ["| scale | experiments | claims | hold | fail | undecided | not judged |", "|" + " --- |" * 7]
    pages = list(pages)
    for scale in scales:
        found = [page for page in pages if page.size == scale or (scale == "reduced" and page.size not in scales)]
        rows += [_counted(scale, found)] if found else []
    return "\n".join([*rows, _counted("all", pages)])


def _counted(scale: str, pages: list[Page]) -> str:
    total: Counter[str] = sum((page.counts for page in pages), Counter())
    cells = [scale, len(pages), sum(total.values()), *(total[kind] for kind in KINDS.values())]
    return f"| {' | '.join(map(str, cells))} |"


def _row(row: Mapping[str, str], pages: Mapping[str, Page]) -> str:
    name = row.get("experiment")
    if name is None:
        return f"| {row['item']} | {row['why']} | - | - | - |"
    if name not in pages:
        experiment = read_experiment(PAPERS / f"{name}.yaml")
        scale = " --scale part" if "part" in experiment.scales else ""
        why = row.get("why", "not run at this version yet")
        return f"| {row['item']} | {why}: `lightning-fed reproduce {name}{scale} --data_root DATA` | - | - | - |"
    page = pages[name]
    result = f"[{page.experiment.title}]({name}.md)"
    if "without" in row:
        result += f"; without {row['without']}: `lightning-fed reproduce {name} --data_root DATA`"
    seeds = f", {page.seeds} seeds" if page.experiment.is_random else ""
    scale = f"{page.size}; {_data(page.experiment, page.scale)}{seeds}; {page.hours:.1f} CPU hours"
    return f"| {row['item']} | {result} | {page.main} | {page.told} | {scale} |"


def _data(experiment: Experiment, scale: str) -> str:
    return ", ".join(Grid(experiment, scale).data_sets) or "none"


def catalogue(pages: Mapping[str, Page]) -> str:
    """Return the list of experiments of the package."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for path in sorted(PAPERS.glob("*.yaml")):
        page = pages.get(path.stem)
        experiment = read_experiment(path) if page is None else page.experiment
        ran = {} if page is None else {"published": page.scale, "seeds": page.seeds, "cpu_hours": f"{page.hours:.1f}"}
        about = {name: getattr(experiment, name) for name in ("name", "title", "paper", "item")}
        data = _data(experiment, "full" if page is None else page.scale)
        writer.writerow({**about, **ran, "scales": ", ".join(experiment.scales), "data": data})
    return text.getvalue()


if __name__ == "__main__":
    found = all_pages()
    (FOLDER / "index.md").write_text(index(found), encoding="utf-8")
    CATALOGUE.write_text(catalogue(found), encoding="utf-8")
