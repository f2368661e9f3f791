"""Numbers computed from curves: a metric's final value, its best, the rounds until it reaches a target."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

from lightning_fed.core.errors import FederatedError
from lightning_fed.lab.stability import climb, settled
from lightning_fed.lab.yaml_files import unknown

Curve: TypeAlias = Mapping[int, float]
"""The values of a tag by the number of completed rounds."""

Series: TypeAlias = Mapping[str, Curve]
"""The logged values of a run, by tag."""

COSTS = {
    "rounds": (),
    "gradients": ("round/gradients",),
    "bytes": ("comm/bytes_up", "comm/bytes_down"),
    "simulated seconds": ("time/simulated",),
}
"""The costs of a run with their tags. The values of tags are summed over rounds, except for :data:`TOTALS`."""

TOTALS = frozenset({"time/simulated"})
"""The tags that are logged as the sum over all rounds so far."""

_FLOAT32 = 1e-7  # the relative error of a number in float32, and of its percent

_EVERY_ROUND = "server/update_norm"  # every run logs it in every round
_TRAIN_LOSS = "population/train_loss"  # determines when a run has settled

_GRAMMAR = re.compile(
    r"(?P<kind>final|best|mean|setbacks|settled)"
    r"|(?P<window>last|round|climb)\s+(?P<count>\d+)"
    r"|(?P<cost>rounds|gradients|bytes|simulated seconds)\s+to\s+(?P<target>[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?)"
    r"(\s+over\s+(?P<over>\d+))?"
)


@dataclass(frozen=True)
class Metric:
    """A metric by its logged name.

    Args:
        name: The tag.
        mode: Whether high or low values are good.
        label: Its name in figures and tables.
        factor: The factor for values that are shown or compared: 100 if they are in percent.
    """

    name: str
    mode: Literal["max", "min"]
    label: str
    factor: float = 1.0

    def of(self, series: Series) -> Curve:
        """Return the curve of a run in this unit, or an empty one if the run did not log it."""
        return {n: self.factor * value for n, value in series.get(self.name, {}).items()}

    @property
    def worst(self) -> float:
        """A value worse than any other, which one that is not finite counts as."""
        return -math.inf if self.mode == "max" else math.inf

    def reaches(self, value: float, target: float) -> bool:
        """Return whether a value is at least as good as the target, up to the precision of a log.

        Example:
            >>> accuracy = Metric("val_acc", "max", "accuracy")
            >>> accuracy.reaches(0.8999999761581421, 0.9)  # 0.9 in float32
            True
        """
        if math.isclose(value, target, rel_tol=_FLOAT32):
            return True
        return value >= target if self.mode == "max" else value <= target


@dataclass(frozen=True)
class Quantity:
    """A number from a run's curves.

    Args:
        text: Its text.
        kind: "final", "best", "mean", "last", "round" or "settled" of the metric, or one of :data:`COSTS` until it
            reaches a target. "setbacks" adds up all its changes for the worse, from each value to the next. "climb" is
            the largest one over a number of rounds.
        metric: The metric.
        number: The target, the number of last values to average, the round, or the number of rounds of a climb.
        over: The number of values in a row whose mean must reach the target.
    """

    text: str
    kind: str
    metric: Metric
    number: float = 0.0
    over: int = 1

    @property
    def is_cost(self) -> bool:
        """Return whether it counts the cost to reach a target."""
        return self.kind in COSTS

    @property
    def is_percent(self) -> bool:
        """Return whether it is in percent."""
        return self.metric.factor == 100 and not self.is_cost

    @property
    def is_share(self) -> bool:
        """Return whether it is a share of the test cases, in percent."""
        return self.is_percent and self.kind in ("final", "best", "mean", "last", "round", "settled")

    @property
    def mode(self) -> Literal["max", "min"]:
        """The better direction: "max" or "min"."""
        return "min" if self.is_cost or self.kind in ("setbacks", "climb") else self.metric.mode

    @property
    def worst(self) -> float:
        """The value of a run that has diverged."""
        return math.inf if self.mode == "min" else -math.inf

    @property
    def label(self) -> str:
        """Its name in figures and tables."""
        if self.is_cost:
            mean = f" (mean of {self.over})" if self.over > 1 else ""
            return f"{self.kind} to {self.metric.label} {self.number:g}{mean}"
        named = {
            "last": f"last {self.number:g}",
            "round": f"round {self.number:g}",
            "setbacks": "setbacks in",
            "climb": f"greatest climb in {self.number:g} rounds of",
        }
        window = named.get(self.kind, self.kind)
        return f"{window} {self.metric.label}"

    @property
    def meaning(self) -> str:
        """The meaning of a quantity whose name does not explain it."""
        if self.is_cost:
            over = f"the mean of {self.over} values in a row" if self.over > 1 else "a value"
            return f"**{self.kind} to {self.number:g}**: until {over} first reaches it."
        best = "highest" if self.metric.mode == "max" else "lowest"
        return {
            "best": f"**best**: the {best} value of the curve, chosen on the test data that it is measured on.",
            "mean": "**mean**: the mean of all values of the curve.",
            "last": f"**last {self.number:g}**: the mean of the last {self.number:g} values of the curve.",
            "setbacks": "**setbacks**: the changes for the worse from one value of the curve to the next, added up.",
            "settled": "**settled**: the value after the first round in which the training loss converges (it changes"
            " by less than 0.0001) or diverges (it has grown by more than 1 in ten rounds), or else after the last.",
            "climb": f"**greatest climb**: by how much a value is worse than {self.number:g} rounds before, at most.",
        }.get(self.kind, "")

    @property
    def tags(self) -> frozenset[str]:
        """The metrics that it is made of."""
        return frozenset({self.metric.name, _TRAIN_LOSS} if self.kind == "settled" else {self.metric.name})

    def of(self, series: Series) -> float:
        """Return the value for one run. It is infinite if a target is not reached.

        Raises:
            FederatedError: If the run's log lacks required values.
        """
        curve = self.metric.of(series)
        if not curve:
            raise FederatedError(
                f"{self.metric.name} was not logged; there is {', '.join(sorted(series)) or 'nothing'}."
            )
        values = [_or(value, self.metric.worst) for value in curve.values()]
        if self.is_cost:
            if (first := first_round(series)) > 1:  # the target may have been reached before
                raise _begins_late(first, self.kind)
            reached = self._reached(series)
            return math.inf if reached is None else cost(series, self.kind)[reached]
        if self.kind == "round":
            if int(self.number) not in curve:
                raise FederatedError(f"{self.metric.name} was not logged after round {self.number:g}.")
            return values[list(curve).index(int(self.number))]
        if self.kind == "best":
            return max(values) if self.metric.mode == "max" else min(values)
        if self.kind == "settled":
            return values[list(curve).index(_last(curve, self._settled(series)[0]))]
        if self.kind == "climb":
            return climb(dict(zip(curve, values, strict=True)), int(self.number), self.metric.mode)[0]
        if self.kind == "setbacks":
            if not all(map(math.isfinite, values)):
                return math.inf
            for_the_worse = -1 if self.metric.mode == "max" else 1
            return add_up(max(for_the_worse * (after - before), 0.0) for before, after in pairwise(values))
        window = {"final": 1, "last": int(self.number), "mean": len(values)}[self.kind]
        return add_up(values[-window:]) / len(values[-window:])

    def rounds_needed(self, series: Series) -> set[int]:
        """Return the rounds whose values suffice for :meth:`of`. They always include the last one."""
        curve = self.metric.of(series)
        rounds = sorted(curve)
        kept = set(rounds[-1:])
        if self.kind in ("mean", "setbacks"):
            return set(rounds)
        if self.kind == "settled" and rounds:
            end, shown = self._settled(series)
            return kept | shown | {_last(curve, end)}
        if self.kind == "climb":
            sound = {n: _or(curve[n], self.metric.worst) for n in rounds}
            return kept | climb(sound, int(self.number), self.metric.mode)[1]
        if self.kind == "last":
            return set(rounds[-int(self.number) :])
        if self.kind == "round":
            return kept | {int(self.number)}
        if self.kind == "best":
            best = max if self.metric.mode == "max" else min
            return kept | set(rounds and [best(rounds, key=lambda n: _or(curve[n], self.metric.worst))])
        if self.is_cost:
            reached = self._reached(series)
            until = [n for n in rounds if reached is None or n <= reached]
            # a mean needs all values before; otherwise, the first value that reaches the target is enough
            return kept | set(until if self.over > 1 else until[-1:])
        return kept

    def _reached(self, series: Series) -> int | None:
        """Return the first round in which the target is reached."""
        curve = self.metric.of(series)
        values = [_or(value, self.metric.worst) for value in curve.values()]
        for end, n in enumerate(curve, start=1):
            mean = add_up(values[max(end - self.over, 0) : end]) / self.over
            if end >= self.over and self.metric.reaches(mean, self.number):
                return n
        return None

    def _settled(self, series: Series) -> tuple[int, set[int]]:
        if not series.get(_TRAIN_LOSS):
            raise FederatedError(f"{_TRAIN_LOSS} was not logged, so it is not known when the run has settled.")
        return settled(series[_TRAIN_LOSS])


def _last(curve: Curve, end: int) -> int:
    """Return the last round of a curve up to a given one, or its first round if there is none."""
    return max((n for n in curve if n <= end), default=min(curve))


def _or(value: float, instead: float) -> float:
    return value if math.isfinite(value) else instead


def first_round(series: Series) -> int:
    """Return the first round of a log. It is greater than 1 for a resumed run.

    Example:
        >>> first_round({"val_acc": {6: 0.5}, "server/update_norm": {4: 0.1, 5: 0.1, 6: 0.1}})
        4
        >>> first_round({"val_acc": {6: 0.5}})  # another program's log
        1
    """
    return min(series.get(_EVERY_ROUND) or [1])


def _begins_late(first: int, kind: str) -> FederatedError:
    return FederatedError(
        f"The log begins with round {first}, so the {kind} before are not known: it is that of a resumed run."
    )


def cost(series: Series, kind: str) -> dict[int, float]:
    """Return the cumulative cost of a run at the end of each round: rounds, gradients, bytes or seconds.

    Raises:
        FederatedError: If the run did not log it.

    Example:
        >>> cost({"val_acc": {2: 0.5}, "round/gradients": {1: 10.0, 2: 30.0}}, "gradients")
        {1: 10.0, 2: 40.0}
        >>> cost({"val_acc": {2: 0.5}, "time/simulated": {1: 3.0, 2: 9.0}}, "simulated seconds")
        {1: 3.0, 2: 9.0}
    """
    tags = COSTS[kind]
    if missing := [tag for tag in tags if not series.get(tag)]:
        raise FederatedError(f"{' and '.join(missing)} were not logged, so the {kind} are not known.")
    are_totals = TOTALS.issuperset(tags)
    if not are_totals and (first := min(n for tag in tags for n in series[tag])) > 1:
        raise _begins_late(first, kind)
    rounds = sorted({n for curve in series.values() for n in curve})
    if not tags:
        return {n: float(n) for n in rounds}
    total, costs = 0.0, {}
    for n in rounds:
        spent = add_up(series[tag].get(n, total if are_totals else 0.0) for tag in tags)
        total = spent if are_totals else total + spent
        costs[n] = total
    return costs


def add_up(values: Iterable[float]) -> float:
    """Return the sum of numbers, rounded once, because ``sum`` rounds differently from Python 3.12 on.

    Example:
        >>> add_up([0.1] * 10)
        1.0
    """
    numbers = list(values)
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # too large a sum, or inf - inf
        return sum(numbers)


def parse_quantity(where: str, text: object, metrics: Mapping[str, Metric]) -> Quantity:
    """Parse a quantity from a text such as "rounds to 0.8 val_acc".

    Args:
        where: The place that requires it, for the message.
        text: The text.
        metrics: The metrics by name. The first is the default if the text names none.

    Raises:
        FederatedError: If the text is not understood, or names an unknown metric.

    Example:
        >>> parse_quantity("tune", "rounds to 0.8", {"val_acc": Metric("val_acc", "max", "accuracy")}).label
        'rounds to accuracy 0.8'
    """
    match = _GRAMMAR.match(text) if isinstance(text, str) else None
    rest = text[match.end() :] if match and isinstance(text, str) else ""
    if match is None or (rest and not rest[0].isspace()):
        raise FederatedError(
            f"{where}: {text!r} is not a quantity. Write 'final', 'best', 'mean', 'settled', 'setbacks', 'climb N',"
            " 'last N', 'round N', 'rounds to V', 'gradients to V', 'bytes to V' or 'simulated seconds to V', each of"
            " these four with 'over N' or without, and then the metric unless it is the first."
        )
    name = rest.strip() or next(iter(metrics))
    if name not in metrics:
        raise unknown(where, "metric", name, metrics)
    if match["kind"] == "settled" and _TRAIN_LOSS not in metrics:
        raise FederatedError(
            f"{where}: {text!r} needs {_TRAIN_LOSS} among the metrics, which determines when a run settles."
        )
    number = float(match["target"] or match["count"] or 0)
    over = int(match["over"] or 1)
    if (match["window"] and number < 1) or over < 1:
        raise FederatedError(f"{where}: {text!r} must count at least 1.")
    return Quantity(str(text), match["kind"] or match["window"] or match["cost"], metrics[name], number, over)
