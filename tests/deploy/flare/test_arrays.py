"""Messages as arrays of bytes."""

import numpy as np

from lightning_fed.deploy.flare.arrays import packed, unpacked


def test_messages_round_trip_through_arrays() -> None:
    assert unpacked(packed({"0": b"\0\xff", "1": b""})) == {"0": b"\0\xff", "1": b""}


def test_values_that_are_not_byte_arrays_are_ignored() -> None:
    wrong = {"0": None, "1": [1], "2": np.zeros(3), "3": "no", 4: np.zeros(2, np.uint8)}
    assert unpacked(wrong) == {"4": b"\0\0"}
    assert unpacked({5: "no", "5": np.zeros(1, np.uint8)}) == {"5": b"\0"}
