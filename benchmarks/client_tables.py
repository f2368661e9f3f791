"""Measure the cost of the rules of ``ClientTable``: CPU seconds to read a table of 20 clients.

    python benchmarks/client_tables.py

Every table has 8 columns of numbers and 2 of words. "numbers alone" skips the words. Each other case reads the same
rows with one more rule.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_fed.data import ClientTable

__all__ = ["main", "seconds", "write"]

NUMBERS, WARDS = [f"x{i}" for i in range(8)], [f"ward {i}" for i in range(20)]
WORDS = {"ward": WARDS, "sex": ["f", "m"]}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "numbers alone": ({}, {"features": NUMBERS}),
    "and two columns of words": ({}, {"categories": WORDS}),
    "and decimal commas": ({"decimal": ","}, {"categories": WORDS, "decimal": ",", "delimiter": ";"}),
    "and a tenth of all values missing": (
        {"decimal": ",", "missing": 0.1},
        {
            "categories": WORDS,
            "decimal": ",",
            "delimiter": ";",
            "missing": {**dict.fromkeys(NUMBERS, "client_mean"), **dict.fromkeys(WORDS, "indicator")},
        },
    ),
}


def write(path: Path, rows: int, decimal: str = ".", missing: float = 0.0) -> None:
    """Write a table with deterministic numbers and words, some of them missing."""
    draw = random.Random(0)  # noqa: S311 - no secret
    lines = [";".join(["site", *NUMBERS, *WORDS, "ill"])]
    for row in range(rows):
        values = [f"{draw.gauss(0, 1):.4f}".replace(".", decimal) for _ in NUMBERS]
        values += [draw.choice(words) for words in WORDS.values()]
        values = ["" if draw.random() < missing else value for value in values]
        lines.append(";".join([f"s{row % 20}", *values, str(row % 2)]))
    text = "\n".join(lines) + "\n"
    path.write_text(text if decimal == "," else text.replace(";", ","))


def seconds(path: Path, **options: Any) -> float:
    """Return the CPU seconds of reading a table."""
    start = time.process_time()
    ClientTable(str(path), "site", "ill", val_fraction=0, **options).setup("fit")
    return time.process_time() - start


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the table")
    given = parser.parse_args(arguments)
    print("| table | CPU seconds |\n| --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.csv"
        for name, (written, options) in CASES.items():
            write(path, given.rows, **written)
            print(f"| {name} | {min(seconds(path, **options) for _ in range(3)):.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
