"""A small network with LoRA adapters of peft, and its federated run in plain torch."""

import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fed import FederatedTrainer  # imported first, so that peft finds a working torchvision
from tests.helpers.training import CLASSES, FEATURES, QUIET

__all__ = ["Adapted", "Reference", "StandIn", "adapted", "exact_trainer", "merged_weights", "stand_in"]


class Network(nn.Module):
    """Two linear layers and a head. The second layer's weight is transposed, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, 7), nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.two(torch.tanh(self.one(x)))))


class Adapted(pl.LightningModule):
    """A frozen network with adapters in two layers and a trained head."""

    def __init__(self, lr: float = 0.5, **options: Any) -> None:
        super().__init__()
        peft = pytest.importorskip("peft", reason='no peft: pip install -e ".[pages]"')
        own = {"r": 2, "lora_alpha": 5, "target_modules": ["one", "two"], "modules_to_save": ["head"], **options}
        self.net, self.lr = peft.get_peft_model(Network(), peft.LoraConfig(**own)), lr

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def adapted(**options: Any) -> Adapted:
    """Return a module with the same initial parameters every time. B does not start at zero."""
    torch.manual_seed(0)
    module = Adapted(**options)
    for name, p in module.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.3)
    return module


class Layer(nn.Module):
    """A LoRA layer with the attributes of peft's layers that the package reads. Importing peft takes seconds."""

    def __init__(self, base: nn.Module, rows: int, columns: int, is_transposed: bool = False) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(columns, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, rows, bias=False)})
        self.lora_embedding_A = nn.ParameterDict()
        self.active_adapters, self.scaling, self.lora_variant = ["default"], {"default": 2.5}, dict[str, Any]()
        self.merged, self.fan_in_fan_out = False, is_transposed

    def get_base_layer(self) -> nn.Module:
        return self.base_layer

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base_layer.weight.t() if self.fan_in_fan_out else self.base_layer.weight
        return x @ weight.t() + 2.5 * self.lora_B["default"](self.lora_A["default"](x))


class StandIn(Adapted):
    """The module without peft. The weight of its second layer is transposed."""

    def __init__(self, lr: float = 0.5) -> None:
        pl.LightningModule.__init__(self)
        one, two = Layer(nn.Linear(FEATURES, 8), 8, FEATURES), Layer(nn.Linear(7, 8), 7, 8, is_transposed=True)
        inner = nn.ModuleDict({"one": one, "two": two, "head": nn.Linear(7, CLASSES)})
        self.net, self.lr = nn.ModuleDict({"base_model": nn.ModuleDict({"model": inner})}), lr

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        (x, y), inner = batch, self.net["base_model"]["model"]
        loss = F.cross_entropy(inner["head"](torch.tanh(inner["two"](torch.tanh(inner["one"](x.to(self.dtype)))))), y)
        self.log("train_loss", loss)
        return loss

    validation_step = None


def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Return the module without peft, with the same parameters every time, and let the package find its layers."""
    monkeypatch.setitem(sys.modules, "peft.tuners.lora", SimpleNamespace(LoraLayer=Layer, Linear=Layer))
    torch.manual_seed(0)
    return StandIn()


def exact_trainer(**options: Any) -> FederatedTrainer:
    """Return a quiet trainer, by default with three rounds and ``lora="exact"`` in float64."""
    local = {} if "local_steps" in options else {"local_epochs": 3}
    own = {**QUIET, "max_rounds": 3, "seed": 0, "lora": "exact", "precision": "64-true", **local, **options}
    return FederatedTrainer(**own)


def merged_weights(state: Mapping[str, Tensor], scaling: float = 2.5) -> dict[str, Tensor]:
    """Return the weights of the layers of :class:`Network` with their adapters, from a module's ``state_dict``."""
    found, start = {}, "net.base_model.model."
    for layer in ("one", "two"):
        a, b = (state[f"{start}{layer}.lora_{x}.default.weight"].double() for x in "AB")
        found[layer] = state[f"{start}{layer}.base_layer.weight"].double() + scaling * b @ a
    return found


class Reference:
    """FedEx-LoRA of :class:`Adapted` in plain torch: full-batch steps on leaves, in float64, without peft.

    Args:
        state: The ``state_dict`` of the module.
        lr: The learning rate.
        scaling: The factor of B A.
    """

    def __init__(self, state: Mapping[str, Tensor], lr: float = 0.5, scaling: float = 2.5) -> None:
        start = "net.base_model.model."
        self.lr, self.scaling = lr, scaling
        self.base = {n: state[f"{start}{n}.base_layer.weight"].double().clone() for n in ("one", "two")}
        self.bias = {n: state[f"{start}{n}.base_layer.bias"].double() for n in ("one", "two")}
        self.trained = {n + x: state[f"{start}{n}.lora_{x}.default.weight"].double() for n in self.base for x in "AB"}
        self.trained |= {
            x: state[f"{start}head.modules_to_save.default.{x}"].double().clone() for x in ("weight", "bias")
        }
        self.mean_merged: dict[str, Tensor] = {}

    def loss(self, own: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        for n in ("one", "two"):
            x = torch.tanh(x @ self.merged(own)[n].T + self.bias[n])
        return F.cross_entropy(x @ own["weight"].T + own["bias"], y)

    def merged(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {n: base + self.scaling * own[n + "B"] @ own[n + "A"] for n, base in self.base.items()}

    def round(self, clients: Sequence[tuple[Tensor, Tensor]], weights: Sequence[float], steps: int) -> None:
        """Train clients, and average adapters and merged weights."""
        models = []
        for x, y in clients:
            own = {name: value.clone().requires_grad_() for name, value in self.trained.items()}
            for _ in range(steps):
                grads = torch.autograd.grad(self.loss(own, x.double(), y), list(own.values()))
                own = {
                    name: (value - self.lr * g).detach().requires_grad_()
                    for (name, value), g in zip(own.items(), grads, strict=True)
                }
            models.append({name: value.detach() for name, value in own.items()})
        shares = [weight / sum(weights) for weight in weights]
        merged = [self.merged(own) for own in models]
        self.mean_merged = {n: sum(p * one[n] for p, one in zip(shares, merged, strict=True)) for n in self.base}
        self.trained = {n: sum(p * own[n] for p, own in zip(shares, models, strict=True)) for n in self.trained}
        product = {n: self.scaling * self.trained[n + "B"] @ self.trained[n + "A"] for n in self.base}
        self.base = {n: self.mean_merged[n] - product[n] for n in self.base}  # by definition of the residual
