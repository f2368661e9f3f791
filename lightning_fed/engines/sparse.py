"""Embeddings with ``sparse=True``: their gradients are dense wherever anything but plain SGD reads them."""

from collections.abc import Callable

from torch import nn

from lightning_fed.compat.private import rank_zero_warn

__all__ = ["densify"]


def densify(module: nn.Module) -> Callable[[], None]:
    """Let the embeddings of a module have dense gradients, which have the same numbers, and warn of it.

    Args:
        module: The module.

    Returns:
        A function that makes them sparse again.
    """
    found = {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse and layer.weight.requires_grad
    }
    if found:
        names = ", ".join(map(repr, found))
        rank_zero_warn(
            f"{names}: sparse=True has no effect in this run. Gradients are dense, with the same numbers, since the"
            " method, the optimizer, the engine or clipping needs all of their entries. Only engine='sequential' with"
            " a method that leaves gradients as they are, such as FedAvg, and plain SGD takes sparse gradients."
        )
    for layer in found.values():
        layer.sparse = False

    def undo() -> None:
        for layer in found.values():
            layer.sparse = True

    return undo
