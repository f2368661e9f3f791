"""From the lines of runs to one line per system, and to tables."""

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["GOALS", "combine", "insert", "read", "table", "tables", "where"]

Line = dict[str, Any]

GOALS = {"W1": 0.55, "W1x10": 0.5, "W2": 0.45, "W3": 0.58, "W4": 0.5}
"""Time of a FedAvg round of lightning_fed at the most, as a ratio to the plain loop's, on two cores together."""

METHOD_GOALS = {
    "Mime": {**dict.fromkeys(GOALS, 2.6), "W4": 2.0},  # all clients of W4 take their full-batch gradients at once
    "Scaffold": dict.fromkeys(GOALS, 1.25),
}
"""Time of a round at the most, as a ratio to FedAvg's."""

_OWN, _REFERENCE = "lightning_fed", "torch"
_LOSS_TOLERANCE = 0.03  # what the order of batches, which systems draw by themselves, does to the loss


def combine(repeats: Sequence[Sequence[Line]]) -> list[Line]:
    """Return one line per run from repeats of the same runs, with ratios of times within each repeat.

    Args:
        repeats: For each repeat, the lines of all runs in the same order; skipped and failed ones included.
    """
    out = []
    for lines in zip(*repeats, strict=True):
        bad = [line for line in lines if not _is_timed(line)]
        if bad:
            out.append(bad[0])
            continue
        line: Line = {
            **lines[-1],
            "s_per_round": statistics.median(row["s_per_round"] for row in lines),
            "min": min(row["min"] for row in lines),
            "max": max(row["max"] for row in lines),
            "peak_rss_mb": max(row["peak_rss_mb"] for row in lines),
            "setup_s": statistics.median(row["setup_s"] for row in lines),
            "repeats": len(lines),
        }
        plain = [_find(repeat, line["workload"], _REFERENCE, "FedAvg") for repeat in repeats]
        line |= _ratio("ratio", lines, plain)
        if line["system"] == _OWN and line["algorithm"] != "FedAvg":
            line |= _ratio("ratio_to_fedavg", lines, [_find(r, line["workload"], _OWN, "FedAvg") for r in repeats])
        elif plain[-1] is not None:
            expected = plain[-1]["loss_end"]
            line["loss_agrees"] = bool(abs(line["loss_end"] - expected) <= _LOSS_TOLERANCE * max(1.0, expected))
        out.append(line)
    return out


def _ratio(name: str, lines: Sequence[Line], others: Sequence[Line | None]) -> Line:
    pairs = [
        line["s_per_round"] / other["s_per_round"]
        for line, other in zip(lines, others, strict=True)
        if other is not None
    ]
    return {name: round(statistics.median(pairs), 3)} if len(pairs) == len(lines) else {}


def _find(lines: Iterable[Line], workload: str, system: str, algorithm: str) -> Line | None:
    wanted = (workload, system, algorithm)
    return next((line for line in lines if _is_timed(line) and _identity(line) == wanted), None)


def _identity(line: Line) -> tuple[str, str, str]:
    return line["workload"], line["system"], line["algorithm"]


def _is_timed(line: Line) -> bool:
    return "s_per_round" in line


def read(path: Path, identity: Sequence[str] = ("workload", "system", "algorithm")) -> list[Line]:
    """Return the lines of a file; of several with the same values of some keys, the last."""
    lines = [json.loads(text) for text in path.read_text().splitlines() if text.strip()]
    return list({tuple(line[key] for key in identity): line for line in lines}.values())


def where(lines: Iterable[Line]) -> str:
    """Return the dates and machines of runs as the start of a sentence."""
    lines = list(lines)
    cores: dict[str, int] = {}  # the most that a system was left with: some keep to one
    for line in lines:
        cores[line["machine"]["cpu"]] = max(cores.get(line["machine"]["cpu"], 0), line["machine"]["cores"])
    machines = sorted(f"{cpu}, {count} cores" for cpu, count in cores.items())
    return f"{' and '.join(sorted({line['date'] for line in lines}))}; {' and '.join(machines)}."


