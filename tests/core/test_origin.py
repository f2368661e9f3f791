"""The origin of a continued run, and differences between optimizer options."""

import torch
from torch import nn

from lightning_fed.core.origin import CHECKPOINT, EARLIER_FIT, differing_options, options_of


def test_remedy_names_what_must_be_the_same() -> None:
    assert CHECKPOINT.remedy("the settings").startswith("Resume with the settings it was written with, or start from")
    assert EARLIER_FIT.remedy("the model").startswith("Call fit() with the model of the earlier fit")


def test_options_cover_every_group_without_the_parameters() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.2)]
    found = options_of(torch.optim.SGD(groups, momentum=0.9))
    assert [(group["lr"], group["momentum"]) for group in found] == [(0.1, 0.9), (0.2, 0.9)]
    assert not any("params" in group for group in found)


def test_differing_options_are_named_with_both_values() -> None:
    built, loaded = [{"lr": 0.1, "momentum": 0.9}], [{"lr": 0.2, "momentum": 0.9, "new": 1}]
    assert differing_options(built, loaded, is_scheduled=False) == ["lr=0.2 (this run has 0.1)"]
    assert differing_options(built, loaded, False, EARLIER_FIT) == ["lr=0.2 (this fit has 0.1)"]
    assert differing_options(built, built, is_scheduled=False) == []


def test_scheduled_learning_rate_is_compared_by_its_initial_value() -> None:
    built = [{"lr": 0.1, "initial_lr": 0.1, "weight_decay": 0.0}]
    moved = [{"lr": 0.05, "initial_lr": 0.1, "weight_decay": 0.0}]
    assert differing_options(built, moved, is_scheduled=True) == []
    other = [{"lr": 0.05, "initial_lr": 0.3, "weight_decay": 0.5}]
    expected = ["lr=0.3 (this run has 0.1)", "weight_decay=0.5 (this run has 0.0)"]
    assert differing_options(built, other, is_scheduled=True) == expected
