"""The output of every round to the loggers."""

import math
from functools import partial
from typing import Any

from lightning_fed.callbacks.base import FederatedCallback, boards, write_histogram
from lightning_fed.callbacks.monitors import warn_of_misspelt
from lightning_fed.callbacks.split_picture import SplitPicture, is_cheap
from lightning_fed.compat.package import pl
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import RoundReport
from lightning_fed.server.heterogeneity import ClientClock
from lightning_fed.server.server import plain_sgd

_SHOWN = ("clients_per_round", "local_epochs", "local_steps", "engine", "seed")
_IF_SET = ("server_optimizer", "heterogeneity", "aggregator", "attack", "compression", "client_privacy", "asynchronous")


class RoundLogger(FederatedCallback):
    """Write each round's report to the loggers, with the number of completed rounds as the step.

    ========================== ===================================================================
    tag                        meaning
    ========================== ===================================================================
    ``client/loss``            example-weighted mean training loss of the cohort
    ``client/update_norm``     mean norm of the client model changes
    ``client/drift``           spread of the client models around their mean
    ``server/update_norm``     norm of the server's step
    ``comm/bytes_up``          bytes sent by the cohort
    ``comm/bytes_down``        bytes sent to the cohort
    ``round/clients``          clients that took part
    ``round/dropped``          clients drawn but left out
    ``round/failed``           clients that failed, with ``on_client_error="drop"`` only
    ``round/local_steps``      local steps taken by all of them
    ``round/gradients``        gradients of single examples that they computed, full-batch and second ones included
    ``round/seconds``          wall time of the round without validation
    ``privacy/epsilon``        the privacy spent so far, with differential privacy of clients
    ``privacy/record_epsilon`` the most that a client has spent so far, with ``client_privacy``
    ========================== ===================================================================

    With differential privacy, only ``server/update_norm`` and ``privacy/epsilon`` are written: the guarantee is about
    the models. All other values depend on the clients' work, including the time.

    Every logger gets the settings of the run next to the hyper-parameters of the module. TensorBoard also shows a
    histogram of the training losses of the cohort's clients, ``client/losses``, after each twentieth of the rounds. A
    new run starts with the text ``method`` and, if the partition used labels and no privacy is at stake, with
    :class:`SplitPicture`.

    The values can be monitored by ``ModelCheckpoint`` and ``EarlyStopping`` under the same names.
    """

    def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check monitored names, since the names of validation's metrics are known now."""
        warn_of_misspelt(trainer)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the settings of the run. Lightning logs the hyper-parameters of the module and the data after this."""
        if not trainer.loggers or not trainer.enable_autolog_hparams:
            return
        given = [one.hparams_initial for one in (pl_module, trainer.datamodule) if one and one._log_hyperparams]
        # skip the command line's notes on loading
        named = {name: value for part in given for name, value in part.items() if name[:1] != "_"}
        settings = _settings(trainer)
        for logger in trainer.loggers:
            if isinstance(logger, pl.loggers.TensorBoardLogger):  # it reads only the first hyper-parameters of a log
                logger.log_hyperparams(named | settings)
            else:  # MLflow refuses to change the value of a name
                logger.log_hyperparams({name: value for name, value in settings.items() if name not in named})

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Introduce a new run in TensorBoard; from a resumed one, remove the rounds that run again."""
        loop = trainer.fit_loop
        shown_on = boards(trainer) if trainer.loggers and trainer.is_global_zero else []
        for board in shown_on:
            _forget(board.experiment, loop.round + 1)
            if not loop.round:
                board.experiment.add_text("method", repr(loop.settings.algorithm), 0)
        if not shown_on or loop.round:
            return
        is_private = loop.epsilon is not None or loop.settings.client_privacy is not None
        if not is_private and is_cheap(trainer):
            SplitPicture().on_train_start(trainer, pl_module)

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round_report: RoundReport) -> None:
        """Write the report."""
        r = round_report
        norms = [c.update_norm for c in r.clients.values()]
        values = {
            "client/loss": r.loss,
            "client/update_norm": sum(norms) / len(norms) if norms else math.nan,
            "client/drift": r.drift,
            "server/update_norm": r.update_norm,
            "comm/bytes_up": float(r.bytes_up),
            "comm/bytes_down": float(r.bytes_down),
            "round/clients": float(len(r.cohort)),
            "round/dropped": float(len(r.dropped)),
            "round/local_steps": float(sum(r.steps.values())),
            "round/gradients": float(r.gradients),
            "round/seconds": r.seconds,
        }
        is_private = trainer.fit_loop.settings.client_privacy is not None
        if is_private and (spent := trainer.fit_loop.client_epsilons):
            values["privacy/record_epsilon"] = max(spent.values())
        if (epsilon := trainer.fit_loop.epsilon) is not None:  # participation is part of the secret
            values = {"server/update_norm": r.update_norm, "privacy/epsilon": epsilon}
        if trainer.fit_loop.settings.drops_failed:
            values["round/failed"] = float(len(r.failed))
        trainer.fit_loop.log_round({name: value for name, value in values.items() if not math.isnan(value)})
        every = max(1, (trainer.max_epochs or 0) // 20)
        if trainer.loggers and epsilon is None and not is_private and trainer.fit_loop.round % every == 0:
            write_histogram(trainer, "client/losses", (client.loss for client in r.clients.values()))


def _settings(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the settings that distinguish runs. "algorithm" is first: TensorBoard shows only the first five names."""
    settings, partition = trainer.fit_loop.settings, getattr(trainer.datamodule, "partition", None)
    values = {name: getattr(settings, name) for name in _SHOWN}
    if settings.client_privacy is not None:
        del values["seed"]  # it determines the noise
    chosen = {name: getattr(settings, name) for name in _IF_SET}
    parts = {name: _described(part) for name, part in chosen.items() if part not in (None, plain_sgd)}
    if settings.asynchronous is not None:
        del parts["aggregator"]  # the same object as asynchronous
    return {
        "algorithm": repr(settings.algorithm),
        **values,
        "partition": None if partition is None else repr(partition),
        **parts,
    }


def _described(part: Any) -> str:
    """Return the name of a part of the run with its options, even if the command line creates it later."""
    if not isinstance(part, partial):
        return str(getattr(part, "__qualname__", repr(part)))
    made = next((one for one in part.args if isinstance(one, type)), part.func)
    return f"{_described(made)}({', '.join(f'{name}={value!r}' for name, value in part.keywords.items())})"


def _forget(writer: Any, step: int) -> None:
    """Make TensorBoard discard everything written at a step or later."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # imports 130 modules, which only such a log needs
    from torch.utils.tensorboard import SummaryWriter

    if isinstance(writer, SummaryWriter):
        writer._get_file_writer().add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))


