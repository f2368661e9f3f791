"""Random labels, and checks of the properties of every partition."""

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from lightning_fed.core.errors import FederatedError

label_lists = st.lists(st.integers(-3, 5), min_size=1, max_size=60)
seeds = st.integers(0, 2**63)


def assert_every_index_once(parts: Sequence[Tensor], n: int) -> None:
    assert all(part.dtype == torch.int64 for part in parts)
    assert torch.cat(list(parts)).sort().values.tolist() == list(range(n))
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)


def deal(partition: Any, labels: Any) -> Any:
    """Return the parts, or None if the partition raises an error with its name."""
    try:
        return partition(torch.tensor(labels))
    except FederatedError as error:
        refusal = str(error)
    assert refusal.startswith(type(partition).__name__)
    assert "num_clients" in refusal
    return None
