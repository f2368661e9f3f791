"""Values that ``self.log`` collects in local steps: the mean of each client, of the round, and of several processes."""

import math
import warnings
from typing import Any

import pytest
import torch

from lightning_fed.engines.logged import EvaluationResults, RoundResults, SharedResults
from tests.helpers.training import Net


def logged(results: RoundResults, values: list[tuple[float, int]], name: str = "loss", **options: Any) -> None:
    """Log values with these batch sizes for one client."""
    with results.of_client(Net()):
        for value, size in values:
            results.log("training_step", name, torch.tensor(value), batch_size=size, **options)


def round_mean(results: RoundResults, name: str = "loss") -> float:
    return float(results.metrics(on_step=False)["callback"][name])


def test_client_and_round_means_are_weighted_by_examples() -> None:
    results = RoundResults()
    logged(results, [(2.0, 1), (5.0, 2)])
    assert results.close_client() == {"loss": 4.0}
    logged(results, [(1.0, 3)])
    assert results.close_client() == {"loss": 1.0}
    assert results.close_client() == {}, "a client without a step logs nothing"
    assert round_mean(results) == (2 + 10 + 3) / 6


def test_batch_size_defaults_to_the_examples_of_the_batch() -> None:
    results = RoundResults()
    with results.of_client(Net()):
        for value, size in ((2.0, 4), (8.0, 2)):
            results.batch_size = size
            results.log("training_step", "loss", torch.tensor(value))
    assert results.close_client() == {"loss": 4.0}


def test_on_step_value_is_the_round_mean_under_its_plain_name() -> None:
    results = RoundResults()
    logged(results, [(2.0, 1), (4.0, 1)], on_step=True, on_epoch=False)
    results.close_client()
    assert round_mean(results) == 3.0


def test_on_step_and_on_epoch_value_warns_once_and_keeps_the_round() -> None:
    results = RoundResults()
    with pytest.warns(UserWarning, match="values of single local steps are not written.*logged as loss_epoch"):
        logged(results, [(2.0, 1), (2.0, 1)], on_step=True, on_epoch=True)
    results.close_client()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logged(results, [(2.0, 1)], on_step=True, on_epoch=True)
    results.close_client()
    assert round_mean(results, "loss_epoch") == 2.0


def test_max_reduction_is_not_averaged() -> None:
    results = RoundResults()
    for value in (3.0, 7.0, 5.0):
        logged(results, [(value, 1)], reduce_fx="max")
        results.close_client()
    assert round_mean(results) == 7.0


def test_values_of_a_failed_client_are_discarded() -> None:
    results = RoundResults()
    logged(results, [(2.0, 1)])
    results.close_client()
    undo = results.savepoint()
    logged(results, [(100.0, 5)])
    logged(results, [(1.0, 1)], "other")
    undo()
    assert results.close_client() == {}
    assert round_mean(results) == 2.0
    assert "other" not in results.metrics(on_step=False)["callback"]


def test_restarted_round_has_no_client_values() -> None:
    results = RoundResults()
    logged(results, [(2.0, 1)])
    results.close_client()
    results.log("on_train_epoch_start", "rate", torch.tensor(0.1), batch_size=1)
    results.forget_clients()
    assert set(results.metrics(on_step=False)["callback"]) == {"rate"}


def test_processes_merge_their_values_by_weight() -> None:
    processes = [RoundResults() for _ in range(2)]
    logged(processes[0], [(2.0, 1), (4.0, 1)])
    logged(processes[1], [(9.0, 3)])
    logged(processes[1], [(6.0, 2)], "rare")
    for name, values in (("least", (3.0, 1.0)), ("most", (3.0, 1.0)), ("total", (3.0, 1.0))):
        for results, value in zip(processes, values, strict=True):
            logged(results, [(value, 1)], name, reduce_fx={"least": "min", "most": "max", "total": "sum"}[name])
    for results in processes:
        results.close_client()
    parts = [results.partial() for results in processes]
    for results in processes:
        results.merge(parts)
        found = {name: float(v) for name, v in results.metrics(on_step=False)["callback"].items()}
        assert found == {"loss": (6 + 27) / 5, "rare": 6.0, "least": 1.0, "most": 3.0, "total": 4.0}


@pytest.mark.parametrize("reduce_fx", ["min", "max", "sum", "mean"])
@pytest.mark.parametrize("broken", [0, 1])
def test_nan_in_one_process_is_nan_in_all(reduce_fx: str, broken: int) -> None:
    processes = [EvaluationResults(training=False) for _ in range(2)]
    for rank, results in enumerate(processes):
        value = torch.tensor(math.nan if rank == broken else 1.0)
        results.log("validation_step", "loss", value, reduce_fx=reduce_fx, batch_size=1)
    parts = [results.partial() for results in processes]
    for results in processes:
        results.merge(parts)
        assert math.isnan(round_mean(results))  # type: ignore[arg-type]


def test_round_hooks_can_sync_values_across_processes() -> None:
    asked: list[str] = []

    def reduce(value: torch.Tensor, reduce_op: str) -> torch.Tensor:
        asked.append(reduce_op)
        return value.add_(10.0)

    def log(name: str, **options: Any) -> None:
        results.log("on_train_epoch_end", name, given, batch_size=1, sync_dist_fn=reduce, **options)

    results, given = RoundResults(), torch.tensor(1.0)
    log("mean", sync_dist=True)
    log("sum", sync_dist=True, reduce_fx="sum")
    log("of_the_first", sync_dist=True, rank_zero_only=True)
    log("own", sync_dist=False)
    assert results.of_hooks() == {"mean": 11.0, "sum": 11.0, "of_the_first": 1.0, "own": 1.0}
    assert asked == ["mean", "sum"]
    assert given == 1.0
    logged(results, [(2.0, 1)], sync_dist=True, sync_dist_fn=reduce)  # not reduced: one process trains the client
    assert asked == ["mean", "sum"]


def test_client_means_cover_all_processes_including_empty_ones() -> None:
    processes = [RoundResults() for _ in range(3)]
    logged(processes[0], [(2.0, 1), (5.0, 2)])
    logged(processes[1], [(1.0, 3)])
    parts = [results.client_partial() for results in processes]
    for results in processes:
        results.merge_client(parts, torch.device("cpu"))
        assert results.close_client() == {"loss": (2 + 10 + 3) / 6}


def test_single_batch_values_warn_once_with_several_processes() -> None:
    def log(processes: int, name: str, **options: Any) -> None:
        results.processes = processes
        results.log("validation_step", name, torch.tensor(1.0), batch_size=1, on_epoch=True, **options)

    results = EvaluationResults(training=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log(1, "alone", on_step=True)
        log(2, "whole", on_step=False)
    with pytest.warns(UserWarning, match="self.log\\('single', on_step=True\\): 2 processes share the batches"):
        log(2, "single", on_step=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log(2, "single", on_step=True)


def test_evaluation_uses_the_given_example_count() -> None:
    results = EvaluationResults(training=False)
    for value, count in ((2.0, 1), (5.0, 2)):
        results.batch_size, results.count = None, lambda count=count: count
        results.log("validation_step", "loss", torch.tensor(value), on_step=False, on_epoch=True)
    assert isinstance(results, SharedResults)
    assert round_mean(results) == 4.0  # type: ignore[arg-type]
