"""The report of a diagnosis, as text, Markdown or JSON."""

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

from lightning_fed.lab.diagnosis.trials import Trial
from lightning_fed.lab.diagnosis.verdicts import Findings, Verdict, corrects_drift, plural
from lightning_fed.lab.tables import markdown

Section: TypeAlias = tuple[str, list[tuple[str, str, str]]]
"""A heading, and rows of name, value and meaning."""

_TRIAL = ("factor", "rate", "losses", "stopped", "cosine")


def sections(f: Findings, notes: Sequence[str]) -> list[Section]:
    """Return the numbers of a report, with their meanings.

    Args:
        f: The findings.
        notes: Other remarks on the run.
    """
    return [_run(f, notes), _clients(f), _suggestions(f), _steps(f.trials)]


def _run(f: Findings, notes: Sequence[str]) -> Section:
    m, t = f.measured, f.theory
    least, mean, most = m.steps
    steps = f"{mean:.3g}" if least == most else f"{mean:.3g} ({least} to {most})"
    sample = "all" if m.clients == m.population else f"a sample of {m.clients}"
    rows = [
        ("method", repr(f.algorithm), f"server: {m.server}"),
        ("clients", f"{m.population}, {t.S:.3g} a round", f"measured: {sample}; weights: {m.weighting}"),
        ("local steps K", steps, "per client and round, before stragglers stop early"),
        ("step size", _number(m.rate), "SGD" if m.is_plain else "not plain SGD: formulas with it do not apply"),
        ("start", f"round {m.round}", "the measurements and the trials start from this model"),
    ]
    return "The run", rows + [("note", "", note) for note in notes]


def _clients(f: Findings) -> Section:
    m, skew = f.measured, f.skew
    sign = "; negative: f is not convex here" if m.curvature[0] < 0 else ""
    lower = "" if m.few == m.population else f", of {m.few} clients"
    rows = [
        ("f", _number(m.loss), "mean training loss"),
        ("gradient", _number(m.gradient), "norm of grad f"),
        ("G", _with_error(m.G), "distance of clients' gradients from their mean (root mean square)"),
        ("B", _number(m.B), "root mean square of clients' gradients over the norm of their mean; 1: all equal"),
        ("noise", _with_error(m.noise), "distance of a batch's gradient from its client's (root mean square)"),
        ("L", _with_error((abs(m.curvature[0]), m.curvature[1])), m.no_hessian or f"largest curvature of f{sign}"),
        ("delta", _with_error(m.delta), f"largest distance of a client's Hessian from their mean{lower}"),
        ("delta, mean", _number(m.delta_mean), "mean distance over these clients"),
    ]
    if skew is not None:
        rows.append(("examples", f"{skew.min_size} to {skew.max_size}", f"per client; {skew.examples:,} in all"))
    if skew is not None and skew.classes:
        balance = f"{2**skew.global_entropy:.3g} of {skew.classes}"
        rows += [
            (
                "label distance",
                f"{skew.label_distance:.2f}",
                "0: all clients have the same mix of classes; 1: disjoint",
            ),
            ("classes", balance, "effective number of classes, from the entropy of all labels"),
        ]
    return "What the clients are like", rows


