"""Messages of single clients."""

from torch import Tensor

from lightning_fed.core.types import State
from lightning_fed.server.aggregation.mean import Aggregation

__all__ = ["add_one"]


def add_one(aggregation: Aggregation, index: int, steps: int, send: State, model: Tensor | None = None) -> None:
    """Add one client's messages."""
    stacked = {name: value[None] for name, value in send.items()}
    aggregation.update({index: steps}, stacked, None if model is None else model[None])
