"""The record of a finished cell."""

import math
from pathlib import Path
from typing import Any

import pytest

from lightning_fed import FederatedError
from lightning_fed.lab.records import Record, number_text, read_record, write_record


def record(folder: Path, **changes: Any) -> Record:
    series = {"round/gradients": {1: 2.0**40, 2: 7.0}, "val_acc": {1: 0.1234567, 3: math.nan}}
    wanted = {
        "config": {"trainer": {"max_rounds": 3}},
        "status": "finished",
        "cause": "",
        "seconds": 1.5,
        "cpu_seconds": None,
    }
    return Record(**{**wanted, "made_with": {"torch": "2"}, "series": series, "folder": folder, **changes})


def test_record_round_trips(tmp_path: Path) -> None:
    for number, cpu_seconds in enumerate((None, 7.25)):
        folder = tmp_path / str(number)
        assert read_record(folder) is None
        folder.mkdir()
        written = record(folder, cpu_seconds=cpu_seconds)
        write_record(folder, written)
        found = read_record(folder)
        assert found is not None
        assert repr(found) == repr(written)  # NaN is not equal to itself


def test_numbers_are_written_as_integers_or_with_seven_digits() -> None:
    numbers = {
        None: "",
        3.0: "3",
        -(2.0**52): str(-(2**52)),
        0.123456789: "0.1234568",
        2.0**60: "1.152922e+18",
        math.inf: "inf",
    }
    assert {number: number_text(number) for number in numbers} == numbers


def test_corrupt_record_raises_with_the_remedy(tmp_path: Path) -> None:
    write_record(tmp_path, record(tmp_path))
    sound = {name: (tmp_path / name).read_text() for name in ("cell.json", "rounds.csv")}
    for name, text in (
        ("cell.json", "{"),
        ("cell.json", "{}"),
        ("rounds.csv", "round,a\n1,many\n"),
        ("rounds.csv", ""),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(FederatedError, match="is damaged .*Delete it"):
            read_record(tmp_path)
        (tmp_path / name).write_text(sound[name])
