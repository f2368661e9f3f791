"""Embeddings with ``sparse=True``: their gradients are dense wherever anything but plain SGD reads them."""

from collections.abc import Mapping

from torch import nn

from lightning_fed.compat.private import rank_zero_warn

__all__ = ["make_dense", "sparse_embeddings"]


def sparse_embeddings(module: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """Return the trained layers of a module that have sparse gradients, by name."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse and layer.weight.requires_grad
    }


def make_dense(layers: Mapping[str, nn.Embedding | nn.EmbeddingBag]) -> None:
    """Give layers dense gradients, which have the same numbers, and warn of it."""
    rank_zero_warn(
        f"{', '.join(map(repr, layers))}: sparse=True has no effect in this run. Gradients are dense, with the same"
        " numbers, since the method, the optimizer, the engine or clipping needs all of their entries. Only"
        " engine='sequential' with a method that leaves gradients as they are, such as FedAvg, and plain SGD takes"
        " sparse gradients."
    )
    for layer in layers.values():
        layer.sparse = False
