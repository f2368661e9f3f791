"""Runs the cases through frameworks and prints, method by framework, how exact they are.

    python benchmarks/conformance --framework lightning_fed
    python benchmarks/conformance --framework nvflare --python nvflare=PATH --results runs.jsonl --render page.md

See README.md.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_PARENT = Path(__file__).resolve().parents[1]
if str(_PARENT) not in sys.path:
    sys.path.insert(0, str(_PARENT))

from conformance.cases import load  # noqa: E402
from conformance.tables import insert, page, read  # noqa: E402

FRAMEWORKS = ("lightning_fed", "fedjax", "flower", "fluke", "nvflare", "pfl")


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for, and print the tables."""
    args = _parser().parse_args(argv)
    pythons = dict(args.python)
    with tempfile.TemporaryDirectory() as folder:
        results = args.results or Path(folder) / "runs.jsonl"
        failed = [name for name in args.framework if _run(name, pythons.get(name), results, args.case)]
        lines = read(results) if results.exists() else []
    text = page(load(), lines)
    if args.render is None:
        print(text)
    else:
        insert(args.render, text)
    for name in failed:
        print(f"{name} did not run: see the error above.", file=sys.stderr)
    return 1 if failed else 0


def _run(name: str, python: str | None, results: Path, cases: Sequence[str]) -> int:
    """Run a framework in a process, whose environment has it."""
    path = os.pathsep.join(filter(None, (str(_PARENT), os.environ.get("PYTHONPATH"))))
    command = [python or sys.executable, "-m", "conformance.runs", name, str(results.resolve()), *cases]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False).returncode  # noqa: S603


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python benchmarks/conformance", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add(
        "--framework", nargs="+", default=[], metavar="NAME",
        help=f"{', '.join(FRAMEWORKS)}, or the path of a file with an adapter; none to render earlier runs",
    )  # fmt: skip
    add("--python", nargs="+", default=[], type=_interpreter, metavar="NAME=PATH", help="the interpreters that have them")
    add("--case", nargs="+", default=[], choices=[case.id for case in load()], metavar="ID", help="some cases only")
    add("--results", type=Path, help="file of JSON lines to add the runs to; the tables show all of it")
    add("--render", type=Path, metavar="PAGE", help="page to write the tables to, between its markers")
    return parser


def _interpreter(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH with the path of a Python interpreter")
    return name, path


if __name__ == "__main__":
    sys.exit(main())
