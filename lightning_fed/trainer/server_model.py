"""The server's model in the user's module, the changes of hooks to it, and the values at the start of a round."""

import copy
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_fed.callbacks.base import FederatedCallback
from lightning_fed.compat.package import pl
from lightning_fed.compat.private import is_overridden, rank_zero_warn
from lightning_fed.core.devices import are_equal
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import State, Vector
from lightning_fed.engines.batch_hooks import is_users_own
from lightning_fed.engines.changes import numbers_in
from lightning_fed.engines.prepared import PreparedModule
from lightning_fed.server.server import Server

_Model: TypeAlias = tuple[Vector, Vector, State, set[str]]
"""Trained and personal parameters, buffers, and the names of the buffers that have changed in the run."""


_COPIED = 2**22  # maximum size of an untrained parameter to copy, so that it can be restored


class Untrained:
    """Saves parameters that are not trained and not on the server, such as a teacher's, at the start of a round."""

    def __init__(self, prepared: PreparedModule) -> None:
        kept, as_buffers = set(map(id, prepared.flat.params)), prepared.buffers.owners
        untrained = [
            (name, p) for name, p in prepared.module.named_parameters() if id(p) not in kept and name not in as_buffers
        ]
        self._small = [(p, p.detach().clone()) for _, p in untrained if p.numel() <= _COPIED]
        self._large: list[tuple[str, Tensor, Any]] = [
            (name, p, numbers_in(p)) for name, p in untrained if p.numel() > _COPIED
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the copies; warn about a large parameter that has changed, because it has no copy."""
        for p, numbers in self._small:
            p.copy_(numbers)
        for name, large, key in self._large:
            if numbers_in(large) != key:
                rank_zero_warn(
                    f"A hook has changed {name!r}, which is not trained, in a round that is cut off: {large.numel():,}"
                    " numbers, too many to keep a copy of. They stay, and a run that continues from here changes them"
                    " again. Change them in on_train_epoch_end, or name the parameter in as_buffers."
                )

    @contextmanager
    def put_back_inside(self) -> Iterator[None]:
        """Restore the copies, and return to the current values on exit."""
        now = [p.detach().clone() for p, _ in self._small]
        self.put_back()
        try:
            yield
        finally:
            with torch.no_grad():
                for (p, _), numbers in zip(self._small, now, strict=True):
                    p.copy_(numbers)


class ServerModel:
    """The server's model, which the module holds between the rounds of a fit."""

    def __init__(self, prepared: PreparedModule, server: Server) -> None:
        self._prepared, self._server = prepared, server
        self._loaded: Vector | None = None  # the parameters [P] that hooks find; None while clients work
        self.change_digest: str | None = None  # covers the model that hooks have changed, to compare processes
        self.keeps_untrained = False  # whether hooks may change untrained parameters in a round
        self._keeps = False  # whether to keep the model before hooks change it
        self._kept: _Model | None = None  # this model, once hooks have changed something
        self._untrained: Untrained | None = None

    def show(self) -> None:
        """Load the server's model into the module, even in the middle of a client's work."""
        prepared, server = self._prepared, self._server
        self._loaded = server.evaluation_x()
        prepared.flat.y.copy_(self._loaded)
        prepared.flat.personal.copy_(server.personal)
        prepared.flat.bind()
        prepared.buffers.write(server.buffers)

    def begin_round(self) -> None:
        """Pass the changes of hooks to the server; clients work in the module until :meth:`show`.

        Raise if a hook has frozen, unfrozen or replaced a parameter.
        """
        self._prepared.check_parameters()
        self.sync_hook_changes()
        self._loaded = None

    def sync_hook_changes(self) -> None:
        """Pass the changes of hooks to the module between rounds to the server; do nothing while clients work.

        Raise if the changed parameters are those of a model that the method shows but does not train.
        """
        prepared, server, loaded = self._prepared, self._server, self._loaded
        if loaded is None:
            return
        flat = prepared.flat
        flat.gather()
        buffers = prepared.buffers.read()
        kept = [(flat.personal, server.personal), *((value, server.buffers[name]) for name, value in buffers.items())]
        is_same, *rest_is_same = are_equal([(flat.y, loaded), *kept])
        if is_same and all(rest_is_same):
            return
        if not is_same and loaded is not server.x:
            raise FederatedError(
                "A hook has changed parameters of the model between rounds, but"
                f" {type(server.algorithm).__name__} shows another model there than the one it trains (evaluate_at)."
                " Use one that shows what it trains."
            )
        if self._keeps and self._kept is None:
            self._kept = self._copy()
        if not is_same:
            server.x.copy_(flat.y)
        server.personal.copy_(flat.personal)
        server.take_buffers(buffers)
        if prepared.trainer.world_size == 1:
            return
        digest = hashlib.blake2b(digest_size=16)
        for value in (flat.whole, *buffers.values()):
            digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        self.change_digest = digest.hexdigest()

    def check_changes_agree(self, digests: Sequence[str | None]) -> None:
        """Raise if the changes of hooks differ between processes, given each one's :attr:`change_digest`."""
        if len(set(digests)) > 1:
            raise FederatedError(
                "Hooks have changed the model's parameters or buffers between rounds, and not alike in all processes:"
                " change them in every process, by the same values."
            )
        self.change_digest = None

    def start_keeping(self) -> None:
        """Pass earlier changes of hooks to the server, and make later ones undoable until :meth:`stop_keeping`."""
        self.sync_hook_changes()
        self._keeps, self._kept = True, None
        self._untrained = Untrained(self._prepared) if self.keeps_untrained else None

    def stop_keeping(self) -> None:
        """Drop the kept values; later changes of hooks cannot be undone."""
        self._keeps, self._kept, self._untrained = False, None, None

    def undo_hook_changes(self) -> None:
        """Undo hook changes since :meth:`start_keeping`; :meth:`show` then loads the server's model into the module."""
        self.sync_hook_changes()
        if self._kept is not None:
            self._set(self._kept)
        if self._untrained is not None:
            self._untrained.put_back()
        self._loaded = None
        self.stop_keeping()

    @contextmanager
    def without_hook_changes(self) -> Iterator[None]:
        """Undo hook changes since :meth:`start_keeping` inside the context, and redo them on exit."""
        self.sync_hook_changes()
        kept, loaded = self._kept, self._loaded
        with nullcontext() if self._untrained is None else self._untrained.put_back_inside():
            if kept is None:
                yield
                return
            now, self._loaded = self._copy(), None
            self._set(kept)
            try:
                yield
            finally:
                self._set(now)
                self._loaded = loaded

    def _copy(self) -> _Model:
        server = self._server
        return server.x.clone(), server.personal.clone(), server.buffers, set(server.moved_buffers)

    def _set(self, model: _Model) -> None:
        server = self._server
        x, personal, server.buffers, moved = model
        server.x.copy_(x)
        server.personal.copy_(personal)
        server.moved_buffers = set(moved)

    @contextmanager
    def preserving_module(self) -> Iterator[None]:
        """Restore the module's parameters and buffers on exit."""
        flat, buffers_of, loaded = self._prepared.flat, self._prepared.buffers, self._loaded
        parts, y, buffers = [p.data for p in flat.params], flat.whole.clone(), buffers_of.read()
        try:
            yield
        finally:
            flat.whole.copy_(y)
            flat.bind(parts)
            buffers_of.write(buffers)
            self._loaded = loaded


EARLY_HOOKS = ("on_train_epoch_start", "on_round_start", "on_round_restart", "on_client_start", "on_client_end")
"""The hooks that are called before a round is complete, and may change untrained parameters."""

_ALL_HOOKS = tuple(name for name in dir(FederatedCallback) if name.startswith("on_"))


def has_round_hooks(trainer: pl.Trainer, hooks: Sequence[str] = _ALL_HOOKS) -> bool:
    """Return whether the user has hooks that a round calls, other than the module's batch hooks."""
    module = trainer.lightning_module
    callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, pl.callbacks.Checkpoint)]
    of_module = [hook for hook in ("on_train_epoch_start", "on_train_epoch_end") if hook in hooks]
    return any(is_overridden(hook, module, pl.LightningModule) for hook in of_module) or any(
        is_users_own(callback, hook) for callback in callbacks for hook in hooks
    )


