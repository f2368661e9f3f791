"""What one client must not change for others: settings, by its hooks, and parameters that nobody trains."""

from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_fed.algorithms.base_optimizers import BaseOptimizer
from lightning_fed.callbacks.base import FederatedCallback, any_uses_hook, uses_hook
from lightning_fed.core.devices import widened
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.engines.base import OnlySequentialError
from lightning_fed.engines.changes import (
    INTERNAL,
    METRICS,
    PASSING,
    Snapshot,
    attribute_tensors,
    describe,
    numbers_in,
    parts_of,
)
from lightning_fed.engines.gradients import buffer_owners
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

_DATA = "datamodule."
_COPIED = 2**22  # tensors up to this size can be restored
_ALL = 2**14  # frozen parameters up to this size are compared in full
_SOME = 1_000  # numbers that are compared of larger ones, at least

Settings: TypeAlias = dict[tuple[str, str], Any]
"""The values of settings by kind ("module", "optimizer" ...) and name. Equal values compare equal."""


class ClientSettings:
    """Ensures that clients that train together have the settings that each would have alone.

    Hooks may set attributes of the module, options of the optimizer and others for one client. The vectorized engine
    calls the hooks of several clients before it trains any of them, so all must set the same values. Nothing is
    compared if no callback of the user has such a hook: those of this package set nothing.

    Settings are the inputs of local work: attributes of the module and its submodules, including collections, tensors
    and the training mode, frozen parameters, options of the local optimizer, and attributes of the method, its base
    optimizer, the trainer (such as ``gradient_clip_val``) and the data module. Trained parameters and buffers are not
    compared: every client starts from the server's.
    """

    def __init__(self, prepared: PreparedModule) -> None:
        self.trainer: Any = prepared.trainer
        self._prepared, self.module = prepared, prepared.module
        self._trained = set(map(id, prepared.flat.params))
        self.is_needed = False  # whether a user's callback has client hooks in this round
        self._at_start: Settings = {}  # at the start of the round
        self._buffers: list[int] = []  # ids of buffers at that time
        self._first: tuple[ClientId, Settings] | None = None  # the first client of the chunk whose hooks ran
        self._worked: tuple[ClientId, Settings] | None = None  # a client of this round that has trained
        self._after: Settings = {}  # after the last chunk's training
        self._alive: list[Any] = []  # objects that settings of the data module are compared by

    def begin_round(self) -> None:
        """Record all settings, if hooks may change them for single clients."""
        self.is_needed = any_uses_hook(self.trainer, *CLIENT_HOOKS, of_users=True)
        self._first = self._worked = None
        if self.is_needed:
            self._alive.clear()
            self._after = {}
            self._at_start, self._buffers = self._now(), self._buffers_now()

    def client_started(self, client_id: ClientId) -> None:
        """Raise if the settings after a client's hook differ from those of the first client of the chunk."""
        if not self.is_needed:
            return
        if self._first is None:
            self._first = client_id, self._now(with_data=True)
            return
        first, settings = self._first
        for kind, name in _differing(settings, self._now(with_data=True)):
            raise self._refusal(f"on_client_start changes {self._name(kind, name)} for client {client_id!r}", first)

    def check(self, clients: Sequence[ClientId]) -> set[str]:
        """Return the kinds of settings that changed since the round began; called before a chunk's work.

        Raises if other clients of this round worked with other settings.
        """
        first, self._first = self._first, None
        client_id, now = first or (clients[0], self._now(with_data=True))
        worked, self._worked = self._worked, (client_id, now)
        if worked is not None:
            other, before = worked
            for kind, name in _differing(_without_data(before), _without_data(now)):
                raise self._refusal(f"a hook changes {self._name(kind, name)} before client {client_id!r}", other)
            return set()
        kinds = {kind for kind, _ in _differing(self._at_start, _without_data(now))}
        return kinds if self._buffers == self._buffers_now() else {*kinds, "buffer"}

    def worked(self) -> None:
        """Record settings after the clients of a chunk trained."""
        if any_uses_hook(self.trainer, "on_client_end", of_users=True):
            self._after = self._now(with_data=True)

    def client_ended(self, client_id: ClientId) -> None:
        """Raise if a client's hook changed settings, since the next clients have already trained."""
        if not any_uses_hook(self.trainer, "on_client_end", of_users=True):
            return
        for kind, name in _differing(self._after, self._now(with_data=True)):
            raise OnlySequentialError(
                f"engine='vectorized' cannot give each client its own settings: on_client_end changes"
                f" {self._name(kind, name)} after client {client_id!r}, and others were trained together with it. Set"
                " it in on_round_start for all clients, or use engine='sequential'. Keep notes in the callback."
            )

    def _refusal(self, what: str, other: ClientId) -> OnlySequentialError:
        return OnlySequentialError(
            f"engine='vectorized' cannot give each client its own settings: {what}, and clients that are trained"
            f" together or after one another must share it with client {other!r}. Make it part of the client's data, or"
            " use engine='sequential'. Keep notes in the callback."
        )

    def _name(self, kind: str, name: str) -> str:
        """Return the name of a setting for messages."""
        if kind == "module":
            return f"the attribute {name!r} of {type(self.module).__name__}"
        if kind == "parameter":
            return f"the frozen parameter {name!r} of {type(self.module).__name__}"
        if kind == "optimizer":
            group, _, option = name.partition(".")
            of_group = f" in its group {group}" if len(self._prepared.optimizer.param_groups) > 1 else ""
            what = "the learning rate" if option == "lr" else f"the option {option!r}"
            return f"{what} of the local optimizer{of_group}"
        if kind == "method":
            return f"the attribute {name!r} of {type(self._prepared.algorithm).__name__}"
        return f"trainer.{name}"

    def _buffers_now(self) -> list[int]:
        return [id(owner.get_buffer(key)) for owner, key in buffer_owners(self.module).values()]

    def _now(self, with_data: bool = False) -> Settings:
        """Return all settings; those of the data module optionally, as it changes when it builds clients' data."""
        found: Settings = {}
        for name, part in parts_of(self.module):
            if not isinstance(part, METRICS):
                start = f"{name}." if name else ""
                found |= {("module", start + key): value for key, value in _attributes(part)}
        for name, p in self.module.named_parameters():
            if id(p) not in self._trained:
                found["parameter", name] = numbers_in(p)
        for number, group in enumerate(self._prepared.optimizer.param_groups):
            for option, value in group.items():
                found["optimizer", f"{number}.{option}"] = describe(value)
        for name, part in _methods(self._prepared):
            found |= {("method", name + key): describe(value) for key, value in vars(part).items()}
        trainer: Any = self.trainer
        found |= {("trainer", name): describe(getattr(trainer, name)) for name in _TRAINER}
        found["trainer", "fit_loop.corrected_clip"] = describe(trainer.fit_loop.corrected_clip)
        if with_data and trainer.datamodule is not None:  # by identity, since it may hold all data
            data = vars(trainer.datamodule).items()
            found |= {("trainer", _DATA + key): describe(value, self._alive) for key, value in data if key != "trainer"}
        return found


