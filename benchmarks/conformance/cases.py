"""The cases: which clients train on which examples in which order, and the parameters they must arrive at."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

__all__ = ["CASES", "Array", "Case", "Problem", "Values", "flat", "load", "named"]

Array: TypeAlias = np.ndarray
Values: TypeAlias = dict[str, Array]
"""Parameters and buffers by name, as in the state dict of a PyTorch module."""

CASES = Path(__file__).with_name("cases.json")


@dataclass(frozen=True)
class Problem:
    """A model, its first parameters, and the clients' examples. Nothing in it is random.

    Attributes:
        kind: "softmax" is a linear layer under the mean cross-entropy of a batch; "batchnorm" puts a BatchNorm layer
            with PyTorch's defaults in front of it, so that the names are "norm.weight", "linear.weight" and so on.
        x: The inputs of each client [n_i, features].
        y: The classes of each client [n_i].
        start: The values at the start.
        batch_size: Examples in a batch.
    """

    kind: str
    x: list[Array]
    y: list[Array]
    start: Values
    batch_size: int

    @property
    def sizes(self) -> list[int]:
        """The number of examples of each client."""
        return [len(y) for y in self.y]

    @property
    def trained(self) -> list[str]:
        """The names of the parameters; the other values are buffers."""
        return [name for name in self.start if name.endswith(("weight", "bias"))]


@dataclass(frozen=True)
class Case:
    """One method on one problem.

    Every local epoch goes through a client's examples in the stored order, in batches of ``problem.batch_size``; the
    last batch may be smaller. ``expected`` holds the server's parameters after each round.

    Attributes:
        id: The name of the case.
        method: The name of the method, a key of :data:`conformance.reference.METHODS`.
        options: The hyper-parameters; see README.md.
        problem: The data and the first parameters.
        cohorts: The clients of each round.
        expected: The parameters after each round.
    """

    id: str
    method: str
    options: dict[str, Any]
    problem: Problem
    cohorts: list[list[int]]
    expected: list[Values]

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return len(self.cohorts)

    @property
    def restart(self) -> int:
        """The round before which an interrupted run stops, to be continued from what the framework saved."""
        return 2

    @property
    def is_partial(self) -> bool:
        """Whether only some clients take part in a round."""
        return any(len(cohort) < len(self.problem.sizes) for cohort in self.cohorts)

    def batches(self, client: int) -> list[slice]:
        """Return the rows of each local step of a client, those of all local epochs."""
        size, step = self.problem.sizes[client], self.problem.batch_size
        return [slice(first, min(first + step, size)) for first in range(0, size, step)] * self.options["local_epochs"]


def load(path: Path = CASES) -> list[Case]:
    """Return the cases of a file."""
    content = json.loads(path.read_text())
    problems = {name: _problem(stored) for name, stored in content["problems"].items()}
    return [
        Case(
            stored["id"],
            stored["method"],
            stored["options"],
            problems[stored["problem"]],
            stored["cohorts"],
            [named(values, problems[stored["problem"]]) for values in stored["expected"]],
        )
        for stored in content["cases"]
    ]


def _problem(stored: dict[str, Any]) -> Problem:
    start = {name: np.array(value) for name, value in stored["start"].items()}
    x = [np.array(client["x"]) for client in stored["clients"]]
    y = [np.array(client["y"]) for client in stored["clients"]]
    return Problem(stored["kind"], x, y, start, stored["batch_size"])


def flat(values: Values, names: list[str]) -> Array:
    """Return the named values as one vector."""
    return np.concatenate([np.asarray(values[name], np.float64).ravel() for name in names])


def named(vector: Any, problem: Problem) -> Values:
    """Return a vector of parameters by name. The reverse of :func:`flat` with ``problem.trained``."""
    out, first, vector = {}, 0, np.asarray(vector, np.float64)
    for name in problem.trained:
        shape = problem.start[name].shape
        size = int(np.prod(shape))
        out[name] = vector[first : first + size].reshape(shape)
        first += size
    return out
