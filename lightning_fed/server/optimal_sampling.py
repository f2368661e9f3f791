"""Client selection by update norms, of this round or of earlier rounds."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.arguments import check_count, check_number
from lightning_fed.core.client_weights import ClientWeights
from lightning_fed.core.devices import accumulation, narrowed, widened
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import ClientReport
from lightning_fed.core.seeds import Purpose, generator
from lightning_fed.core.types import ClientId, State, Vector, Weighting
from lightning_fed.server.aggregation.mean import Aggregation, Aggregator, Collectives, averaged_points
from lightning_fed.server.aggregation.robust import not_finite
from lightning_fed.server.participation import no_weight
from lightning_fed.server.sampling import CountingSampler, Sampler, included


class OptimalClientSampling(Aggregator):
    r"""An unbiased estimate of the mean from the updates of a few clients, drawn by this round's norms.

    Chen, Horváth, and Richtárik, *Optimal Client Sampling for Federated Learning*, TMLR 2022
    (https://arxiv.org/abs/2010.13723), Algorithm 1 (OCS). All clients of the cohort train, and send the norm of their
    weighted update, :math:`u_i = w_i \lVert U_i \rVert`. The server answers with the probabilities :math:`p_i` of
    Equation 7, which minimize the variance for m expected clients. Client i sends :math:`U_i` with probability
    :math:`p_i`, independently of the others, and the server uses

    .. math::
        \sum_{i \in S} \frac{w_i}{p_i} U_i

    in place of the cohort's mean :math:`\sum_i w_i U_i`, which is its expected value over the draws of S. This saves
    messages, not local work. The round's bytes count the updates that are sent, and 8 bytes each for every client's
    norm and probability. If no client sends, the sum is zero, and the server takes its step along zero.

    It needs a method whose clients only send the change of their models, such as FedAvg or FedProx. Clients that do
    not send still keep their new states, such as Ditto's personal models. It only works in simulations: real sites
    would have to wait for their probability. Algorithm 2 (AOCS) approximates the probabilities from sums over the
    clients, and is not implemented.

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
        check_sends_changes(f"aggregator={self!r}", algorithm)
        return super().for_run(algorithm, weighting, sampler)

    def of_round(self, *arguments: Any, **named: Any) -> Aggregation:
        """Return an object that draws the clients that send; it also takes the run's ``seed`` and the ``round``."""
        return _DrawnAggregation(self.expected_clients, *arguments, **named)


class _DrawnAggregation(Aggregation):
    """Holds a cohort's updates until all norms are known, and sums the updates of the drawn clients."""

    is_one_by_one = True

    def __init__(self, expected: int, *arguments: Any, seed: int, round: int, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._expected, self._seed, self._round = expected, seed, round
        self._held: dict[int, Tensor] = {}
        self._norms: dict[int, float] = {}

    def update(self, steps: Mapping[int, int], send: State, models: Tensor | None = None) -> None:
        """Store clients' updates and norms; raise a :class:`ClientError` for a non-finite update."""
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
        """Draw from the clients of all processes, and reduce the sums."""
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


class UpdateNormSampler(CountingSampler):
    r"""Include clients independently, preferring long last updates, and weight them without bias.

    Let :math:`U_i` be the change of client i's model in its last round, and :math:`u_i = w_i \lVert U_i \rVert`. The
    sampler includes client i with probability

    .. math::
        p_i = (1 - \gamma)\, p^*_i + \gamma \frac{m}{N},

    where :math:`p^*` are the probabilities of Chen, Horváth, and Richtárik, *Optimal Client Sampling for Federated
    Learning*, TMLR 2022 (https://arxiv.org/abs/2010.13723), Equation 7, for m expected clients. The server moves along
    :math:`\sum_{i \in S} (w_i / p_i) U_i` (their Equation 2). For any norms, its expected value over the draws is the
    step of full participation, :math:`\sum_i w_i U_i`.

    This is not their Algorithm 1 (OCS) or 2 (AOCS). Both train all clients in each round, to get the norms of this
    round's updates, and only save messages. Here, clients that are not drawn do not train. The norms are from each
    client's last round, so the variance is not the smallest one. Two choices are ours. A client that has not taken
    part gets the mean of the known norms, so the first round draws by :math:`w_i`. The share :math:`\gamma` keeps every
    probability positive: an update that was zero once may be long later.

    The weights of a round do not sum to one. The sampler needs a method whose clients only send the change of their
    models, such as FedAvg or FedProx. It needs ``weighting`` "examples" or "uniform", and no dropped clients. Running
    statistics of normalization layers are averaged over the cohort as usual. A client built on demand that turns out
    to be empty counts as a zero update.

    Args:
        clients_per_round: m, the expected size of the cohort, as a count or a share.
        uniform_share: :math:`\gamma` in (0, 1]; 1 is uniform sampling with probability m / N.
        weights: The :math:`w_i` in the norms, up to a factor: "examples", "uniform", a mapping, or the path of a file.
            Use the run's ``weighting``: other weights only raise the variance.

    Raises:
        FederatedError: If a value is out of range.
    """

    def __init__(
        self,
        clients_per_round: int | float,
        uniform_share: float = 0.1,
        weights: Literal["examples", "uniform"] | Mapping[ClientId, float] | str = "examples",
    ) -> None:
        super().__init__(clients_per_round)
        self.uniform_share = check_number(self, "uniform_share", uniform_share, "(0, 1]")
        self.weights: ClientWeights | str = "uniform" if weights == "uniform" else ClientWeights(weights)
        self._norms: dict[ClientId, float] = {}  # the last norms of updates

    def probabilities(self, round: int, population: Sequence[ClientId]) -> Tensor:
        """Return the probability of each client [N] to be in the cohort of a round, float64."""
        n, m = len(population), self.count(len(population))
        norms = torch.ones(n, dtype=torch.float64)
        if self._norms:
            unseen = sum(self._norms.values()) / len(self._norms)
            norms = torch.tensor([self._norms.get(i, unseen) for i in population], dtype=torch.float64)
        if isinstance(self.weights, ClientWeights):
            w = self.weights.of(population)
            w = w / w.max()
            norms = norms * (w / w.sum())
        return (1 - self.uniform_share) * optimal_probabilities(norms, m) + self.uniform_share * m / n

    def __call__(self, seed: int, round: int, population: Sequence[ClientId]) -> list[ClientId]:
        """Return the cohort of a round, in the population's order."""
        return included(self.probabilities(round, population), population, generator(seed, Purpose.COHORT, round))

    def update(self, round: int, reports: Mapping[ClientId, ClientReport]) -> None:
        """Record the update norms of clients that trained."""
        self._norms |= {i: float(r.update_norm) for i, r in reports.items() if r.steps and math.isfinite(r.update_norm)}

    def state_dict(self) -> dict[str, Any]:
        """Return the last norms."""
        return {"norms": dict(self._norms)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the last norms."""
        self._norms = {client_id: float(norm) for client_id, norm in state_dict["norms"].items()}


def check_sends_changes(who: str, algorithm: Algorithm) -> None:
    """Raise if the method's clients send more than the change of their models, which ``who`` estimates."""
    if dict(algorithm.reduces) != {"delta": "weighting"} or averaged_points(algorithm):
        raise FederatedError(
            f"{who} cannot be combined with {algorithm!r}, whose clients send"
            f" {[*algorithm.reduces, *averaged_points(algorithm)]}: the estimate is made for the weighted mean of the"
            " models' changes alone. Use a method such as FedAvg or FedProx."
        )


def optimal_probabilities(norms: Tensor, m: int) -> Tensor:
    r"""Return the probabilities [N] of m expected clients that minimize the variance of the unbiased sum.

    Chen, Horváth, and Richtárik (2022), Equation 7: in ascending order of the norms :math:`u`,

    .. math::
        p_i = \begin{cases}
            (m + l - N)\, u_i / \sum_{j \le l} u_{(j)} & \text{for the } l \text{ smallest norms} \\
            1 & \text{for the others,}
        \end{cases}

    with the largest l such that :math:`0 < m + l - N \le \sum_{j \le l} u_{(j)} / u_{(l)}`. The equation leaves fewer
    than m positive norms open. Here, these clients have probability 1, and the others share the rest equally.

    Args:
        norms: The weighted norms u_i [N] of the clients' updates, float64.
        m: The expected number of clients, at most N.

    Example:
        >>> optimal_probabilities(torch.tensor([1.0, 1.0, 2.0, 12.0], dtype=torch.float64), 2)
        tensor([0.2500, 0.2500, 0.5000, 1.0000], dtype=torch.float64)
    """
    n, positive = len(norms), int((norms > 0).sum())
    if positive <= m:
        rest = (m - positive) / max(1, n - positive)
        return torch.full_like(norms, rest).masked_fill_(norms > 0, 1.0)  # torch.where of two numbers is float32
    order = norms.argsort(stable=True)
    ascending = norms[order]
    sums, count = ascending.cumsum(0), m - n + torch.arange(1, n + 1)
    # products, not quotients by zero norms; the norm at l >= N - m + 1 is positive, since more than m are positive
    fits = (count > 0) & (count * ascending <= sums)
    l = int(fits.nonzero().max()) + 1  # noqa: E741 - the paper's name
    found = torch.ones_like(norms)
    found[order[:l]] = count[l - 1] * ascending[:l] / sums[l - 1]
    return found.clamp(max=1.0)
