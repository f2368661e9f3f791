"""Write a table for each site: `python tables.py`. In a real deployment, each site has its own."""

import csv
import random
from pathlib import Path

SITES = {"hospital-north": (160, 0.0), "hospital-south": (90, 0.5), "bank": (240, -0.5)}  # rows, and their shift


def write_tables(folder: Path) -> None:
    """Write ``<site>.csv`` for each site.

    Args:
        folder: The folder to write to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for site, (rows, shift) in SITES.items():
        chance = random.Random(site)  # noqa: S311 - no secrets
        with (folder / f"{site}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["site", "age", "income", "debt", "late", "repaid"])
            for _ in range(rows):
                age, income, debt, late = (round(chance.gauss(shift, 1.0), 3) for _ in range(4))
                repaid = int(income - debt - late + 0.3 * age + chance.gauss(0, 0.5) > shift)
                table.writerow([site, age, income, debt, late, repaid])


if __name__ == "__main__":
    write_tables(Path("tables"))
