"""Runs of every oracle case of a folder with the real trainer: ``pytest tests/oracle --oracle-cases DIR``.

The server parameters after every round must satisfy ``|got - expected| <= 1e-9 (1 + |expected|)`` elementwise, in
float64. The same is required of stored states that the run has after a round. The table of deviations names the
states that it lacks.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.processes import in_processes

from .cases import Case, load_case, load_index
from .conftest import WORST
from .methods import takes_full_batches, takes_population_loss, translate
from .runner import Result, Variant, run, run_resumed

TOLERANCE = 1e-9

APPLIES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "test_full_batches_in_uneven_chunks_match_case": lambda entry: takes_full_batches(entry["algorithm"], entry["hp"]),
    "test_l2_as_weight_decay_matches_case": lambda entry: entry["problem"]["l2"] > 0,
}
"""The cases that a variant has something to say about."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Create one test for every case in the folder."""
    folder = metafunc.config.getoption("--oracle-cases")
    if folder is None:
        pytest.skip("no oracle cases: run `pytest tests/oracle --oracle-cases DIR`, DIR with a cases.json")
    applies = APPLIES.get(metafunc.function.__name__, lambda entry: True)
    entries = [entry for entry in entries_of(Path(folder)) if applies(entry)]
    cases, met = [], set()
    # cases of one method follow the same code path, except in test_sequential_engine_matches_case
    for entry in entries:
        kind = entry["algorithm"], entry["hp"].get("option"), "adaptive" in entry["hp"]
        known = kind in met and metafunc.function.__name__ != "test_sequential_engine_matches_case"
        met.add(kind)
        cases.append(pytest.param(entry, id=entry["id"], marks=pytest.mark.thorough if known else ()))
    metafunc.parametrize("entry", cases)


def entries_of(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of a folder and its subfolder ``next``."""
    later = load_index(folder / "next") if (folder / "next").is_dir() else []
    return [*load_index(folder), *({**entry, "file": f"next/{entry['file']}"} for entry in later)]


@pytest.fixture
def case(entry: dict, request: pytest.FixtureRequest) -> Case:
    """The case, loaded and checked."""
    return load_case(Path(request.config.getoption("--oracle-cases")), entry)


def test_sequential_engine_matches_case(case: Case, record_property: Callable[[str, object], None]) -> None:
    compare(case, Variant(), record_property)


def test_full_batches_in_uneven_chunks_match_case(case: Case, record_property: Callable[[str, object], None]) -> None:
    compare(case, Variant(uneven_chunks=True), record_property)


def test_l2_as_weight_decay_matches_case(case: Case, record_property: Callable[[str, object], None]) -> None:
    if takes_population_loss(case.hp):
        pytest.skip("the loss that adapts mu is training_step's, which does not know the optimizer's weight_decay")
    compare(case, Variant(decay_in_optimizer=True), record_property)


def test_vectorized_engine_matches_case(case: Case, record_property: Callable[[str, object], None]) -> None:
    compare(case, Variant(engine="vectorized"), record_property)


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_two_processes_match_case(
    case: Case, engine: str, record_property: Callable[[str, object], None], tmp_path: Path
) -> None:
    def in_two(*arguments: Any) -> Result:
        first, second = in_processes(lambda: run(*arguments), tmp_path)
        assert not first.trace, first.trace
        assert not second.trace, second.trace
        return first.value

    compare(case, Variant(engine=engine, processes=2), record_property, in_two)


def test_resumed_run_has_identical_bits(case: Case, tmp_path: Path) -> None:
    setup = translate(case)
    whole = run(case, setup)
    resumed = run_resumed(case, setup, tmp_path / "half.ckpt")
    assert torch.equal(resumed.parameters, whole.parameters), (
        f"{case.id}: resumed after {case.n_rounds // 2} rounds, the parameters are off by up to"
        f" {(resumed.parameters - whole.parameters).abs().amax(1).tolist()} by round"
    )
    if whole.personal is not None:
        assert torch.equal(resumed.personal, whole.personal), f"{case.id}: clients' own models differ after a resume"
    assert resumed.states.keys() == whole.states.keys()
    for name, value in whole.states.items():
        assert torch.equal(resumed.states[name], value), f"{case.id}: the state {name!r} differs after a resume"


def compare(
    case: Case, variant: Variant, record_property: Callable[[str, object], None], go: Callable[..., Result] = run
) -> None:
    """Run a case and compare parameters and states with the stored ones, round by round."""
    setup = translate(case)
    result, stored = go(case, setup, variant), case.states()
    pairs = {name: (result.states[name], stored[name]) for name in setup.states}
    pairs["parameters"] = (result.parameters, case.expected())
    if result.personal is not None:
        pairs["own models"] = (result.personal, case.expected_personal())
    deviations = {name: deviation(*pair) for name, pair in pairs.items()}
    record_property(WORST, float(torch.cat(list(deviations.values())).max()))
    unseen = [f"({name} is not compared)" for name in stored if name not in setup.states]
    record_property("states", " ".join([*setup.states, *unseen]))
    for name, by_round in deviations.items():
        if not bool((by_round <= TOLERANCE).all()):  # nan counts as a deviation
            pytest.fail(
                f"{case.id} ({case.algorithm}): {name} off by {float(by_round.max()):.2e} (allowed {TOLERANCE:.0e});"
                f" by round {', '.join(f'{d:.1e}' for d in by_round.tolist())}",
                pytrace=False,
            )


def deviation(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return ``max |got - expected| / (1 + |expected|)`` of every round [R]; nan for rounds with a nan."""
    assert got.dtype == expected.dtype == torch.float64
    got, expected = got.reshape(len(got), -1), expected.flatten(1)
    assert got.shape == expected.shape
    return ((got - expected).abs() / (1 + expected.abs())).amax(1)
