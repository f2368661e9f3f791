"""The local steps of a round in FedProx's Figure 12, weighted like the mean of the models."""

import math
from statistics import fmean

import pytest

from lightning_fed.data import Synthetic
from lightning_fed.data.batches.examples import size_of
from lightning_fed.server import UniformSampler, WeightedSampler

ROUNDS = 2000


@pytest.mark.thorough
def test_15_uniform_epochs_match_the_steps_of_20_drawn_by_size() -> None:
    data = Synthetic(num_clients=30, batch_size=10)
    data.setup("fit")
    sizes = {client: size_of(data.client_dataset(client)) for client in data.client_ids}

    def steps(sampler: UniformSampler | WeightedSampler, epochs: int, by_size: bool) -> float:
        """Return the mean of the weighted local steps over rounds."""
        means = []
        for n in range(ROUNDS):
            cohort = sampler(seed=1, round=n, population=list(sizes))
            weights = [sizes[client] if by_size else 1 for client in cohort]
            taken = [epochs * math.ceil(sizes[client] / 10) for client in cohort]
            means.append(sum(w * k for w, k in zip(weights, taken, strict=True)) / sum(weights))
        return fmean(means)

    draws = WeightedSampler(10, sizes, replacement=False)
    assert steps(UniformSampler(10), 15, by_size=True) == pytest.approx(steps(draws, 20, by_size=False), rel=0.03)
