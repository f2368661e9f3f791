"""Bounds of what a server takes from a site; ``test_replies`` has whole messages."""

from typing import Any

import pytest
import torch

from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy.message import MOST, printable, quoted
from lightning_fed.deploy.reply_checks import Fields, check_finite, check_tensor


@pytest.mark.parametrize("value", [-1, MOST + 1, 10**400, True, 1.0, float("inf"), "1", None, [], {"a": 1}])
def test_a_count_is_a_whole_number_that_a_float_can_hold(value: Any) -> None:
    with pytest.raises(FederatedError, match="it is not valid: its a is .*, and a whole number from 0 to 2"):
        Fields("it", {"a": value}).count("a")
    assert [Fields("it", {"a": n}).count("a") for n in (0, MOST)] == [0, MOST]
    assert float(MOST) + 1.0 == MOST, "the first whole number that is none"


@pytest.mark.parametrize("value", [10**400, -(10**400), True, "1", None, [], {}])
def test_a_number_is_one_that_a_float_can_hold(value: Any) -> None:
    with pytest.raises(FederatedError, match="its a is .*, and a number is expected"):
        Fields("it", {"a": value}).number("a")
    assert [Fields("it", {"a": n}).number("a") for n in (3, -0.5, float("inf"))] == [3.0, -0.5, float("inf")]


def test_numbers_by_name_are_finite_or_none_and_names_are_short() -> None:
    found = Fields("it", {"a": {"x": 1, "y": float("nan")}}).numbers("a")
    assert found["x"] == 1.0
    assert found["y"] != found["y"]
    wrong: list[Any] = [None, [], {"x": float("inf")}, {"x": {}}, {"x" * 201: 1.0}, {"a\nb": 1.0}, {1: 1.0}]
    for value in [*wrong, {str(i): 1.0 for i in range(1001)}]:
        with pytest.raises(FederatedError, match="it is not valid"):
            Fields("it", {"a": value}).numbers("a")


def test_names_are_printable_texts() -> None:
    assert Fields("it", {"a": ["x", "y"]}).names("a") == ["x", "y"]
    assert Fields("it", {"a": {"x": "y"}}).texts("a") == {"x": "y"}
    for value in ("xy", {"x": 1}, [1], [["x"]], ["\x1b"]):
        with pytest.raises(FederatedError, match="it is not valid"):
            Fields("it", {"a": value}).names("a")
    with pytest.raises(FederatedError, match="'x' is a list, and a name"):
        Fields("it", {"a": {"x": []}}).texts("a")
    with pytest.raises(FederatedError, match="its report is None, and a mapping"):
        Fields("it", None)


def test_a_tensor_has_exactly_a_shape_and_a_type() -> None:
    like = torch.Size([2]), torch.float32
    check_tensor("it", "a", torch.zeros(2), like)
    for value in (torch.zeros(()), torch.zeros(1, 2), torch.zeros(2).double(), torch.tensor([0.0, float("inf")])):
        with pytest.raises(FederatedError, match="it has 'a'"):
            check_tensor("it", "a", value, like)
    check_finite("it", "a", torch.zeros(2, dtype=torch.int64))


def test_what_is_quoted_is_one_short_line() -> None:
    assert printable("a\nb\x1b[0m\u2028ü") == "a\\nb\\x1b[0m\\u2028ü"
    assert printable("x" * 30, 10) == "x" * 10 + " ..."
    assert [quoted(value) for value in (None, 1.5, "a\tb", [[[]]], {"a": 1})] == [
        "None",
        "1.5",
        "'a\\tb'",
        "a list",
        "a dict",
    ]
    assert len(quoted(10**400)) < 70
