"""Five oracles. Each one checks a property that every configuration must have."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from tests.fuzz import plain_loop
from tests.fuzz.configuration import Configuration
from tests.fuzz.runs import ROUNDS, Outcome, run, run_in_processes

__all__ = ["Finding", "differences", "examine"]

TOLERANCES = {"64-true": 1e-11, "32-true": 3e-5, "bf16-mixed": 5e-2}
"""Relative to the largest entry of a tensor, or of 0.1: three rounds add to the rounding of one."""

METRICS = 1e-6
"""Lightning keeps what is logged in float32."""


@dataclass(frozen=True)
class Finding:
    """A fault that an oracle found.

    Attributes:
        oracle: "refusal", "engine", "resume", "processes" or "plain".
        text: The fault and its symptom.
        trace: The trace of an exception, if there is one.
    """

    oracle: str
    text: str
    trace: str = ""

    def __str__(self) -> str:
        return f"{self.oracle}: {self.text}"


def examine(c: Configuration, oracle: str | None = None) -> tuple[list[Finding], Outcome]:
    """Return the faults of a configuration, and its sequential run.

    Args:
        c: The configuration.
        oracle: The only oracle to use; all of them if None.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        reference = run(c, states_dir=folder / "reference")
        if reference.failure is not None:
            return _refused(reference, "engine='sequential'"), reference
        findings = []
        if oracle in (None, "plain") and plain_loop.applies(c):
            findings += _plain(c, reference)
        if oracle in (None, "engine") or (oracle == "resume" and c.resume_after):
            found, engine, of_engine = _engine(c, reference, folder)
            findings += found if oracle != "resume" else []
            if c.resume_after and oracle != "engine":
                findings += _resumed(replace(c, engine=engine), of_engine, folder)
        if oracle in (None, "processes") and c.processes > 1:
            findings += _processes(c, reference, folder)
    return findings, reference


def _refused(outcome: Outcome, where: str, oracle: str = "refusal") -> list[Finding]:
    """Return the faults of a refusal: in its class, time or message."""
    failure = outcome.failure
    assert failure is not None
    said = f"{where} raises {failure.kind}: {failure.text}"
    if not failure.is_refusal:
        return [Finding(oracle, f"{said} (it is no FederatedError)", failure.trace)]
    if failure.began:
        return [Finding(oracle, f"{said} (after the first round has begun)", failure.trace)]
    return [] if failure.has_remedy else [Finding(oracle, f"{said} (which names no remedy)", failure.trace)]


# ---------------------------------------------------------------------- the oracles


def _engine(c: Configuration, reference: Outcome, folder: Path) -> tuple[list[Finding], str, Outcome]:
    """Compare the configuration's engine with the sequential one; return findings, a working engine, and its run."""
    name, found = c.engine, run(c, c.engine, c.chunk, states_dir=folder / "engine")
    if found.failure is not None and name == "vectorized" and found.failure.is_refusal:
        name, found = "auto", run(c, "auto", c.chunk, states_dir=folder / "auto")
    where = f"engine={name!r}, chunk_size={c.chunk}"
    if found.failure is not None:
        findings = _refused(found, where, "engine") or [
            Finding("engine", f"{where} refuses what 'sequential' runs: {found.failure.text}", found.failure.trace)
        ]
        return findings, "sequential", reference
    one, other = _comparable(reference), _comparable(found)
    engines = sorted(set(found.engines.values()))
    if c.network == "dropout" and engines != ["sequential"]:  # masks differ: only names and counts are compared
        one, other = _without_values(one), _without_values(other)
    lines = differences(one, other, TOLERANCES[c.precision])
    return _told("engine", f"{where} (which ran {' and '.join(engines)})", lines), name, found


def _resumed(c: Configuration, whole: Outcome, folder: Path) -> list[Finding]:
    """Compare a stopped and resumed run with an uninterrupted one, bit for bit."""
    r, states = c.resume_after, folder / "resumed"
    places: dict[str, Any] = {"engine": c.engine, "chunk": None if c.engine == "sequential" else c.chunk}
    first = run(c, rounds=r, save_to=folder / "saved.ckpt", states_dir=states, **places)
    if first.failure is not None:
        return _told("resume", f"{r} rounds", [f"raise {first.failure.kind}: {first.failure.text}"], first)
    second = run(c, ckpt_path=folder / "saved.ckpt", states_dir=states, **places)
    where = f"resumed after round {r} with {places}"
    if second.failure is not None:
        return _told("resume", where, [f"raises {second.failure.kind}: {second.failure.text}"], second)
    expected, found = _comparable(whole), _comparable(second)
    for part in ("rounds", "models", "buffers", "logged"):
        start = r + 1 if part == "logged" else r
        expected[part], found[part] = ({k: v for k, v in o[part].items() if k >= start} for o in (expected, found))
    return _told("resume", where, differences(expected, found, 0.0))


