"""Every example runs, and its ``main`` returns the accuracy it reached."""

import importlib.util
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lightning_fed.algorithms import FedAvg
from tests.helpers import Round, play, quadratic

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def new_algorithm() -> Any:
    (path,) = [p for p in EXAMPLES if p.stem == "new_algorithm"]
    return load(path)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_two_rounds(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accuracy = load(path).main(max_rounds=2)
    assert math.isfinite(accuracy)
    assert 0.1 < accuracy <= 1.0, "ten classes: no better than one answer for all"
    assert "rounds           2" in capsys.readouterr().out


def test_fedacg_is_the_papers() -> None:
    a, b, lam, beta, lr = [1.0, 0.5, 2.0], [-3.0, 1.0, 0.5], 0.75, 0.5, 0.25
    cohorts = [[0, 1], [2], [1, 2], [0, 2]]
    theta, m, want = 1.0, 0.0, []
    for cohort in cohorts:
        start, moved = theta + lam * m, []
        for i in cohort:
            y = start
            for _ in range(2):
                y -= lr * (a[i] * y + b[i] + beta * (y - start))
            moved.append(y - start)
        m = lam * m + sum(moved) / len(moved)
        theta += m
        want.append(theta)
    algorithm = new_algorithm().FedACG(lam=lam, beta=beta)
    rounds = [Round({i: [None, None] for i in cohort}) for cohort in cohorts]
    x = torch.tensor([1.0], dtype=torch.float64)
    played = play(algorithm, quadratic(a, b), [1, 1, 1], x, rounds, lr=lr)
    got = [algorithm.evaluate_at(x, server) for x, server in zip(played.x, played.server, strict=True)]
    torch.testing.assert_close(torch.cat(got), torch.tensor(want, dtype=torch.float64), rtol=1e-10, atol=0)


def test_fedacg_without_momentum_and_pull_is_fedavg() -> None:
    x, rounds = torch.ones(2, dtype=torch.float64), [Round({0: [None], 1: [None] * 3})] * 3
    problem = quadratic([1.0, 0.5], [-3.0, 1.0]), [5, 1], x, rounds
    ours = play(new_algorithm().FedACG(lam=0.0, beta=0.0), *problem).x
    fedavg = play(FedAvg(), *problem, weighting="uniform").x
    torch.testing.assert_close(torch.stack(ours), torch.stack(fedavg), rtol=1e-10, atol=0)
