"""Labels that are looked up when their values are first used: a partition may only need to know how many there are."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["LazyLabels", "lazy_labels"]

_SHAPE_ONLY = {
    Tensor.__len__,
    Tensor.dim,
    Tensor.ndimension,
    Tensor.nelement,
    Tensor.numel,
    Tensor.size,
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
    torch.numel,
}


class LazyLabels(Tensor):
    """Labels [n] of which only the number is known as yet; any other use of the tensor looks up the values."""

    _look_up: Callable[[], Tensor]
    _found: Tensor | None = None

    @property
    def values_used(self) -> Tensor | None:
        """The values, None if they have not been used."""
        return self._found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of PyTorch on the values."""
        if func in _SHAPE_ONLY:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map_only(LazyLabels, _values_of, (args, kwargs or {}))
        return func(*args, **kwargs)


def lazy_labels(size: int, look_up: Callable[[], Tensor]) -> LazyLabels:
    """Return labels that are looked up when their values are used.

    Args:
        size: Their number n.
        look_up: Returns the labels [n].

    Example:
        >>> labels = lazy_labels(3, lambda: torch.tensor([5, 7, 5]))
        >>> len(labels), labels.values_used is None, (labels == 5).tolist()
        (3, True, [True, False, True])
    """
    blank = torch.zeros(1, dtype=torch.int64).expand(size)  # n labels in the memory of one
    labels: LazyLabels = blank.as_subclass(LazyLabels)
    labels._look_up = look_up
    return labels


def _values_of(labels: LazyLabels) -> Tensor:
    if labels._found is None:
        labels._found = labels._look_up()
    return labels._found
