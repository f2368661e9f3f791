"""The residual networks are torchvision's and the paper's, with another stem and another normalization."""

from functools import partial

import pytest
import torch
from torch import nn
from torchvision.models import resnet18

from lightning_fed.models import ResNet
from tests.helpers.selection import few


@pytest.mark.parametrize("norm", few(["group", "batch"], ["batch"]))  # test_models.py counts those with groups
@pytest.mark.parametrize(
    ("depth", "num_classes", "count"),
    [(20, 10, 269_722), (20, 100, 275_572), (18, 10, 11_173_962), (18, 100, 11_220_132)],
)
def test_parameter_count(depth, num_classes, count, norm):
    model = ResNet(depth, num_classes, norm=norm)
    assert sum(p.numel() for p in model.parameters()) == count
    assert sum(isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3) for m in model.modules()) == {18: 17, 20: 19}[depth]


@pytest.mark.thorough
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_resnet18_matches_torchvision_except_for_the_stem(norm):
    layer = nn.BatchNorm2d if norm == "batch" else partial(nn.GroupNorm, 2)
    theirs = resnet18(weights=None, num_classes=10, norm_layer=layer)
    theirs.conv1, theirs.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    model = ResNet(18, norm=norm)
    theirs.load_state_dict(model.net.state_dict())
    x = torch.rand(2, 3, 16, 16)
    torch.testing.assert_close(theirs(x), model(x))


@pytest.mark.parametrize("depth", [18, 20])
def test_convolutions_are_initialized_as_in_torchvision(depth):
    for conv in (m for m in ResNet(depth).modules() if isinstance(m, nn.Conv2d)):
        fan_out = conv.out_channels * conv.kernel_size[0] ** 2
        assert conv.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.2)


def test_normalization_defaults_to_two_groups():
    norms = [m for m in ResNet(20).modules() if isinstance(m, nn.GroupNorm)]
    assert {m.num_groups for m in norms} == {2}
    assert len(norms) == 19
    assert not list(ResNet(20).buffers())


def test_resnet20_halves_the_image_twice_and_ends_with_64_features():
    model, shapes = ResNet(20), []
    for n in (1, 2, 3):
        model.net.get_submodule(f"layer{n}").register_forward_hook(lambda *args: shapes.append(tuple(args[2].shape)))
    model(torch.rand(2, 3, 32, 32))
    assert shapes == [(2, 16, 32, 32), (2, 32, 16, 16), (2, 64, 8, 8)]


def test_shortcuts_keep_every_second_pixel_and_pad_with_zeros():
    shortcut = ResNet(20).net.layer2[0].downsample
    x = torch.rand(2, 16, 5, 5)
    out = shortcut(x)
    assert torch.equal(out[:, :16], x[:, :, [0, 2, 4]][..., [0, 2, 4]])
    assert out.shape == (2, 32, 3, 3)
    assert not out[:, 16:].any()


def test_batch_normalization_updates_running_statistics():
    model = ResNet(20, norm="batch")
    before = model.net.bn1.running_mean.clone()
    model.training_step((torch.rand(4, 3, 8, 8), torch.arange(4)), 0)
    assert not torch.equal(model.net.bn1.running_mean, before)


def test_single_channel_axis_is_optional():
    model, images = ResNet(20, in_channels=1), torch.rand(3, 8, 8)
    assert torch.equal(model(images), model(images[:, None]))
