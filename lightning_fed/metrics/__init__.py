"""Client heterogeneity: pure functions of gradients, Hessian-vector products, updates and metrics."""

from lightning_fed.metrics.gradients import GradientDissimilarities, PairwiseCosine, gradient_dissimilarity
from lightning_fed.metrics.hessians import Eigenvalue, extreme_eigenvalue, hessian_dissimilarity
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
