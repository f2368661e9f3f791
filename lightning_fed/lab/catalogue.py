"""The package's experiments with their CPU times and data sets, read from a small file without PyTorch."""

import csv
from pathlib import Path

CATALOGUE = Path(__file__).parent / "papers" / "catalogue.csv"
"""A row for each experiment; ``python docs/papers_index.py`` writes it."""

COLUMNS = ("name", "scales", "published", "seeds", "cpu_hours", "data", "title", "paper", "item")
"""The columns. Seeds and CPU hours are for the published scale."""


def listing() -> str:
    """Return the list of experiments, a line each."""
    with CATALOGUE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    lines = [("name", "scales", "CPU time", "data", "what")]
    for row in rows:
        hours = "<0.1" if row["cpu_hours"] == "0.0" else row["cpu_hours"]
        took = f"{hours} h at {row['published']}" if row["published"] else "not run"
        paper = row["paper"].partition(" (")[0] if "arXiv" in row["paper"] else "our own comparison"
        about = f"{row['title']} ({paper})"
        lines.append((row["name"], row["scales"], took, row["data"] or "none", about))
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    return "\n".join(
        "  ".join([*(text.ljust(width) for text, width in zip(line, widths, strict=False)), line[-1]]) for line in lines
    )
