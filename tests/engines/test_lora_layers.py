"""The mean of adapters, with stand-ins for the layers of peft, which takes seconds to import."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fed import FederatedCallback, FederatedError
from tests.helpers.adapters import StandIn, exact_trainer, stand_in
from tests.helpers.training import data

LAYERS = ("one", "two")


def layer_of(module: Any, name: str) -> Any:
    return module.net["base_model"]["model"][name]


def merged(module: Any) -> dict[str, Tensor]:
    """Return the weights of the layers with their adapters."""
    found = {}
    for name in LAYERS:
        layer = layer_of(module, name)
        base = layer.base_layer.weight
        product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        found[name] = ((base.t() if layer.fan_in_fan_out else base) + 2.5 * product).detach().clone()
    return found


class Ends(FederatedCallback):
    """Compares the server's merged weights with the mean of the clients'."""

    def __init__(self) -> None:
        self.of_clients: dict[Any, dict[str, Tensor]] = {}
        self.rounds, self.gap = 0, 0.0

    def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
        self.of_clients[client_report.client_id] = merged(pl_module)

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        found, self.rounds = merged(pl_module), self.rounds + 1
        for name in LAYERS:
            mean = sum(p * self.of_clients[i][name] for i, p in round_report.weights.items())
            self.gap = max(self.gap, float((found[name] - mean).abs().max()))


@pytest.mark.parametrize(
    ("engine", "clients_per_round"),
    [("sequential", 2), pytest.param("vectorized", 3, marks=pytest.mark.thorough)],
)
def test_merged_weights_match_the_mean_of_the_client_weights(
    engine: str, clients_per_round: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, module = Ends(), stand_in(monkeypatch)
    start = {name: layer_of(module, name).base_layer.weight.double().clone() for name in LAYERS}
    options = {"clients_per_round": clients_per_round, "engine": engine, "max_rounds": 2, "limit_val_batches": 0}
    exact_trainer(callbacks=[ends], **options).fit(module, data())
    assert ends.rounds == 2
    assert ends.gap < 1e-12
    for name in LAYERS:
        assert float((layer_of(module, name).base_layer.weight - start[name]).abs().max()) > 1e-4  # far above 1e-12


@pytest.mark.parametrize("personal", [[], ["*lora_A*"]])
def test_matrix_is_frozen_only_during_the_fit(personal: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    module = stand_in(monkeypatch)
    start = layer_of(module, "one").lora_A["default"].weight.double().clone()
    trainer = exact_trainer(lora="frozen_a", max_rounds=1, limit_val_batches=0, personal=personal)
    if not personal:
        trainer.fit(module, data())
        assert torch.equal(layer_of(module, "one").lora_A["default"].weight, start)
    else:
        with pytest.raises(FederatedError, match="fits no trained parameter"):
            trainer.fit(module, data())
    assert all(p.requires_grad for name, p in module.named_parameters() if "lora" in name)


def share_base(module: StandIn) -> None:
    module.other = nn.Linear(1, 1)
    module.other.weight = layer_of(module, "one").base_layer.weight


def halve_base(module: StandIn) -> None:
    layer = layer_of(module, "one").base_layer
    layer.weight.data = layer.weight.data.bfloat16()


REFUSED: dict[str, tuple[Callable[[StandIn], Any], dict[str, Any], str]] = {
    "variant": (lambda m: layer_of(m, "one").lora_variant.update(default=1), {}, "has a variant of LoRA, such as DoRA"),
    "trained base": (
        lambda m: layer_of(m, "one").base_layer.weight.requires_grad_(True),
        {},
        "has a base weight that is trained",
    ),
    "shared base": (share_base, {}, "has a base weight that other layers use"),
    "bfloat16": (halve_base, {"precision": "32-true"}, "has a base weight of torch.bfloat16, which cannot hold"),
    "merged": (lambda m: setattr(layer_of(m, "one"), "merged", True), {}, "has merged its adapter into the base"),
    "personal": (lambda m: None, {"personal": ["*lora_A*"]}, "has matrices that stay with the clients"),
    "frozen": (
        lambda m: [layer_of(m, name).lora_A.requires_grad_(False) for name in LAYERS],
        {},
        "the mean is exact already",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_layers_without_an_exact_mean_are_rejected(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, options, told = REFUSED[case]
    module = stand_in(monkeypatch)
    change(module)
    with pytest.raises(FederatedError, match=told):
        exact_trainer(num_sanity_val_steps=0, **options).fit(module, data())
