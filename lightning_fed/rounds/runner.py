"""The rounds of a fit, as far as clients take part in them."""

import math
from typing import Any, TypeAlias

import pytorch_lightning as pl
import torch

from lightning_fed._compat import rank_zero_info
from lightning_fed.callbacks.base import call_round_hook, hears
from lightning_fed.core.errors import ClientError
from lightning_fed.core.types import ClientId
from lightning_fed.engines.base import Engine, WorkPlan
from lightning_fed.engines.client_errors import NamesClient
from lightning_fed.rounds.faults import Faults
from lightning_fed.rounds.planner import Planner
from lightning_fed.rounds.round import Round
from lightning_fed.server.privacy import DifferentialPrivacy
from lightning_fed.server.server import Server
from lightning_fed.settings import Settings
from lightning_fed.strategies.processes import Ranks, Sent, metrics_alone
from lightning_fed.strategies.split import BatchSplit

__all__ = ["RoundRunner"]

Outline: TypeAlias = dict[str, Any]
"""What a process tells the others of its part in a round; see :meth:`Round.outline`."""


class RoundRunner:
    """Draws the cohorts of a fit's rounds and lets their clients work, until the server could take its step.

    Args:
        trainer: The trainer.
        settings: How rounds are run.
        server: The server's side of the run.
        planner: Plans the work of cohorts.
        engine: Runs the clients.
        ranks: The processes that share the clients.
        split: The processes that share every batch.

    Attributes:
        work: The round at work; None between rounds.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        settings: Settings,
        server: Server,
        planner: Planner,
        engine: Engine,
        ranks: Ranks,
        split: BatchSplit,
    ) -> None:
        self.trainer, self.settings, self.server = trainer, settings, server
        self.planner, self.engine, self.ranks, self.split = planner, engine, ranks, split
        self.work: Round | None = None
        self._faults = Faults()
        self._plans: list[WorkPlan] = []
        self._gradient_plans: list[WorkPlan] = []
        self._dropped: list[ClientId] = []

    @property
    def _is_private(self) -> bool:
        return isinstance(self.settings.aggregator, DifferentialPrivacy)

    def draw(self) -> None:
        """Draw the next round's cohort."""
        s, number = self.settings, self.server.round
        self._faults = Faults(s.drops_failed, s.max_failed_share, s.max_update_ratio, number)
        self._plans, self._gradient_plans, self._dropped = self.planner.cohort(number, self._faults)
        if not self._plans and not self._faults.causes and not self._is_private:
            rank_zero_info(f"Nobody takes part in round {number}: it changes nothing.")

    def run(self, edit: str | None) -> tuple[Round, list[Outline]]:
        """Let the clients of the cohort work; those that fail on the way are left out, if that is what is asked for.

        Args:
            edit: What tells this process's model from others, if hooks have changed it since the last round.

        Returns:
            The round, ready for the server's step, and what all processes have told.
        """
        undo = self.engine.undo_point() if self.settings.drops_failed else None
        while (outlines := self._try(edit)) is None:
            assert undo is not None
            undo()
            self.server.clients.discard()
            call_round_hook(self.trainer, "on_round_restart", self.server.round)
        assert self.work is not None
        return self.work, outlines

    def leave(self) -> None:
        """Let go of the round at work, and of its data: the next round's need not lie beside them."""
        self.work, self._plans, self._gradient_plans = None, [], []

    def _try(self, edit: str | None) -> list[Outline] | None:
        """Let the clients work; return None if some failed whose part others rest on, and it is to be done without."""
        ranks, faults, algorithm = self.ranks, self._faults, self.settings.algorithm
        gathers = bool(self._plans and algorithm.full_grad_at and algorithm.full_grad_for != "client")
        if self.settings.drops_failed:
            faults.merge(ranks.gather(faults.causes))  # data may have failed to load in some processes only
        work = self.work = self._make_round(gathers)
        work.has_lost_any([])
        with self.split.in_step(), metrics_alone(self.trainer):
            self.engine.begin_round(work.mine)
            if work.plans or self._is_private:
                if gathers and not work.take_gradients():
                    return None
                loss = self._population_loss() if algorithm.population_loss else None
                if work.has_lost_any([]):
                    return None
                work.begin(loss)
            found = ranks.exchange_and_deliver(lambda: self._train_clients(work, edit))
            outlines = [outline for outline, _ in found]
            if self.split.size > 1:
                outlines = self.split.gather(outlines[0])
        work.merge(outlines, [received for _, received in found])
        return None if work.is_spoiled() else outlines

    def _make_round(self, gathers: bool) -> Round:
        """Return the round that the cohort is to do; ``gathers`` says whether gradients of clients are averaged."""
        settings = self.settings
        return Round(
            self.engine,
            self.server,
            settings.weighting,
            self.planner.population,
            self._plans,
            self._gradient_plans if gathers else (),
            self._dropped,
            self.ranks,
            settings.aggregator,
            self._faults,
            settings.compression,
        )

    def _train_clients(self, work: Round, edit: str | None) -> tuple[Outline, Sent]:
        """Train this process's clients, and return what other processes need of it."""
        trainer, engine = self.trainer, self.engine
        starts, ends = (hears(trainer, hook) for hook in ("on_client_start", "on_client_end"))
        work.send_guests()
        for plans in work.guests_last(engine.chunks(work.mine)):
            for plan in plans if starts else ():
                call_round_hook(trainer, "on_client_start", self.server.round, plan.participant.client_id)
            if starts:
                engine.check_hooks()
            result = work.train(plans)
            if result is None or not ends:
                continue
            for row in result.asked:
                if result.reports[row].client_id not in work.faults.causes:
                    engine.point_to(result, row)
                    call_round_hook(trainer, "on_client_end", result.reports[row])
        engine.end_round()
        outline, sent = work.outline() if self.ranks.size > 1 else ({}, ())
        logged = trainer.fit_loop.epoch_loop._results.outline() if trainer.world_size > 1 else {}
        own = {"logged": logged, "stop": trainer._signal_connector.asked, "edit": edit}
        return {**outline, **own, "gave_up": engine.has_given_up}, sent

    def _population_loss(self) -> torch.Tensor:
        """Return the mean loss over all examples of all clients at x (0-dim); those that fail are left out."""
        x, ranks, faults = self.server.x, self.ranks, self._faults

        def take() -> tuple[float, int, dict[ClientId, str]]:
            return *self._summed_loss(x), faults.causes

        totals, sizes, failed = zip(*ranks.exchange(take), strict=True)
        faults.merge(failed)
        faults.check(faults.causes, len(self.planner.population))
        total, examples = sum(totals), sum(sizes)
        return torch.tensor(total / examples, device=x.device, dtype=x.dtype)

    def _summed_loss(self, x: torch.Tensor) -> tuple[float, int]:
        """Return the sum of the loss over the examples of this process's clients at ``x``, and their number."""
        engine, number = self.engine, self.server.round
        total, examples = 0.0, 0
        for index, client_id in self.planner.everyone(self.ranks.is_home_of):
            self.trainer._signal_connector.check()
            try:
                with NamesClient(client_id, number, "the population's loss", lambda: None):
                    batches = self.trainer.datamodule.client_batches(client_id)
                    loss = engine.loss_at(x, batches, number, index)
                    if not math.isfinite(loss):
                        raise ClientError(f"its loss is {loss:g}. Lower the rates, or look at its data.")
            except ClientError as error:
                self._faults.add(error)
                continue
            total += loss
            examples += batches.size
        return sum(engine.split.gather(total)), examples
