"""Run cells one after another in a process, and record everything that each fit logs."""

import json
import os
import platform
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning_fed._version import __version__
from lightning_fed.cli.configuration import CellParts
from lightning_fed.compat.package import USED, pl
from lightning_fed.core.devices import accelerator_name
from lightning_fed.core.errors import refusal_in
from lightning_fed.data.files.stored import StoredDataModule
from lightning_fed.lab.overlays import Config, overlay
from lightning_fed.lab.provenance import checksums, commit, files_read
from lightning_fed.lab.records import Record, write_record
from lightning_fed.lab.store import settle
from lightning_fed.trainer.trainer import FederatedTrainer

_PROBE: Config = {"trainer": {"max_rounds": 1, "limit_val_batches": 1, "check_val_every_n_epoch": 1}}


class Recorder(pl.loggers.Logger):
    """A logger that keeps every value.

    Args:
        folder: The folder for callbacks that write files.

    Attributes:
        series: The values by tag and step. The step is the number of completed rounds.
    """

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        self.folder = folder
        self.series: dict[str, dict[int, float]] = {}

    @property
    def name(self) -> str:
        """The name of the cell's runs, which is empty."""
        return ""

    @property
    def version(self) -> str:
        """The version of the run, which is empty."""
        return ""

    @property
    def save_dir(self) -> str | None:
        """The folder of callbacks' files."""
        return None if self.folder is None else str(self.folder)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the record has the configuration."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Keep the values."""
        for tag, value in metrics.items():
            if tag != "epoch":
                self.series.setdefault(tag, {})[0 if step is None else step] = float(value)


class CellRunner:
    """Run cells one after another. A data set read from files is reused if the next cell has the same one."""

    def __init__(self) -> None:
        self._data: tuple[str, pl.LightningDataModule] | None = None
        self._sums: tuple[str, dict[str, str]] = ("", {})  # the data's key, and the checksums of its files

    def run(self, config: Config, completed: Config, final: Path) -> None:
        """Run a cell, and write its record.

        A loss or a model that is not finite ends the cell with the status "diverged", which is a valid result.

        Args:
            config: The configuration to run.
            completed: The configuration to keep in the record.
            final: The folder of the record. It must not exist yet.
        """
        work = final.with_name(f".{final.name}")
        work.mkdir(parents=True, exist_ok=True)
        recorder, started, cpu_before, cause = Recorder(work), time.perf_counter(), _cpu_seconds(), ""
        try:
            self._fit(config, recorder)
        except Exception as error:
            if "not finite" not in str(refusal_in(error)):
                raise
            cause = str(refusal_in(error))
        seconds, cpu_seconds = time.perf_counter() - started, _cpu_seconds() - cpu_before
        status: Any = "diverged" if cause else "finished"
        found = (completed, status, cause, seconds, cpu_seconds, made_with(), recorder.series, final, self._sums[1])
        write_record(work, Record(*found))
        settle(work, final)

    def probe(self, config: Config) -> list[str] | None:
        """Run one round of a cell with one batch per client, and return the logged tags, or None if it diverges.

        Raises:
            FederatedError: If the cell cannot be run.
        """
        recorder = Recorder()
        try:
            self._fit(overlay(_measured_every_round(config), _PROBE), recorder, probes=True)
        except Exception as error:
            if "not finite" not in str(refusal_in(error)):
                raise
            return None
        return sorted(recorder.series)

    def _fit(self, config: Config, recorder: Recorder, probes: bool = False) -> None:
        parts = CellParts(config, recorder)
        assert isinstance(parts.trainer, FederatedTrainer)
        if probes and parts.trainer.fit_loop.settings.algorithm.local_work:  # a limit without local work is an error
            parts.trainer.limit_train_batches = 1
        model, data = parts.model, parts.datamodule
        key = json.dumps(config["data"], sort_keys=True, default=str)
        if isinstance(data, StoredDataModule):
            if self._data is not None and self._data[0] == key:
                data = self._data[1]
            self._data = (key, data)
        else:
            self._data = None
        root: str | None = (config["data"].get("init_args") or {}).get("root")
        try:
            with files_read(root) as files:
                parts.trainer.fit(model, data)
        finally:  # runs even if the fit diverged
            if files or self._sums[0] != key:
                self._sums = (key, {} if root is None else checksums(files, root))


def _measured_every_round(node: Any) -> Any:
    """Return a configuration that measures everything in every round."""
    if isinstance(node, Mapping):
        return {key: 1 if key == "every_n_rounds" else _measured_every_round(value) for key, value in node.items()}
    return [_measured_every_round(value) for value in node] if isinstance(node, list) else node


def _cpu_seconds() -> float:
    """Return the CPU time so far of this process and of its child processes that have ended."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


@cache
def made_with() -> dict[str, str]:
    """Return versions, hardware and date."""
    packages = {}
    for name in ("torch", USED.replace("_", "-"), "numpy"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    accelerator, code = accelerator_name(), commit()
    gpu = {} if accelerator is None else {"gpu": accelerator}
    return {
        "lightning_fed": __version__,
        **({} if code is None else {"commit": code}),
        **packages,
        "python": platform.python_version(),
        "system": platform.system(),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        **gpu,
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def _processor() -> str:
    """Return the processor's name, as far as the system reports it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
