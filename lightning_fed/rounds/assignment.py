"""Who trains whom: the clients of a round are dealt among processes."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping

from lightning_fed.server.aggregation import Participant
from lightning_fed.strategies.processes import Ranks

__all__ = ["assign"]

_MODELS = (2**13, 2**20)  # parameters from which a model is middling, and large: a step takes longer than to send them
# In local steps on a batch of 20, about, of a small model, a middling and a large one:
_AROUND = (4, 4, 0)  # what a client that keeps a state takes beside its steps
_MOVE = (2, 2, 1)  # what it takes to send its state of one vector, there and back
_TRIP = (25, 2, 1)  # what it takes to send anything at all


def assign(
    cohort: Iterable[Participant], ranks: Ranks, keeps_state: bool, most_moves: int = 2**31, numel: int = _MODELS[0]
) -> Mapping[int, int]:
    """Return who trains whom: ranks by stored index.

    Args:
        cohort: The clients, with the steps planned for them.
        ranks: The processes.
        keeps_state: Whether clients keep state from round to round. They are then trained where it is kept, but for
            those by whose moving all are done sooner; else the largest are dealt first, each to whoever has the fewest
            local steps so far.
        most_moves: The most clients that are trained elsewhere than their state is kept.
        numel: The number of parameters.
    """
    members = {member.index: member for member in cohort}
    if ranks.size == 1:
        return dict.fromkeys(members, 0)
    if keeps_state:
        homes = {index: ranks.home_of(index) for index in members}
        kind = sum(numel >= least for least in _MODELS)
        work = {index: member.steps + _AROUND[kind] for index, member in members.items()}
        return _balanced(homes, work, ranks.size, most_moves, _MOVE[kind], _TRIP[kind])
    loads = [0] * ranks.size
    owners = {}
    for member in sorted(members.values(), key=lambda m: (-m.steps, -m.size, m.index)):
        rank = loads.index(min(loads))
        loads[rank] += max(1, member.steps)
        owners[member.index] = rank
    return owners


def _balanced(
    homes: Mapping[int, int], work: Mapping[int, int], size: int, most_moves: int, a_move: int, a_trip: int
) -> Mapping[int, int]:
    """Move clients from the process with the most work to that with the least, as long as it gains."""
    loads = [0] * size
    for index, rank in homes.items():
        loads[rank] += work[index]
    movable = [_Movable(work, [i for i, home in homes.items() if home == rank]) for rank in range(size)]
    owners, at_home, moves = dict(homes), max(loads), 0
    while True:
        most, fewest = loads.index(max(loads)), loads.index(min(loads))
        afterwards = [
            (max(loads[most] - work[index], loads[fewest] + work[index]) + a_move, index)
            for index in movable[most].nearest((loads[most] - loads[fewest]) / 2)
        ]
        after, best = min(afterwards, default=(loads[most], -1))
        if moves == most_moves or after >= loads[most]:
            return owners if loads[most] + a_trip < at_home else homes
        owners[best], moves = fewest, moves + 1
        movable[most].remove(best)
        loads[most] += a_move - work[best]
        loads[fewest] += a_move + work[best]


class _Movable:
    """Clients by their work, of which there are few different amounts in large cohorts.

    Args:
        work: The work of each client.
        indices: The clients.
    """

    def __init__(self, work: Mapping[int, int], indices: Iterable[int]) -> None:
        self.work = work
        self._with: dict[int, list[int]] = {}  # the lowest index last
        for index in sorted(indices, reverse=True):
            self._with.setdefault(work[index], []).append(index)
        self._amounts = sorted(self._with)

    def nearest(self, amount: float) -> list[int]:
        """Return those with the work next to an amount, below and from there up, the lowest index of each."""
        at = bisect_left(self._amounts, amount)
        return [self._with[near][-1] for near in self._amounts[max(0, at - 1) : at + 1]]

    def remove(self, index: int) -> None:
        """Remove one of the nearest."""
        amount = self.work[index]
        self._with[amount].pop()
        if not self._with[amount]:
            del self._amounts[bisect_left(self._amounts, amount)]
