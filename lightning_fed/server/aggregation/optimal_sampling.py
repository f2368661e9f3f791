"""Optimal Client Sampling: all clients train, and those with long updates are likely to send them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.arguments import check_count
from lightning_fed.core.devices import accumulation, narrowed, widened
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.seeds import Purpose, generator
from lightning_fed.core.types import State, Vector, Weighting
from lightning_fed.server.aggregation.mean import Aggregation, Aggregator, Collectives, averaged_points
from lightning_fed.server.aggregation.robust import not_finite
from lightning_fed.server.participation import no_weight
from lightning_fed.server.sampling import Sampler
from lightning_fed.server.update_norms import optimal_probabilities


class OptimalClientSampling(Aggregator):
    r"""The unbiased estimate of the mean from the updates of a few clients, which are drawn by this round's norms.

    Chen, Horváth, and Richtárik, *Optimal Client Sampling for Federated Learning*, TMLR 2022
    (https://arxiv.org/abs/2010.13723), Algorithm 1 (OCS). All clients of the cohort train, and send the norm of their
    weighted update, :math:`u_i = w_i \lVert U_i \rVert`. The server answers with the probabilities :math:`p_i` of
    Equation 7, which have the least variance for m expected clients. Client i sends :math:`U_i` with probability
    :math:`p_i`, independently of the others, and the server uses

    .. math::
        \sum_{i \in S} \frac{w_i}{p_i} U_i

    in place of the mean :math:`\sum_i w_i U_i` over the cohort, which is its mean over the draws of S. This saves
    messages, not local work. The round's bytes count the updates that are sent, and for each client its norm and its
    probability, 8 bytes each. If no client sends, the sum is zero, and the server takes its step along zero.

    It needs a method whose clients send the change of their models alone, such as FedAvg or FedProx. Clients that do
    not send keep what they have learned for themselves, such as Ditto's personal models. It works in simulations only:
    real sites would have to wait for their probability. Algorithm 2 (AOCS), which needs only sums over the clients to
    approximate the probabilities, is not offered.

    Args:
        expected_clients: m, the expected number of clients that send their update. In a cohort of at most m, all do.

    Raises:
        FederatedError: If the number is not positive.

    Example:
        >>> OptimalClientSampling(expected_clients=3)
        OptimalClientSampling(expected_clients=3)
    """

    def __init__(self, expected_clients: int) -> None:
        self.expected_clients = check_count(self, "expected_clients", expected_clients, least=1)

    def for_run(self, algorithm: Algorithm, weighting: Weighting | None, sampler: Sampler) -> Aggregator:
        """Return the aggregator; raise if the method's clients send more than the change of their models."""
        if dict(algorithm.reduces) != {"delta": "weighting"} or averaged_points(algorithm):
            raise FederatedError(
                f"aggregator={self!r} cannot be combined with {algorithm!r}, whose clients send"
                f" {[*algorithm.reduces, *averaged_points(algorithm)]}: it is made for the weighted mean of the models'"
                " changes alone. Use a method such as FedAvg or FedProx."
            )
        return super().for_run(algorithm, weighting, sampler)

    def of_round(self, *arguments: Any, **named: Any) -> Aggregation:
        """Return an object that draws the clients that send; it also takes the run's ``seed`` and the ``round``."""
        return _DrawnAggregation(self.expected_clients, *arguments, **named)


class _DrawnAggregation(Aggregation):
    """Holds the updates of a cohort until all norms are known, and sums those of the clients that are drawn."""

    is_one_by_one = True

    def __init__(self, expected: int, *arguments: Any, seed: int, round: int, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._expected, self._seed, self._round = expected, seed, round
        self._held: dict[int, Tensor] = {}
        self._norms: dict[int, float] = {}

    def update(self, steps: Mapping[int, int], send: State, models: Tensor | None = None) -> None:
        """Hold the updates of clients, and note their norms; a non-finite update is a :class:`ClientError`."""
        self._check_names(send)
        self._note_steps(steps)
        for index, value in zip(steps, send["delta"], strict=True):
            norm = float(torch.linalg.vector_norm(widened(value.detach())))
            if not math.isfinite(norm):
                raise not_finite(self._members[index], "delta")
            self._held[index], self._norms[index] = value.detach().clone(), norm

    def partial(self) -> dict[str, Any]:
        """Return the steps and norms that other processes need to draw the same clients."""
        return {"steps": {index: self._steps[index] for index in self._held}, "norms": self._norms}

    def merge(self, partials: Sequence[Mapping[str, Any]], ranks: Collectives, x: Vector) -> None:
        """Draw from the clients of all processes, and add their sums."""
        for partial in partials:
            self._note_steps(partial["steps"])
            self._norms = {**self._norms, **partial["norms"]}
        self._draw(x)
        ranks.sum([self._sums["delta"]])

    def compute(self, x: Vector) -> tuple[State, Vector | None]:
        """Return the estimate of the mean change, zero if no client sends; call it once a round."""
        if self.senders is None:
            self._draw(x)
        return {"delta": narrowed(self._sums["delta"], x)}, None

    def _draw(self, x: Vector) -> None:
        """Draw the clients that send, give them the weights w_i / p_i, and sum the updates held here."""
        there = sorted(self._norms)
        w = torch.tensor([self._raw["weighting"][index] for index in there], dtype=torch.float64)
        if there and not w.sum() > 0:
            raise no_weight([self._members[index].client_id for index in there])
        w = w / w.sum()
        norms = torch.tensor([self._norms[index] for index in there], dtype=torch.float64)
        p = optimal_probabilities(w * norms, min(self._expected, len(there)))
        coins = torch.empty_like(p)
        for place, index in enumerate(there):
            coins[place].uniform_(generator=generator(self._seed, Purpose.SENDERS, self._round, index))
        is_drawn = coins < p
        shares = torch.where(is_drawn, w / p, 0.0).tolist()
        self._raw["weighting"], self._totals["weighting"] = dict(zip(there, shares, strict=True)), 1.0
        self.is_estimate = True
        self.senders = {index for index, is_sender in zip(there, is_drawn.tolist(), strict=True) if is_sender}
        total = torch.zeros(x.shape, **accumulation(x.device))
        for index, update in self._held.items():
            if index in self.senders:
                total.add_(widened(update), alpha=self._raw["weighting"][index])
        self._sums["delta"] = total
        self._held = {}
