"""Statistics of a metric over clients."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Literal

import torch

from lightning_fed.core.arguments import check_one_of
from lightning_fed.core.errors import FederatedError


@dataclass(frozen=True, slots=True)
class Spread:
    """Statistics of a metric over clients with equal weights.

    Attributes:
        mean: The mean.
        std: The standard deviation of the measured clients (divided by N).
        worst_10: The mean over the worst tenth of the clients, at least one.
        p10: The 10th percentile, interpolated linearly.
        p90: The 90th percentile.
    """

    mean: float
    std: float
    worst_10: float
    p10: float
    p90: float

    def named(self, prefix: str) -> dict[str, float]:
        """Return the values under ``prefix/mean`` and so on."""
        return {f"{prefix}/{name}": value for name, value in asdict(self).items()}


def spread(values: Sequence[float], mode: Literal["max", "min"] = "max") -> Spread:
    """Summarize a metric over clients: its mean, its spread, and the mean of the worst tenth.

    Li et al., *Fair Resource Allocation in Federated Learning*, ICLR 2020 (https://arxiv.org/abs/1905.10497), compare
    methods by the mean of the worst 10 % and the spread.

    Args:
        values: The metric of each client.
        mode: "max" if larger is better, as for an accuracy; "min" if smaller is, as for a loss.

    Raises:
        FederatedError: If there are no values.

    Example:
        >>> spread([0.9, 0.5, 0.7, 0.9]).worst_10
        0.5
    """
    check_one_of("spread", "mode", mode, ("max", "min"))
    if not isinstance(values, list | tuple) or not all(isinstance(v, Real) for v in values):  # divergence gives NaN
        raise FederatedError(f"spread(values={values!r}): values must be a list of numbers.")
    if not values:
        raise FederatedError("spread(values=[]) got no values: there is no client to compare.")
    found = torch.tensor([float(value) for value in values], dtype=torch.float64)
    worst = found.sort(descending=mode == "min").values[: math.ceil(len(values) / 10)]
    if found.isnan().any():  # NaN sorts last, and counts as worst
        worst = found.new_tensor([math.nan])
    p10, p90 = torch.quantile(found, torch.tensor([0.1, 0.9], dtype=torch.float64)).tolist()
    return Spread(float(found.mean()), float(found.std(correction=0)), float(worst.mean()), p10, p90)
