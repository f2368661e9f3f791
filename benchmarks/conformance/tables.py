"""Tables of verdicts in Markdown."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conformance.cases import Case
from conformance.reference import METHODS
from conformance.verdicts import Verdict, judge

__all__ = ["insert", "page", "read"]

Line = dict[str, Any]
_MARKERS = ("<!-- exactness:start -->", "<!-- exactness:end -->")


def read(path: Path) -> list[Line]:
    """Return the lines of a file; of several of one framework, case and way, the last."""
    lines = [json.loads(text) for text in path.read_text().splitlines() if text.strip()]
    return list({(line["framework"], line["case"], line.get("way", "")): line for line in lines}.values())


def insert(path: Path, text: str) -> None:
    """Replace what a page has between its markers.

    Raises:
        SystemExit: If the page does not have them.
    """
    first, last = _MARKERS
    before, start, rest = path.read_text().partition(first)
    _, end, after = rest.partition(last)
    if not start or not end:
        raise SystemExit(f"{path} has no lines {first} and {last} to put the tables between.")
    path.write_text(f"{before}{start}\n\n{text}\n\n{end}{after}")


def page(cases: Sequence[Case], lines: Sequence[Line]) -> str:
    """Return the summary, what is right, and a table for each framework."""
    known = {case.id: case for case in cases}
    judged = [(line, judge(known[line["case"]], line)) for line in lines if line["case"] in known]
    frameworks = list(dict.fromkeys(line["framework"] for line in lines))
    parts = [_summary(cases, judged, frameworks), "### What is right", _papers(cases)]
    for name in frameworks:
        own = [(line, verdict) for line, verdict in judged if line["framework"] == name]
        parts += [f"### {_heading(own)}", _details(cases, own)]
    return "\n\n".join(parts)


def _heading(own: Sequence[tuple[Line, Verdict]]) -> str:
    last = max((line for line, _ in own), key=lambda line: line["date"])
    versions = ", ".join(f"{name} {number}" for name, number in last["versions"].items())
    dates = " and ".join(sorted({line["date"] for line, _ in own}))
    return f"{last['framework']} ({versions}; {dates})"


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join([lines[0], f"|{' --- |' * len(rows[0])}", *lines[1:]])


def _summary(cases: Sequence[Case], judged: Sequence[tuple[Line, Verdict]], frameworks: Sequence[str]) -> str:
    """Return a row for each case: what the first way of each framework gives, and the best of the others."""
    rows = [["case", *frameworks]]
    for case in cases:
        row = [case.id]
        for name in frameworks:
            found = [v for line, v in judged if line["case"] == case.id and line["framework"] == name]
            row.append(_cell(found))
        rows.append(row)
    return _table(rows)


def _papers(cases: Sequence[Case]) -> str:
    """Return the papers' lines, and what they leave open."""
    rows = [["method", "the paper's line", "left open: counts as exact too"]]
    for name in dict.fromkeys(case.method for case in cases):
        method = METHODS[name]
        choices = [question.answers[choice] for question in method.questions.values() for choice in question.choices]
        rows.append([method.title, method.paper, "; ".join(choices)])
    return _table(rows)


def _cell(found: Sequence[Verdict]) -> str:
    if not found or not found[0].offered:
        return "-"
    texts = [_short(found[0])]
    if not found[0].exact and any(verdict.exact for verdict in found[1:]):
        texts.append("an option is exact")
    return "; ".join(texts)


def _short(verdict: Verdict) -> str:
    if verdict.failed:
        return "did not run"
    return f"exact, {_digit(verdict.digit)}" if verdict.exact else f"{100 * verdict.off:.1f} % off"


def _digit(distance: float) -> str:
    """Return a distance to one digit; what lies below the rounding of some steps differs between versions of NumPy."""
    return "< 1e-14" if distance < 1e-14 else f"{distance:.0e}"


def _details(cases: Sequence[Case], own: Sequence[tuple[Line, Verdict]]) -> str:
    rows = [["case", "run as", "result", "what differs, or what is chosen", "after a restart"]]
    order = {case.id: number for number, case in enumerate(cases)}
    for line, verdict in sorted(own, key=lambda pair: order[pair[0]["case"]]):
        if verdict.offered:
            rows.append([line["case"], line["how"], _short(verdict), _rule(verdict), _restart(verdict)])
    missing = [f"`{case.id}`" for case in cases if _is_missing(case, own)]
    text = _table(rows)
    return f"{text}\n\nNot offered or not run: {', '.join(missing)}." if missing else text


def _is_missing(case: Case, own: Sequence[tuple[Line, Verdict]]) -> bool:
    same = {line["case"] for line, verdict in own if verdict.offered}
    return case.id not in same


def _rule(verdict: Verdict) -> str:
    if verdict.failed:
        return verdict.failed
    parts = []
    if verdict.exact:
        parts += [f"choice: {words}" for words in verdict.choices]
    elif verdict.rule:
        parts.append(f"{'; '.join(verdict.rule)} (exact by this rule, {_digit(verdict.digit)})")
    else:
        parts.append("follows no rule known here")
    return "; ".join([*parts, *filter(None, [verdict.buffers])])


def _restart(verdict: Verdict) -> str:
    if verdict.restart == "exact":
        return "exact, bit for bit" if verdict.restart_off == 0 else f"exact, {_digit(verdict.restart_off)}"
    if verdict.restart == "fails":
        return f"ends with {verdict.lost}"
    if verdict.restart == "loses":
        lost = f"loses {verdict.lost}" if verdict.lost else "differs"
        return f"{lost}: {100 * verdict.restart_off:.1f} % off"
    return "not measured"
