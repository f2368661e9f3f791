"""Random configurations under every oracle, and tests that the oracles find planted faults.

To run and shrink a single failing configuration: ``python -m tests.fuzz --number N``.
"""

import inspect
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

import lightning_fed.algorithms
from lightning_fed.algorithms import Algorithm, FedProx
from lightning_fed.server.server import Server
from tests.fuzz.configuration import AXES, Configuration, draw
from tests.fuzz.default import DEFAULT
from tests.fuzz.oracles import differences, examine
from tests.fuzz.runs import METHODS
from tests.fuzz.shrink import shrink


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "number" in metafunc.fixturenames:
        count = metafunc.config.getoption("--fuzz")
        metafunc.parametrize("number", DEFAULT if count is None else range(count))


def test_random_configuration_passes_every_oracle(number: int, pytestconfig: pytest.Config) -> None:
    c = draw(pytestconfig.getoption("--fuzz-seed"), number)
    findings, _ = examine(c)
    assert not findings, "\n".join([str(c), *map(str, findings), *(f.trace for f in findings)])


# ---------------------------------------------------------------------- draws


def test_every_axis_includes_its_default_value() -> None:
    defaults = {field.name: field.default for field in fields(Configuration) if field.name not in ("seed", "number")}
    assert defaults.keys() == AXES.keys()
    assert [name for name, value in defaults.items() if value not in AXES[name]] == []


def test_configuration_depends_only_on_seed_and_number() -> None:
    assert draw(3, 77) == draw(3, 77)
    assert len({replace(draw(seed, 77), seed=0) for seed in range(5)}) == 5


def test_every_value_is_drawn() -> None:
    drawn = [draw(0, number) for number in range(160)]
    assert [name for name, values in AXES.items() if {getattr(c, name) for c in drawn} != set(values)] == []


def test_default_run_covers_nearly_every_value() -> None:
    chosen = [draw(0, number) for number in DEFAULT]
    assert len(DEFAULT) == len(set(DEFAULT)) == 25
    lacking = {(name, v) for name, values in AXES.items() for v in values} - {
        (n, getattr(c, n)) for c in chosen for n in AXES
    }
    assert len(lacking) < 10, lacking


def test_every_method_is_drawn() -> None:
    found = vars(lightning_fed.algorithms).values()
    methods = {cls.__name__ for cls in found if inspect.isclass(cls) and issubclass(cls, Algorithm)} - {"Algorithm"}
    assert methods == set(METHODS) == set(AXES["method"])


def test_description_lists_only_non_default_values() -> None:
    c = Configuration(number=4, network="conv", chunk=1)
    assert str(c) == "[seed 0 number 4] network='conv' chunk=1"


# ---------------------------------------------------------------------- findings

PLAIN = Configuration(sizes=(5, 2, 11))


def found_by(c: Configuration, oracle: str | None = None) -> set[str]:
    return {finding.oracle for finding in examine(c, oracle)[0]}


def test_wrong_formula_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    c = replace(PLAIN, method="FedProx", engine="vectorized")
    assert found_by(c, "plain") == set()
    monkeypatch.setattr(FedProx, "correct", lambda self, g, y, step: g + 0.9 * step.server["mu"] * (y - step.x))
    assert found_by(c, "plain") == {"plain"}


@pytest.mark.thorough
def test_state_missing_from_a_checkpoint_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    c = replace(PLAIN, method="FedCM", resume_after=1)
    before = Server.state_dict

    def without(self: Any, *args: Any) -> dict[str, Any]:
        saved = before(self, *args)
        return {**saved, "state": {name: torch.zeros_like(value) for name, value in saved["state"].items()}}

    monkeypatch.setattr(Server, "state_dict", without)
    assert found_by(c, "resume") == {"resume"}


def test_engine_difference_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_fed.engines.vectorized.clients import ChunkMeans

    before = ChunkMeans.add
    monkeypatch.setattr(ChunkMeans, "add", lambda self, at, n, *rest: before(self, at, n + 1, *rest))
    assert found_by(PLAIN, "engine") == {"engine"}


def test_unexpected_error_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, x: Any) -> Any:
        raise KeyError("mu")

    monkeypatch.setattr(FedProx, "init_server", broken)
    assert found_by(replace(PLAIN, method="FedProx")) == {"refusal"}


@pytest.mark.parametrize(
    ("one", "other", "rtol"),
    [
        ({"a": 1.0}, {"a": 1.0, "b": 1.0}, 1.0),
        ({"a": 1}, {"a": 2}, 1.0),
        ({"a": [1.0]}, {"a": [1.0 + 1e-9]}, 1e-10),
        ({"a": 1.0}, {"a": float("nan")}, 1.0),
        ({"a": torch.ones(2)}, {"a": torch.ones(3)}, 1.0),
        ({"a": torch.ones(2)}, {"a": torch.ones(2) + 1e-6}, 0.0),
        ({"a": torch.ones(2, dtype=torch.long)}, {"a": torch.zeros(2, dtype=torch.long)}, 1.0),
        ({"a": torch.ones(2)}, {"a": torch.ones(2).double()}, 1.0),
    ],
)
def test_differences_are_detected(one: Any, other: Any, rtol: float) -> None:
    assert len(differences(one, other, rtol)) == 1
    assert differences(one, one, 0.0) == differences(other, other, 0.0) == []


def test_shrinking_keeps_only_the_relevant_settings() -> None:
    c = replace(draw(0, 5), network="conv", chunk=2)
    assert shrink(c, lambda smaller: smaller.chunk == 2).changed == {"chunk": 2}
