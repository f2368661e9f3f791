"""FedProx: a proximal term keeps the clients near the server model."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.arguments import check_number
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import Cohort, Step
from lightning_fed.core.types import State, Vector


class FedProx(Algorithm):
    r"""FedAvg with a proximal term in every local step.

    Li et al., *Federated Optimization in Heterogeneous Networks*, MLSys 2020 (https://arxiv.org/abs/1812.06127),
    Algorithm 2.

    .. math::
        y_i \leftarrow y_i - \eta_l \left( g_i(y_i) + \mu (y_i - x) \right), \qquad x \leftarrow \sum_i p_i y_i

    Note:
        The inexact local solver is ``local_steps`` or ``local_epochs`` of the user's optimizer, with fewer for
        stragglers. Algorithm 2 samples clients in proportion to :math:`n_i` and averages uniformly; the experiments
        sample uniformly and weight by :math:`n_i`. The latter is the default, the former a choice of sampler and
        ``weighting``. The adaptive rule is the heuristic of the paper's appendix. It evaluates the population's
        training loss f at :math:`x^0` and after every round. If f rises, :math:`\mu` grows by ``step``; if f falls
        ``patience`` times in a row, :math:`\mu` shrinks by ``step``, never below zero. The new :math:`\mu` applies from
        the next round on.

    Args:
        mu: :math:`\mu \ge 0`; with ``adaptive``, the initial value. 0 is FedAvg.
        adaptive: ``{"step": 0.1, "patience": 5}``, or True for these values, adapts :math:`\mu`, at the cost of a pass
            over all clients' data per round. None keeps it fixed.

    Raises:
        FederatedError: If a hyper-parameter is out of range or unknown.

    Example:
        >>> FedProx(mu=1, adaptive={"step": 0.2})
        FedProx(mu=1.0, adaptive={'step': 0.2, 'patience': 5})
    """

    def __init__(self, mu: float, adaptive: Mapping[str, float] | bool | None = None) -> None:
        self.mu = check_number(self, "mu", mu, "[0, inf)")
        self.adaptive = self._adaptive(adaptive)
        self.population_loss = self.adaptive is not None

    def init_server(self, x: Vector) -> State:
        """Return mu; if it adapts, also the number of falls in a row and the last loss (none yet)."""
        mu = torch.tensor(self.mu, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        if self.adaptive is None:
            return {"mu": mu}
        return {"mu": mu, "falls": torch.zeros_like(mu), "loss": torch.full_like(mu, torch.nan)}

    def begin_round(self, x: Vector, server: State, cohort: Cohort) -> State:
        """Adapt mu to the loss at x; reload a fixed mu, since hooks may have set it."""
        if self.adaptive is None:
            return {**server, **self.init_server(x)}
        if cohort.loss is None:
            raise FederatedError("FedProx(adaptive=...) needs the population loss; this engine gave none.")
        mu, step, loss = server["mu"], self.adaptive["step"], cohort.loss.to(server["mu"])
        rose, fell = loss > server["loss"], loss < server["loss"]
        falls = torch.where(fell, server["falls"] + 1, 0.0)
        due = falls == self.adaptive["patience"]
        mu = torch.where(rose, mu + step, torch.where(due, (mu - step).clamp(min=0), mu))
        return {"mu": mu, "falls": torch.where(due, 0.0, falls), "loss": loss}

    def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
        """Return g + mu (y - x)."""
        return g + (self.mu if self.adaptive is None else step.server["mu"]) * (y - step.x)

    def _adaptive(self, given: Mapping[str, float] | bool | None) -> dict[str, float] | None:
        if given is None or given is False:
            return None
        if given is not True and not isinstance(given, Mapping):
            raise FederatedError(
                f"FedProx(adaptive={given!r}): adaptive must be None, True or {{'step': 0.1, 'patience': 5}}."
            )
        rule = {"step": 0.1, "patience": 5, **({} if given is True else given)}
        if unknown := sorted(map(str, rule.keys() - {"step", "patience"})):
            raise FederatedError(f"FedProx(adaptive=...): unknown {unknown}; allowed are 'step' and 'patience'.")
        patience = check_number(self, "adaptive['patience']", rule["patience"], "[1, inf)")
        if not patience.is_integer():
            raise FederatedError(f"FedProx(adaptive['patience']={patience!r}): patience must be a whole number.")
        return {"step": check_number(self, "adaptive['step']", rule["step"], "(0, inf)"), "patience": int(patience)}
