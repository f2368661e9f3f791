"""What every round writes to the loggers."""

import math

import pytorch_lightning as pl

from lightning_fed.callbacks.base import FederatedCallback
from lightning_fed.core.rounds import RoundReport

__all__ = ["RoundLogger"]


class RoundLogger(FederatedCallback):
    """Write each round's report to the loggers, with the number of completed rounds as the step.

    ========================= ===================================================================
    tag                       meaning
    ========================= ===================================================================
    ``client/loss``           example-weighted mean training loss of the cohort
    ``client/update_norm``    mean norm of the client model changes
    ``client/drift``          spread of the client models around their mean
    ``server/update_norm``    norm of the server's step
    ``comm/bytes_up``         bytes sent by the cohort
    ``comm/bytes_down``       bytes sent to the cohort
    ``round/clients``         clients that took part
    ``round/dropped``         clients drawn but left out
    ``round/local_steps``     local steps taken by them all
    ``round/seconds``         wall time of the round without validation
    ========================= ===================================================================

    The values can be monitored by ``ModelCheckpoint`` and ``EarlyStopping`` under the same names.
    """

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
            "round/seconds": r.seconds,
        }
        trainer.fit_loop.log_round({name: value for name, value in values.items() if not math.isnan(value)})
