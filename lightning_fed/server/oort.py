"""Oort: prefers clients with high statistical utility that are not too slow, and explores new ones."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fed.core.arguments import check_count, check_number, check_texts
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import ClientReport
from lightning_fed.core.seeds import Purpose, generator
from lightning_fed.core.types import ClientId
from lightning_fed.server.heterogeneity import ClientClock
from lightning_fed.server.sampling import CountingSampler, first_drawn, has_examples

_EXPLOIT, _EXPLORE = 1, 2  # the random streams of a round


class OortSampler(CountingSampler):
    r"""Draw clients by data utility and speed, and explore clients that have not taken part (Oort).

    Lai, Zhu, Madhyastha, and Chowdhury, *Oort: Efficient Federated Learning via Guided Participant Selection*, OSDI
    2021 (https://arxiv.org/abs/2010.06081), Algorithm 1. Let L(i) be a client's last round and D(i) its last duration.
    In round R = 1, 2, ..., a client that has taken part has the utility

    .. math::
        \left( \min(U(i), \text{the clip quantile of } U) + \sqrt{0.1 \log R / L(i)} \right)
        \cdot \left( \frac{T}{D(i)} \right)^{\alpha\, [T < D(i)]}, \qquad
        U(i) = |B_i| \sqrt{\frac{1}{|B_i|} \sum_{k \in B_i} \text{loss}(k)^2}.

    The sampler draws :math:`(1 - \varepsilon) K` clients in proportion to it, if they have at least c times the utility
    of the :math:`(1 - \varepsilon) K`-th best. The other :math:`\varepsilon K` have not taken part, and are drawn in
    proportion to their speed if ``clock`` simulates it. Each round multiplies :math:`\varepsilon` by its decay until it
    reaches its least value. The pacer raises T by :math:`\Delta` if the total U of the last W rounds' clients is below
    the total of the W rounds before.

    The formulas are exact, with the paper's constants as defaults. By default, there are two exceptions:

    - A client's report lacks the loss of each example. U(i) is :math:`|B_i|` times the mean training loss, which is at
      most the exact value, by Jensen's inequality. Both agree if all examples have one loss. For the exact value, let
      ``training_step`` log the batch mean of squared example losses, and pass its name as ``squared_loss``.
    - This machine's times are not device times. Without a ``clock``, there is no system penalty and no pacer.

    The paper leaves some cases open. Numbers of clients are rounded. If one of the two groups has too few clients, the
    other one fills their places. All draws are without replacement, and stored order breaks ties. The quantile is
    interpolated. Clients built on demand that turn out to be empty are skipped. If ``most_rounds`` is set, clients that
    took part in more rounds are drawn last, uniformly.

    The authors' code differs from Algorithm 1. It scales utilities to [0, 1] before it adds the second term. T is a
    percentile of the durations. The pacer raises T every W rounds if U hardly changes. Unexplored clients are drawn by
    size.

    Args:
        clients_per_round: K, as a count or a share.
        exploration: The initial :math:`\varepsilon`.
        exploration_decay: Its factor after each round.
        least_exploration: The value at or below which it stops decaying.
        cutoff: c.
        clip: The quantile at which utilities are clipped, to bound a client's gain from a high loss. 1 disables
            clipping.
        alpha: :math:`\alpha`, the exponent of the system penalty.
        pacer_step: :math:`\Delta`, in seconds, and the first T. Required with a clock.
        window: W, in rounds.
        clock: The source of durations: a :class:`ClientClock` for simulated times, "reports" for the seconds in
            clients' reports, or None. With "reports", a run is not reproducible.
        squared_loss: The name of the logged mean of squared losses.
        most_rounds: See above; 10 in the paper's example.

    Raises:
        FederatedError: If a value is out of range, or only one of ``clock`` and ``pacer_step`` is given.
    """

    def __init__(
        self,
        clients_per_round: int | float,
        exploration: float = 0.9,
        exploration_decay: float = 0.98,
        least_exploration: float = 0.2,
        cutoff: float = 0.95,
        clip: float = 0.95,
        alpha: float = 2.0,
        pacer_step: float | None = None,
        window: int = 20,
        clock: ClientClock | Literal["reports"] | None = None,
        squared_loss: str | None = None,
        most_rounds: int | None = None,
    ) -> None:
        super().__init__(clients_per_round)
        name = type(self).__name__
        self.exploration = check_number(self, "exploration", exploration, "[0, 1]")
        self.exploration_decay = check_number(self, "exploration_decay", exploration_decay, "[0, 1]")
        self.cutoff = check_number(self, "cutoff", cutoff, "[0, 1]")
        self.least_exploration = check_number(self, "least_exploration", least_exploration, "[0, 1)")
        self.clip = check_number(self, "clip", clip, "(0, 1]")
        self.alpha = check_number(self, "alpha", alpha, "[0, inf)")
        if clock is not None and clock != "reports" and not isinstance(clock, ClientClock):
            raise FederatedError(f"{name}(clock={clock!r}): clock must be a ClientClock, 'reports' or None.")
        if (clock is None) != (pacer_step is None):
            raise FederatedError(
                f"{name}(clock={clock!r}, pacer_step={pacer_step!r}): the pacer raises the preferred duration of a"
                " round by pacer_step seconds, and durations come from the clock. Pass both, or neither."
            )
        self.clock = clock
        self.pacer_step = None if pacer_step is None else check_number(self, "pacer_step", pacer_step, "(0, inf)")
        self.window = check_count(self, "window", window)
        if squared_loss is not None:
            check_texts(self, squared_loss=squared_loss)
        self.squared_loss = squared_loss
        self.most_rounds = None if most_rounds is None else check_count(self, "most_rounds", most_rounds)
        self._clients: dict[ClientId, tuple[float, int, int, float]] = {}  # U, L, the number of rounds, the reported D
        self._achieved: list[float] = []  # the sum of U over each round's clients, for the last 2 W rounds
        self._preferred = self.pacer_step or 0.0  # T
        self._empty: set[ClientId] = set()  # clients without examples, to avoid building them again

    def exploration_in(self, round: int) -> float:
        r"""Return :math:`\varepsilon` in a round, from 0."""
        epsilon = self.exploration
        for _ in range(round):
            if epsilon <= self.least_exploration:
                break
            epsilon *= self.exploration_decay
        return epsilon

    def __call__(self, seed: int, round: int, population: Sequence[ClientId]) -> list[ClientId]:
        """Return the cohort of a round, in the population's order."""
        k = self.count(len(population))
        explored, unexplored, tired = list[int](), list[int](), list[int]()
        for place, client_id in enumerate(population):
            if client_id not in self._clients:
                unexplored.append(place)
            elif self.most_rounds is not None and self._clients[client_id][2] > self.most_rounds:
                tired.append(place)
            else:
                explored.append(place)
        if isinstance(self.clock, ClientClock) and self.clock.per_example:  # sizes are known, and some may be zero
            sized: Any = population
            sizes = sized.sizes
            unexplored = [place for place in unexplored if sizes[place] > 0]
        exploit = min(len(explored), k - min(len(unexplored), int(self.exploration_in(round) * k + 0.5)))
        stream = generator(seed, Purpose.COHORT, round, _EXPLORE)
        drawn = self._explored(seed, round, population, unexplored, k - exploit, stream)
        exploit = min(len(explored), k - len(drawn))
        if exploit:
            utilities = self._utilities(seed, round, population, explored)
            least = self.cutoff * float(utilities.sort(descending=True).values[exploit - 1])
            admitted = (utilities >= least).nonzero()[:, 0]
            own = generator(seed, Purpose.COHORT, round, _EXPLOIT)
            drawn += [explored[int(i)] for i in admitted[first_drawn(utilities[admitted], exploit, own)]]
        if missing := k - len(drawn):
            others = first_drawn(torch.ones(len(tired), dtype=torch.float64), missing, stream)
            drawn += [tired[i] for i in others.tolist()]
        return [population[place] for place in sorted(drawn)]

    def _explored(
        self,
        seed: int,
        round: int,
        population: Sequence[ClientId],
        places: Sequence[int],
        count: int,
        stream: torch.Generator,
    ) -> list[int]:
        """Draw at most ``count`` of the places by speed, and skip clients that turn out to be empty."""
        found = list[int]()
        if not count:
            return found
        speeds = torch.ones(len(places), dtype=torch.float64)
        if isinstance(self.clock, ClientClock):
            seconds = [self.clock.seconds_of(seed, population, place, round) for place in places]
            speeds /= torch.tensor(seconds, dtype=torch.float64)
        for place in map(places.__getitem__, first_drawn(speeds, len(places), stream).tolist()):
            client_id = population[place]
            if client_id in self._empty or not has_examples(population, client_id):
                self._empty.add(client_id)
            else:
                found.append(place)
            if len(found) == count:
                break
        return found

    def _utilities(self, seed: int, round: int, population: Sequence[ClientId], places: Sequence[int]) -> Tensor:
        """Return the utilities, float64, of clients that have taken part."""
        known = [self._clients[population[place]] for place in places]
        utility, last = (torch.tensor([row[i] for row in known], dtype=torch.float64) for i in (0, 1))
        utility = utility.clamp(max=float(torch.quantile(utility, self.clip)))
        utility += (0.1 * math.log(round + 1) / last).sqrt()
        if self.clock is None:
            return utility
        if self.clock == "reports":
            seconds = [row[3] for row in known]
        else:
            clock = self.clock
            seconds = [clock.seconds_of(seed, population, i, row[1] - 1) for i, row in zip(places, known, strict=True)]
        durations = torch.tensor(seconds, dtype=torch.float64)
        slow = self._preferred < durations
        return torch.where(slow, utility * (self._preferred / durations.clamp(min=1e-300)) ** self.alpha, utility)

    def update(self, round: int, reports: Mapping[ClientId, ClientReport]) -> None:
        """Record the utilities and durations of clients that trained, and run the pacer."""
        achieved = 0.0
        for client_id, report in reports.items():
            utility = self._utility(report)
            _, _, times, _ = self._clients.get(client_id, (0.0, 0, 0, 0.0))
            seconds = float(report.seconds) if self.clock == "reports" else 0.0
            self._clients[client_id] = (utility, round + 1, times + 1, seconds)
            achieved += utility
        w = self.window
        self._achieved = [*self._achieved, achieved][-2 * w :]
        is_due = self.pacer_step is not None and len(self._achieved) == 2 * w
        if is_due and sum(self._achieved[:w]) > sum(self._achieved[w:]):
            self._preferred += self.pacer_step or 0.0

    def _utility(self, report: ClientReport) -> float:
        """Return U(i), or 0 if the client took no steps or its loss is not finite."""
        if not report.steps:
            return 0.0
        root = abs(report.loss)
        if self.squared_loss is not None:
            if (square := report.metrics.get(self.squared_loss)) is None:
                raise FederatedError(
                    f"{type(self).__name__}(squared_loss={self.squared_loss!r}): client {report.client_id!r} has logged"
                    f" no such value, but {sorted(report.metrics)}. Log it in training_step."
                )
            root = math.sqrt(square) if square >= 0 else math.nan
        return report.size * root if math.isfinite(root) else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the records of clients, and the state of the pacer."""
        return {
            "clients": {client_id: list(row) for client_id, row in self._clients.items()},
            "achieved": list(self._achieved),
            "preferred": self._preferred,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        rows = state_dict["clients"].items()
        self._clients = {i: (float(u), int(last), int(times), float(s)) for i, (u, last, times, s) in rows}
        self._achieved = [float(value) for value in state_dict["achieved"]]
        self._preferred = float(state_dict["preferred"])
