"""The convolutional networks have the papers' layers and sizes."""

import pytest
import torch
from torch import nn

from lightning_fed.models import CifarCNN, ConvNet, EmnistCNN, MnistCNN


def layers(model):
    return [type(m).__name__ for m in model.net if not isinstance(m, nn.ReLU)]


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (EmnistCNN, 1_206_590),  # Reddi et al.
        (lambda: EmnistCNN(num_classes=10), 1_199_882),
        (MnistCNN, 1_663_370),  # McMahan et al.
        (CifarCNN, 797_962),
        (lambda: CifarCNN(num_classes=100), 815_332),
        (lambda: ConvNet(8, channels=[16, 32], padding="same", hidden=[64]), 13_706),
    ],
)
def test_parameter_count(model, count):
    assert sum(p.numel() for p in model().parameters()) == count


def test_layers_of_emnist_network():
    model = EmnistCNN()
    assert layers(model) == ["Conv2d", "Conv2d", "MaxPool2d", "Dropout", "Flatten", "Linear", "Dropout", "Linear"]
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.25, 0.5]
    assert [m.kernel_size for m in model.modules() if isinstance(m, nn.Conv2d)] == [(3, 3), (3, 3)]
    assert sum(isinstance(m, nn.ReLU) for m in model.net) == 3


@pytest.mark.parametrize(("make", "padding"), [(MnistCNN, "same"), (CifarCNN, "valid")])
def test_layers_of_networks_with_pooling_after_each_convolution(make, padding):
    model = make()
    assert layers(model)[:4] == ["Conv2d", "MaxPool2d", "Conv2d", "MaxPool2d"]
    assert all(m.kernel_size == (5, 5) and m.padding == padding for m in model.net if isinstance(m, nn.Conv2d))
    assert all(m.p == 0 for m in model.modules() if isinstance(m, nn.Dropout))


@pytest.mark.parametrize("size", [6, 7, 8, 11])
@pytest.mark.parametrize("padding", ["valid", "same"])
@pytest.mark.parametrize("pool", ["each", "last"])
@pytest.mark.parametrize("kernel_size", [2, 3])
def test_dense_layers_fit_the_convolutions(size, padding, pool, kernel_size):
    if (padding, pool) == ("valid", "each") and size < 10:
        size += 4
    model = ConvNet(size, 3, 4, [2, 5], kernel_size, padding, pool, hidden=[])
    assert model(torch.rand(2, 3, size, size)).shape == (2, 4)


def test_single_channel_axis_is_optional():
    model, images = ConvNet(8, channels=[4]), torch.rand(3, 8, 8)
    assert torch.equal(model(images), model(images[:, None]))
