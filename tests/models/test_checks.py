"""Common checks of models, with errors that name the model."""

import pytest
import torch
from torch import nn

from lightning_fed import FederatedError
from lightning_fed.models import LinearRegression
from lightning_fed.models.classifier import as_images, check_floating, check_widths, sized


def test_widths_must_be_a_list_of_positive_integers() -> None:
    assert check_widths("Net", "hidden", (3, 4)) == [3, 4]
    for wrong, said in (("34", r"hidden='34'\): hidden must be a list"), (3, "hidden=3"), ([3, 0], r"hidden\[1\]=0")):
        with pytest.raises(FederatedError, match=said):
            check_widths("Net", "hidden", wrong)


def test_layers_out_of_memory_report_their_sizes() -> None:
    said = r"Net\(width=10+\): layers of this size do not fit into memory"
    with pytest.raises(FederatedError, match=said), sized("Net", width=10**15):
        nn.Linear(10**15, 10**15)


def test_inputs_of_another_type_are_rejected_with_the_conversion() -> None:
    single, double = LinearRegression(2), LinearRegression(2).double()
    check_floating(single, torch.zeros(2))
    check_floating(double, torch.zeros(2).double())
    for module, x, said in (
        (single, torch.zeros(2, dtype=torch.uint8), "give floating point numbers, such as x / 255"),
        (single, torch.zeros(2).double(), "precision='64-true'"),
        (double, torch.zeros(2), "precision='64-true'"),
    ):
        with pytest.raises(FederatedError, match=f"LinearRegression got inputs of type .*{said}"):
            check_floating(module, x)


def test_single_channel_axis_is_optional_and_bad_shapes_are_rejected() -> None:
    module = LinearRegression(2)
    assert as_images(module, torch.zeros(5, 4, 4), channels=1).shape == (5, 1, 4, 4)
    assert as_images(module, torch.zeros(5, 3, 4, 6), channels=3).shape == (5, 3, 4, 6)
    for shape, size, said in (((5, 4, 4), None, "height, width"), ((5, 3, 4, 6), 4, "4, 4"), ((5, 2, 4, 4), 4, "4, 4")):
        with pytest.raises(FederatedError, match=rf"expects \[B, 3, {said}\]"):
            as_images(module, torch.zeros(shape), channels=3, size=size)
