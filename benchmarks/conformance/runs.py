"""Runs the cases through one adapter, in the environment of its framework, and writes what came out.

    PATH/python -m conformance.runs ADAPTER FILE [CASE ...]
"""

import datetime
import json
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conformance.adapter import Adapter, load_adapter
from conformance.cases import Case, Values, flat, load

__all__ = ["main", "run"]

Line = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Append one JSON line per case and way."""
    name, file, *wanted = argv
    adapter = load_adapter(name)
    for case in load():
        if wanted and case.id not in wanted:
            continue
        for line in run(name, adapter, case):
            with Path(file).open("a") as out:
                out.write(json.dumps(line) + "\n")
            print(f"{name}: {case.id}{' (' + line['way'] + ')' if line.get('way') else ''}", file=sys.stderr, flush=True)
    return 0


def run(name: str, adapter: Adapter, case: Case) -> list[Line]:
    """Return a line for each way in which the framework runs a case, or one that says that it does not."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    line: Line = {"framework": _stem(name), "versions": adapter.versions(), "date": today, "case": case.id}
    ways = adapter.offers(case)
    if not ways:
        return [{**line, "offered": False}]
    return [{**line, "offered": True, "way": way, "how": how, **_played(adapter, case, way)} for way, how in ways.items()]


def _stem(name: str) -> str:
    return Path(name).stem.removeprefix("with_")


def _played(adapter: Adapter, case: Case, way: str) -> Line:
    try:
        played = adapter.run(case, way)
    except Exception as error:
        return {"failed": _told(error)}
    found: Line = {"rounds": _vectors(case, played), "resumed": None}
    try:
        with tempfile.TemporaryDirectory() as folder:
            resumed = adapter.resume(case, way, Path(folder))
        found["resumed"] = resumed and _vectors(case, resumed)
    except Exception as error:
        found["resume_failed"] = _told(error)
    buffers = [key for key in case.problem.start if key not in case.problem.trained]
    if buffers:
        found["buffers"] = {key: np.asarray(played[-1][key], np.float64).tolist() for key in buffers}
    return found


def _told(error: Exception) -> str:
    """Return the kind of an error and its first line, and print all of it."""
    traceback.print_exc()
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _vectors(case: Case, played: list[Values]) -> list[list[float]]:
    return [flat(values, case.problem.trained).tolist() for values in played]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