def _suggestions(f: Findings) -> Section:
    m, t = f.measured, f.theory
    corrected = "; this method corrects it" if corrects_drift(f.algorithm) else ""
    useful = f"{_number(t.useful_steps)} to {_number(t.useful_steps_mean)}"
    rows: dict[str, tuple[str | float, str]] = {
        "K = L/delta": (
            useful,
            f"useful local steps if the method corrects drift, with delta and its mean; here {t.K:.3g}",
        ),
        "1/L": (t.ceiling, f"largest useful step size on f; here {_number(m.rate)}"),
        "1/(L + delta)": (t.client_ceiling, "the same on a client with the largest possible curvature"),
        "drift": (
            m.drift,
            f"error of FedAvg's mean gradient in a round, on {m.few} clients; does not average out{corrected}",
        ),
        "drift-free gradient": (
            m.progress,
            "mean gradient of the same steps on f; FedAvg stalls once it falls to the drift",
        ),
        "bound of the drift": (t.drift_bound, "eta (K - 1)/2 delta G, to first order in eta"),
        "batch noise": (t.batches, "error of the mean gradient in a round; averages out over rounds"),
        "sampling noise": (t.drawing, "the same, from the sampling of clients"),
        "G^2/(L T^2)": (
            t.lower_bound,
            f"FedAvg's error after T = {_number(t.T)} rounds on the worst clients with this G",
        ),
        "MimeMVR step size": (t.mvr_rate, "the largest that its theorem IV allows; the constants are cautious"),
        "MimeMVR a": (t.mvr_a, "1536 (eta delta K)^2, with that step size"),
    }
    shown = [(name, v if isinstance(v, str) else _number(v), meaning) for name, (v, meaning) in rows.items()]
    return "What the theory suggests", shown


def _steps(trials: Sequence[Trial]) -> Section:
    rounds = max(len(trial.losses) for trial in trials) - 1
    rows = []
    for trial in trials:
        course = " ".join(_number(loss) for loss in trial.losses)
        change = "diverges" if math.isinf(trial.change) else f"{100 * trial.change:+.1f} %"
        here = ", as configured" if trial.factor == 1 else ""
        cosine = "" if math.isnan(trial.cosine) else f"; cosine {trial.cosine:.2f}"
        rows.append((f"{_number(trial.rate)}{here}", change, f"loss {course}{cosine}"))
    rows.append(("cosine", "", "between the model's change and -grad f at the start"))
    return f"Five step sizes, {plural(rounds, 'round')} each", rows


def as_text(found: Sequence[Section], check: str, verdicts: Sequence[Verdict]) -> str:
    """Return the report to be printed."""
    lines = []
    for title, rows in found:
        lines += [title, *(f"  {name:<19} {value:<18} {meaning}".rstrip() for name, value, meaning in rows), ""]
    lines += ["Self-check", _wrapped("  ", check), "", "Verdicts, best evidence first"]
    lines += [_wrapped(f"  {n}. ", f"{v.cause} ({v.evidence}): {v.text}") for n, v in enumerate(verdicts, 1)]
    return "\n".join(lines)


def _wrapped(start: str, text: str) -> str:
    return textwrap.fill(text, 110, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False)


def as_markdown(found: Sequence[Section], check: str, verdicts: Sequence[Verdict]) -> str:
    """Return the report as a page."""
    parts = ["# Diagnosis"]
    for title, rows in found:
        parts += [f"## {title}", markdown(["", "value", "meaning"], rows)]
    parts += ["## Self-check", check, "## Verdicts, best evidence first"]
    parts += ["\n".join(f"{n}. **{v.cause}** ({v.evidence}): {v.text}" for n, v in enumerate(verdicts, 1))]
    return "\n\n".join(parts) + "\n"


def as_json(f: Findings, verdicts: Sequence[Verdict]) -> str:
    """Return all numbers, unrounded. Those that are not finite are null."""
    content = {
        "algorithm": repr(f.algorithm),
        **{name: asdict(getattr(f, name)) for name in ("measured", "theory", "check")},
        "skew": None if f.skew is None else asdict(f.skew),
        "trials": [{name: getattr(trial, name) for name in _TRIAL} for trial in f.trials],
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }
    return json.dumps(_finite(content), indent=2, allow_nan=False) + "\n"


def _finite(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _finite(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_finite(value) for value in node]
    return None if isinstance(node, float) and not math.isfinite(node) else node


def _number(value: float) -> str:
    return "unknown" if math.isnan(value) else f"{value:.3g}"


def _with_error(pair: tuple[float, float]) -> str:
    value, error = pair
    return _number(value) if error == 0 or math.isnan(error) else f"{_number(value)} +- {error:.1g}"
