"""What one client must not change for others: settings, by its hooks, and parameters that nobody trains."""

from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fed.algorithms.base_optimizers import BaseOptimizer
from lightning_fed.callbacks.base import FederatedCallback, uses_hook
from lightning_fed.core.devices import widened
from lightning_fed.core.errors import FederatedError
from lightning_fed.engines.changes import METRICS, Snapshot, attribute_tensors, has_other_numbers, numbers_in, parts_of
from lightning_fed.engines.prepared import PreparedModule

CLIENT_HOOKS = ("on_client_start", "on_client_end")
"""The callbacks' hooks for single clients."""

_TRAINER = (
    "accumulate_grad_batches",
    "gradient_clip_algorithm",
    "gradient_clip_val",
    "limit_train_batches",
    "overfit_batches",
)
"""Attributes of the trainer that local work reads."""

_COPIED = 2**22  # tensors up to this size can be restored
_ALL = 2**14  # frozen parameters up to this size are compared in full
_SOME = 1_000  # numbers that are compared of larger ones, at least


class SettingsSnapshot:
    """Saves all settings, to restore them after a client, or if a round restarts.

    Settings are the inputs of local work: attributes of the module and its submodules, including collections, tensors
    and the training mode, frozen parameters and ``requires_grad``, options of the local optimizer, and attributes of
    the method, its base optimizer, the trainer (such as ``gradient_clip_val``) and the data module. Trained parameters
    and buffers are not saved: every client starts from the server's. Other effects of hooks cannot be undone. With
    ``with_callbacks``, attributes of callbacks with client hooks are included.
    """

    def __init__(self, prepared: PreparedModule, with_callbacks: bool = True) -> None:
        trainer: Any = prepared.trainer
        self._prepared = prepared
        callbacks = [
            callback
            for callback in trainer.callbacks
            if with_callbacks
            and isinstance(callback, FederatedCallback)
            and any(uses_hook(callback, h, FederatedCallback) for h in CLIENT_HOOKS)
        ]
        parts = [(name, part) for name, part in parts_of(prepared.module) if not isinstance(part, METRICS)]
        methods, groups = list(_methods(prepared)), prepared.optimizer.param_groups
        self._snapshot = Snapshot([part for _, part in (*parts, *methods)] + callbacks)
        for group in groups:  # each separately, for any number of parameters
            self._snapshot.add_options(group)
        if trainer.datamodule is not None:
            self._snapshot.add_attributes(trainer.datamodule)
        self._snapshot.add_attributes(trainer, *_TRAINER)
        self._snapshot.add_attributes(trainer.fit_loop, "corrected_clip")
        self._places = {  # kinds of settings and the start of their names, by owner
            id(trainer.datamodule): ("trainer", "datamodule."),
            id(trainer): ("trainer", ""),
            id(trainer.fit_loop): ("trainer", "fit_loop."),
            **{id(part): ("module", f"{name}." if name else "") for name, part in parts},
            **{id(part): ("method", name) for name, part in methods},
            **{id(group): ("optimizer", f"{number}.") for number, group in enumerate(groups)},
        }
        trained = set(map(id, prepared.flat.params))
        named: Any = prepared.module.named_parameters()
        tensors: list[tuple[str, str, Tensor]] = [("parameter", name, p) for name, p in named if id(p) not in trained]
        held = (pair for pair in attribute_tensors(parts) if not isinstance(pair[1], nn.Parameter))
        tensors += [("module", name, tensor) for (_, name), tensor in held]
        options = ((f"{n}.{name}", value) for n, group in enumerate(groups) for name, value in group.items())
        tensors += [("optimizer", name, value) for name, value in options if isinstance(value, Tensor)]
        noted = [(kind, name, tensor, numbers_in(tensor)) for kind, name, tensor in tensors]
        self._small = [(*own, own[2].detach().clone()) for own in noted if own[2].numel() <= _COPIED]
        self._large = [own for own in noted if own[2].numel() > _COPIED]

    def keep_changed(self, hook: str) -> None:
        """Forget what a hook has not changed, so that only its changes are restored; raise for a large tensor."""
        self._snapshot.keep_changed()
        self._small = [own for own in self._small if has_other_numbers(*own[2:])]
        for _, name, tensor, numbers in self._large:
            if numbers_in(tensor) != numbers:
                raise FederatedError(
                    f"{hook} changes {name!r} of {type(self._prepared.module).__name__} in place: {tensor.numel():,}"
                    " numbers, too many to keep a copy of for the other clients. Assign another tensor to an"
                    " attribute, or make it part of the client's data."
                )
        self._large = []

    def changed(self) -> str | None:
        """Return a setting that has changed by now, for messages, or None."""
        written = [own[:2] for own in self._small if has_other_numbers(*own[2:])]
        written += [own[:2] for own in self._large if numbers_in(own[2]) != own[3]]
        for kind, name in written:
            return named_setting(self._prepared, kind, name)
        if (found := self._snapshot.changed()) is None:
            return None
        kind, start = self._places[id(found[0])]
        return named_setting(self._prepared, kind, start + found[1])

    def restore(self) -> None:
        """Restore everything, or after :meth:`keep_changed` what a hook had changed.

        Raise for a changed large tensor, since it has no copy.
        """
        self._snapshot.restore()
        with torch.no_grad():
            for _, _, tensor, _, copied in self._small:
                tensor.copy_(copied)
        for _, name, tensor, numbers in self._large:
            if numbers_in(tensor) != numbers:
                raise FederatedError(
                    f"A hook of single clients has changed {name!r} of {type(self._prepared.module).__name__} in place,"
                    f" and engine={self._prepared.settings.engine!r} cannot put it back to begin the round again. Use"
                    " engine='sequential'."
                )


def named_setting(prepared: PreparedModule, kind: str, name: str) -> str:
    """Return a setting for messages, given its kind ("module", "optimizer" ...) and name."""
    if kind == "module":
        return f"the attribute {name!r} of {type(prepared.module).__name__}"
    if kind == "parameter":
        return f"the frozen parameter {name!r} of {type(prepared.module).__name__}"
    if kind == "optimizer":
        group, _, option = name.partition(".")
        of_group = f" in its group {group}" if len(prepared.optimizer.param_groups) > 1 else ""
        what = "the learning rate" if option == "lr" else f"the option {option!r}"
        return f"{what} of the local optimizer{of_group}"
    if kind == "method":
        return f"the attribute {name!r} of {type(prepared.algorithm).__name__}"
    return f"trainer.{name}"


def _methods(prepared: PreparedModule) -> Iterator[tuple[str, Any]]:
    """Yield the method, its base optimizer and its inner solve, with the prefixes of their attributes."""
    for name, method in (("", prepared.algorithm), ("own_solve.", prepared.algorithm.own_solve)):
        if method is None:
            continue
        yield name, method
        for key, part in vars(method).items():
            if isinstance(part, BaseOptimizer):
                yield f"{name}{key}.", part


class FrozenParameters:
    """Ensures that what nobody trains, such as the teacher of self-supervised methods, does not change in local work.

    Unlike buffers, these parameters are neither reset to the server's values for each client nor averaged, so that a
    change would reach the next clients. Those that are treated as buffers are not among their ``names``.
    """

    def __init__(self, prepared: PreparedModule) -> None:
        self._module, self._trained, self._prepared = prepared.module, prepared.flat.names, prepared
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
            self._prepared.check_parameters()  # a step may have unfrozen it, for the optimizer to train
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