def table(lines: Iterable[Line]) -> str:
    """Return the figures as a table in Markdown, the fastest first within each workload."""
    rows = [
        ("workload", "system", "s a round", "min to max", "x plain loop", "peak MB", "set-up s", "loss", "run as"),
        ("---",) * 9,
    ]
    timed = [line for line in lines if _is_timed(line)]
    for line in sorted(timed, key=lambda row: (row["workload"], row["s_per_round"])):
        is_fedavg = line["algorithm"] == "FedAvg"
        rows.append(
            (
                line["workload"],
                line["system"] if is_fedavg else f"{line['system']}, {line['algorithm']}",
                f"{line['s_per_round']:.4f}",
                f"{line['min']:.4f} to {line['max']:.4f}",
                f"{line['ratio']:.2f}" if "ratio" in line else "",
                f"{line['peak_rss_mb']:.0f}",
                f"{line['setup_s']:.1f}",
                f"{line['loss_end']:.3f}" + ("" if line.get("loss_agrees", True) else " (differs)"),
                _run_as(line["config"]),
            )
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _run_as(config: Line) -> str:
    engine = f"{config['engine']}, {config['chunk']} at once, " if "engine" in config else ""
    count = config["processes"]
    cores = f", {config['cores']} core{'s' * (config['cores'] > 1)}" if "cores" in config else ""
    place = ", GPU" if config.get("accelerator") == "gpu" else ""
    return f"{engine}{count} process{'es' * (count > 1)}{cores}{place}"


def tables(lines: Sequence[Line]) -> str:
    """Return what belongs between the markers of a page: hardware and date, goals, all figures, what is missing."""
    timed = [line for line in lines if _is_timed(line)]
    parts = [_heading(timed), _goals(timed), table(timed)] if timed else []
    missing = sorted({line["system"] for line in lines if "skipped" in line})
    if missing:
        parts.append(f"Not installed: {', '.join(missing)}.")
    failed = [f"{line['system']} on {line['workload']}" for line in lines if "failed" in line]
    if failed:
        parts.append(f"Did not finish: {', '.join(failed)}.")
    return "\n\n".join(parts)


def _heading(timed: Sequence[Line]) -> str:
    runs: dict[str, list[str]] = {}
    for line in sorted(timed, key=lambda row: str(row["workload"])):
        count, turns = line.get("repeats", 1), ", in turns" * (line.get("in_turns", 0) > 0)
        what = f"{count} repeat{'s' * (count > 1)} of {line['rounds']} rounds after {line['warmup']} to warm up{turns}"
        if line["workload"] not in runs.setdefault(what, []):
            runs[what].append(line["workload"])
    if len(runs) == 1:
        medians = f"Medians of {next(iter(runs))}"
    else:
        medians = "Medians, " + "; ".join(f"for {' and '.join(names)} of {what}" for what, names in runs.items())
    versions = sorted({f"{line['system']} {line['config']['version']}" for line in timed})
    return f"{where(timed)} {medians}. {'; '.join(versions)}."


def _goals(timed: Sequence[Line]) -> str:
    rows: list[tuple[str, ...]] = [
        ("workload", "lightning_fed, x plain loop", "goal", "fastest peer, x plain loop", "Mime / FedAvg", "goal",
         "SCAFFOLD / FedAvg", "goal"),
        ("---",) * 8,
    ]  # fmt: skip
    for workload, goal in GOALS.items():
        own = _find(timed, workload, _OWN, "FedAvg")
        if own is None or "ratio" not in own:
            continue
        peers = [
            line
            for line in timed
            if line["workload"] == workload and not line["system"].startswith((_OWN, _REFERENCE)) and "ratio" in line
        ]
        best = min(peers, key=lambda line: line["ratio"], default=None)
        row = [workload, f"{own['ratio']:.2f}", _verdict(own["ratio"], goal)]
        row.append("" if best is None else f"{best['system']} {best['ratio']:.2f}")
        for method, bounds in METHOD_GOALS.items():
            line = _find(timed, workload, _OWN, method)
            ratio = None if line is None else line.get("ratio_to_fedavg")
            row += ["", ""] if ratio is None else [f"{ratio:.2f}", _verdict(ratio, bounds[workload])]
        rows.append(tuple(row))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _verdict(ratio: float, goal: float) -> str:
    return f"{goal}, {'met' if ratio <= goal else 'missed'}"


def insert(page: Path, text: str, name: str = "workloads") -> None:
    """Replace what a page has between the markers of a name.

    Raises:
        SystemExit: If the page does not have them.
    """
    first, last = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    before, start, rest = page.read_text().partition(first)
    _, end, after = rest.partition(last)
    if not start or not end:
        raise SystemExit(f"{page} has no lines {first} and {last} to put the figures between.")
    page.write_text(f"{before}{start}\n\n{text}\n\n{end}{after}")
