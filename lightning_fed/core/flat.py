"""The trainable parameters of a module as views of one flat vector."""

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import State, Vector

_SMALL = 2**16  # a CPU is faster on one vector than on its parts up to this size


class Layout:
    """The layout of a flat vector [P] as tensors of given shapes, in order.

    Example:
        >>> import torch
        >>> [v.shape for v in Layout([torch.Size([2, 3]), torch.Size([2])]).views(torch.zeros(8))]
        [torch.Size([2, 3]), torch.Size([2])]
    """

    def __init__(self, shapes: Iterable[torch.Size]) -> None:
        self.shapes = list(shapes)
        self.sizes = [shape.numel() for shape in self.shapes]
        self.numel = sum(self.sizes)

    def views(self, vector: Vector) -> list[Tensor]:
        """Return one view of ``vector`` [P] per shape."""
        return [part.view(shape) for part, shape in zip(vector.split(self.sizes), self.shapes, strict=True)]

    def stacked_views(self, vectors: Tensor) -> list[Tensor]:
        """Return one view [n, *shape] of ``vectors`` [n, P] per shape."""
        parts = zip(vectors.split(self.sizes, dim=1), self.shapes, strict=True)
        return [part.view(len(vectors), *shape) for part, shape in parts]

    def joined(self, parts: Sequence[Tensor]) -> Vector:
        """Return a vector [P] with copies of these parts, one tensor per shape."""
        return torch.cat([part.reshape(-1) for part in parts])

    def joined_state(self, columns: Sequence[State], like: State) -> State:
        """Return the inverse of :meth:`state_views`; the entries of ``like`` show which are vectors."""
        return {
            name: self.joined([column[name] for column in columns])
            if value.shape == (self.numel,)
            else columns[0][name]
            for name, value in like.items()
        }

    def state_views(self, state: State) -> list[State]:
        """Return ``state`` once per shape: vectors become views, other entries (0-dim, odd shapes) are unchanged."""
        columns = [self.views(v) if v.shape == (self.numel,) else [v] * len(self.shapes) for v in state.values()]
        rows = zip(*columns, strict=True) if columns else [()] * len(self.shapes)
        return [dict(zip(state, row, strict=True)) for row in rows]


class FlatParameters:
    """Parameters of a module as views of one vector ``whole`` [P + Q].

    The parameter objects stay the same, so optimizers, tied weights and hooks keep working. Loading a model is one copy
    into ``y``, the first P numbers, which server and clients exchange. The other Q numbers, :attr:`personal`, stay on
    each client.

    Args:
        named: (name, parameter) pairs, without duplicates, in the module's order.
        personal: The names of personal parameters; they come last.

    Attributes:
        names: The names of all parameters, in the order of the vector.
        params: The parameters.
        views: The parameters' views of ``whole``.
        num_shared: The number of exchanged parameters.
        numel: The number of exchanged trainable numbers, P.
        joins: Whether gradients are joined into one vector for elementwise work. That costs a copy and saves a kernel
            per parameter and operation, which pays off unless the vector exceeds a CPU's cache.
        layout: The shapes of the parameters in ``y``.
        whole_layout: The shapes of all parameters.

    Raises:
        FederatedError: If there is no parameter, or if they differ in dtype or device.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], personal: Collection[str] = frozenset()) -> None:
        if not named:
            raise FederatedError(
                "The model has no trainable parameter in its optimizer: set requires_grad=True on what should be"
                " trained and pass it to the optimizer in configure_optimizers()."
            )
        shared = [pair for pair in named if pair[0] not in personal]
        named = [*shared, *(pair for pair in named if pair[0] in personal)]
        self.names = [name for name, _ in named]
        self.params = [p for _, p in named]
        kinds: dict[tuple[torch.dtype, torch.device], str] = {}
        for name, p in named:
            kinds.setdefault((p.dtype, p.device), name)
        if len(kinds) > 1:
            found = ", ".join(f"{name!r} is {dtype} on {device}" for (dtype, device), name in kinds.items())
            raise FederatedError(
                f"Trainable parameters must share one dtype and one device, found: {found}. Convert them (a complex"
                " one to a real one [..., 2], which torch.view_as_complex(weight.clone()) reads), or freeze the others"
                " with requires_grad_(False)."
            )
        self.num_shared = len(shared)
        self.layout = Layout(p.shape for p in self.params[: self.num_shared])
        self.numel = self.layout.numel
        self.whole_layout = Layout(p.shape for p in self.params)
        self.whole: Vector = torch.cat([p.detach().reshape(-1) for p in self.params])
        self.y: Vector = self.whole[: self.layout.numel]
        self.personal: Vector = self.whole[self.layout.numel :]
        self.joins = self.whole.device.type != "cpu" or self.layout.numel <= _SMALL
        self.views = self.whole_layout.views(self.whole)
        self._places = [view.data_ptr() for view in self.views]
        self.bind()

    def cut(self, vector: Vector) -> list[Tensor]:
        """Return one view per parameter, for a vector of all parameters [P + Q] or of the exchanged ones [P]."""
        return (self.layout if len(vector) == self.layout.numel else self.whole_layout).views(vector)

    def bind(self, views: Sequence[Tensor] | None = None) -> None:
        """Bind the parameters to these tensors of equal shapes, by default to ``whole``.

        Personal parameters stay bound if no tensors are given for them.
        """
        for p, view in zip(self.params, self.views if views is None else views, strict=False):
            p.data = view

    def gather(self) -> None:
        """Copy parameters that ``p.data = ...`` bound to other tensors into ``whole``, and bind them to it."""
        if list(map(Tensor.data_ptr, self.params)) != self._places:
            for p, view in zip(self.params, self.views, strict=True):
                view.copy_(p.detach())
            self.bind()

    def release(self) -> None:
        """Give every parameter its own storage, with the same values."""
        self.bind([p.detach().clone() for p in self.params])


def trained_parameters(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    """Return the optimizer's trainable parameters, in the module's order, tied ones once.

    Raises:
        FederatedError: If the optimizer has parameters that are not the module's.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad and id(p) in held]
    unexpected = len([1 for g in optimizer.param_groups for p in g["params"] if p.requires_grad]) - len(named)
    if unexpected > 0:
        raise FederatedError(
            f"{type(module).__name__}.configure_optimizers() returned an optimizer with {unexpected} parameters that"
            " are not the module's own: server and clients could not exchange them. Assign them to the module."
        )
    return named
