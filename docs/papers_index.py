"""Write docs/papers/index.md, the list of the papers' results: python docs/papers_index.py."""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import yaml

FOLDER = Path(__file__).parent / "papers"
ITEMS = Path(__file__).parent / "papers_items.yaml"
PAPERS = Path(__file__).parent.parent / "lightning_fed" / "lab" / "papers"
KINDS = {"hold": "hold", "do not hold": "fail", "undecided": "undecided", "could not be judged": "not judged"}
INTRODUCTION = """\
# Results

What `lightning-fed reproduce` makes of the figures and tables of the papers: a page each, with the paper's numbers
beside ours, every departure from the paper, what was tuned, command, versions, hardware and date. Each page is computed
from two small files beside it (`NAME_cells.csv`, `NAME_rounds.csv.gz`), and a test computes all of them again.
[Reproducing papers](../reproducing.md) describes the command and its files.

A claim holds, fails, or is undecided: the difference is within two standard errors of the paired difference over seeds.
Claims that fail or are undecided are shown as such, with what we found out. "Full" is the paper's scale without any
departure.
"""


@dataclass(frozen=True)
class Page:
    """What a page says of its experiment.

    Args:
        scale: The scale, with a word on departures.
        counts: How many claims hold, fail, are undecided or were not judged.
    """

    scale: str
    counts: Counter[str]

    @staticmethod
    def of(name: str) -> "Page | None":
        """Return the page of an experiment; None if there is none."""
        path = FOLDER / f"{name}.md"
        if not path.is_file():
            return None
        text = path.read_text(encoding="utf-8")
        reduced = re.findall(r"^At the scale `(\w+)`", text, re.MULTILINE)
        scale = "full" if not reduced else "full, with departures" if reduced[0] == "full" else reduced[0]
        (summary,) = re.findall(r"^Of \d+ claims?: (.*)\.$", text, re.MULTILINE)
        counts: Counter[str] = Counter()
        for part in summary.split(", "):
            for words, kind in KINDS.items():
                if found := re.match(rf"(\d+) {words}", part):
                    counts[kind] = int(found[1])
        return Page(scale, counts)


def index() -> str:
    """Return the page."""
    papers = yaml.safe_load(ITEMS.read_text(encoding="utf-8"))
    names = [row["experiment"] for rows in papers.values() for row in rows if "experiment" in row]
    pages = {name: page for name in dict.fromkeys(names) if (page := Page.of(name)) is not None}
    parts = [INTRODUCTION, _totals(list(pages.values()))]
    for paper, rows in papers.items():
        parts += [f"\n## {paper}\n", "| item | result | scale | claims |", "| --- | --- | --- | --- |"]
        parts += [_row(row, pages) for row in rows]
    return "\n".join(parts) + "\n"


def _totals(pages: list[Page]) -> str:
    scales = ("full", "full, with departures", "reduced")
    rows = ["| scale | experiments | claims | hold | fail | undecided | not judged |", "|" + " --- |" * 7]
    for scale in scales:
        own = [page for page in pages if page.scale == scale or (scale == "reduced" and page.scale not in scales)]
        rows.append(_counted(scale, own))
    return "\n".join([*rows, _counted("all", pages)])


def _counted(scale: str, pages: list[Page]) -> str:
    total: Counter[str] = sum((page.counts for page in pages), Counter())
    cells = [scale, len(pages), sum(total.values()), *(total[kind] for kind in KINDS.values())]
    return f"| {' | '.join(map(str, cells))} |"


def _row(row: dict[str, str], pages: dict[str, Page]) -> str:
    name = row.get("experiment")
    if name in pages:
        page = pages[name]
        told = ", ".join(f"{page.counts[kind]} {kind}" for kind in KINDS.values() if page.counts[kind])
        result = f"[{name}]({name}.md)"
        if "without" in row:
            result += f"; without {row['without']}: `lightning-fed reproduce {name} --data_root DATA`"
        return f"| {row['item']} | {result} | {page.scale} | {told} |"
    if name is None:
        return f"| {row['item']} | {row['why']} | - | - |"
    why = row.get("why", "not run at this version yet")
    stated = yaml.safe_load((PAPERS / f"{name}.yaml").read_text(encoding="utf-8"))
    scale = " --scale part" if "part" in stated["scales"] else ""
    return f"| {row['item']} | {why}: `lightning-fed reproduce {name}{scale} --data_root DATA` | - | - |"


if __name__ == "__main__":
    (FOLDER / "index.md").write_text(index(), encoding="utf-8")
