"""The report as text, as a page and as JSON."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from lightning_fed.cli.main import main
from lightning_fed.lab.diagnosis.report import as_json, as_markdown, as_text, sections
from lightning_fed.lab.diagnosis.verdicts import Verdict
from tests.helpers.diagnosis import BASE, findings


@pytest.mark.thorough
def test_report_is_written_as_markdown() -> None:
    Path("config.yaml").write_text(yaml.safe_dump(BASE))
    main(["diagnose", "--config", "config.yaml", "--rounds", "1", "--out", "pages/report.md"])
    page = Path("pages/report.md").read_text()
    assert page.startswith("# Diagnosis\n")
    assert "| G | " in page
    assert "## Verdicts, best evidence first" in page


def test_every_report_format_has_the_numbers_check_and_verdicts() -> None:
    f = findings(steps=(2, 3.5, 5), noise=(0.25, 0.03), trials={10.0: [2.0, math.inf]})
    reasons = [Verdict("likely", "clients drift", "Because.")]
    found = sections(f, ["labels are not looked at"])
    rows = {name: (value, meaning) for _, part in found for name, value, meaning in part}
    assert rows["local steps K"][0] == "3.5 (2 to 5)"
    assert rows["clients"][1] == "measured: all; weights: examples"
    assert rows["noise"][0] == "0.25 +- 0.03"
    assert rows["0.1, as configured"] == ("-50.0 %", "loss 2 1; cosine 0.90")
    assert rows["1"][0] == "diverges"
    assert rows["classes"][0] == "9.85 of 10"
    assert rows["note"] == ("", "labels are not looked at")
    text = as_text(found, "It agrees.", reasons)
    assert text.endswith("Verdicts, best evidence first\n  1. clients drift (likely): Because.")
    page = as_markdown(found, "It agrees.", reasons)
    assert page.startswith("# Diagnosis\n")
    assert "| noise | 0.25 +- 0.03 | distance of" in page
    assert "1. **clients drift** (likely): Because." in page
    content = json.loads(as_json(f, reasons))
    assert content["trials"][2]["losses"] == [2.0, None]  # not finite
    assert (content["measured"]["noise"], content["skew"]["classes"]) == ([0.25, 0.03], 10)
    assert content["verdicts"] == [{"evidence": "likely", "cause": "clients drift", "text": "Because."}]


def test_missing_measurements_are_reported_as_unknown() -> None:
    f = replace(findings(curvature=(math.nan, math.nan), no_hessian="It cannot be differentiated twice."), skew=None)
    rows = {name: (value, meaning) for _, part in sections(f, []) for name, value, meaning in part}
    assert rows["L"] == ("unknown", "It cannot be differentiated twice.")
    assert "classes" not in rows
