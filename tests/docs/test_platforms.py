"""docs/platforms.md has the errors that people search for, word for word."""

from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "platforms.md"


def test_platforms_page_quotes_the_torchvision_mismatch_error() -> None:
    """Its native library does not load then, so the first operator that it describes to PyTorch does not exist.

    Here ``lightning_fed`` has declared that operator, so another name stands in for it.
    """
    with pytest.raises(RuntimeError) as refused:
        torch.library.register_fake("not_torchvision::nms", lambda *_: None)
    assert f"## `RuntimeError: {refused.value}`".replace("not_torchvision", "torchvision") in PAGE.read_text()
