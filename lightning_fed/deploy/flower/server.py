"""The ServerApp: it drives a FederatedServer through Flower, and saves its checkpoint after every round."""

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.deploy.flower.courier import Courier, Refusal
from lightning_fed.deploy.flower.resident import STARTED_BY, Maker, called, end_with
from lightning_fed.deploy.server import FederatedServer

__all__ = ["server_app"]

DEFAULTS = {"phase-timeout": 3600.0, "ask-again": 60.0}
"""A run's options in its configuration, in seconds: when a phase is closed, and when a silent node is asked again."""

_PAUSE = 0.5  # seconds between two looks for replies
_PATIENCE = 30.0  # seconds in which another run that works with the checkpoint is to end
_log = logging.getLogger("flwr")


def server_app(
    make_trainer: Maker,
    make_model: Maker,
    client_ids: Sequence[ClientId] | Maker,
    checkpoint: str | Path,
    make_val: Maker | None = None,
) -> ServerApp:
    """Return the ServerApp of a run.

    ``flwr run`` starts the run, or goes on with it from the checkpoint. Its configuration may say ``phase-timeout``,
    the seconds after which a phase is closed without the clients that have not answered (3600), and ``ask-again``, the
    seconds after which the node of a task without a reply is asked whether it is still at it (60). The process ends
    with Flower's that has started it, and so with the SuperLink.

    Args:
        make_trainer: Makes the trainer, with the arguments of a simulation: a function, or ``"module:function"``; so
            are the others.
        make_model: Makes the module.
        client_ids: The clients' ids, in the order of their stored indices, or a function that returns them.
        checkpoint: Where the checkpoint is written after every round, and read from if it is there. A relative path
            begins at the folder in which the SuperLink was started.
        make_val: Makes the server's own validation set.

    Example::

        app = server_app("hospital.task:make_trainer", "hospital.task:make_model", ["north", "south"], "hospital.ckpt")
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        end_with(STARTED_BY)  # Flower itself lets it wait for a SuperLink that has ended, which may never come back
        ids: Any = called(client_ids)() if callable(client_ids) or isinstance(client_ids, str) else client_ids
        val = None if make_val is None else called(make_val)()
        phase_timeout, ask_again = (seconds(context.run_config, name) for name in DEFAULTS)
        with FederatedServer(called(make_trainer)(), called(make_model)(), ids, val=val) as server:
            run_server(server, grid, Path(checkpoint).absolute(), phase_timeout, ask_again)

    return app


def seconds(run_config: Mapping[str, Any], name: str) -> float:
    """Return an option in a run's configuration."""
    value = run_config.get(name, DEFAULTS[name])
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise FederatedError(f"{name} = {value!r} in the run's configuration must be a positive number of seconds.")
    return float(value)


def run_server(server: FederatedServer, grid: Grid, checkpoint: Path, phase_timeout: float, ask_again: float) -> None:
    """Run all rounds, and write the checkpoint after each; no other run may use it meanwhile."""
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    try:  # the system frees the lock, however the process ends
        held = FileLock(f"{checkpoint}.lock", timeout=_PATIENCE).acquire()
    except Timeout as error:
        raise FederatedError(
            f"Another run works with the checkpoint {checkpoint}. `flwr list` shows it, and `flwr stop` ends it; or"
            " give this one another checkpoint."
        ) from error
    with held:
        if checkpoint.is_file():
            server.load(checkpoint)
            _log.info("The run goes on from %s.", checkpoint)
        courier = Courier(grid, server.client_ids, phase_timeout, ask_again)
        while server.phase is not None:
            refused = _exchange(server, courier, phase_timeout)
            try:
                report = server.close_phase()
            except ClientError:
                raise
            except FederatedError as error:
                raise FederatedError(
                    " ".join([str(error), *(f"{c!r} says: {r}" for c, r in refused.items())])
                ) from error
            if report is not None:
                server.save(checkpoint)
                _log.info("Round %d: clients %s, loss %.6g.", report.round, list(report.clients), report.loss)
    _log.info("All rounds are done. The model is in %s.", checkpoint)


def _exchange(server: FederatedServer, courier: Courier, timeout: float) -> dict[ClientId, str]:
    """Exchange the messages of a phase; return which clients refuse to answer, and why."""
    tasks, refused, end = server.tasks(), dict[ClientId, str](), time.monotonic() + timeout
    courier.group = f"{server.phase} {next(iter(tasks.values())).header['round']}" if tasks else ""
    courier.forget_tasks()
    while waiting := [client for client in server.missing() if client not in refused]:
        is_quiet = True
        late = {c: task for c, task in server.greetings().items() if c not in refused}
        for come in courier.exchange({client: tasks[client] for client in waiting} | late):
            is_quiet = False
            if isinstance(come, Refusal):
                refused[come.client] = come.reason
                _log.error("Client %r does not answer: %s", come.client, come.reason)
                continue
            try:
                server.receive(come)
            except ClientError:
                raise
            except FederatedError as error:
                refused[come.client] = str(error)
                _log.error("%s", error)
        if time.monotonic() > end:
            away = [client for client in waiting if client not in courier.found]
            _log.error("No reply for %g s of %s; of %s no node is there.", timeout, server.missing(), away or "none")
            break
        if is_quiet:
            time.sleep(_PAUSE)
    return refused
