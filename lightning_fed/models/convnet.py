"""The convolutional networks of the papers, and residual networks for small images."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

from lightning_fed.core.arguments import check_count, check_number, check_one_of
from lightning_fed.core.errors import FederatedError
from lightning_fed.models.classifier import Classifier, as_images, check_widths, dense, sized


class ConvNet(Classifier):
    """Convolutions with ReLU and 2x2 max pooling, then dense layers with ReLU.

    The papers' networks are its subclasses: :class:`EmnistCNN`, :class:`MnistCNN` and :class:`CifarCNN`. Logging,
    checkpoints and predictions are as in :class:`Classifier`.

    Args:
        image_size: Height and width of the images.
        in_channels: Channels of the images [B, in_channels, image_size, image_size]; one channel also allows [B,
            image_size, image_size].
        num_classes: The number of classes.
        channels: Output channels of each convolution.
        kernel_size: Height and width of each convolution's kernel.
        padding: ``"valid"`` for none, or ``"same"`` for zeros that preserve height and width.
        pool: Whether max pooling follows ``"each"`` convolution or the ``"last"`` one only.
        hidden: Widths of the hidden dense layers.
        conv_dropout: The share of activations dropped after the convolutions.
        dropout: The share of activations dropped after each hidden dense layer.
        lr: The learning rate of the local steps.
        momentum: SGD's momentum.
        weight_decay: SGD's weight decay.

    Raises:
        FederatedError: If an argument is not allowed, the images are too small, or a batch does not fit.

    Example:
        >>> import torch
        >>> model = ConvNet(image_size=8, channels=[8, 16], hidden=[32], padding="same")
        >>> model(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        image_size: int = 28,
        in_channels: int = 1,
        num_classes: int = 10,
        channels: Sequence[int] = (32, 64),
        kernel_size: int = 3,
        padding: Literal["valid", "same"] = "valid",
        pool: Literal["each", "last"] = "each",
        hidden: Sequence[int] = (128,),
        conv_dropout: float = 0.0,
        dropout: float = 0.0,
        lr: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        owner = type(self).__name__
        check_count(owner, "num_classes", num_classes, least=2)
        check_count(owner, "kernel_size", kernel_size)
        check_one_of(owner, "padding", padding, ("valid", "same"))
        check_one_of(owner, "pool", pool, ("each", "last"))
        check_number(owner, "conv_dropout", conv_dropout, "[0, 1)")
        check_number(owner, "dropout", dropout, "[0, 1)")
        size, width = check_count(owner, "image_size", image_size), check_count(owner, "in_channels", in_channels)
        outputs = check_widths(owner, "channels", channels)
        units = check_widths(owner, "hidden", hidden)
        layers: list[nn.Module] = []
        sizes = {"image_size": image_size, "in_channels": in_channels, "channels": channels, "hidden": hidden}
        with sized(owner, **sizes, kernel_size=kernel_size, num_classes=num_classes):
            for n, output in enumerate(outputs, start=1):
                layers += [nn.Conv2d(width, output, kernel_size, padding=padding), nn.ReLU()]
                width, size = output, size if padding == "same" else size - kernel_size + 1
                if pool == "each" or n == len(outputs):
                    layers.append(nn.MaxPool2d(2))
                    size //= 2
            if size < 1:
                raise FederatedError(
                    f"{owner}(image_size={image_size}): images of {image_size} x {image_size} have no pixels left"
                    f" after {len(outputs)} convolutions and their pooling. Set padding='same', fewer channels or"
                    " pool='last'."
                )
            layers += [nn.Dropout(conv_dropout), nn.Flatten()]
            net = nn.Sequential(*layers, *dense(width * size * size, units, dropout, num_classes))
        super().__init__(net, num_classes, lr, momentum, weight_decay)
        self._shape = (in_channels, image_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, num_classes] of images [B, in_channels, image_size, image_size]."""
        return super().forward(as_images(self, x, *self._shape))


class EmnistCNN(ConvNet):
    """The EMNIST network of adaptive federated optimization (Reddi et al., ICLR 2021, arXiv:2003.00295).

    Two 3x3 convolutions with 32 and 64 channels, 2x2 max pooling, dropout 0.25, 128 hidden units, dropout 0.5:
    1,206,590 parameters for 62 classes. Images are [B, 1, 28, 28] or [B, 28, 28].

    Args:
        num_classes: The number of classes: 62 for letters and digits, 10 for digits only.
        conv_dropout: The share of activations dropped after the convolutions.
        dropout: The share of activations dropped after the hidden layer.
        lr: The learning rate of the local steps.
        momentum: SGD's momentum.
        weight_decay: SGD's weight decay.

    Raises:
        FederatedError: If an argument is not allowed, or a batch does not fit.

    Example:
        >>> sum(p.numel() for p in EmnistCNN().parameters())
        1206590
    """

    def __init__(
        self,
        num_classes: int = 62,
        conv_dropout: float = 0.25,
        dropout: float = 0.5,
        lr: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            num_classes=num_classes,
            pool="last",
            conv_dropout=conv_dropout,
            dropout=dropout,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
        )


class MnistCNN(ConvNet):
    """The MNIST network of federated averaging (McMahan et al., AISTATS 2017, arXiv:1602.05629, section 3).

    Two 5x5 convolutions with 32 and 64 channels, each padded and followed by 2x2 max pooling, and 512 hidden units:
    1,663,370 parameters. Images are [B, 1, 28, 28] or [B, 28, 28].

    Args:
        num_classes: The number of classes.
        lr: The learning rate of the local steps.
        momentum: SGD's momentum.
        weight_decay: SGD's weight decay.

    Raises:
        FederatedError: If an argument is not allowed, or a batch does not fit.

    Example:
        >>> sum(p.numel() for p in MnistCNN().parameters())
        1663370
    """

    def __init__(
        self, num_classes: int = 10, lr: float = 0.1, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__(
            num_classes=num_classes,
            kernel_size=5,
            padding="same",
            hidden=(512,),
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
        )


class CifarCNN(ConvNet):
    """The CIFAR network of FedDyn (Acar et al., ICLR 2021, arXiv:2111.04263).

    Two 5x5 convolutions with 64 channels, each followed by 2x2 max pooling, and two hidden layers of 384 and 192 units,
    as in FedDyn's code (its text says 394 for the first): 797,962 parameters for 10 classes. Images are [B, 3, 32, 32].

    Args:
        num_classes: The number of classes: 10 or 100.
        lr: The learning rate of the local steps.
        momentum: SGD's momentum.
        weight_decay: SGD's weight decay.

    Raises:
        FederatedError: If an argument is not allowed, or a batch does not fit.

    Example:
        >>> sum(p.numel() for p in CifarCNN().parameters())
        797962
    """

    def __init__(
        self, num_classes: int = 10, lr: float = 0.1, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__(
            image_size=32,
            in_channels=3,
            num_classes=num_classes,
            channels=(64, 64),
            kernel_size=5,
            hidden=(384, 192),
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
        )


_STAGES = {18: ((64, 128, 256, 512), 2), 20: ((16, 32, 64), 3)}  # depth: channels of each stage, blocks per stage
_Norm = Callable[[int], nn.Module]


class ResNet(Classifier):
    """ResNet-18 or ResNet-20 (He et al., CVPR 2016, arXiv:1512.03385) for images of about 32 x 32 pixels.

    Both start with one 3x3 convolution without pooling, and use torchvision's basic blocks. ResNet-18 has four stages
    of 64, 128, 256 and 512 channels, with 1x1 convolutions at changes of shape (the paper's option B). ResNet-20 has
    the paper's three CIFAR stages of 16, 32 and 64 channels, and shortcuts without parameters (option A).

    Batch normalization works badly if clients' labels differ, and group normalization works well (Hsieh et al., ICML
    2020, arXiv:1910.00189). Two groups are the default, as in Reddi et al. (ICLR 2021, arXiv:2003.00295). Their network
    differs otherwise: it is ResNet v2 with a 7x7 convolution and pooling. The running statistics of batch normalization
    are buffers, which the server averages.

    Args:
        depth: 18 (11.2 million parameters) or 20 (0.27 million).
        num_classes: The number of classes.
        in_channels: Channels of the images [B, in_channels, height, width]; one channel also allows [B, height, width].
        norm: ``"group"`` or ``"batch"`` normalization.
        groups: The number of normalization groups, which must divide the stages' channels.
        lr: The learning rate of the local steps.
        momentum: SGD's momentum.
        weight_decay: SGD's weight decay.

    Raises:
        FederatedError: If an argument is not allowed, or a batch does not fit.

    Example:
        >>> sum(p.numel() for p in ResNet(depth=20).parameters())
        269722
    """

    def __init__(
        self,
        depth: int = 18,
        num_classes: int = 10,
        in_channels: int = 3,
        norm: Literal["group", "batch"] = "group",
        groups: int = 2,
        lr: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        owner = type(self).__name__
        check_one_of(owner, "depth", depth, tuple(_STAGES))
        check_count(owner, "num_classes", num_classes, least=2)
        check_count(owner, "in_channels", in_channels)
        check_one_of(owner, "norm", norm, ("group", "batch"))
        check_count(owner, "groups", groups)
        widths, _ = _STAGES[depth]
        if norm == "group" and widths[0] % groups:  # later stages have multiples of the first one's channels
            raise FederatedError(
                f"{owner}(groups={groups}): the {widths[0]} channels of ResNet-{depth}'s first stage cannot be cut into"
                f" {groups} equal groups. Set groups to a power of two up to {widths[0]}."
            )
        normalize: _Norm = nn.BatchNorm2d if norm == "batch" else partial(nn.GroupNorm, groups)
        with sized(owner, num_classes=num_classes, in_channels=in_channels):
            net = _network(depth, in_channels, num_classes, normalize)
        super().__init__(net, num_classes, lr, momentum, weight_decay)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, num_classes] of images [B, in_channels, height, width]."""
        return super().forward(as_images(self, x, self.hparams["in_channels"]))


class _PaddedShortcut(nn.Module):
    """Every second pixel, with zeros for the missing channels: the paper's option A."""

    def __init__(self, new_channels: int) -> None:
        super().__init__()
        self.new_channels = new_channels

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.new_channels))


def _network(depth: int, in_channels: int, num_classes: int, norm: _Norm) -> nn.Sequential:
    """Return stem, stages and head, with torchvision's names."""
    widths, blocks = _STAGES[depth]
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(in_channels, widths[0], kernel_size=3, padding=1, bias=False),
        bn1=norm(widths[0]),
        relu=nn.ReLU(),
    )
    width = widths[0]
    for n, output in enumerate(widths, start=1):
        stride = 1 if n == 1 else 2
        shortcut: nn.Module | None = None
        if width != output and depth == 20:
            shortcut = _PaddedShortcut(output - width)
        elif width != output:
            convolution = nn.Conv2d(width, output, kernel_size=1, stride=2, bias=False)
            shortcut = nn.Sequential(convolution, norm(output))
        stage = [BasicBlock(width, output, stride, shortcut, norm_layer=norm)]
        stage += [BasicBlock(output, output, norm_layer=norm) for _ in range(blocks - 1)]
        layers[f"layer{n}"] = nn.Sequential(*stage)
        width = output
    layers.update(avgpool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=nn.Linear(width, num_classes))
    net = nn.Sequential(layers)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):  # torchvision initializes its networks like this
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return net
