"""README and docs are correct: code runs, links resolve, and signatures and costs match the code."""

import ast
import inspect
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fed import FederatedCallback, FederatedError, algorithms, server
from tests.helpers.selection import few
from tests.helpers.training import Net, data, seeded, trainer

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
METHODS = ROOT / "docs" / "methods.md"
SKIP = "<!-- no-run -->"


def blocks(path: Path) -> list[tuple[int, str]]:
    """Return a page's Python blocks to run, each with the line on which its code starts."""
    found, lines = [], path.read_text().splitlines()
    starts = [n for n, line in enumerate(lines) if line.strip() == "```python"]
    for start in starts:
        end = next(n for n in range(start + 1, len(lines)) if lines[n].strip() == "```")
        if start == 0 or lines[start - 1].strip() != SKIP:
            found.append((start + 1, "\n".join(lines[start + 1 : end])))
    return found


def needed(path: Path, line: int) -> list[str]:
    """Return the optional packages of a block, from the comment above it."""
    above = path.read_text().splitlines()[line - 2] if line > 1 else ""
    found = re.fullmatch(r"<!-- needs: (.+) -->", above)
    return found[1].split(", ") if found else []


def prose(path: Path) -> str:
    """Return a page without its fenced blocks and its code."""
    return re.sub(r"`[^`\n]*`", "`code`", re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S))


def anchors(path: Path) -> set[str]:
    """Return the fragments that the repository's host generates from a page's headings."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ +(.+?) *$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


LONG = {
    f"docs/{name}.md"
    for name in (
        "adding_a_method",
        "aggregation",
        "asynchronous",
        "coming_from",
        "data",
        "engines",
        "export",
        "hugging_face",
        "measures",
        "monitoring",
        "participation",
        "populations",
        "quickstart",
        "reproducing",
        "your_model",
    )
}
WITH_CODE = [p for p in PAGES if blocks(p)]


@pytest.mark.parametrize(
    "path",
    few(WITH_CODE, [p for p in WITH_CODE if p.relative_to(ROOT).as_posix() not in LONG]),
    ids=lambda p: p.relative_to(ROOT).as_posix(),
)
def test_documented_code_runs(path: Path) -> None:
    logger = logging.getLogger("pytorch_lightning")
    level = logger.level
    namespace: dict[str, Any] = {"__name__": "__main__"}
    try:
        for line, code in blocks(path):
            for package in needed(path, line):
                pytest.importorskip(
                    package, reason=f"{path.name} needs {package} from its line {line}: it is not installed"
                )
            exec(compile("\n" * line + code, str(path), "exec"), namespace)
    finally:
        logger.setLevel(level)  # a page silences trials


def test_links_resolve() -> None:
    broken = []
    for path in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, fragment = target.partition("#")
            page = (path.parent / name).resolve() if name else path
            if not page.exists() or (fragment and fragment not in anchors(page)):
                broken.append(f"{path.name} links to {target}")
    assert not broken


def test_required_pages_exist() -> None:
    assert {ROOT / "docs" / name for name in ("methods.md", "adding_a_method.md")} <= set(PAGES)
    assert all(blocks(p) for p in (ROOT / "README.md", ROOT / "docs" / "adding_a_method.md"))


def signatures() -> list[ast.Call]:
    """Return the calls after "Class:" in the page of methods."""
    lines = re.findall(r"^- Class: .*$", METHODS.read_text(), flags=re.M)
    calls = [ast.parse(text, mode="eval").body for line in lines for text in re.findall(r"`([A-Z]\w+\(.*?\))`", line)]
    return [call for call in calls if isinstance(call, ast.Call)]


def name_of(call: ast.Call) -> str:
    assert isinstance(call.func, ast.Name)
    return call.func.id


@pytest.mark.parametrize("call", signatures(), ids=name_of)
def test_documented_signatures_match_the_code(call: ast.Call) -> None:
    name = name_of(call)
    cls = getattr(algorithms, name, None) or getattr(server, name)
    required = [ast.unparse(argument) for argument in call.args]
    written = {**dict.fromkeys(required, inspect.Parameter.empty)}
    written |= {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    real = {p.name: p.default for p in inspect.signature(cls).parameters.values()}
    assert list(written) == list(real)
    for argument, default in real.items():
        if argument not in required:
            assert written[argument] == default
    if required:
        with pytest.raises((TypeError, FederatedError)):
            cls()


def test_every_method_and_optimizer_has_a_documented_signature() -> None:
    kinds = (algorithms.Algorithm, algorithms.BaseOptimizer, torch.optim.Optimizer)
    classes = {n for module in (algorithms, server) for n in module.__all__ if issubclass(getattr(module, n), kinds)}
    written = {name_of(call) for call in signatures()}
    assert classes - written == {"Algorithm", "BaseOptimizer", "SGD"}


class Last(FederatedCallback):
    """Keep the last round's report."""

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        self.report = round_report


class Counting(Net):
    """Count the gradients. It has one parameter group."""

    calls = 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.calls += 1
        return super().training_step(batch, batch_idx)


def costs() -> list[list[str]]:
    section = METHODS.read_text().split("## Cost per round")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `.*$", section, flags=re.M)
    return [[cell.strip() for cell in row.strip("| ").split("|")] for row in rows]


@pytest.mark.parametrize("row", few(costs(), costs()[::3]), ids=lambda row: row[0].strip("`"))
def test_documented_costs_match_the_measured_ones(row: list[str]) -> None:
    code, per_step, full, counted, on_server, on_client = row
    algorithm = eval(code.strip("`"), vars(algorithms))
    clients, steps, calls = 2, (1, 2), []
    for k in steps:
        last, model = Last(), seeded(Counting)
        local: dict[str, Any] = {"local_steps": k} if algorithm.local_work else {"local_epochs": None}
        run = trainer(algorithm=algorithm, max_rounds=1, clients_per_round=clients, callbacks=last, **local)
        run.fit(model, data(sizes=(8,) * clients))
        calls.append(model.calls / clients)
    size = sum(p.numel() for p in model.parameters())
    measured = (calls[1] - calls[0]) / (steps[1] - steps[0])
    assert measured == int(per_step)
    assert calls[0] - steps[0] * measured == int(full)
    vectors = [round(n / 4 / size / clients, 1) for n in (last.report.bytes_up, last.report.bytes_down)]
    assert vectors == [float(n) for n in counted.split("/")]
    state = run.fit_loop.state
    for values, want in ((state.state, on_server), (state.client_state(0), on_client)):
        assert sum(v.numel() for v in values.values()) // size == int(want)


def test_every_method_has_a_documented_cost() -> None:
    written = {row[0].strip("`").split("(")[0] for row in costs()}
    methods = {n for n in algorithms.__all__ if issubclass(getattr(algorithms, n), algorithms.Algorithm)}
    of_a_part = {"FedBN", "FedPer", "FedRep", "LGFedAvg"}  # the cost of FedAvg on the shared part of the model
    assert written == methods - {"Algorithm", *of_a_part}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_tables_have_a_delimiter_for_each_column(path: Path) -> None:
    """Otherwise the repository's host shows them as text. The site accepts them."""
    lines = [re.sub(r"`[^`]*`|\\\|", "code", line) for line in path.read_text().splitlines()]
    rows = [n for n, line in enumerate(lines) if re.fullmatch(r"\|(?: *:?-+:? *\|)+", line)]
    assert not [lines[n - 1] for n in rows if lines[n].count("|") != lines[n - 1].count("|")]
