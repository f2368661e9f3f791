"""IDX files: what is written comes back, and whatever is damaged is named."""

import gzip

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed.core.errors import FederatedError
from lightning_fed.data.datasets.idx import find_idx, read_idx


def idx(values):
    """Return a tensor of bytes as an IDX file."""
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return bytes([0, 0, 8, values.ndim]) + sizes + values.numpy().tobytes()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=3), st.booleans())
def test_what_is_written_comes_back(tmp_path_factory, shape, packed):
    values = torch.randint(256, shape, dtype=torch.uint8)
    path = tmp_path_factory.mktemp("idx") / ("a.gz" if packed else "a")
    path.write_bytes(gzip.compress(idx(values)) if packed else idx(values))
    assert read_idx(path, ndim=len(shape)).equal(values)


WHOLE = idx(torch.arange(24, dtype=torch.uint8).view(2, 3, 4))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "magic number 00 00 08 03, and begins with nothing"),
        (WHOLE[:9], "magic number"),
        (b"<html>" + WHOLE, "begins with 3c 68 74 6d"),
        (idx(torch.zeros(3, dtype=torch.uint8)), "magic number"),
        (WHOLE[:-1], r"\[2, 3, 4\], and 1 of its bytes are missing|more than it can hold"),
        (WHOLE + b"0", "more bytes follow"),
        (WHOLE[:4] + b"\xff" * 12 + WHOLE[16:], "more than it can hold"),
    ],
    ids=["empty", "short header", "a page", "other dimensions", "short", "long", "huge"],
)
def test_a_damaged_file_is_named(tmp_path, content, problem, packed):
    path = tmp_path / ("a.gz" if packed else "a")
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(FederatedError, match=f"{path.name} is damaged or no IDX file: .*({problem})"):
        read_idx(path, ndim=3)


@pytest.mark.parametrize(
    "spoil", [lambda c: c[:-12], lambda c: c[:20] + bytes([c[20] ^ 1]) + c[21:], lambda c: c[:-5] + b"0" * 5]
)
def test_a_damaged_archive_is_named(tmp_path, spoil):
    path = tmp_path / "a.gz"
    path.write_bytes(spoil(gzip.compress(WHOLE)))
    with pytest.raises(FederatedError, match="a.gz is damaged"):
        read_idx(path, ndim=3)


def test_a_file_is_found_packed_or_not(tmp_path):
    assert find_idx(tmp_path / "a") is None
    (tmp_path / "a.gz").touch()
    assert find_idx(tmp_path / "a") == tmp_path / "a.gz"
    (tmp_path / "a").touch()
    assert find_idx(tmp_path / "a") == tmp_path / "a"
