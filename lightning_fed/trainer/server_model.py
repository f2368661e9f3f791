"""What the module holds between rounds, when hooks see it, and what hooks make of it."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning_fed.compat.package import pl
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import Vector
from lightning_fed.engines.prepared import PreparedModule
from lightning_fed.server.server import Server

__all__ = ["ShownModel"]


class ShownModel:
    """The side of :class:`lightning_fed.FederatedLoop` that lets the module hold the server model outside of rounds."""

    trainer: pl.Trainer
    prepared: PreparedModule | None = None  # while a fit is running, or clients work without one
    _state: Server | None = None
    _shown: Vector | None = None  # the parameters [P] that hooks find in the module; none while clients are at work
    _edit: str | None = None  # what tells the model that hooks have made since the last round from others

    def show_server_model(self) -> None:
        """Let the module hold the server model, also in the middle of a client's work."""
        if self.prepared is not None and self._state is not None:
            self._shown = self._state.shown()
            self.prepared.flat.y.copy_(self._shown)
            self.prepared.flat.personal.copy_(self._state.personal)
            self.prepared.flat.restore()
            self.prepared.buffers.write(self._state.buffers)

    def take_in_edits(self) -> None:
        """Let the server have what hooks have made of the model they were shown; nothing while clients are at work.

        Raises:
            FederatedError: If parameters were edited that are not those that the method trains.
        """
        prepared, state, shown = self.prepared, self._state, self._shown
        if prepared is None or state is None or shown is None:
            return
        flat = prepared.flat
        flat.gather()
        buffers, is_edited = prepared.buffers.read(), not torch.equal(flat.y, shown)
        has_others = not torch.equal(flat.personal, state.personal)
        has_others = has_others or any(not torch.equal(value, state.buffers[name]) for name, value in buffers.items())
        if is_edited and shown is not state.x:
            raise FederatedError(
                f"A hook has changed parameters of the model between rounds, but {type(state.algorithm).__name__} shows"
                " another model there than the one it trains (evaluate_at). Use one that shows what it trains."
            )
        if is_edited:
            state.x.copy_(flat.y)
        elif not has_others:
            return
        state.personal.copy_(flat.personal)
        state.take_buffers(buffers)
        if self.trainer.world_size == 1:
            return
        digest = hashlib.blake2b(digest_size=16)
        for value in (flat.whole, *buffers.values()):
            digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        self._edit = digest.hexdigest()

    def check_trained(self) -> None:
        """Refuse a parameter that a hook has frozen.

        Raises:
            FederatedError: Naming it.
        """
        assert self.prepared is not None
        flat = self.prepared.flat
        frozen = [name for name, p in zip(flat.names, flat.params, strict=True) if not p.requires_grad]
        if frozen:
            raise FederatedError(
                f"A hook has frozen the parameter {frozen[0]!r}: what is trained is settled when the fit starts. Freeze"
                " it in the module's __init__, or set requires_grad and start a new fit of another trainer."
            )

    @contextmanager
    def showing_server_model(self) -> Iterator[None]:
        """Let the module hold the server model inside, and afterwards what it held before."""
        with self._leaving_the_module():
            self.show_server_model()
            yield

    @contextmanager
    def _leaving_the_module(self) -> Iterator[None]:
        """Let the module hold afterwards what it held before."""
        if self.prepared is None:
            yield
            return
        flat, buffers_of, shown = self.prepared.flat, self.prepared.buffers, self._shown
        shown_parts, y, buffers = [p.data for p in flat.params], flat.whole.clone(), buffers_of.read()
        try:
            yield
        finally:
            flat.whole.copy_(y)
            flat.point_to(shown_parts)
            buffers_of.write(buffers)
            self._shown = shown
