"""The conformance tool: its cases, its reference, its verdicts, and lightning_fed's adapter on all cases."""

import importlib
import json
import logging
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def modules():
    sys.path.insert(0, str(BENCHMARKS))
    logger = logging.getLogger("pytorch_lightning")
    level = logger.level
    yield lambda name: importlib.import_module(f"conformance.{name}")
    logger.setLevel(level)
    sys.path.remove(str(BENCHMARKS))
    for name in [name for name in sys.modules if name.partition(".")[0] == "conformance"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def cases(modules):
    return {case.id: case for case in modules("cases").load()}


def ran(modules, case, **more):
    """Return the line of a correct run."""
    rounds = [x.tolist() for x in modules("reference").rounds_of(case)]
    line = {"framework": "one", "versions": {"one": "1.0"}, "date": "2026-01-01", "case": case.id, "offered": True}
    return {**line, "way": "", "how": "as ever", "rounds": rounds, "resumed": rounds[case.restart :], **more}


def test_stored_cases_match_the_reference(modules, cases):
    flat, rounds_of = modules("cases").flat, modules("reference").rounds_of
    for case in cases.values():
        for stored, x in zip(case.expected, rounds_of(case), strict=True):
            np.testing.assert_allclose(flat(stored, case.problem.trained), x, rtol=1e-12, atol=1e-13)


def test_reference_gradients_match_autograd(modules, cases):
    gradient, flat = modules("reference").gradient, modules("cases").flat
    torch = pytest.importorskip("torch")
    network = modules("adapters.torch_client").network
    for name in ("fedavg", "batchnorm"):
        problem = cases[name].problem
        net = network(problem)
        loss = torch.nn.functional.cross_entropy(net(torch.tensor(problem.x[2])), torch.tensor(problem.y[2]))
        loss.backward()
        expected = np.concatenate([p.grad.numpy().ravel() for p in net.parameters()])
        found = gradient(problem, flat(problem.start, problem.trained), 2, slice(None))
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.thorough
def test_lightning_fed_is_exact_on_all_cases(modules, cases):
    adapter = modules("adapters.with_lightning_fed").adapter()
    flat = modules("cases").flat
    for case in cases.values():
        for found, right in zip(adapter.run(case, ""), case.expected, strict=True):
            names = case.problem.trained
            np.testing.assert_allclose(flat(found, names), flat(right, names), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "name",
    [
        "scaffold ii, some clients",
        *(pytest.param(n, marks=pytest.mark.thorough) for n in ("fedadam", "feddyn", "mime")),
    ],
)
def test_lightning_fed_resumes_exactly(modules, cases, name):
    (line,) = modules("runs").run("lightning_fed", modules("adapter").load_adapter("lightning_fed"), cases[name])
    verdict = modules("verdicts").judge(cases[name], line)
    assert verdict.exact
    assert (verdict.restart, verdict.restart_off) == ("exact", 0)
    assert line["versions"].keys() == {"lightning_fed", "torch"}


@pytest.mark.parametrize(
    ("name", "way", "words"),
    [
        (
            "scaffold ii",
            {"weights": "steps", "c_weights": "steps"},
            "x weighted by local steps; c weighted by local steps",
        ),
        ("scaffold ii, some clients", {"share": "1"}, "no |S|/N in c"),
        ("fedprox", {"pull": "2mu"}, "penalty mu |y - x|², without the half"),
        ("fedadam", {"correction": "Adam", "v0": "0"}, "v starts at 0; Adam's bias correction"),
        ("mime", {"weights": "steps"}, "x weighted by local steps"),
        ("feddyn, some clients", {"share": "1/|S|"}, "h moves by 1/|S|"),
        ("feddyn, some clients", {"first": "mean"}, "a client's first round starts from the mean of the models"),
        ("fednova", {"weights": "uniform"}, "x averaged uniformly"),
    ],
)
def test_verdict_names_the_rule_of_a_deviation(modules, cases, name, way, words):
    case, reference = cases[name], modules("reference")
    questions = reference.METHODS[case.method].questions
    answers = {key: next(iter(question.answers)) for key, question in questions.items()} | way
    line = ran(modules, case, rounds=[x.tolist() for x in reference.rounds_of(case, answers)], resumed=None)
    verdict = modules("verdicts").judge(case, line)
    assert not verdict.exact
    assert verdict.off > 0.01
    assert "; ".join(verdict.rule) == words
    assert verdict.restart == "not measured"


def test_detail_left_open_by_the_paper_counts_as_a_choice(modules, cases):
    case, reference = cases["fedavg, client momentum"], modules("reference")
    kept = reference.rounds_of(case, {"weights": "examples", "momentum": "kept"})
    verdict = modules("verdicts").judge(case, ran(modules, case, rounds=[x.tolist() for x in kept]))
    assert verdict.exact
    assert verdict.choices == ("momentum kept between rounds",)


def test_numbers_matching_no_known_rule_are_off(modules, cases):
    case = cases["fedavg"]
    line = ran(modules, case)
    start = modules("cases").flat(case.problem.start, case.problem.trained)
    line["rounds"] = [(start + 0.9 * (np.array(x) - start)).tolist() for x in line["rounds"]]
    verdict = modules("verdicts").judge(case, line)
    assert verdict.off == pytest.approx(0.1)
    assert verdict.rule == ()


@pytest.mark.parametrize(
    ("name", "lost", "words"),
    [
        ("scaffold ii", "c", "c"),
        ("scaffold ii", "c c_i", "c and c_i"),
        ("fedyogi", "m,v", "m and v"),
        ("mime", "m", "m"),
        ("feddyn", "h", "h"),
    ],
)
def test_verdict_names_the_state_lost_on_restart(modules, cases, name, lost, words):
    case = cases[name]
    after = modules("reference").rounds_of(case, lost=lost)[case.restart :]
    verdict = modules("verdicts").judge(case, ran(modules, case, resumed=[x.tolist() for x in after]))
    assert (verdict.restart, verdict.lost) == ("loses", words)
    assert verdict.restart_off > 0.01


@pytest.mark.parametrize(
    ("rule", "words"),
    [("largest", "from the client with the most steps"), ("mean", "averaged to 24.4"), ("client cut", "24.1, which")],
)
def test_verdict_describes_the_buffer_rule(modules, cases, rule, words):
    case = cases["batchnorm"]
    buffers = modules("reference").buffers_of(case, "examples", rule)
    line = ran(modules, case, buffers={name: value.tolist() for name, value in buffers.items()})
    assert words in modules("verdicts").judge(case, line).buffers


ADAPTER = """
    from conformance.adapter import Adapter
    from conformance.cases import named
    from conformance.reference import rounds_of

    class Mine(Adapter):
        packages = ("numpy",)

        def offers(self, case):
            return {"": "the reference itself"} if case.method == "fedavg" else {}

        def run(self, case, way):
            if "some" in case.id:
                raise RuntimeError("No cohorts here. None at all.")
            return [named(x, case.problem) for x in rounds_of(case)]

        def resume(self, case, way, folder):
            raise ValueError("Cannot load.")

    def adapter():
        return Mine()
"""


def test_adapter_from_a_file_runs_and_is_rendered(modules, tmp_path, monkeypatch, capsys):
    file, page, results = tmp_path / "mine.py", tmp_path / "page.md", tmp_path / "runs.jsonl"
    file.write_text(textwrap.dedent(ADAPTER))
    page.write_text("before\n<!-- exactness:start -->\nold\n<!-- exactness:end -->\nafter\n")
    monkeypatch.delenv("COVERAGE_PROCESS_START", raising=False)
    main = modules("__main__").main
    chosen = ["--case", "fedavg", "fedavg, some clients", "mime", "--results", str(results)]
    assert main(["--framework", str(file), *chosen, "--render", str(page)]) == 0
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["offered"] for line in lines] == [True, True, False]
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "\nold\n" not in text
    assert "| fedavg | exact, < 1e-14 |" in text
    assert "| fedavg, some clients | did not run |" in text
    assert "| the reference itself | did not run | RuntimeError: No cohorts here |" in text
    assert "ends with ValueError: Cannot load." in text
    assert "| mime | - |" in text
    assert main(["--results", str(results)]) == 0
    assert "| fedavg | exact, < 1e-14 |" in capsys.readouterr().out
    page.write_text("no markers")
    with pytest.raises(SystemExit, match="exactness:start"):
        main(["--results", str(results), "--render", str(page)])


def test_error_names_the_missing_framework(modules, tmp_path, capsys):
    missing = tmp_path / "missing.py"
    assert modules("__main__").main(["--framework", str(missing), "--case", "fedavg"]) == 1
    assert f"{missing} did not run" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        modules("__main__").main(["--framework", "fluke", "--python", "fluke=/no/such/python"])
    assert "with the path of a Python interpreter" in capsys.readouterr().err


@pytest.mark.thorough
def test_page_shows_the_stored_runs(modules, cases):
    tables = modules("tables")
    text = tables.page(list(cases.values()), tables.read(BENCHMARKS / "conformance" / "runs.jsonl"))
    assert text in (ROOT / "docs" / "exactness.md").read_text()
