"""Prints a table of the oracle cases' worst deviations after the tests."""

import math
from typing import Any

import pytest

WORST = "worst deviation"
"""The property under which a test records its deviation, ``max |got - expected| / (1 + |expected|)``."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show one line for every test that compared numbers."""
    rows = [
        (report.nodeid.rpartition("::")[2], outcome, properties)
        for outcome in ("passed", "failed")
        for report in _reports(terminalreporter, outcome)
        if WORST in (properties := dict(report.user_properties))
    ]
    if not rows:
        return
    terminalreporter.section("oracle cases, worst deviation")
    for name, outcome, properties in sorted(rows, key=lambda row: row[0]):
        terminalreporter.line(f"{properties[WORST]:8.1e}  {outcome:6}  {name}  {properties.get('states', '')}".rstrip())
    worst = max((properties[WORST] for _, _, properties in rows), key=lambda value: (math.isnan(value), value))
    terminalreporter.line(f"{len(rows)} comparisons, the worst {worst:.1e}")


def _reports(terminalreporter: pytest.TerminalReporter, outcome: str) -> list[Any]:
    return [report for report in terminalreporter.getreports(outcome) if report.when == "call"]
