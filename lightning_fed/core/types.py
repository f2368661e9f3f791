"""Type names that the whole package shares."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from torch import Tensor

Vector: TypeAlias = Tensor
"""All trainable parameters as one flat tensor [P], or a quantity of that shape (a gradient, a control variate)."""

State: TypeAlias = dict[str, Tensor]
"""Named vectors and 0-dim tensors that the server or a client keeps from round to round."""

ClientId: TypeAlias = int | str
"""A client's name, as the user gave it."""

Metrics: TypeAlias = Mapping[str, float]
"""Metric values by name."""

Weighting: TypeAlias = str | Callable[..., Any]
"""A weighting of messages: a name ("examples", "uniform", "steps") or a function of (client_id, size, steps)."""

LocalScheduleMode: TypeAlias = Literal["restart", "continue", "total"]
"""The count that schedules by local step follow; see :class:`lightning_fed.FederatedTrainer`."""
