"""Write docs/papers/index.md, the list of the papers' results: python docs/papers_index.py."""

import re
from pathlib import Path

FOLDER = Path(__file__).parent / "papers"
INTRODUCTION = """\
# Results

What `lightning-fed reproduce` made of the papers' figures and tables so far, at the paper's scale or at one that says
what it changed; a page each, with pictures, the claims and their numbers, the chosen learning rates, the command,
versions, hardware and date. [Reproducing papers](../reproducing.md) describes the command and its files.

The papers' own texts were not at hand. Settings and claims are as we know them, and the pages say what was settled
here. A claim that does not hold is shown as such, with what we found out.

| experiment | of | scale | claims that hold |
| --- | --- | --- | --- |
"""


def index() -> str:
    """Return the page."""
    return INTRODUCTION + "".join(_row(path) for path in sorted(FOLDER.glob("*.md")) if path.name != "index.md")


def _row(path: Path) -> str:
    text = path.read_text()
    paper, item = re.findall(r"^(\w+) \([^)]*\), (.*)\.$", text, re.MULTILINE)[0]
    scale = re.findall(r"^At (?:the scale `(\w+)`|(full) scale)", text, re.MULTILINE)[0]
    hold, judged = re.findall(r"^(\d+) of (\d+) hold", text, re.MULTILINE)[0]
    return f"| [{path.stem}]({path.name}) | {paper}, {item} | {''.join(scale)} | {hold} of {judged} |\n"


if __name__ == "__main__":
    (FOLDER / "index.md").write_text(index())
