"""Stored oracle cases: an index ``cases.json`` and one ``.npz`` a case (format 1).

A case names every client's rows, the initial parameters, the cohorts, every minibatch, the hyper-parameters and the
server parameters after every round. Nothing in it is random. The reader raises an error that names any unknown key or
value: an ignored key could make a wrong number look right.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

FORMAT = 1
PAD = -1

_ENTRY_KEYS = ("id", "algorithm", "hp", "problem", "n_clients", "n_rounds", "sizes", "format")
_ENTRY_NOTES = ("reference", "note")
_INDEX_ONLY = ("file", "fp32_dev")
_ROWS = {"softmax": ("X", "y"), "least_squares": ("X", "y"), "quadratic": ("a", "b")}
_PARAMETERS = {"softmax": ("weight", "bias"), "least_squares": ("weight", "bias"), "quadratic": ("x",)}


PERSONAL: dict[str, tuple[str, ...]] = {
    "ditto": ("personal_batch_idx",),
    "fedper": (),
    "lg_fedavg": (),
    "fedrep": ("personal_steps",),
    "pfedme": (),
    "apfl": (),
}
"""The methods whose clients have models of their own, with the arrays that their cases have beside these models."""

ASYNCHRONOUS = {"fedbuff"}
"""The methods whose server steps when answers arrive. Their cases list the arrivals, in place of local minibatches."""

_ARRIVALS = ("arrivals", "arrival_batch_idx")

STATES = ("c", "m", "v", "delta", "g", "avg", "c_clients", "dual", "mu", "eval", "h_clients", "mixed", "eta_g")
"""The states that a case may store, without their ``state_`` prefix."""

WEIGHTINGS = ("uniform", "examples")


class CaseError(ValueError):
    """A case has an unknown entry, or lacks a required one."""


def check_keys(where: str, given: Mapping[str, Any], required: Collection[str], optional: Collection[str] = ()) -> None:
    """Raise unless ``given`` has every required key, and otherwise only optional ones."""
    if unknown := sorted(set(given) - set(required) - set(optional)):
        raise CaseError(f"{where}: unknown {unknown}; known are {sorted({*required, *optional})}.")
    if missing := sorted(set(required) - set(given)):
        raise CaseError(f"{where}: {missing} missing; the format gives no default.")


@dataclass(frozen=True)
class Case:
    """One case, checked against the format when it is loaded.

    Attributes:
        id: Its name.
        algorithm: The method's name in the format.
        hp: The method's hyper-parameters, not yet checked.
        kind: "softmax", "least_squares" or "quadratic".
        l2: The coefficient of ``0.5 * ||x||^2`` in every loss.
        shape: ``(n_out, n_in)`` of the linear layer; empty for the quadratic.
        n_rounds: R.
        sizes: The rows of every client.
        arrays: The arrays of the ``.npz``.
    """

    id: str
    algorithm: str
    hp: Mapping[str, Any]
    kind: str
    l2: float
    shape: tuple[int, ...]
    n_rounds: int
    sizes: tuple[int, ...]
    arrays: Mapping[str, np.ndarray]

    def rows(self, client: int) -> tuple[Tensor, Tensor]:
        """Return all rows of a client, as the two tensors of a batch."""
        first, second = (torch.from_numpy(self.arrays[f"{name}_{client}"]) for name in _ROWS[self.kind])
        return first, second

    def cohort(self, round: int) -> list[int]:
        """Return the clients that train in a round, in the stored order."""
        return _unpad(self.arrays["cohort"][round])

    def grad_cohort(self, round: int) -> list[int]:
        """Return the clients of the gradient phase of a round (FedDANE)."""
        return _unpad(self.arrays["grad_cohort"][round])

    def batches(self, round: int, client: int) -> list[list[int]]:
        """Return the row numbers of each local minibatch of a client in a round, in order."""
        return self._all_batches(round, client)[self._head_steps(round, client) :]

    def _all_batches(self, round: int, client: int) -> list[list[int]]:
        return _batches(self.arrays["batch_idx"][round, client])

    def arrivals(self, round: int) -> list[tuple[int, int]]:
        """Return the updates of a server step, in order: the client, and the number of server steps when it began."""
        return [(int(client), int(began)) for client, began in self.arrays["arrivals"][round]]

    def arrival_batches(self, round: int, place: int) -> list[list[int]]:
        """Return the row numbers of each minibatch of the arrival at this place in its round."""
        return _batches(self.arrays["arrival_batch_idx"][round, place])

    def own_batches(self, round: int, client: int) -> list[list[int]] | None:
        """Return the row numbers of the client's personal solve before its local steps, None if the case has none."""
        if "personal_batch_idx" in self.arrays:
            return _batches(self.arrays["personal_batch_idx"][round, client])
        return self._all_batches(round, client)[: self._head_steps(round, client)] if self._has_head_steps else None

    @property
    def _has_head_steps(self) -> bool:
        return "personal_steps" in self.arrays

    def _head_steps(self, round: int, client: int) -> int:
        return int(self.arrays["personal_steps"][round, client]) if self._has_head_steps else 0

    def initial(self) -> dict[str, Tensor]:
        """Return the initial parameters by name."""
        return {name: torch.from_numpy(self.arrays[f"init_{name}"]) for name in _PARAMETERS[self.kind]}

    def expected(self) -> Tensor:
        """Return the server parameters [R, P] after every round, flattened as ``parameters_to_vector`` does."""
        parts = [self.arrays[f"expected_{name}"].reshape(self.n_rounds, -1) for name in _PARAMETERS[self.kind]]
        return torch.from_numpy(np.concatenate(parts, axis=1))

    def expected_personal(self) -> Tensor | None:
        """Return the personal model of every client [R, N, P] after every round, None if the case has none."""
        names = [f"expected_personal_{name}" for name in _PARAMETERS[self.kind]]
        if names[0] not in self.arrays:
            return None
        parts = [self.arrays[name].reshape(self.n_rounds, len(self.sizes), -1) for name in names]
        return torch.from_numpy(np.concatenate(parts, axis=2))

    def states(self) -> dict[str, Tensor]:
        """Return the stored states after every round by name, without their ``state_`` prefix."""
        return {k.removeprefix("state_"): torch.from_numpy(v) for k, v in self.arrays.items() if k.startswith("state_")}


