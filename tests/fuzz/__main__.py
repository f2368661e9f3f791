"""Run configurations and print the findings: ``python -m tests.fuzz --configurations 500 --seed 0``."""

import argparse
import sys
import time
from collections import Counter
from dataclasses import replace

import torch

from tests.fuzz.configuration import AXES, Configuration, draw
from tests.fuzz.default import DEFAULT
from tests.fuzz.oracles import examine
from tests.fuzz.shrink import shrink


def main() -> int:
    """Run the configurations, and return whether anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--configurations", type=int, help="how many, from --first on (default: the default run's 25)")
    parser.add_argument("--first", type=int, default=0, help="the first number (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="what the numbers are drawn with (default: 0)")
    parser.add_argument("--number", type=int, help="run this one alone, and print traces")
    parser.add_argument("--set", nargs="*", default=[], metavar="AXIS=VALUE", help="change axes after the draw")
    parser.add_argument("--defaults", action="store_true", help="draw nothing: run all defaults, but for what is set")
    parser.add_argument("--no-shrink", action="store_true", help="leave what fails as it was drawn")
    given = parser.parse_args()
    torch.set_num_threads(1)
    alone = 0 if given.defaults else given.number
    numbers = DEFAULT if given.configurations is None else range(given.first, given.first + given.configurations)
    numbers = numbers if alone is None else [alone]
    changes = dict(_parsed(text) for text in given.set)
    started, seen, failed = time.perf_counter(), Counter[str](), 0
    for number in numbers:
        c = replace(Configuration() if given.defaults else draw(given.seed, number), **changes)
        findings, reference = examine(c)
        seen["refused" if reference.failure else "run"] += 1
        failed += bool(findings)
        for finding in findings:
            print(f"{c}\n    {finding}", flush=True)
            if alone is not None and finding.trace:
                print(finding.trace, flush=True)
            if not given.no_shrink:
                print(f"    shrunk to {_shrunk(c, finding.oracle)}", flush=True)
    spent = time.perf_counter() - started
    print(f"{len(numbers)} configurations in {spent:.0f} s: {dict(seen)}, {failed} of them failed.")
    return int(failed > 0)


def _shrunk(c: Configuration, oracle: str) -> Configuration:
    asked = None if oracle == "refusal" else oracle
    return shrink(c, lambda smaller: any(f.oracle == oracle for f in examine(smaller, asked)[0]))


def _parsed(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    found = [allowed for allowed in AXES[name] if str(allowed) == value]
    if not found:
        raise SystemExit(f"{name}={value}: use one of {sorted(set(map(str, AXES[name])))}")
    return name, found[0]


if __name__ == "__main__":
    sys.exit(main())