def _processes(c: Configuration, reference: Outcome, folder: Path) -> list[Finding]:
    """Compare two processes with one."""
    findings = []
    for rank, found in enumerate(run_in_processes(c, folder, states_dir=folder / "shared")):
        if found.failure is not None:
            if found.failure.is_refusal and not found.failure.began and found.failure.has_remedy:
                continue
            text = f"raises {found.failure.kind}: {found.failure.text}"
            findings += _told("processes", f"rank {rank} of 2", [text], found)
            continue
        one, other = _comparable(reference), _comparable(found)
        for outcome in (one, other):
            outcome.pop("logged")  # only rank zero logs
        findings += _told("processes", f"rank {rank} of 2", differences(one, other, TOLERANCES[c.precision]))
    return findings


def _plain(c: Configuration, reference: Outcome) -> list[Finding]:
    """Compare with a loop written from the papers' formulas."""
    plain = plain_loop.plain_run(c, reference.rounds)
    lines = []
    for r in range(ROUNDS):
        report = reference.rounds[r]
        fields = ("steps", "size", "loss", "metrics", "update_norm")
        own = {i: {name: client[name] for name in fields} for i, client in report["clients"].items()}
        for client in (*own.values(), *plain.clients[r].values()):
            client["metrics"] = dict(client["metrics"])
        for what, expected, found in (
            ("model", plain.models[r], reference.models[r]),
            ("buffers", plain.buffers[r], reference.buffers[r]),
            ("clients", plain.clients[r], own),
            ("metrics", plain.logged[r], dict(report["metrics"])),
        ):
            lines += [f"round {r} {what}{line}" for line in differences(expected, found, 1e-10)]
    return _told("plain", "the loop without the package", lines)


# ---------------------------------------------------------------------- comparing


def _comparable(outcome: Outcome) -> dict[str, Any]:
    parts = ("rounds", "models", "buffers", "logged", "state")
    return {name: dict(getattr(outcome, name)) for name in parts}


def _told(oracle: str, where: str, lines: list[str], failed: Outcome | None = None) -> list[Finding]:
    if not lines:
        return []
    more = f" (and {len(lines) - 4} more)" if len(lines) > 4 else ""
    trace = failed.failure.trace if failed is not None and failed.failure is not None else ""
    return [Finding(oracle, f"{where}: {'; '.join(lines[:4])}{more}", trace)]


def differences(one: Any, other: Any, rtol: float, path: str = "") -> list[str]:
    """Return the differences between two nested values, one line for each leaf.

    Args:
        one: The expected value.
        other: The actual value.
        rtol: The relative tolerance of numbers; 0 requires the same bits.
        path: Their place in the outer value.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        lines = []
        if set(one) != set(other):
            lines.append(f"{path} has {_sorted(set(other) - set(one))} more and lacks {_sorted(set(one) - set(other))}")
        return lines + [line for k in one if k in other for line in differences(one[k], other[k], rtol, f"{path}.{k}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [line for k, (a, b) in pairs for line in differences(a, b, rtol, f"{path}[{k}]")]
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return [] if _tensors_agree(one, other, rtol) else [f"{path} is {_short(other)}, expected {_short(one)}"]
    if isinstance(one, float) and isinstance(other, float):
        return [] if _numbers_agree(one, other, rtol, path) else [f"{path} is {other!r}, expected {one!r}"]
    return [] if type(one) is type(other) and one == other else [f"{path} is {other!r}, expected {one!r}"]


def _tensors_agree(one: Tensor, other: Tensor, rtol: float) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if rtol == 0 or not one.is_floating_point():
        return torch.equal(one, other) or bool(((one == other) | (one != one) & (other != other)).all())
    if one.numel() == 0:
        return True
    scale = max(0.1, float(one.abs().max()))
    return bool(((one - other).abs().double() <= rtol * scale).all())


def _numbers_agree(one: float, other: float, rtol: float, path: str) -> bool:
    if math.isnan(one) or math.isnan(other) or rtol == 0:
        return one == other or (math.isnan(one) and math.isnan(other))
    is_logged = ".logged" in path or "metrics" in path
    rtol = max(rtol, METRICS) if is_logged else rtol
    return abs(one - other) <= rtol * max(0.1, abs(one), abs(other))


def _without_values(value: Any) -> Any:
    """Return a nested value without its numbers, but with its counts and shapes."""
    if isinstance(value, Mapping):
        return {k: _without_values(v) for k, v in value.items()}
    if isinstance(value, Tensor):
        return tuple(value.shape)
    return 0.0 if isinstance(value, float) else value


def _sorted(names: set[Any]) -> list[Any]:
    return sorted(names, key=str)


def _short(value: Tensor) -> str:
    flat = [f"{v:.6g}" for v in value.detach().double().reshape(-1)[:3].tolist()]
    return f"[{', '.join(flat)}{', ...' if value.numel() > 3 else ''}]"
