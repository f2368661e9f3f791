"""LoRA adapters of peft in a module."""

import sys
from collections import Counter
from typing import Any

import torch
from torch import nn

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.flat import FlatParameters
from lightning_fed.server.aggregation.lora import LoraPair


def _layers(module: nn.Module, lora: str) -> tuple[Any, list[tuple[str, Any]]]:
    """Return peft's package of LoRA layers, and the module's layers by name; raise if there are none."""
    package: Any = sys.modules.get("peft.tuners.lora")  # any module with such layers has imported it
    layers: list[tuple[str, Any]] = []
    if package is not None:
        layers = [(name, part) for name, part in module.named_modules() if isinstance(part, package.LoraLayer)]
    if not layers:
        raise FederatedError(
            f"lora={lora!r} is about LoRA layers of peft, and {type(module).__name__} has none. Make them with"
            " peft.get_peft_model(network, peft.LoraConfig(...)), or leave lora unset."
        )
    return package, layers


def lora_a(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the matrices A of all adapters by name; raise if there are none, or a weight is not linear in B."""
    _, layers = _layers(module, "frozen_a")
    for name, layer in layers:
        if layer.lora_variant.keys() & set(layer.active_adapters):
            raise FederatedError(
                f"lora='frozen_a' makes the mean of merged weights exact where they are base + scaling * B @ A, and"
                f" {name!r} has a variant of LoRA, such as DoRA, whose weights are not of this form. Use plain LoRA,"
                " or set lora='separate'."
            )
    parts = [part for _, layer in layers for part in (layer.lora_A, layer.lora_embedding_A)]
    found = {id(p) for part in parts for p in part.parameters()}
    return {name: p for name, p in module.named_parameters() if id(p) in found}


def lora_pairs(module: nn.Module, flat: FlatParameters) -> list[LoraPair]:
    """Return the adapters with two trained matrices; raise if there are none, or one does not allow an exact mean."""
    package, layers = _layers(module, "exact")
    ends = torch.tensor(flat.layout.sizes).cumsum(0).tolist()
    shared = zip(flat.params[: flat.num_shared], ends, flat.layout.sizes, strict=True)
    places = {id(p): slice(end - size, end) for p, end, size in shared}
    personal = {id(p) for p in flat.params[flat.num_shared :]}
    trained = {*places, *personal}
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    pairs: list[LoraPair] = []
    for name, layer in layers:
        for adapter in layer.active_adapters:
            matrices = [part[adapter].weight for part in (layer.lora_A, layer.lora_B) if adapter in part]
            known = len(matrices) == 2 and type(layer) is package.Linear
            if not (trained.issuperset(map(id, matrices)) if known else trained & set(map(id, layer.parameters()))):
                continue  # the product is linear in the trained matrix, so its mean is exact
            base: Any = layer.get_base_layer().weight if known else None
            reasons = {
                f"is {type(layer).__module__.removeprefix('peft.tuners.')}.{type(layer).__name__}, and only lora.Linear"
                " is supported": not known,
                "has a variant of LoRA, such as DoRA, whose merged weight is not base + scaling * B @ A": adapter
                in layer.lora_variant,
                "has merged its adapter into the base weight": layer.merged,
                "has matrices that stay with the clients (personal)": any(id(p) in personal for p in matrices),
                "has a base weight that is trained": known and id(base) in trained,
                "has a base weight that other layers use": known and uses[id(base)] != 1,
                f"has a base weight of {getattr(base, 'dtype', None)}, which cannot hold the residual": known
                and torch.promote_types(base.dtype, flat.y.dtype) != base.dtype,
            }
            for reason, holds in reasons.items():
                if holds:
                    raise FederatedError(
                        f"lora='exact' adds a residual to the base weights of adapters, and {name!r} {reason}. Leave"
                        " the layer out of target_modules, or set lora='separate' or 'frozen_a'."
                    )
            a, b = matrices
            scaling = float(layer.scaling[adapter])
            pairs.append(LoraPair(base, places[id(a)], places[id(b)], len(a), scaling, bool(layer.fan_in_fan_out)))
    if not pairs:
        raise FederatedError(
            f"lora='exact' corrects the mean of adapters whose matrices clients train both, and {type(module).__name__}"
            " has none. Leave lora unset: the mean is exact already."
        )
    return pairs
