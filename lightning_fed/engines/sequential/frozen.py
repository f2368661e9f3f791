"""Frozen parameters must stay as they are while a client trains: the next client would find what this one has left."""

import torch
from torch import Tensor, nn

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.flat import FlatParameters

__all__ = ["Frozen"]


class Frozen:
    """Notice that local work changes parameters that are not trained, such as the teacher of self-supervised methods.

    Such parameters neither start from the server's for each client nor are averaged, as buffers are. One client's work
    is looked at, by sums over the parameters, so that no copy of a large frozen model is made.

    Args:
        module: The module.
        flat: Its trained parameters.
    """

    def __init__(self, module: nn.Module, flat: FlatParameters) -> None:
        trained = {id(p) for p in flat.params}
        self._module = module
        self._parameters = {name: p for name, p in module.named_parameters() if id(p) not in trained}
        self._before: dict[str, tuple[float, float]] = {}

    def remember(self) -> None:
        """Take note of the parameters before a client's work."""
        self._before = {name: _sums(p) for name, p in self._parameters.items()}

    def check(self) -> None:
        """Compare the parameters after the client's work.

        Raises:
            FederatedError: If one has changed, naming it.
        """
        for name, p in self._parameters.items():
            if _sums(p) != self._before[name]:
                raise FederatedError(
                    f"{type(self._module).__name__} changes the parameter {name!r} while a client trains, though it is"
                    " frozen (requires_grad=False): other clients would start from the changed one. Make it a buffer"
                    " with register_buffer(): buffers start from the server's for every client, and are averaged."
                )


def _sums(p: Tensor) -> tuple[float, float]:
    """Return two numbers that change with the values of a parameter; NaN becomes 0."""
    value = p.detach().double().nan_to_num()
    return float(value.sum()), float(torch.linalg.vector_norm(value))
