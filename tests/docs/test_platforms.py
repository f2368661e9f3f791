"""docs/platforms.md quotes errors word for word, since people search for them."""

from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "platforms.md"


def test_platforms_page_quotes_the_torchvision_mismatch_error() -> None:
    """With a mismatch, torchvision's native library does not load, so its first registered operator does not exist.

    ``lightning_fed`` has declared that operator here, so the test uses another name.
    """
    with pytest.raises(RuntimeError) as refused:
        torch.library.register_fake("not_torchvision::nms", lambda *_: None)
    assert f"## `RuntimeError: {refused.value}`".replace("not_torchvision", "torchvision") in PAGE.read_text()
