"""torch-uncertainty: its routines, LightningModules around any network."""

# pip install: torch-uncertainty lightning rich huggingface_hub timm

import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.public_modules.harness import AGREED, SIZES, PublicCase, Published, needs

needs("torch_uncertainty", lightning="lightning")
from torch_uncertainty.layers.bayesian import BayesLinear
from torch_uncertainty.losses import ELBOLoss
from torch_uncertainty.routines import ClassificationRoutine, RegressionRoutine


def rows(n: int, seed: int, real: bool = False) -> TensorDataset:
    stream = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=stream)
    return TensorDataset(x, x[:, :1] - x[:, 1:2] if real else x[:, :3].argmax(1))


def clients(real: bool = False) -> list[TensorDataset]:
    return [rows(n, seed, real) for seed, n in enumerate(SIZES)]


def network(out: int, layer: type[nn.Module] = nn.Linear) -> nn.Sequential:
    return nn.Sequential(layer(6, 8), nn.Tanh(), layer(8, out))


def classifier() -> ClassificationRoutine:
    net = network(3)
    recipe = torch.optim.SGD(net.parameters(), lr=0.1)
    return ClassificationRoutine(net, num_classes=3, loss=nn.CrossEntropyLoss(), optim_recipe=recipe)


def regressor() -> RegressionRoutine:
    net = network(1)
    recipe = torch.optim.Adam(net.parameters(), lr=0.01)
    return RegressionRoutine(net, output_dim=1, loss=nn.MSELoss(), optim_recipe=recipe)


def bayesian() -> ClassificationRoutine:
    net = network(3, BayesLinear)
    loss = ELBOLoss(net, nn.CrossEntropyLoss(), kl_weight=0.01, num_samples=2)
    recipe = torch.optim.SGD(net.parameters(), lr=0.1)
    return ClassificationRoutine(net, num_classes=3, loss=loss, optim_recipe=recipe)


LOGGED = {"logged": ("train_loss",)}
CASES = [
    PublicCase("ClassificationRoutine", classifier, clients, "vectorized", AGREED, val=lambda: rows(20, 9), **LOGGED),
    PublicCase("RegressionRoutine", regressor, lambda: clients(real=True), "vectorized", AGREED, **LOGGED),
    PublicCase(
        "ELBOLoss",
        bayesian,
        clients,
        "sequential",
        "it changes the attribute 'model.0.log_variational_posterior'",
        draws=True,
        **LOGGED,
    ),
]


class TestPublished(Published):
    cases = CASES
