"""Power-of-Choice: selects the clients with the highest loss among random candidates."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from lightning_fed.core.arguments import check_one_of
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import ClientReport
from lightning_fed.core.seeds import Purpose, generator
from lightning_fed.core.types import ClientId
from lightning_fed.server.sampling import CountingSampler, WeightedSampler, has_examples

_TIES = 1  # the random stream of a round that breaks ties between equal losses


class PowerOfChoiceSampler(CountingSampler):
    r"""Draw d candidates, and take the m with the highest loss (Power-of-Choice).

    Cho, Wang, and Joshi, *Client Selection in Federated Learning: Convergence Analysis and Power-of-Choice Selection
    Strategies*, 2020 (https://arxiv.org/abs/2010.01243), Section 4. The sampler draws candidates one at a time without
    replacement, client k with probability :math:`p_k = n_k / n`. Ties are broken at random. The paper takes the simple
    mean of the chosen clients' models: set the trainer's ``weighting="uniform"``.

    - ``losses="fresh"`` is :math:`\pi_{\text{pow-}d}`: the candidates compute their loss :math:`F_k(x)` at the server
      model. It costs a forward pass over the data of d clients per round, and a transfer of the model to them. The
      round's bytes include the transfer. Candidates that do not answer are skipped.
    - ``losses="last"`` is :math:`\pi_{\text{rpow-}d}`: the mean training loss of a client's last local work replaces
      :math:`F_k(x)`, and clients that have not taken part come first. It has no extra cost.

    The paper's third variant, :math:`\pi_{\text{cpow-}d}`, computes the loss on one batch, and is not implemented. The
    choice is biased towards clients with a high loss, at the expense of the mean over all clients. A larger d is
    faster and more biased; d = m samples by p_k.

    Args:
        clients_per_round: m, as a count or a share.
        candidates: d, as a count or a share, at least m.
        losses: "fresh" or "last".
        weights: The :math:`p_k`, as for :class:`WeightedSampler`: "examples", a mapping, or the path of a file.

    Raises:
        FederatedError: If a number is out of range, or there are fewer clients than candidates.

    Example:
        >>> sampler = PowerOfChoiceSampler(
        ...     1, candidates=3, weights={"a": 1, "b": 1, "c": 1}
        ... )
        >>> sampler(
        ...     seed=0,
        ...     round=0,
        ...     population=["a", "b", "c"],
        ...     losses={"a": 0.1, "b": 0.9, "c": 0.5},
        ... )
        ['b']
    """

    _positional = 2

    def __init__(
        self,
        clients_per_round: int | float,
        candidates: int | float,
        losses: Literal["fresh", "last"] = "fresh",
        weights: Literal["examples"] | Mapping[ClientId, float] | str = "examples",
    ) -> None:
        super().__init__(clients_per_round)
        name = type(self).__name__
        self.losses = check_one_of(name, "losses", losses, ("fresh", "last"))
        try:
            self._of_candidates = WeightedSampler(candidates, weights, replacement=False)
        except FederatedError as error:
            raise FederatedError(f"{name}(candidates={candidates!r}, weights=...): {error}") from error
        self.candidates, self.weights = candidates, self._of_candidates.weights
        if type(candidates) is type(clients_per_round) and candidates < clients_per_round:
            raise FederatedError(
                f"{name}(clients_per_round={clients_per_round!r}, candidates={candidates!r}): clients are chosen among"
                " the candidates. Pass at least as many candidates."
            )
        self._last: dict[ClientId, float] = {}  # the last loss, for losses="last"

    def count(self, population: int) -> int:
        """Return m for a population; raise if the population is smaller than d, or d than m."""
        m, d = super().count(population), self._of_candidates.clients_per_round
        found = max(1, round(d * population)) if isinstance(d, float) else d
        if not m <= found <= population:
            raise FederatedError(
                f"{self!r} draws {found} candidates and takes {m} of them, and there are {population} clients. The"
                " number of candidates must lie between the two."
            )
        return m

    def needs_losses_of(self, seed: int, round: int, population: Sequence[ClientId]) -> list[ClientId]:
        """Return the candidates if their losses must be measured."""
        return self._of_candidates(seed, round, population) if self.losses == "fresh" else []

    def __call__(
        self, seed: int, round: int, population: Sequence[ClientId], losses: Mapping[ClientId, float]
    ) -> list[ClientId]:
        """Return the cohort of a round, in the population's order, given the fresh losses."""
        m, candidates, highest = self.count(len(population)), self._of_candidates(seed, round, population), math.inf
        known = losses
        if self.losses == "last":
            there = [i for i in candidates if i in self._last or has_examples(population, i)]
            known = {client_id: self._last.get(client_id, highest) for client_id in there}
        ties = torch.rand(len(candidates), generator=generator(seed, Purpose.COHORT, round, _TIES)).tolist()
        ranked = sorted(
            (-known[client_id], tie, place)
            for place, (client_id, tie) in enumerate(zip(candidates, ties, strict=True))
            if client_id in known and not math.isnan(known[client_id])
        )
        return [candidates[place] for place in sorted(place for _, _, place in ranked[:m])]

    def update(self, round: int, reports: Mapping[ClientId, ClientReport]) -> None:
        """Record the losses of clients that trained."""
        if self.losses == "last":
            self._last |= {i: float(r.loss) for i, r in reports.items() if r.steps and not math.isnan(r.loss)}

    def state_dict(self) -> dict[str, Any]:
        """Return the last losses."""
        return {"losses": dict(self._last)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the last losses."""
        self._last = {client_id: float(loss) for client_id, loss in state_dict["losses"].items()}
