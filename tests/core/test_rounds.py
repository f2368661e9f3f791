"""The records of a step, a client's round and a cohort."""

import copy
import pickle
from dataclasses import FrozenInstanceError
from types import MappingProxyType

import pytest
import torch

from lightning_fed.core.rounds import ClientReport, RoundReport, Run


def test_client_report_round_trips_through_pickle() -> None:
    report = ClientReport("a", 5, 3, 0.25, {"train_loss": 0.5}, 1.5, 0.125)
    assert pickle.loads(pickle.dumps(report)) == report
    assert len(pickle.dumps([report] * 2)) < 300  # pickled as a call, not field by field


def test_round_report_can_be_copied_and_pickled() -> None:
    client = ClientReport("a", 5, 3, 0.25, {"train_loss": 0.5}, 1.5, 0.125)
    by_id = map(MappingProxyType, ({"a": 5}, {"a": 3}, {"a": 1.0}, {"train_loss": 0.5}, {"a": client}))
    report = RoundReport(0, ("a",), (), *by_id, 0.25, 1.0, 0.5, 8, 8, 0.25, MappingProxyType({}), 12)
    for again in (pickle.loads(pickle.dumps(report)), copy.deepcopy(report)):
        assert again == report
        assert isinstance(again.clients, MappingProxyType)


def test_reports_are_read_only() -> None:
    report = ClientReport("a", 5, 3, 0.25, {}, 1.5, 0.125)
    with pytest.raises(FrozenInstanceError):
        report.loss = 0.0  # type: ignore[misc]


def test_path_gradient_is_computed_on_demand() -> None:
    asked = []

    def path() -> torch.Tensor:
        asked.append(1)
        return torch.ones(2)

    x = torch.zeros(2)
    run = Run(x, x, {}, {}, {}, {}, {}, 5, 5.0, 3, 0.3, path)
    assert (asked, run.path_follows) == ([], False)
    assert run.path_gradient.tolist() == [1.0, 1.0]
    assert asked == [1]