class SettingsSnapshot:
    """Saves all settings, to restore them after a client, or if a round restarts.

    These are attributes, the contents of lists, dicts and sets, and the numbers in tensors. Other effects of hooks
    cannot be undone. With ``with_callbacks``, attributes of callbacks with client hooks are included.
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
        methods = [part for _, part in _methods(prepared)]
        self._snapshot = Snapshot([*(part for _, part in parts), *methods, *callbacks])
        for group in prepared.optimizer.param_groups:  # each separately, for any number of parameters
            self._snapshot.add(group)
        if trainer.datamodule is not None:
            self._snapshot.add_attributes(trainer.datamodule)
        self._snapshot.add_attributes(trainer, *_TRAINER)
        self._snapshot.add_attributes(trainer.fit_loop, "corrected_clip")
        trained = set(map(id, prepared.flat.params))
        parameters: Any = prepared.module.named_parameters()
        tensors: list[tuple[str, Tensor]] = [(name, p) for name, p in parameters if id(p) not in trained]
        tensors += [(name, t) for (_, name), t in attribute_tensors(parts) if not isinstance(t, nn.Parameter)]
        self._small = [(tensor, tensor.detach().clone()) for _, tensor in tensors if tensor.numel() <= _COPIED]
        self._large = [(name, tensor, numbers_in(tensor)) for name, tensor in tensors if tensor.numel() > _COPIED]

    def keep_changed(self, hook: str) -> None:
        """Forget what a hook has not changed, so that only its changes are restored; raise for a large tensor."""
        self._snapshot.keep_changed()
        self._small = [(tensor, held) for tensor, held in self._small if numbers_in(tensor) != numbers_in(held)]
        for name, tensor, numbers in self._large:
            if numbers_in(tensor) != numbers:
                raise FederatedError(
                    f"{hook} changes {name!r} of {type(self._prepared.module).__name__} in place: {tensor.numel():,}"
                    " numbers, too many to keep a copy of for the other clients. Assign another tensor to an"
                    " attribute, or make it part of the client's data."
                )
        self._large = []

    def restore(self) -> None:
        """Restore everything, or after :meth:`keep_changed` what a hook had changed.

        Raise for a changed large tensor, since it has no copy.
        """
        self._snapshot.restore()
        with torch.no_grad():
            for tensor, numbers in self._small:
                tensor.copy_(numbers)
        for name, tensor, numbers in self._large:
            if numbers_in(tensor) != numbers:
                raise FederatedError(
                    f"A hook of single clients has changed {name!r} of {type(self._prepared.module).__name__} in place,"
                    f" and engine={self._prepared.settings.engine!r} cannot put it back to begin the round again. Use"
                    " engine='sequential'."
                )


def _methods(prepared: PreparedModule) -> Iterator[tuple[str, Any]]:
    """Yield the method, its base optimizer and its inner solve, with the prefixes of their attributes."""
    for name, method in (("", prepared.algorithm), ("own_solve.", prepared.algorithm.own_solve)):
        if method is None:
            continue
        yield name, method
        for key, part in vars(method).items():
            if isinstance(part, BaseOptimizer):
                yield f"{name}{key}.", part


def _attributes(part: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the names and contents of a module's attributes, submodules and hooks, but not parameters."""
    for key, value in vars(part).items():
        if key in PASSING or key in ("_parameters", "_buffers"):
            continue
        if key == "_modules":  # submodules' attributes are compared separately
            yield key, tuple((name, type(own)) for name, own in value.items())
        elif key in INTERNAL and isinstance(value, dict):  # hooks, by numbers that change each time
            if value:
                yield key, tuple(map(id, value.values()))
        else:
            yield key, describe(value)


def _differing(one: Settings, other: Settings) -> list[tuple[str, str]]:
    """Return the kinds and names of the settings that differ."""
    if one == other:
        return []
    missing = object()
    return [k for k in dict.fromkeys((*other, *one)) if one.get(k, missing) != other.get(k, missing)]


def _without_data(settings: Settings) -> Settings:
    return {(kind, name): value for (kind, name), value in settings.items() if not name.startswith(_DATA)}


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
