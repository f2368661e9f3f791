"""Parts of a grid, by the labels of its axes."""

from typing import Any

import pytest

from lightning_fed import FederatedError
from lightning_fed.lab.selections import is_within, read_selection, read_skip
from tests.helpers.lab import Write, check_mistakes

MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"skip": [{"method": "FedAvgg"}]}, "Did you mean 'FedAvg'"),
    ({"skip": [{}]}, "names nothing"),
]


def test_invalid_selections_are_rejected(write: Write) -> None:
    check_mistakes(write, MISTAKES)


LABELS = {"method": ("FedAvg", "SCAFFOLD"), "K": ("1", "10")}


def test_selection_takes_one_or_several_labels_per_axis() -> None:
    assert read_selection("at", None, LABELS) == {}
    assert read_selection("at", {"method": "FedAvg", "K": [1, 10]}, LABELS) == {"method": ("FedAvg",), "K": ("1", "10")}
    for found, message in (("FedAvg", "at must name axes and labels"), ({"G": 1}, "at: there is no axis 'G'")):
        with pytest.raises(FederatedError, match=message):
            read_selection("at", found, LABELS)


def test_point_is_within_a_selection_that_lists_its_labels() -> None:
    point = {"method": "FedAvg", "K": "10"}
    assert is_within(point, {})
    assert is_within(point, {"K": ("1", "10"), "G": ("5",)})  # axes that the point lacks are ignored
    assert not is_within(point, {"K": ("1",)})


def test_skip_is_a_list_of_selections() -> None:
    assert read_skip("skip", [{"K": 1}, {"method": ["FedAvg"]}], LABELS) == ({"K": ("1",)}, {"method": ("FedAvg",)})
    with pytest.raises(FederatedError, match="skip must be a list"):
        read_skip("skip", {"K": 1}, LABELS)
