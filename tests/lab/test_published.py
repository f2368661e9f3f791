"""A run's published files are small, and give the same quantities as the whole run."""

import math

from hypothesis import given
from hypothesis import strategies as st

from lightning_fed.lab.published import thinned
from lightning_fed.lab.quantities import Metric, parse_quantity

LOSS = "population/train_loss"
METRICS = {LOSS: Metric(LOSS, "min", "loss"), "acc": Metric("acc", "max", "accuracy", 100.0)}
TEXTS = [
    "final", "best", "mean", "last 5", "last 1000", "rounds to 2.5", "gradients to 2.5", "bytes to 2.5", "final acc",
    "best acc", "last 3 acc", "rounds to 60 acc", "setbacks", "setbacks acc", "climb 10", "climb 3 acc",
    "settled", "settled acc", "simulated seconds to 2.5", "rounds to 2.5 over 3", "simulated seconds to 60 over 4 acc",
]  # fmt: skip


@given(
    st.lists(st.one_of(st.floats(0, 5), st.just(math.nan)), min_size=1, max_size=400),
    st.sampled_from(TEXTS),
    st.integers(1, 20),
    st.booleans(),
)
def test_thinned_curves_preserve_every_quantity(values: list[float], text: str, every: int, is_drawn: bool) -> None:
    series = {
        LOSS: {every * (i + 1): value for i, value in enumerate(values)},
        "acc": {every * (i + 1): value / 5 for i, value in enumerate(values)},
        **{tag: {n: float(n) for n in range(1, every * len(values) + 1)} for tag in (*COSTS, "time/simulated")},
    }
    quantity = parse_quantity("", text, METRICS)
    small = thinned(series, METRICS, [quantity], is_drawn)
    assert quantity.of(small) == quantity.of(series)
    assert small[LOSS].items() <= series[LOSS].items() or math.isnan(sum(values))


COSTS = ("round/gradients", "comm/bytes_up", "comm/bytes_down")


def test_drawn_curve_keeps_100_rounds_and_others_only_needed_ones() -> None:
    series = {LOSS: {n: 1 / n for n in range(1, 1001)}, "client/drift": dict.fromkeys(range(1, 1001), 1.0)}
    quantity = parse_quantity("", "final", METRICS)
    assert sorted(thinned(series, METRICS, [quantity], is_drawn=True)) == [LOSS]
    drawn = thinned(series, METRICS, [quantity], is_drawn=True)[LOSS]
    assert len(drawn) == 100
    assert (min(drawn), max(drawn)) == (1, 1000)
    assert thinned(series, METRICS, [quantity], is_drawn=False)[LOSS] == {1000: 1 / 1000}
