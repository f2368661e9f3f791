"""Tables in LaTeX with booktabs, the best method of each comparison in bold."""

import math
from collections import defaultdict
from collections.abc import Sequence

from lightning_fed.lab.experiment import METHOD, Label, Table
from lightning_fed.lab.quantities import Quantity
from lightning_fed.lab.results import Results
from lightning_fed.lab.tables import TableCell, cells_of

_ESCAPED = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$", "±": r"$\pm$", "μ": r"$\mu$",
}  # fmt: skip


def latex(table: Table, results: Results) -> str:
    """Return a table as a ``tabular`` that needs the package booktabs.

    Among cells that differ only in the method, the best is bold.

    Args:
        table: The table's description.
        results: The finished cells.
    """
    heads, rows = cells_of(table, results)
    best = _best([cell for _, cells in rows for cell in cells if cell is not None])
    seeds = results.grid.seeds
    spread = f"; mean and sample standard deviation over {seeds} seeds" if results.grid.experiment.is_random else ""
    lines = [
        f"% {results.grid.experiment.title}: {table.name}, at the scale {results.grid.scale.name}{spread}.",
        f"\\begin{{tabular}}{{{'l' * len(table.rows)}{'r' * len(heads)}}}",
        r"\toprule",
        _line([_escaped(text) for text in (*table.rows, *heads)]),
        r"\midrule",
        *(_line([*map(_escaped, labels), *(_number(cell, best) for cell in cells)]) for labels, cells in rows),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _best(cells: Sequence[TableCell]) -> set[int]:
    """Return the ids of cells with the best of several methods."""
    groups: defaultdict[tuple[tuple[tuple[str, Label], ...], Quantity], list[TableCell]] = defaultdict(list)
    for cell in cells:
        others = tuple(pair for pair in cell.point.labels if pair[0] != METHOD)
        if math.isfinite(cell.estimate.mean):
            groups[others, cell.estimate.quantity].append(cell)
    found = set()
    for (_, quantity), group in groups.items():
        pick = min if quantity.mode == "min" else max
        mean = pick(cell.estimate.mean for cell in group)
        found |= {id(cell) for cell in group if cell.estimate.mean == mean} if len(group) > 1 else set()
    return found


def _number(cell: TableCell | None, best: set[int]) -> str:
    if cell is None:
        return ""
    text = _escaped(str(cell.estimate))
    paper = _escaped(str(cell).removeprefix(str(cell.estimate)))
    return (f"\\textbf{{{text}}}" if id(cell) in best else text) + paper


def _line(cells: Sequence[str]) -> str:
    return f"{' & '.join(cells)} \\\\"


def _escaped(text: str) -> str:
    return "".join(_ESCAPED.get(letter, letter) for letter in text)
