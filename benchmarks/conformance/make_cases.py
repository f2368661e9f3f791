"""Writes cases.json: the problems from fixed seeds, and what the reference computes by the papers' rules.

    python benchmarks/conformance/make_cases.py

Frameworks are compared with the file, so that its numbers stay when this script or NumPy changes.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np  # noqa: E402

from conformance.cases import CASES, Case, load  # noqa: E402
from conformance.reference import METHODS, rounds_of  # noqa: E402

SIZES = (8, 6, 16, 10)  # in batches of 4: 2, 2, 4 and 3 steps an epoch, so that examples and steps weigh differently
FEATURES, CLASSES, BATCH = 3, 3, 4
FULL, PARTIAL = [[0, 1, 2, 3]] * 4, [[0, 1], [1, 2], [0, 3], [1, 2]]

_LOCAL = {"client_lr": 0.2, "local_epochs": 2}
_SERVER = {**_LOCAL, "server_lr": 0.1, "beta1": 0.9, "beta2": 0.99, "tau": 0.01}
_MIME = {**_LOCAL, "beta": 0.9}
_LISTED: list[tuple[str, str, dict[str, Any], str, list[list[int]]]] = [
    ("fedavg", "fedavg", _LOCAL, "linear", FULL),
    ("fedavg, some clients", "fedavg", _LOCAL, "linear", PARTIAL),
    ("fedavg, client momentum", "fedavg", {**_LOCAL, "client_lr": 0.05, "client_momentum": 0.9}, "linear", FULL),
    ("fedprox", "fedprox", {**_LOCAL, "mu": 0.5}, "linear", FULL),
    ("scaffold, equal clients", "scaffold", {**_LOCAL, "option": "ii"}, "equal", FULL),
    ("scaffold ii", "scaffold", {**_LOCAL, "option": "ii"}, "linear", FULL),
    ("scaffold ii, some clients", "scaffold", {**_LOCAL, "option": "ii"}, "linear", PARTIAL),
    ("scaffold i", "scaffold", {**_LOCAL, "option": "i"}, "linear", FULL),
    ("scaffold i, some clients", "scaffold", {**_LOCAL, "option": "i"}, "linear", PARTIAL),
    ("fedadam", "fedopt", {**_SERVER, "server": "adam"}, "linear", FULL),
    ("fedyogi", "fedopt", {**_SERVER, "server": "yogi"}, "linear", FULL),
    ("fedadagrad", "fedopt", {**_SERVER, "server": "adagrad", "beta1": 0.0}, "linear", FULL),
    ("mime", "mime", _MIME, "linear", FULL),
    ("mime, some clients", "mime", _MIME, "linear", PARTIAL),
    ("mimelite", "mimelite", _MIME, "linear", FULL),
    ("feddyn", "feddyn", {**_LOCAL, "alpha": 0.5}, "linear", FULL),
    ("feddyn, some clients", "feddyn", {**_LOCAL, "alpha": 0.5}, "linear", PARTIAL),
    ("fednova", "fednova", _LOCAL, "linear", FULL),
    ("batchnorm", "batchnorm", _LOCAL, "batchnorm", FULL),
]


def problem(kind: str, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Return clients around different means with different shares of classes; numbers are exact in float32."""
    stream = np.random.default_rng(49)

    def normal(*shape: int) -> np.ndarray:
        return np.round(stream.standard_normal(shape) * 64) / 64

    clients = []
    for size in sizes:
        shares = stream.dirichlet(np.full(CLASSES, 0.6))
        clients.append(
            {
                "x": (normal(size, FEATURES) + normal(1, FEATURES)).tolist(),
                "y": stream.choice(CLASSES, size, p=shares).tolist(),
            }
        )
    start = {"weight": normal(CLASSES, FEATURES) / 4, "bias": normal(CLASSES) / 4}
    if kind == "batchnorm":
        ones, zeros = np.ones(FEATURES), np.zeros(FEATURES)
        start = {
            "norm.weight": ones, "norm.bias": zeros, "norm.running_mean": zeros, "norm.running_var": ones,
            "norm.num_batches_tracked": np.array(0), **{f"linear.{name}": value for name, value in start.items()},
        }  # fmt: skip
    listed = {name: value.tolist() for name, value in start.items()}
    return {"kind": kind, "batch_size": BATCH, "start": listed, "clients": clients}


def main() -> None:
    """Write the file: once without the expected parameters, to compute them from what a reader gets."""
    content: dict[str, Any] = {
        "format": 1,
        "problems": {
            "linear": problem("softmax", SIZES),
            "equal": problem("softmax", (8, 8, 8, 8)),
            "batchnorm": problem("batchnorm", SIZES),
        },
        "cases": [
            {
                "id": name,
                "method": method,
                "paper": METHODS[method].paper,
                "formula": " ".join(str(METHODS[method].formula.__doc__).split()),
                "options": options,
                "problem": data,
                "cohorts": cohorts,
                "expected": [],
            }
            for name, method, options, data, cohorts in _LISTED
        ],
    }
    _write(content)
    for case, stored in zip(load(), content["cases"], strict=True):
        stored["expected"] = [x.tolist() for x in _expected(case)]
    _write(content)


def _expected(case: Case) -> list[np.ndarray]:
    return rounds_of(case)


def _write(content: dict[str, Any]) -> None:
    parts = [f'{json.dumps(name)}: {json.dumps(value)}' for name, value in content["problems"].items()]
    cases = [json.dumps(case) for case in content["cases"]]
    CASES.write_text(
        '{"format": 1,\n"problems": {\n' + ",\n".join(parts) + '},\n"cases": [\n' + ",\n".join(cases) + "]}\n"
    )


if __name__ == "__main__":
    main()
