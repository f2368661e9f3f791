"""The server's model in the user's module, as hooks find and change it between rounds."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from lightning_fed.core.devices import are_equal
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import Vector
from lightning_fed.engines.prepared import PreparedModule
from lightning_fed.server.server import Server

__all__ = ["ServerModel"]


class ServerModel:
    """The server's model, which the module holds between the rounds of a fit.

    Args:
        prepared: The module.
        server: The server's side of the run.

    Attributes:
        change_digest: A digest of the model after hooks changed it since the last round, to compare between processes.
    """

    def __init__(self, prepared: PreparedModule, server: Server) -> None:
        self._prepared, self._server = prepared, server
        self._loaded: Vector | None = None  # the parameters [P] that hooks find; None while clients work
        self.change_digest: str | None = None
        trained = set(map(id, prepared.flat.params))
        held = {id(p) for group in prepared.optimizer.param_groups for p in group["params"]} - trained
        self._frozen = [(name, p) for name, p in prepared.module.named_parameters() if id(p) in held]

    def show(self) -> None:
        """Let the module hold the server's model, even in the middle of a client's work."""
        prepared, server = self._prepared, self._server
        self._loaded = server.evaluation_x()
        prepared.flat.y.copy_(self._loaded)
        prepared.flat.personal.copy_(server.personal)
        prepared.flat.restore()
        prepared.buffers.write(server.buffers)

    def begin_round(self) -> None:
        """Take over what hooks have changed; clients work in the module until :meth:`show`.

        Raise if a hook has frozen, unfrozen or replaced a parameter.
        """
        self._prepared.check_parameters()
        flat = self._prepared.flat
        frozen = [name for name, p in zip(flat.names, flat.params, strict=True) if not p.requires_grad]
        if frozen:
            raise FederatedError(
                f"A hook has frozen the parameter {frozen[0]!r}: the trained parameters are fixed when the fit starts."
                " Freeze it in the module's __init__, or set requires_grad and start a new fit of another trainer."
            )
        unfrozen = [name for name, p in self._frozen if p.requires_grad]
        if unfrozen:  # the local optimizer would move it, but no client would send it
            raise FederatedError(
                f"A hook has unfrozen the parameter {unfrozen[0]!r}: the trained parameters are fixed when the fit"
                " starts. Train it from the start, or set requires_grad after the fit, and fit with another trainer."
            )
        self.sync_hook_changes()
        self._loaded = None

    def sync_hook_changes(self) -> None:
        """Give the server what hooks have changed in the module between rounds; do nothing while clients work.

        Changes of parameters that the method does not train are refused.
        """
        prepared, server, loaded = self._prepared, self._server, self._loaded
        if loaded is None:
            return
        flat = prepared.flat
        flat.gather()
        buffers = prepared.buffers.read()
        kept = [(flat.personal, server.personal), *((value, server.buffers[name]) for name, value in buffers.items())]
        is_same, *rest_is_same = are_equal([(flat.y, loaded), *kept])
        is_changed = not is_same
        if is_changed and loaded is not server.x:
            raise FederatedError(
                "A hook has changed parameters of the model between rounds, but"
                f" {type(server.algorithm).__name__} shows another model there than the one it trains (evaluate_at)."
                " Use one that shows what it trains."
            )
        if is_changed:
            server.x.copy_(flat.y)
        elif all(rest_is_same):
            return
        server.personal.copy_(flat.personal)
        server.take_buffers(buffers)
        if prepared.trainer.world_size == 1:
            return
        digest = hashlib.blake2b(digest_size=16)
        for value in (flat.whole, *buffers.values()):
            digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        self.change_digest = digest.hexdigest()

    def check_changes_agree(self, digests: Sequence[str | None]) -> None:
        """Refuse changes by hooks that are not the same in all processes.

        Args:
            digests: The :attr:`change_digest` of every process.
        """
        if len(set(digests)) > 1:
            raise FederatedError(
                "Hooks have changed the model's parameters or buffers between rounds, and not alike in all processes:"
                " change them in every process, by the same values."
            )
        self.change_digest = None

    @contextmanager
    def preserving_module(self) -> Iterator[None]:
        """Restore parameters and buffers of the module afterwards."""
        flat, buffers_of, loaded = self._prepared.flat, self._prepared.buffers, self._loaded
        parts, y, buffers = [p.data for p in flat.params], flat.whole.clone(), buffers_of.read()
        try:
            yield
        finally:
            flat.whole.copy_(y)
            flat.bind(parts)
            buffers_of.write(buffers)
            self._loaded = loaded
