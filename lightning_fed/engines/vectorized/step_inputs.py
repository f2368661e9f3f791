"""What a method's correction may read in a local step, as tensors in a fixed order."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_fed.core.flat import Layout
from lightning_fed.core.rounds import Step
from lightning_fed.core.types import State
from lightning_fed.core.watched import Watched
from lightning_fed.engines.base import RoundInputs

__all__ = ["StepInputs"]


class StepInputs:
    """What stays as it is from local step to local step, for the clients of a chunk.

    Args:
        inputs: What the server hands out.
        layout: The parameters' shapes.
        examples: The clients' numbers of examples [S].
        clients: Their kept states, stacked: vectors [S, P], numbers [S].
        full_grad: Their full-batch gradients by point [S, P].
        lr: The learning rate; per coordinate [P] where groups have different ones.

    Attributes:
        shared: What is the same for all clients.
        own: What is each client's own, stacked [S, ...].
        read: The names of the server's state and of mean gradients that were read.
    """

    def __init__(
        self,
        inputs: RoundInputs,
        layout: Layout,
        examples: Tensor,
        clients: State,
        full_grad: State,
        lr: float | Tensor,
    ) -> None:
        server, cohort_grad = inputs.server.unwatched(), inputs.cohort_grad.unwatched()
        x = inputs.x
        mean = torch.tensor(inputs.mean_examples, dtype=x.dtype, device=x.device)
        rate = torch.as_tensor(lr, dtype=x.dtype, device=x.device)
        self._layout = layout
        self._names = [tuple(state) for state in (server, cohort_grad, clients, full_grad)]
        self.shared = [x, mean, rate, *server.values(), *cohort_grad.values()]
        self.own = [examples, *clients.values(), *full_grad.values()]
        self.read: dict[str, set[str]] = {"server": set(), "cohort_grad": set()}

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """What decides how the tensors are used, the same for any number of clients."""
        own = tuple((value.shape[1:], value.dtype) for value in self.own)
        return *self._names, *((value.shape, value.dtype) for value in self.shared), *own

    def whole(self, shared: Sequence[Tensor], own: Sequence[Tensor], local: State) -> Step:
        """Return what hooks of whole vectors read of one client.

        Args:
            shared: What is the same for all clients, in the order of :attr:`shared`.
            own: What is the client's own, in the order of :attr:`own`, without the dimension of clients.
            local: Its state of this round.
        """
        server_names, grad_names, client_names, full_names = self._names
        x, mean, lr, *states = shared
        examples, *own_states = own
        server, cohort_grad = _named(server_names, states), _named(grad_names, states[len(server_names) :])
        client, full_grad = _named(client_names, own_states), _named(full_names, own_states[len(client_names) :])
        watched = Watched(server, self.read["server"]), Watched(cohort_grad, self.read["cohort_grad"])
        return Step(x, watched[0], client, local, None, full_grad, watched[1], examples, mean, lr)

    def point(self, shared: Sequence[Tensor], name: str) -> list[Tensor]:
        """Return the parameters at a point that the method names: x, or an entry of the server's state."""
        if name == "x":
            return self._layout.views(shared[0])
        return self._layout.views(shared[3 + self._names[0].index(name)])


def _named(names: Sequence[str], tensors: Sequence[Tensor]) -> State:
    return dict(zip(names, tensors, strict=False))