class RoundStart:
    """The values that replace the current ones in a checkpoint in the middle of a round.

    The checkpoint is of the last completed round. A run that resumes from it calls the round's hooks again. So it must
    not contain their changes to the server's model, the local optimizer's options and the callbacks' states. Callbacks
    that save checkpoints keep their current states, which match the existing files. ``server_model`` is None without
    hooks that may change these.
    """

    def __init__(self, trainer: pl.Trainer, server_model: ServerModel | None) -> None:
        self.precision: dict[str, Any] = copy.deepcopy(trainer.precision_plugin.state_dict())
        # callbacks may monitor these; they exclude values of the round's first steps
        self.metrics: dict[str, Tensor] = dict(trainer._logger_connector._callback_metrics)
        self._callbacks: dict[str, Any] = {}
        self._options: list[dict[str, Any]] = []  # one entry per parameter group
        if server_model is None:
            return
        server_model.start_keeping()
        groups = [group for optimizer in trainer.optimizers for group in optimizer.state_dict()["param_groups"]]
        self._options = [copy.deepcopy({k: v for k, v in group.items() if k != "params"}) for group in groups]
        for callback in trainer.callbacks:
            if is_users_own(callback, "state_dict") and not isinstance(callback, pl.callbacks.Checkpoint):
                state = callback.state_dict()
                with suppress(Exception):  # a checkpoint omits a state that cannot be copied
                    state = copy.deepcopy(state)
                self._callbacks[callback.state_key] = state

    def put_back(self, trainer: pl.Trainer) -> None:
        """Restore the precision and the options when the round is abandoned."""
        if self.precision:
            trainer.precision_plugin.load_state_dict(self.precision)
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        for group, options in zip(groups, self._options, strict=False):  # fewer if a hook removed one: the run fails
            group.update(copy.deepcopy(options))

    def put_into(self, checkpoint: dict[str, Any], trainer: pl.Trainer) -> None:
        """Replace the current values in a checkpoint, except for the server's model."""
        if (name := type(trainer.precision_plugin).__qualname__) in checkpoint:
            checkpoint[name] = self.precision
        groups = [group for state in checkpoint.get("optimizer_states", ()) for group in state["param_groups"]]
        for group, options in zip(groups, self._options, strict=False):
            group.update(options)
        if "callbacks" in checkpoint:
            checkpoint["callbacks"] |= self._callbacks
