"""Traces of several clients that take any number of them: they give what a trace of their own would give."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_fed.algorithms import FedAvg, Mime, Scaffold, SGDm
from lightning_fed.tracing import traces
from lightning_fed.tracing.passes import generalize, simplify
from lightning_fed.tracing.traces import Traces
from tests.engines.vectorized.test_schedule import cut
from tests.helpers.engines import assert_agree, run, state_of
from tests.helpers.selection import few
from tests.helpers.training import same

Function = Callable[[Tensor, Tensor, Tensor], Any]


def given(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights, inputs and targets of so many clients."""
    stream = torch.Generator().manual_seed(count)
    weights, inputs = (torch.randn(count, *shape, generator=stream) for shape in ((3, 4), (6, 4)))
    return weights, inputs, torch.randint(3, (count, 6), generator=stream)


def traced(function: Function, count: int) -> fx.GraphModule:
    module = make_fx(lambda *tensors: [function(*tensors)])(*given(count))
    simplify(module)
    return module


def takes_any(function: Function) -> tuple[bool, fx.GraphModule]:
    one, other = traced(function, 5), traced(function, 7)
    found = generalize([(one.graph, other.graph)], (one, other))
    one.graph.lint()
    one.recompile()
    return found, one


def losses(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return vmap(lambda w, x, y: F.cross_entropy(x @ w.t(), y))(w, x, y)


STACKED: dict[str, Function] = {
    "a loss of each": losses,
    "a view": lambda w, x, y: x.view(len(x) * 6, 4) * 2.0,
    "twice as many rows": lambda w, x, y: torch.cat((x, x)).view(2 * len(x), 24),
    "an expanded row": lambda w, x, y: w[:1].expand(len(w), 3, 4) + 1.0,
    "a number of rows": lambda w, x, y: torch.zeros(len(w), 5) + torch.arange(len(w))[:, None],
    "as a keyword": lambda w, x, y: x.sum(0, keepdim=True).repeat(len(x), 1, 1),
    "a mean over clients": lambda w, x, y: w.sum(0) / len(w),
    "no number at all": lambda w, x, y: torch.relu(w),
    "a constant of its size": lambda w, x, y: w * 5.0 + 7.0,
}


@pytest.mark.parametrize("name", STACKED)
def test_a_graph_takes_any_number(name: str) -> None:
    found, module = takes_any(STACKED[name])
    assert found
    for count in (2, 3, 5, 6, 7, 12):
        assert torch.equal(module(*given(count))[0], STACKED[name](*given(count)))


HELD = {n: torch.randn(abs(n) if n < 0 else 1, 3, 4) for n in (5, 7, -5, -7)}


def difference(one: Tensor, other: Tensor, in_order: bool) -> Tensor:
    return one - other if in_order else other - one


NOT: dict[str, Function] = {
    "the number squared": lambda w, x, y: torch.zeros(len(w) ** 2) + w.sum(),
    "one more": lambda w, x, y: torch.zeros(len(w) + 1) + w.sum(),
    "no multiple": lambda w, x, y: torch.zeros(min(len(w) + 1, 7)) + w.sum(),
    "another operator": lambda w, x, y: w.exp() if len(w) == 5 else w.sin(),
    "more operators": lambda w, x, y: w.exp() if len(w) == 5 else w.exp() + 1.0,
    "another number": lambda w, x, y: w * (2.0 if len(w) == 5 else 3.0),
    "another input": lambda w, x, y: torch.relu(w[:, 0] if len(w) == 5 else w[:, 1]),
    "other operands": lambda w, x, y: difference(w.exp(), w.sin(), len(w) == 5),
    "another constant": lambda w, x, y: w + HELD[len(w)],
    "a constant of another size": lambda w, x, y: w + HELD[-len(w)],
}


@pytest.mark.parametrize("name", NOT)
def test_a_graph_that_differs_in_anything_else_stays_as_it_is(name: str) -> None:
    before = traced(NOT[name], 5)
    found, module = takes_any(NOT[name])
    assert not found
    assert [(n.target, str(n.args)) for n in module.graph.nodes] == [
        (n.target, str(n.args)) for n in before.graph.nodes
    ]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda w, x, y: torch.zeros(2 * len(w)) + w.sum(), True),
        (lambda w, x, y: torch.zeros({5: 10, 7: 14, 3: 9}[len(w)]) + w.sum(), False),
        (lambda w, x, y: w.exp() if len(w) > 3 else w.sin(), False),
    ],
    ids=["a multiple", "another multiple", "another operator"],
)
def test_a_third_number_has_to_agree(function: Function, expected: bool) -> None:
    modules = [traced(function, count) for count in (5, 7, 3)]
    before = str(modules[0].graph)
    assert generalize([[module.graph for module in modules]], modules) is expected
    assert (str(modules[0].graph) != before) is expected


def test_of_two_graphs_both_or_none_are_changed() -> None:
    one, other = traced(STACKED["a view"], 5), traced(STACKED["a view"], 7)
    first, second = traced(NOT["one more"], 5), traced(NOT["one more"], 7)
    before = str(one.graph)
    assert not generalize([(one.graph, other.graph), (first.graph, second.graph)], (one, other))
    assert str(one.graph) == before


# In runs


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
