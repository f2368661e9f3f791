"""Common options of the commands, and the command line quoted on a page."""

import os

import pytest
from jsonargparse import ArgumentParser

from lightning_fed.lab.grid import Grid
from lightning_fed.lab.options import add_run_options, command_line, default_jobs, reproduce_command
from lightning_fed.lab.reading import read_experiment
from tests.helpers.lab import Write
from tests.lab.conftest import LESS


@pytest.mark.parametrize(
    ("option", "expected"), [(["--seeds", "0"], "at least 1, found 0"), (["--jobs", "-1"], "at least 0, found -1")]
)
def test_out_of_range_numbers_are_rejected(
    option: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = ArgumentParser()
    add_run_options(parser, "out")
    with pytest.raises(SystemExit):
        parser.parse_args(option)
    assert expected in capsys.readouterr().err


def test_quoted_command_omits_machine_specific_options() -> None:
    args = [
        "mime_fig1",
        "--out",
        "/home/ann/out",
        "--jobs=4",
        "--data_root=/mnt",
        "--seeds",
        "2",
        "--grid=/a/b/grid.yaml",
    ]
    assert command_line("sweep", args) == "lightning-fed sweep mime_fig1 --data_root DATA --seeds 2 --grid=grid.yaml"
    assert command_line("sweep", ["a b.yaml", "--out"]) == "lightning-fed sweep 'a b.yaml'"


def test_page_names_options_that_differ_from_the_file(write: Write) -> None:
    scales = {"full": {}, "small": {"departures": LESS, "seeds": 2}}
    experiment = read_experiment(write(scales=scales, seeds=3))
    assert reproduce_command(Grid(experiment)) == "lightning-fed reproduce tiny.yaml"
    assert reproduce_command(Grid(experiment, "small")) == "lightning-fed reproduce tiny.yaml --scale small"
    assert reproduce_command(Grid(experiment, seeds=1)) == "lightning-fed reproduce tiny.yaml --seeds 1"
    data = {"data": {"class_path": "lightning_fed.data.Concrete", "init_args": {"root": "data"}}}
    reads_files = read_experiment(write(methods={"FedAvg": data}))
    assert reproduce_command(Grid(reads_files)) == "lightning-fed reproduce tiny.yaml --data_root DATA"


def test_jobs_default_to_the_number_of_usable_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 7}, raising=False)
    assert default_jobs() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert default_jobs() == 1
