"""Graphs of functions of tensors that are called over and over: what PyTorch does, without the Python around it."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_fed._compat import rank_zero_warn
from lightning_fed.engines.graphs import simplify, update_in_place

__all__ = ["PASSING", "Traces", "marks"]

Values: TypeAlias = dict[str, tuple[Tensor, int | None]]
"""What was logged by name: the value, and the ``batch_size`` given with it."""

Found: TypeAlias = tuple[Sequence[Tensor], Tensor, Values]
"""Gradients, loss and logged values."""

PASSING = ("log", "log_dict", "_trainer", "_current_fx_name", "_metric_attributes")
"""Attributes of modules that Lightning and this package set and take back."""


class Traces:
    """Traces of functions by key, each made when it is first asked for.

    A trace repeats what Python decided when it was made. Whoever holds the traces must therefore forbid them where
    Python may decide otherwise later, drop them when something has changed, and check them now and then. What is traced
    must not depend on what was run before: a trace rounds otherwise, and a resumed run has the same bits.
    """

    def __init__(self) -> None:
        self.allowed = True
        self._made: dict[Any, Callable[..., Found]] = {}

    def __len__(self) -> int:
        """The number of traces."""
        return len(self._made)

    def forbid(self) -> None:
        """Drop all traces and make no others."""
        self.allowed = False
        self._made.clear()

    def drop(self) -> None:
        """Drop all traces; they are made anew."""
        self._made.clear()

    def get(self, key: Any, function: Callable[..., Found], flat: Sequence[Tensor]) -> Callable[..., Found] | None:
        """Return the trace of a function, None if there can be none.

        Args:
            key: What decides the function and the shapes.
            function: From tensors to gradients, loss and logged values.
            flat: The tensors.
        """
        if key not in self._made:
            if not self.allowed or (traced := self._trace(function, flat)) is None:
                return None
            module, sizes = traced
            self._made[key] = _Call(module.forward, sizes)
        return self._made[key]

    def get_step(
        self, key: Any, function: Callable[..., Found], flat: Sequence[Tensor], count: int
    ) -> Callable[..., Found] | None:
        """Return the trace of a function that steps its first ``count`` tensors by a factor, its last argument.

        It returns no gradients. Otherwise as :meth:`get`.
        """
        if key not in self._made:
            if not self.allowed or (traced := self._trace(function, flat)) is None:
                return None
            module, sizes = traced
            update_in_place(module.graph, count)
            module.recompile()
            self._made[key] = _Call(module.forward, sizes)
        return self._made[key]

    def _trace(
        self, function: Callable[..., Found], flat: Sequence[Tensor]
    ) -> tuple[fx.GraphModule, dict[str, int | None]] | None:
        sizes: dict[str, int | None] = {}

        def outputs(*tensors: Tensor) -> list[Tensor]:
            grads, loss, values = function(*tensors)
            sizes.update({name: size for name, (_, size) in values.items()})
            return [*grads, loss, *(value for value, _ in values.values())]

        try:
            with torch.no_grad():
                module = make_fx(outputs)(*flat)
        except Exception as error:
            self.forbid()
            rank_zero_warn(f"Local steps run untraced, which is slower: {type(error).__name__} in tracing ({error}).")
            return None
        if not self.allowed:  # the function has forbidden it
            return None
        simplify(module.graph)
        module.recompile()
        return module, sizes


class _Call:
    """A traced function.

    Args:
        forward: From tensors to gradients, if there are any, the loss and the logged values, in one list.
        sizes: The ``batch_size`` of each logged value, by name.
    """

    def __init__(self, forward: Callable[..., list[Tensor]], sizes: dict[str, int | None]) -> None:
        self._forward = forward
        self._sizes = sizes
        self._start = -len(sizes) - 1

    def __call__(self, *arguments: Any) -> Found:
        """Return gradients, loss and logged values."""
        with torch.no_grad():
            out = self._forward(*arguments)
        names = self._sizes.items()
        values = {
            name: (value, size)
            for (name, size), value in zip(names, out[self._start + 1 :] if names else [], strict=True)
        }
        return out[: self._start], out[self._start], values


def marks(module: nn.Module) -> dict[tuple[str, str], Any]:
    """Return, by module and attribute, what changes when an attribute is set, a collection grows, a tensor is written.

    Parameters and buffers are not looked at.
    """
    return {
        (name, key): _mark(value)
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if key not in PASSING
    }


def _mark(value: Any) -> Any:
    if isinstance(value, (int, float, str, bool, type(None))):
        return value
    if isinstance(value, Tensor):
        return id(value), value._version
    return id(value), len(value) if isinstance(value, (list, dict, set)) else 0