def load_index(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of a folder's ``cases.json``."""
    index = folder / "cases.json"
    if not index.is_file():
        raise CaseError(f"{folder} holds no cases.json, so it is no folder of oracle cases.")
    entries: list[dict[str, Any]] = json.loads(index.read_text())
    if not entries:
        raise CaseError(f"{index} lists no case.")
    return entries


def load_case(folder: Path, entry: Mapping[str, Any]) -> Case:
    """Load one case, and check that all its entries are known.

    Args:
        folder: The folder of the index.
        entry: The case's object in ``cases.json``.

    Raises:
        CaseError: If it has a key, problem or array that is not in the format, or contradicts itself.
    """
    check_keys(f"cases.json, {entry.get('id', entry)}", entry, (*_ENTRY_KEYS, "file"), (*_ENTRY_NOTES, "fp32_dev"))
    with np.load(folder / entry["file"], allow_pickle=False) as stored:
        arrays = dict(stored)
    if json.loads(str(arrays.pop("meta_json"))) != {k: v for k, v in entry.items() if k not in _INDEX_ONLY}:
        raise CaseError(f"{entry['id']}: meta_json in {entry['file']} differs from cases.json.")
    if entry["format"] != FORMAT:
        raise CaseError(f"{entry['id']}: format {entry['format']!r}; this reader knows format {FORMAT}.")
    kind, l2, shape = _problem(entry["id"], entry["problem"])
    case = Case(
        id=entry["id"],
        algorithm=entry["algorithm"],
        hp=entry["hp"],
        kind=kind,
        l2=l2,
        shape=shape,
        n_rounds=entry["n_rounds"],
        sizes=tuple(entry["sizes"]),
        arrays=arrays,
    )
    _check_arrays(case, entry["n_clients"])
    return case


def _problem(case_id: str, problem: Mapping[str, Any]) -> tuple[str, float, tuple[int, ...]]:
    kind = problem.get("kind")
    if kind not in _ROWS:
        raise CaseError(f"{case_id}: unknown problem kind {kind!r}; known are {sorted(_ROWS)}.")
    sizes = () if kind == "quadratic" else ("n_out", "n_in")
    check_keys(f"{case_id}, problem", problem, ("kind", "l2", *sizes))
    return kind, problem["l2"], tuple(problem[name] for name in sizes)


def _check_arrays(case: Case, n_clients: int) -> None:
    rows = [f"{name}_{i}" for name in _ROWS[case.kind] for i in range(n_clients)]
    parameters = [f"{when}_{name}" for name in _PARAMETERS[case.kind] for when in ("init", "expected")]
    own_cohort = ("grad_cohort",) if case.algorithm == "feddane" else ()
    personal = [f"expected_personal_{name}" for name in _PARAMETERS[case.kind]] if case.algorithm in PERSONAL else []
    own = _ARRIVALS if case.algorithm in ASYNCHRONOUS else PERSONAL.get(case.algorithm, ())
    required = (*rows, *parameters, *personal, *own, "cohort", "batch_idx", *own_cohort)
    check_keys(f"{case.id}, arrays", case.arrays, required, [f"state_{name}" for name in STATES])
    found = tuple(len(case.arrays[f"{_ROWS[case.kind][0]}_{i}"]) for i in range(n_clients))
    if found != case.sizes:
        raise CaseError(f"{case.id}: sizes {case.sizes} differ from the stored rows {found}.")
    for name in (
        "cohort",
        "batch_idx",
        *own_cohort,
        *own,
        *personal,
        *(p for p in parameters if p.startswith("expected")),
        *(k for k in case.arrays if k.startswith("state_")),
    ):
        if len(case.arrays[name]) != case.n_rounds:
            raise CaseError(f"{case.id}: {name} has {len(case.arrays[name])} rounds, not {case.n_rounds}.")
    for r in range(case.n_rounds):
        cohort = case.cohort(r)
        if len(set(cohort)) != len(cohort):
            raise CaseError(f"{case.id}: the cohort {cohort} of round {r} names a client twice.")
        if case.algorithm in ASYNCHRONOUS:
            _check_arrivals(case, r, cohort)


def _check_arrivals(case: Case, round: int, cohort: list[int]) -> None:
    arrivals = case.arrivals(round)
    if {client for client, _ in arrivals} != set(cohort):
        raise CaseError(f"{case.id}: the cohort {cohort} of round {round} is not that of its arrivals {arrivals}.")
    for place, (client, began) in enumerate(arrivals):
        if not 0 <= began <= round:
            raise CaseError(f"{case.id}: an arrival in round {round} began after {began} server steps.")
        if not case.arrival_batches(round, place):
            raise CaseError(f"{case.id}: the arrival of client {client} in round {round} has no minibatch.")


def _batches(padded: np.ndarray) -> list[list[int]]:
    return [rows for row in padded if (rows := _unpad(row))]


def _unpad(row: np.ndarray) -> list[int]:
    return [int(i) for i in row if i != PAD]