class SimulatedTime(FederatedCallback):
    """Log ``time/simulated``, the simulated seconds since the start of the run, after every round.

    A synchronous round takes as long as its slowest client. An asynchronous one ends when the last answer of its step
    arrives.

    Args:
        clock: The time that clients take. Defaults to the clock of ``asynchronous``, or one second each.

    Attributes:
        seconds: The time so far.

    Raises:
        FederatedError: If it is not a clock. When the fit starts, if the run has its own clock.

    Example:
        >>> SimulatedTime().seconds
        0.0
    """

    def __init__(self, clock: ClientClock | None = None) -> None:
        if clock is not None and not isinstance(clock, ClientClock):
            raise FederatedError(f"SimulatedTime(clock={clock!r}): clock must be a ClientClock, or None.")
        self.clock = clock
        self.seconds = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the time so far."""
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the time from a checkpoint."""
        self.seconds = float(state_dict["seconds"])

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Begin anew in a new run; the callback may have been in another one. A checkpoint's state is loaded later."""
        if stage == "fit" and not trainer.fit_loop.round:
            self.seconds = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse a second clock."""
        if self.clock is not None and trainer.fit_loop.is_asynchronous:
            raise FederatedError(
                "SimulatedTime(clock=...) cannot be combined with asynchronous=..., which has its own clock. Leave it"
                " unset."
            )

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round_report: RoundReport) -> None:
        """Add the time of the round."""
        loop = trainer.fit_loop
        if loop.is_asynchronous:
            self.seconds = loop.arrived
        else:
            clock, population = self.clock or ClientClock(), loop.population
            places = map(population.place_of, round_report.cohort)
            seconds = (clock.seconds_of(loop.state.seed, population, place, round_report.round) for place in places)
            self.seconds += max(seconds, default=0.0)
        loop.log_round({"time/simulated": self.seconds})
