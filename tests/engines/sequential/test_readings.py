"""Clients' numbers that stay on the accelerator until one common read. Here, the CPU replaces it."""

import math

import pytest
import torch
from torch import Tensor

from lightning_fed.core.rounds import ClientReport
from lightning_fed.engines.sequential.readings import ClientNumbers, Reading, read


def reading(client: int, losses: Tensor | list[float], norm: float = 2.0, accumulated: int = 1) -> Reading:
    numbers = ClientNumbers(losses, [3, 1], {"acc": torch.tensor(0.5), "known": 0.25}, accumulated)
    report = ClientReport(client, 4, 2, math.nan, {}, math.nan, 1.0)
    return Reading(report, torch.tensor(norm), numbers, round=7)


def test_reports_are_completed_in_one_read() -> None:
    readings = [reading(0, torch.tensor([1.0, 5.0])), reading(1, [2.0, 6.0], norm=3.0)]
    assert read(readings) == []
    first, second = (each.report for each in readings)
    assert (first.loss, first.update_norm, first.metrics) == (2.0, 2.0, {"acc": 0.5, "known": 0.25})
    assert (second.loss, second.update_norm) == (3.0, 3.0)


def test_clients_with_non_finite_numbers_are_named() -> None:
    readings = [
        reading(0, torch.tensor([1.0, 1.0])),
        reading(1, torch.tensor([1.0, math.inf])),
        reading(2, torch.tensor([1.0, 1.0]), norm=math.nan),
    ]
    loss, parameters = map(str, read(readings))
    assert "Client 1 returned a loss that is not finite in round 7, after 2 local steps" in loss
    assert "first inf at local step 2" in loss
    assert "Client 2 returned parameters that are not finite in round 7" in parameters


@pytest.mark.parametrize(("accumulated", "steps"), [(1, [1.0, 5.0]), (2, [6.0])])
def test_local_step_has_the_mean_loss_of_its_batches(accumulated: int, steps: list[float]) -> None:
    assert ClientNumbers([1.0, 5.0], [3, 1], {}, accumulated).step_losses() == steps


def test_client_without_examples_has_no_mean_loss() -> None:
    assert math.isnan(ClientNumbers([], [], {}, 1).loss)
    assert ClientNumbers([1.0], [2], {}, 1, totals=(12.0, 4.0)).loss == 3.0
