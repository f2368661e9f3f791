"""Complete configurations of published tasks: they read no files until they run, and run if the files exist.

Set ``LIGHTNING_FED_DATA`` to a folder of data sets for the second part.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_fed.data import FederatedDataModule, skew_table, split_figure
from tests.helpers.command_line import built
from tests.helpers.optional import needs_matplotlib
from tests.helpers.selection import few

TASKS = sorted((Path(__file__).parents[2] / "configs" / "tasks").glob("*.yaml"))
ALSO = {
    "cifar10": ["--data", "lightning_fed.lab.jpeg.JpegCIFAR10"],  # the originals may not be redistributed
    "femnist": ["--data.init_args.folder", "femnist_leaf_sample"],
}
REGRESSION = {"concrete", "least_squares", "quadratics"}
SMALL = {"concrete", "femnist", "least_squares", "mnist", "quadratics", "table"}  # the others take seconds to read
NOT_PUBLISHED = {"sentiment140"}  # tested only if a folder of that name exists


@pytest.fixture(autouse=True)
def _command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pass only a test's own arguments, and restore the environment that ``seed_everything`` changes."""
    monkeypatch.setattr(sys, "argv", ["lightning-fed"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")


def title(data: FederatedDataModule) -> str:
    """Return the title of the clients' figure."""
    shown: str = split_figure(data, max_clients=3).axes[0].get_title()
    return shown


def root_in(path: Path) -> str | None:
    """Return the folder of data sets that a task names, or None if it needs none."""
    root: str | None = yaml.safe_load(path.read_text())["data"]["init_args"].get("root")
    return root


@pytest.mark.parametrize("path", few(TASKS, TASKS[::3]), ids=lambda p: p.stem)
def test_task_config_is_complete_and_reads_no_files_until_run(path: Path) -> None:
    config: dict[str, Any] = yaml.safe_load(path.read_text())
    assert set(config) == {"seed_everything", "model", "data", "trainer"}
    assert root_in(path) in ("data", None)
    assert {"algorithm", "max_rounds"} <= set(config["trainer"])
    cli = built("--config", str(path))  # in an empty folder
    for name, value in (("model", cli.model), ("data", cli.datamodule)):
        assert type(value).__name__ == config[name]["class_path"].rpartition(".")[2]


@needs_matplotlib
@pytest.mark.parametrize("path", few(TASKS, [path for path in TASKS if path.stem in SMALL]), ids=lambda p: p.stem)
def test_task_trains_and_plots_its_clients_if_data_is_available(path: Path) -> None:
    folder = os.environ.get("LIGHTNING_FED_DATA")
    words = [
        *("--trainer.max_rounds", "2", "--trainer.clients_per_round", "2"),
        *("--trainer.limit_train_batches", "2", "--trainer.limit_val_batches", "2"),
    ]
    if root_in(path) is not None:
        if folder is None:
            pytest.skip("LIGHTNING_FED_DATA names no folder of data sets")
        if path.stem in NOT_PUBLISHED and not Path(folder, path.stem).exists():
            pytest.skip(f"LIGHTNING_FED_DATA has no folder {path.stem}")
        words += ["--data.init_args.root", folder, *ALSO.get(path.stem, [])]
    if path.stem == "table":
        pytest.importorskip("pyarrow", reason='no pyarrow: pip install "lightning_fed[tables]"')
        lines = [
            f"{('north', 'south')[i % 2]};{i or ''};{'fm'[i % 3 > 0]};70,{i};{('ill', 'well')[i % 5 > 1]}"
            for i in range(40)
        ]
        Path("patients.csv").write_text("\n".join(["hospital;age;sex;weight;outcome", *lines]))
    cli = built("--config", str(path), "--trainer.enable_progress_bar", "false", *words)
    cli.trainer.fit(cli.model, cli.datamodule)
    assert cli.trainer.current_epoch == 2
    assert "train_loss" in cli.trainer.callback_metrics
    assert skew_table(cli.datamodule).clients == cli.datamodule.num_clients
    assert "target" in title(cli.datamodule) if path.stem in REGRESSION else "class" in title(cli.datamodule)
