"""Parameters that nobody trains, which must not change while clients train."""

from collections.abc import Collection, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from lightning_fed.core.devices import widened
from lightning_fed.core.errors import FederatedError
from lightning_fed.engines.prepared import PreparedModule

_ALL = 2**14  # tensors up to this size are compared in full
_SOME = 1_000  # numbers that are compared of larger ones, at least


class FrozenParameters:
    """Ensures that what nobody trains, such as the teacher of self-supervised methods, does not change in local work.

    Unlike buffers, these parameters are neither reset to the server's values for each client nor averaged, so that a
    change would reach the next clients. Those that are treated as buffers are not among their ``names``.
    """

    def __init__(self, prepared: PreparedModule) -> None:
        self._module, self._trained = prepared.module, prepared.flat.names
        trained, buffers = set(map(id, prepared.flat.params)), prepared.buffers.owners
        named = self._module.named_parameters()
        self.names = [name for name, p in named if id(p) not in trained and name not in buffers]
        self._has_summed = False  # the first clients' work is compared in sums of all numbers as well

    def read(self) -> list[object]:
        """Return what changes with the values, for :meth:`check`; a copy of all may not fit in memory."""
        found = [self._module.get_parameter(name).detach() for name in self.names]
        samples = _samples(found)
        if self._has_summed:
            return samples
        return [(sample, *_sums(value)) for sample, value in zip(samples, found, strict=True)]

    def changed(self, before: list[object]) -> str | None:
        """Return the first parameter that has changed since :meth:`read`, or None."""
        now = self.read() if before else []
        return next((name for name, value, then in zip(self.names, now, before, strict=False) if value != then), None)

    def check(self, before: list[object]) -> None:
        """Raise if a client's work has changed a parameter since :meth:`read`."""
        name, self._has_summed = self.changed(before), True
        if name is not None:
            raise FederatedError(
                f"{type(self._module).__name__} changes the parameter {name!r} while a client trains, though the"
                " optimizer does not train it: other clients would start from the changed one. Pass"
                f" as_buffers=[{_pattern_of(name, self._trained)!r}] to the trainer, with patterns for all such"
                " parameters: like buffers, they then start from the server's for every client, and are averaged."
            )


def _sums(value: Tensor) -> tuple[float, float]:
    wide = widened(value).nan_to_num()
    return float(wide.sum()), float(torch.linalg.vector_norm(wide))


def _samples(values: Sequence[Tensor]) -> list[object]:
    """Return the bytes of some numbers of each tensor, none of another kind; they leave the device together."""
    if not values:
        return []
    parts = [_sample(value) for value in values]
    content = torch.cat(parts).cpu().numpy().tobytes()
    ends = list(accumulate(map(len, parts)))
    return [content[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _sample(value: Tensor) -> Tensor:
    if value.layout != torch.strided or type(value) is not Tensor or not value.numel():
        return torch.empty(0, dtype=torch.uint8, device=value.device)
    flat = value.reshape(-1)[:: 1 if value.numel() <= _ALL else value.numel() // _SOME]
    return flat.contiguous().view(torch.uint8)


def _pattern_of(name: str, trained: Collection[str]) -> str:
    """Return the shortest pattern of a parameter and its neighbors that fits no trained parameter."""
    parts = name.split(".")
    roots = (".".join(parts[:depth]) + "." for depth in range(1, len(parts)))
    return next((f"{root}*" for root in roots if not any(own.startswith(root) for own in trained)), name)
