"""Draw the package as a house: folders and top-level files by floor, with the imports between them.

    python docs/architecture_picture.py

It writes docs/images/architecture.svg from the imports in the code. A room is one floor above the highest room that it
imports. All arrows point downwards. Arrows that follow from others are left out: if a imports b and b imports c, a may
import c. Files whose names begin with an underscore are left out.
"""

import ast
from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lightning_fed"

Rooms = Mapping[str, set[str]]  # each room with the rooms that it imports
Place = tuple[str, ...]  # (room), or (upper, lower, floor) if an arrow passes a floor

_BOX, _FLOOR, _GAP, _LETTER, _PASS, _SWEEPS = 30, 84, 16, 8.2, 10, 24


def rooms(package: Path) -> dict[str, set[str]]:
    """Return the rooms of a package, each with the rooms that it imports."""
    found: dict[str, set[str]] = {}
    for path in sorted(package.rglob("*.py")):
        room = _room(path.relative_to(package).parts)
        if room is None:
            continue
        names = found.setdefault(room, set())
        for node in ast.walk(ast.parse(path.read_text())):
            modules: list[str] = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module == package.name:
                modules = [f"{package.name}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            names |= {m.split(".")[1] for m in modules if m.startswith(f"{package.name}.")} - {room}
    return {room: names & found.keys() for room, names in found.items()}


def _room(parts: Sequence[str]) -> str | None:
    """Return a file's top folder, or its own name at the top level; None for private files."""
    return None if parts[0].startswith("_") else parts[0].removesuffix(".py")


def floors(house: Rooms) -> dict[str, int]:
    """Return each room's floor. The lowest floor is 0.

    Raises:
        graphlib.CycleError: If rooms import each other in a cycle.
    """
    found: dict[str, int] = {}
    for room in TopologicalSorter(house).static_order():
        found[room] = 1 + max((found[below] for below in house[room]), default=-1)
    return found


def arrows(house: Rooms) -> list[tuple[str, str]]:
    """Return the pairs (upper, lower) where upper imports lower, except pairs that follow from others."""
    below: dict[str, set[str]] = {}
    for room in TopologicalSorter(house).static_order():
        below[room] = house[room].union(*(below[other] for other in house[room]))
    return [
        (room, other)
        for room in sorted(house)
        for other in sorted(house[room])
        if not any(other in below[between] for between in house[room])
    ]


def _rows(house: Rooms) -> tuple[list[list[Place]], list[tuple[Place, Place]]]:
    """Return the places on each floor from left to right, and the parts of arrows from floor to floor."""
    level = floors(house)
    rows: list[list[Place]] = [[] for _ in range(max(level.values()) + 1)]
    for room in sorted(house):
        rows[level[room]].append((room,))
    parts: list[tuple[Place, Place]] = []
    for upper, lower in arrows(house):
        at: Place = (upper,)
        for floor in range(level[upper] - 1, level[lower], -1):
            rows[floor].append((upper, lower, str(floor)))
            parts.append((at, rows[floor][-1]))
            at = rows[floor][-1]
        parts.append((at, (lower,)))
    joined: dict[Place, list[Place]] = {}
    for one, other in parts:
        joined.setdefault(one, []).append(other)
        joined.setdefault(other, []).append(one)
    for sweep in range(_SWEEPS):  # down and up: move each place near the places that it is joined with
        step = -1 if sweep % 2 == 0 else 1
        for floor in range(len(rows))[::step][1:]:
            x = {**_centers(rows[floor]), **_centers(rows[floor - step])}
            near = {place: [x[p] for p in joined[place] if p in x] or [x[place]] for place in rows[floor]}
            rows[floor].sort(key=lambda place: sum(near[place]) / len(near[place]))
    return rows, parts


def _width(place: Place) -> float:
    return _PASS if len(place) > 1 else 20 + _LETTER * len(place[0])


def _centers(row: Sequence[Place]) -> dict[Place, float]:
    """Return the center of each place in a row that is centered at 0."""
    x, found = -(sum(map(_width, row)) + _GAP * (len(row) - 1)) / 2, {}
    for place in row:
        found[place] = x + _width(place) / 2
        x += _width(place) + _GAP
    return found


def draw(house: Rooms) -> str:
    """Return the picture as SVG."""
    rows, parts = _rows(house)
    middle = 10 + max(sum(map(_width, row)) + _GAP * (len(row) - 1) for row in rows) / 2
    at = {
        place: (middle + x, 10 + _FLOOR * (len(rows) - 1 - floor) + _BOX / 2)
        for floor, row in enumerate(rows)
        for place, x in _centers(row).items()
    }
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * middle:.0f} {20 + _FLOOR * (len(rows) - 1) + _BOX}"'
        ' font-family="sans-serif" font-size="14">',
        '<rect width="100%" height="100%" fill="white"/>',
        '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#667"/></marker>',
    ]
    for upper, lower in parts:
        (x, y), (x2, y2) = at[upper], at[lower]
        y, y2 = y + _BOX / 2 * (len(upper) == 1), y2 - _BOX / 2 * (len(lower) == 1)
        tip = ' marker-end="url(#tip)"' if len(lower) == 1 else ""
        bend = (y2 - y) / 2
        path = f"M{x:.0f} {y:.0f}C{x:.0f} {y + bend:.0f} {x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2:.0f}"
        out.append(f'<path d="{path}" fill="none" stroke="#667"{tip}/>')
    for place, (x, y) in at.items():
        if len(place) > 1:
            continue
        is_folder = (PACKAGE / place[0]).is_dir()
        width, fill = _width(place), "#dfe8f5" if is_folder else "#f6f6f2"
        out.append(
            f'<rect x="{x - width / 2:.0f}" y="{y - _BOX / 2:.0f}" width="{width:.0f}" height="{_BOX}" rx="4"'
            f' fill="{fill}" stroke="#667"/>'
            f'<text x="{x:.0f}" y="{y + 5:.0f}" text-anchor="middle">{escape(place[0])}{"/" * is_folder}</text>'
        )
    return "\n".join([*out, "</svg>", ""])


def main() -> None:
    """Draw the package."""
    path = Path(__file__).parent / "images" / "architecture.svg"
    path.write_text(draw(rooms(PACKAGE)))
    print(f"wrote {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


if __name__ == "__main__":
    main()
