"""The server's half of a job: a controller that fits with clients through FLARE, and saves after every round."""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nvflare.apis.controller_spec import Task, TaskCompletionStatus
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.signal import Signal

from lightning_fed.core.arguments import check_number
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.deploy.flare.transport import AbortedError, FlareTransport
from lightning_fed.deploy.saved_run import serve

_log = logging.getLogger("lightning_fed.deploy")


class RoundsController(Controller):
    """Run all rounds of a fit, from the checkpoint if it exists. A job's ``config_fed_server.json`` names this class.

    An abort of the job ends the fit while it waits. The checkpoint of the last round stays, and the same job, submitted
    again, continues from it.

    Args:
        make_trainer: The name of a function that makes the trainer, ``"module:function"``, like the others.
        make_model: Makes the module.
        client_ids: The clients' ids, in the order of their stored indices, or a function that returns them.
        checkpoint: The checkpoint's file. It is written after every round, and read if it exists. The previous round's
            checkpoint stays next to it, with ``.previous`` in its name. A relative path starts at the FLARE server's
            workspace.
        sites: The clients of each site, by its name in FLARE. By default, each site has the client of its name.
        make_val: Makes the server's own validation set.
        max_examples: As for :class:`lightning_fed.deploy.RemoteClients`.
        batch_size: As for :class:`lightning_fed.deploy.RemoteClients`.
        phase_timeout: The seconds after which a phase is closed without the clients that have not answered.
        agree_on: As for :class:`lightning_fed.deploy.RemoteClients`. ``make_val`` then takes the words by column.
        absent_after: With ``on_client_error="drop"``, a phase does not wait for clients of a site that FLARE has not
            heard from for this many seconds.
    """

    def __init__(
        self,
        make_trainer: str,
        make_model: str,
        client_ids: Sequence[ClientId] | str,
        checkpoint: str,
        sites: Mapping[str, Sequence[ClientId]] | None = None,
        make_val: str | None = None,
        max_examples: int | None = None,
        batch_size: int | None = None,
        phase_timeout: float = 3600.0,
        agree_on: Sequence[str] = (),
        absent_after: float = 300.0,
    ) -> None:
        super().__init__()
        for name, value in (("phase_timeout", phase_timeout), ("absent_after", absent_after)):
            check_number(self, name, value, "(0, inf)")
        self.make_trainer, self.make_model, self.make_val = make_trainer, make_model, make_val
        self.client_ids, self.sites, self.checkpoint = client_ids, sites, checkpoint
        self.max_examples, self.batch_size, self.phase_timeout = max_examples, batch_size, phase_timeout
        self.agree_on, self.absent_after = agree_on, absent_after
        self._heard = defaultdict[str, float](time.monotonic)  # when a site was last heard from, or first looked up

    def set_communicator(self, communicator: Any) -> None:
        """Set the communicator, and record each sign of life of a site, with which FLARE calls it."""

        def note(site: str, *rest: Any) -> None:
            self._heard[site] = time.monotonic()
            type(communicator).client_is_active(communicator, site, *rest)

        super().set_communicator(communicator)
        communicator.client_is_active = note

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Fit; FLARE calls this in a thread of the job's process."""

        def transport_to(ids: Sequence[ClientId]) -> FlareTransport:
            sites = {str(client): [client] for client in ids} if self.sites is None else self.sites
            if unexpected := {*ids} ^ {client for clients in sites.values() for client in clients}:
                wrong = sorted(map(repr, unexpected))
                raise FederatedError(f"client_ids and sites do not name the same clients: {wrong}.")
            return FlareTransport(
                lambda site, arrays, done: self._ask(site, arrays, done, fl_ctx),
                self.cancel_task,
                sites,
                self.phase_timeout,
                lambda: bool(abort_signal.triggered),
                lambda site: time.monotonic() - self._heard[site],
                self.absent_after,
            )

        try:
            serve(
                transport_to, self.make_trainer, self.make_model, self.client_ids, self.checkpoint,
                self.make_val, self.max_examples, self.batch_size, self.agree_on,
            )  # fmt: skip
        except AbortedError:
            _log.warning("The job was aborted. Submitted again, it continues from %s.", self.checkpoint)

    def _ask(
        self, site: str, arrays: dict[str, Any], done: Callable[[dict[str, Any] | str], None], fl_ctx: FLContext
    ) -> Task:
        data, timeout = DXO(DataKind.WEIGHTS, data=arrays).to_shareable(), math.ceil(self.phase_timeout)
        task = Task("train", data, timeout=timeout, task_done_cb=lambda task, fl_ctx: done(_result_of(task)))
        self.send(task, fl_ctx, targets=[site])
        return task

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Do nothing: the fit does all the work."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Do nothing."""

    def process_result_of_unknown_task(self, *args: Any, **kwargs: Any) -> None:
        """Ignore a result that arrives after its task was canceled."""


def _result_of(task: Task) -> dict[str, Any] | str:
    """Return a site's result for a task, or the reason why there is none."""
    result = task.client_tasks[-1].result if task.client_tasks else None
    if task.completion_status == TaskCompletionStatus.CLIENT_DEAD:
        return "FLARE says that its job process has ended"
    if task.completion_status != TaskCompletionStatus.OK or result is None:
        return f"its task has ended as {task.completion_status}"
    try:
        if (code := result.get_return_code(ReturnCode.OK)) != ReturnCode.OK:
            return f"{code}; the log of the job on that site has the reason"
        return dict(from_shareable(result).data)
    except Exception as error:  # a site may send anything
        return f"its result is not a model: {error}"
