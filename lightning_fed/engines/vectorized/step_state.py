"""What a step of a module may leave behind: compared by name, identity and value, and put back."""

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from lightning_fed.core.seeds import foreign_state
from lightning_fed.engines.vectorized.changes import (
    INTERNAL,
    METRICS,
    PASSING,
    changed,
    class_data,
    class_marks,
    holders,
    marks,
    own_classes,
    parts_of,
    tensor_marks,
    values_in,
    version_of,
)

__all__ = ["StepState"]

_Restore: TypeAlias = Callable[[], Any]


class StepState:
    """The state of a module before a step: parameters, buffers, metrics and attributes, of submodules too.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.foreign = foreign_state()
        self._parts = list(parts_of(module))
        self._tensors = tensor_marks(module, with_trained=True)
        self._attributes, self._classes = marks(module), class_marks(module)
        self._metrics = {name: _metric_marks(part) for name, part in self._parts if isinstance(part, Metric)}
        held = [*_own_tensors(self._parts), *_attribute_tensors(self._parts)]
        self._values = [(key, value, value.detach().clone()) for key, value in held if _is_plain(value)]
        self._restorers = list(_restorers(self._parts))

    def changed_tensor(self, kind: str) -> str | None:
        """Return the name of a "buffer" or "parameter" that was assigned, changed in place, added or removed."""
        before, after = self._tensors, tensor_marks(self.module, with_trained=True)
        key = next((k for k in (*before, *after) if k[0] == kind and before.get(k) != after.get(k)), None)
        if key is None:  # `.data` changes values without notice
            key = next((k for k, value, was in self._values if k[0] == kind and not _same(value, was)), None)
        return None if key is None else key[1]

    def changed_metric(self) -> str | None:
        """Return the name of a metric object that was updated."""
        parts = dict(self._parts)
        return next((name for name, before in self._metrics.items() if _metric_marks(parts[name]) != before), None)

    def changed_attribute(self) -> str | None:
        """Return the name of an attribute of a module or of its class that has changed."""
        written = (key[1] for key, value, was in self._values if key[0] == "attribute" and not _same(value, was))
        return (
            changed(self._attributes, marks(self.module))
            or changed(self._classes, class_marks(self.module))
            or next(written, None)
        )

    def restore(self) -> None:
        """Give modules the attributes, tensors and metrics that they had, with their values and contents."""
        for restore in self._restorers:
            restore()
        for _, value, was in self._values:
            if not _same(value, was):
                value.data.copy_(was)


def _is_plain(value: Tensor) -> bool:
    """Whether a tensor has values that can be compared and written."""
    is_odd = value.is_inference() or value.is_quantized or value.is_meta or is_lazy(value)
    return value.layout is torch.strided and not is_odd


def _same(value: Tensor, was: Tensor) -> bool:
    if torch.equal(value, was):
        return True
    return value.is_floating_point() and torch.allclose(value, was, rtol=0.0, atol=0.0, equal_nan=True)


def _metric_marks(metric: Any) -> Any:
    states = ((name, getattr(metric, name)) for name in metric._defaults)
    return metric._update_count, [(name, id(value), _content(value)) for name, value in states]


def _content(state: Any) -> Any:
    return version_of(state) if isinstance(state, Tensor) else len(state)


def _own_tensors(parts: list[tuple[str, nn.Module]]) -> Iterator[tuple[tuple[str, str], Tensor]]:
    for prefix, part in parts:
        for kind, own in (("parameter", part._parameters), ("buffer", part._buffers)):
            for name, value in own.items():
                if value is not None:
                    yield (kind, f"{prefix}.{name}" if prefix else name), value


def _attribute_tensors(parts: list[tuple[str, nn.Module]]) -> Iterator[tuple[tuple[str, str], Tensor]]:
    for prefix, part in parts:
        for name, attribute in vars(part).items():
            if name in INTERNAL or name in PASSING:
                continue
            kind = "metric" if isinstance(part, METRICS) else "attribute"
            for value in values_in(attribute):
                if isinstance(value, Tensor):
                    yield (kind, f"{prefix}.{name}" if prefix else name), value


def _restorers(parts: list[tuple[str, nn.Module]]) -> Iterator[_Restore]:
    """Yield what puts attributes, contents of collections, classes and generators back."""
    for _, part in parts:
        held = dict(vars(part))
        yield partial(_put_back, part.__dict__, held)
        for name, value in held.items():
            if name in INTERNAL:
                if isinstance(value, (dict, set)):
                    yield _refill(value)
            elif name not in PASSING:
                yield from map(_refill, holders(value))
                yield from filter(None, map(_rewind, values_in(value)))
    for cls in own_classes(part for _, part in parts):
        data = class_data(cls)
        yield partial(_put_back_class, cls, data)
        for value in data.values():
            yield from map(_refill, holders(value))


def _put_back(now: dict[str, Any], held: dict[str, Any]) -> None:
    for key in now.keys() - held.keys() - set(PASSING):
        del now[key]
    now.update({key: value for key, value in held.items() if key not in PASSING})


def _put_back_class(cls: type, data: dict[str, Any]) -> None:
    for name in class_data(cls).keys() - data.keys():
        delattr(cls, name)
    for name, value in data.items():
        if vars(cls).get(name) is not value:
            setattr(cls, name, value)


def _refill(value: Any) -> _Restore:
    content = copy.copy(value)

    def restore() -> None:
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(content)

    return restore


def _rewind(value: Any) -> _Restore | None:
    """Return what sets a generator back to where it is now; None for anything else."""
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return partial(value.set_state, state)
    if type(value) is random.Random:
        python = value.getstate()
        return partial(value.setstate, python)
    if isinstance(value, np.random.RandomState):
        legacy = value.get_state(legacy=False)
        return partial(value.set_state, legacy)
    if isinstance(value, np.random.Generator):
        numpy = copy.deepcopy(value.bit_generator.state)
        return partial(setattr, value.bit_generator, "state", numpy)
    return None
