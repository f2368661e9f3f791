"""Traces of several clients that take any number of them give what a trace of their own would give."""

from functools import partial
from typing import Any

import pytest

from lightning_fed.algorithms import FedAvg, Mime, Scaffold, SGDm
from lightning_fed.tracing import traces
from lightning_fed.tracing.traces import Traces
from tests.engines.vectorized.test_schedule import cut
from tests.helpers.engines import assert_agree, run, state_of
from tests.helpers.selection import few
from tests.helpers.training import same


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many clients each trace of several was made with."""
    found: list[int] = []
    split = Traces._split

    def noted(self: Traces, function: Any, tensors: Any, *args: Any, **options: Any) -> Any:
        if tensors[0].ndim == 3:  # the first weights of several
            found.append(len(tensors[0]))
        return split(self, function, tensors, *args, **options)

    monkeypatch.setattr(Traces, "_split", noted)
    return found


SIZES = (30, 28, 26, 24, 22, 20, 18, 16, 14)  # in batches of four: 7, 7, 6, 6, 5, 5, 4, 4 and 3 full ones
METHODS = [FedAvg(), Scaffold(), Mime(SGDm())]
OPTIONS = {"datamodule": partial(cut, SIZES), "clients_per_round": 9}


@pytest.mark.parametrize("algorithm", few(METHODS, METHODS[1:2]), ids=["FedAvg", "Scaffold", "Mime"])
def test_one_trace_serves_all_numbers_of_clients(algorithm: Any, made: list[int], steps: list[int]) -> None:
    assert_agree(*(run(engine, algorithm=algorithm, **OPTIONS) for engine in ("sequential", "vectorized")))
    assert made == [5, 7]
    assert {9, 8, 6, 4, 2} <= set(steps)
    assert len(steps) == 3 * (7 + 5)  # the full batches of all at work, and five smaller ones


def test_clients_of_a_single_smaller_batch_are_all_at_once_too(made: list[int], steps: list[int]) -> None:
    options = {**OPTIONS, "datamodule": partial(cut, (3,) * 9), "local_epochs": 2, "algorithm": Scaffold()}
    assert_agree(*(run(engine, **options) for engine in ("sequential", "vectorized")))
    assert made == [5, 7]
    assert steps == [9] * 6


def test_clients_with_smaller_batches_of_their_own_are_never_at_once(made: list[int], steps: list[int]) -> None:
    options = {**OPTIONS, "datamodule": partial(cut, (3, 2, 1, 3, 2, 3, 1, 2, 3))}
    assert_agree(*(run(engine, **options) for engine in ("sequential", "vectorized")))
    assert not made
    assert set(steps) == {1}


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", few(METHODS, METHODS[:1]), ids=["FedAvg", "Scaffold", "Mime"])
def test_without_such_a_trace_only_steps_of_all_clients_are_traced(
    algorithm: Any, made: list[int], steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run("vectorized", algorithm=algorithm, **OPTIONS)
    made.clear()
    steps.clear()
    monkeypatch.setattr(traces, "generalize", lambda *args: False)
    assert_agree(expected, run("vectorized", algorithm=algorithm, **OPTIONS))
    assert made == [5, 7, 9]  # tried with two numbers, once
    assert max(steps) == 9


def test_a_resumed_run_has_the_same_bits_with_another_first_chunk(tmp_path: Any) -> None:
    options = {**OPTIONS, "clients_per_round": 5, "precision": "32-true"}
    whole = run("vectorized", max_rounds=4, **options)
    first = run("vectorized", max_rounds=2, **options)
    first.save_checkpoint(tmp_path / "half.ckpt")
    resumed = run("vectorized", max_rounds=4, ckpt_path=tmp_path / "half.ckpt", **options)
    assert same(state_of(whole), state_of(resumed))
