"""Scaffnew: proximal skipping, in which all clients take the same number of corrected steps between averages."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm, lr_sum
from lightning_fed.core.arguments import check_number
from lightning_fed.core.rounds import Run, Step, Update
from lightning_fed.core.types import State, Vector


class Scaffnew(Algorithm):
    r"""Local gradient steps with control variates that are exact at the optimum.

    Mishchenko, Malinovsky, Stich and Richtárik, *ProxSkip: Yes! Local Gradient Steps Provably Lead to Communication
    Acceleration! Finally!*, ICML 2022 (https://arxiv.org/abs/2202.09357), Algorithm 2.

    .. math::
        y_i \leftarrow y_i - \eta_l \left( g_i(y_i) - h_i \right), \qquad
        x \leftarrow \tfrac{1}{N} \sum_i y_i, \qquad
        h_i \leftarrow h_i + \tfrac{p}{\eta_l} (x - y_i)

    Note:
        In the paper, a shared coin with probability p ends the local steps; here, ``local_steps`` fixes their number,
        whose expectation in the paper is :math:`1 / p`. All clients must participate in every round, with the same
        number of steps; other settings raise. :math:`h_i` begins at zero, and a client updates it when it gets the next
        x. :math:`\eta_l` is the mean of the rates of the client's steps. There is no weighted form. The formulas assume
        the server optimizer SGD(lr=1).

    Args:
        prob: p, in (0, 1].

    Raises:
        FederatedError: If ``prob`` is out of range.

    Example:
        >>> Scaffnew(prob=0.1)
        Scaffnew(prob=0.1)
    """

    reduces: Mapping[str, str] = {"delta": "uniform"}
    needs_everyone = True
    uses_path_gradient = False

    def __init__(self, prob: float) -> None:
        self.prob = check_number(self, "prob", prob, "(0, 1]")

    def init_client(self, x: Vector) -> State:
        """Return the initial h_i = 0, without an update to add."""
        return {"h_i": torch.zeros_like(x), "y_i": x.clone(), "scale": torch.zeros_like(x)}

    def init_local(self, x: Vector, server: State, client: State) -> State:
        """Return this round's h_i, given the mean of the last round."""
        return {"h_i": client["h_i"] + client["scale"] * (x - client["y_i"])}

    def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
        """Return g - h_i."""
        return g - step.local["h_i"]

    def finish(self, y: Vector, run: Run) -> Update:
        """Send the model's change, and save the parts of the next h_i."""
        rates = lr_sum(run)
        is_still = rates == 0  # all rates were zero: no client has moved, and h_i stays
        scale = torch.where(is_still, 0.0, self.prob * run.num_steps / torch.where(is_still, 1.0, rates))
        kept = {"h_i": run.local["h_i"], "y_i": y.clone(), "scale": scale.expand_as(y).clone()}
        return Update({"delta": run.delta}, kept)
