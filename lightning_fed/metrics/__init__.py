"""Client heterogeneity: pure functions of gradients, Hessian-vector products, updates and metrics."""

from lightning_fed.metrics.dissimilarity import (
    Eigenvalue,
    GradientDissimilarities,
    PairwiseCosine,
    extreme_eigenvalue,
    gradient_dissimilarity,
    hessian_dissimilarity,
)
from lightning_fed.metrics.spread import Spread, spread

__all__ = [
    "Eigenvalue",
    "GradientDissimilarities",
    "PairwiseCosine",
    "Spread",
    "extreme_eigenvalue",
    "gradient_dissimilarity",
    "hessian_dissimilarity",
    "spread",
]
