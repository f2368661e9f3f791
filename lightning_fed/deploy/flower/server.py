"""The ServerApp: it fits with clients through Flower, and saves a checkpoint after every round."""

import logging
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.deploy.flower.transport import FlowerTransport
from lightning_fed.deploy.remote import RemoteClients
from lightning_fed.deploy.saved_run import fit
from lightning_fed.deploy.site_worker import STARTED_BY, Maker, called, end_with

DEFAULTS = {"phase-timeout": 3600.0, "ask-again": 60.0, "absent-after": 300.0}
"""A run's options in its configuration, in seconds, as :class:`FlowerTransport` explains them."""

_OTHER = "`flwr list` shows it, and `flwr stop` ends it"
_log = logging.getLogger("flwr")


def server_app(
    make_trainer: Maker,
    make_model: Maker,
    client_ids: Sequence[ClientId] | Maker,
    checkpoint: str | Path,
    make_val: Maker | None = None,
    max_examples: int | None = None,
    owners: Mapping[ClientId, str | PathLike[str]] | None = None,
    batch_size: int | None = None,
    agree_on: Sequence[str] = (),
) -> ServerApp:
    """Return the ServerApp of a run.

    ``flwr run`` starts the run, or continues it from the checkpoint. Its configuration may set ``phase-timeout``, the
    seconds after which a phase ends without the clients that have not answered (3600). ``ask-again`` sets the seconds
    after which the server checks the node of a task without a reply (60). With ``on_client_error="drop"``, a phase does
    not wait for clients that have had no node for ``absent-after`` seconds (300). The process ends with the Flower
    process that started it, and so with the SuperLink.

    Args:
        make_trainer: Makes the trainer, with the arguments of a simulation: a function, or ``"module:function"``; so
            are the others.
        make_model: Makes the module.
        client_ids: The clients' ids, in the order of their stored indices, or a function that returns them.
        checkpoint: The checkpoint's file. It is written after every round, and read if it exists. The previous round's
            checkpoint stays next to it, with ``.previous`` in its name. A relative path starts at the SuperLink's start
            folder.
        make_val: Makes the server's own validation set.
        max_examples: As for :class:`lightning_fed.deploy.RemoteClients`.
        owners: The file of a public key for each client that only the SuperNode with this key may have, such as
            ``{"bank": "bank.pub"}``. Relative paths are as for ``checkpoint``. A client without one belongs to the
            first SuperNode that names it, for as long as that one is there.
        batch_size: As for :class:`lightning_fed.deploy.RemoteClients`.
        agree_on: As there. ``make_val`` then takes the words by column.

    Example::

        app = server_app(
            "hospital.task:make_trainer",
            "hospital.task:make_model",
            ["north", "south"],
            "hospital.ckpt",
        )
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        end_with(STARTED_BY)  # Flower itself lets it wait for a SuperLink that has ended, which may never come back
        deploy = logging.getLogger("lightning_fed.deploy")
        deploy.setLevel(logging.INFO)
        deploy.handlers, deploy.propagate = _log.handlers, False  # so `flwr log` shows it
        ids: Any = called(client_ids)() if callable(client_ids) or isinstance(client_ids, str) else client_ids
        make = None if make_val is None else called(make_val)
        val = make() if make is not None and not agree_on else make
        phase_timeout, ask_again, absent_after = (seconds(context.run_config, name) for name in DEFAULTS)
        transport = FlowerTransport(grid, ids, phase_timeout, ask_again, owners, absent_after)
        clients = RemoteClients(transport, ids, val, max_examples, batch_size, agree_on)
        fit(called(make_trainer)(), called(make_model)(), clients, Path(checkpoint).absolute(), _log, _OTHER)

    return app


def seconds(run_config: Mapping[str, Any], name: str) -> float:
    """Return an option in a run's configuration."""
    value = run_config.get(name, DEFAULTS[name])
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise FederatedError(f"{name} = {value!r} in the run's configuration must be a positive number of seconds.")
    return float(value)
