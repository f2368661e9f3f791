"""Protects clients from each other: undoes hooks' changes of settings, and checks untrained parameters for changes."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fed.callbacks.base import FederatedCallback, uses_hook
from lightning_fed.core.devices import widened
from lightning_fed.core.errors import FederatedError
from lightning_fed.engines.batch_hooks import hooked_parameter
from lightning_fed.engines.changes import (
    Key,
    TensorCopies,
    attribute_tensors,
    attributes_of,
    own_tensors,
    parts_of_method,
    sample_of,
    without_metrics,
)
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


class SettingsSnapshot:
    """Saves all settings, to restore them after a client, or if a round restarts.

    Settings are the inputs of local work. In the module and its submodules, they are attributes, including collections,
    modules in them, tensors and the training mode, frozen parameters and ``requires_grad``. Others are options of the
    local optimizer, and attributes of the method, its base optimizer, the trainer (such as ``gradient_clip_val``) and
    the data module. Trained parameters and buffers are not saved: every client starts from the server's. Other effects
    of hooks cannot be undone. With ``with_callbacks``, attributes of callbacks with client hooks are included.
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
        parts, groups = list(without_metrics(prepared.module)), prepared.optimizer.param_groups
        self._snapshot = snapshot = attributes_of(prepared.module)
        for prefix, method in (("", prepared.algorithm), ("own_solve.", prepared.algorithm.own_solve)):
            for name, part in () if method is None else parts_of_method(method):
                snapshot.add("method", prefix + name, part)
        for callback in callbacks:
            snapshot.add("callback", f"{type(callback).__name__}.", callback)
        for number, group in enumerate(groups):  # each group separately, for any number of parameters
            snapshot.add("optimizer", f"{number}.", group)
        if trainer.datamodule is not None:
            snapshot.add("trainer", "datamodule.", trainer.datamodule, deep=False)
        snapshot.add("trainer", "", trainer, _TRAINER, deep=False)
        snapshot.add("trainer", "fit_loop.", trainer.fit_loop, ("corrected_clip",), deep=False)
        tensors: list[tuple[Key, Tensor]] = [(("parameter", name), p) for name, p in frozen_parameters(prepared)]
        tensors += [own for own in attribute_tensors(parts) if not isinstance(own[1], nn.Parameter)]
        registered = set(map(id, (*prepared.module.parameters(), *prepared.module.buffers())))
        tensors += [(("attribute", name), t) for (_, name), t in own_tensors(parts) if id(t) not in registered]
        for number, group in enumerate(groups):
            options = ((name, value) for name, value in group.items() if isinstance(value, Tensor))
            tensors += [(("optimizer", f"{number}.{name}"), value) for name, value in options]
        self._copies = TensorCopies(tensors, most=_COPIED)

    def keep_changed(self, hook: str) -> None:
        """Keep only a hook's changes, so that :meth:`restore` touches nothing else; raise for large changed tensors."""
        self._snapshot.keep_changed()
        self._copies.keep_changed()
        self._check_large(
            f"{hook} changes {{!r}} of {type(self._prepared.module).__name__} in place: {{:,}} numbers, too many to"
            " keep a copy of for the other clients. Assign another tensor to an attribute, or make it part of the"
            " client's data."
        )

    def changed(self) -> str | None:
        """Return a changed setting, or a parameter with a hook, as text for messages; else None."""
        if (hooked := hooked_parameter(self._prepared.module)) is not None:
            return f"the hooks of the parameter {hooked!r}"
        written = next((key for key, *_ in self._copies.changed()), None)
        return self._named(written or self._snapshot.changed(replaced=True))

    def changed_in_module(self) -> str | None:
        """Return a changed attribute or frozen parameter of the module, as text for messages; else None."""
        written = next((key for key, *_ in self._copies.changed("attribute", "parameter")), None)
        return self._named(written or self._snapshot.changed("attribute"))

    def restore(self) -> None:
        """Restore everything, or after :meth:`keep_changed` only the hook's changes.

        Raise for a changed large tensor, since it has no copy.
        """
        self._snapshot.restore()
        self._copies.restore()
        self._check_large(
            f"A hook of single clients has changed {{!r}} of {type(self._prepared.module).__name__} in place, and"
            f" engine={self._prepared.settings.engine!r} cannot put it back to begin the round again. Use"
            " engine='sequential'."
        )

    def _named(self, key: Key | None) -> str | None:
        """Return a setting as text for messages."""
        if key is None:
            return None
        (kind, name), prepared = key, self._prepared
        if kind == "attribute":
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

    def _check_large(self, message: str) -> None:
        for (_, name), tensor, has_copy in self._copies.changed():
            if not has_copy:
                raise FederatedError(message.format(name, tensor.numel()))


def frozen_parameters(prepared: PreparedModule) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters, with names, that are neither trained nor treated as buffers."""
    trained, buffers = set(map(id, prepared.flat.params)), prepared.buffers.owners
    named = prepared.module.named_parameters()
    return [(name, p) for name, p in named if id(p) not in trained and name not in buffers]


class FrozenParameters:
    """Ensures that local work does not change untrained parameters, such as the teacher of self-supervised methods.

    Unlike buffers, these parameters are neither reset to the server's values for each client nor averaged, so a change
    would reach the next clients. ``names`` does not include parameters that are treated as buffers.
    """

    def __init__(self, prepared: PreparedModule) -> None:
        self._module, self._trained, self._prepared = prepared.module, prepared.flat.names, prepared
        self.names = [name for name, _ in frozen_parameters(prepared)]
        self._has_summed = False  # the first clients' work is also compared by sums over all numbers

    def read(self) -> list[object]:
        """Return a fingerprint of the values for :meth:`check`, since a copy of all may not fit in memory."""
        values = [self._module.get_parameter(name).detach() for name in self.names]
        are_plain = [v.layout == torch.strided and type(v) is Tensor and v.numel() > 0 for v in values]
        samples = [sample_of(v) for v, is_plain in zip(values, are_plain, strict=True) if is_plain]
        whole = torch.cat(samples).cpu() if samples else torch.empty(0)  # one transfer from the device
        rest = (part.numpy().tobytes() for part in whole.split(list(map(len, samples))))
        found: list[object] = [next(rest) if is_plain else b"" for is_plain in are_plain]
        if self._has_summed:
            return found
        return [(sample, *_sums(value)) for sample, value in zip(found, values, strict=True)]

    def check(self, before: list[object]) -> None:
        """Raise if a client's work has changed a parameter since :meth:`read`."""
        names = (name for name, now, then in zip(self.names, self.read(), before, strict=True) if now != then)
        name, self._has_summed = next(names, None), True
        if name is not None:
            self._prepared.check_parameters()  # a step may have unfrozen it, so that the optimizer trains it
            raise FederatedError(
                f"{type(self._module).__name__} changes the parameter {name!r} while a client trains, though the"
                " optimizer does not train it: other clients would start from the changed one. Pass"
                f" as_buffers=[{_pattern_of(name, self._trained)!r}] to the trainer, with patterns for all such"
                " parameters: like buffers, they then start from the server's for every client, and are averaged."
            )


def _sums(value: Tensor) -> tuple[float, float]:
    wide = widened(value).nan_to_num()
    return float(wide.sum()), float(torch.linalg.vector_norm(wide))


def _pattern_of(name: str, trained: Collection[str]) -> str:
    """Return the shortest pattern of a parameter and its neighbors that fits no trained parameter."""
    parts = name.split(".")
    roots = (".".join(parts[:depth]) + "." for depth in range(1, len(parts)))
    return next((f"{root}*" for root in roots if not any(own.startswith(root) for own in trained)), name)
