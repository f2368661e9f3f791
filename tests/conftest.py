"""Options, hypothesis profiles and fixtures that all tests share."""

import argparse
import gc
import logging
import os
import signal
import sys
import threading
import zlib
from collections.abc import Generator, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from _pytest.doctest import DoctestModule
from tqdm import tqdm

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # under nohup, or in a background job of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Forks share tqdm's default lock: if one is killed while it draws a bar, the others wait forever. Set the lock before
# any bar is drawn. Otherwise subclasses, such as Lightning's, get a lock that this setting does not reach.
tqdm.set_lock(threading.RLock())
os.register_at_fork(after_in_child=lambda: tqdm.set_lock(threading.RLock()))


def _share(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is no share: write K/N with 1 <= K <= N, such as 3/8")
    return int(number), int(count)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the folder of oracle cases, the number of random configurations, and the share of the tests to run."""
    parser.addoption(
        "--oracle-cases",
        metavar="DIR",
        default=os.environ.get("LIGHTNING_FED_ORACLE_CASES"),
        help="a folder of oracle cases to run through the real trainer (default: $LIGHTNING_FED_ORACLE_CASES)",
    )
    parser.addoption("--fuzz", metavar="N", type=int, help="run this many random configurations in tests/fuzz")
    parser.addoption("--fuzz-seed", metavar="SEED", type=int, default=0, help="draw others")
    parser.addoption(
        "--share",
        metavar="K/N",
        type=_share,
        default=(1, 1),
        help="run the K-th of N equal shares of the selected tests",
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import what every test needs, and let hypothesis try few examples in the default run.

    The pytest-xdist controller imports nothing, which saves seconds.
    """
    config = session.config
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    gc.disable()  # imports and collection make a million objects that stay
    import lightning_fed  # noqa: F401  # before anything that imports Lightning

    try:
        from hypothesis import settings
    except ModuleNotFoundError:  # the files that import it are skipped
        return
    settings.register_profile("default", max_examples=25, deadline=None, derandomize=True, database=None)
    settings.register_profile("thorough", max_examples=300, deadline=None)
    if not config.getoption("--hypothesis-profile", None):
        settings.load_profile("default" if "not thorough" in config.getoption("-m") else "thorough")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the requested share of the tests. A test's share depends only on its name."""
    number, count = config.getoption("--share")
    kept = [item for item in items if zlib.crc32(item.nodeid.encode()) % count == number - 1]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the device tests unless they are named: otherwise all tests would run on the test device."""
    devices = Path(__file__).parent / "devices"
    if collection_path != devices:
        return None
    given = [(config.invocation_params.dir / arg.partition("::")[0]).resolve() for arg in config.args]
    return None if any(devices in (path, *path.parents) for path in given) else True


def pytest_collection_finish() -> None:
    """Enable garbage collection, but exclude objects of imports and collection: scanning them takes 0.5 s each time."""
    gc.freeze()
    gc.enable()


class _TestFile(pytest.Module):
    """A test file that is skipped without Hypothesis, which dozens of files import first."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        """Collect the tests, or skip them."""
        try:
            return super().collect()
        except self.CollectError as error:
            if isinstance(error.__cause__, ModuleNotFoundError) and error.__cause__.name == "hypothesis":
                pytest.skip('no Hypothesis: pip install "lightning_fed[dev]"', allow_module_level=True)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    """Collect a test file as a :class:`_TestFile`."""
    return _TestFile.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Generator[None, Any, Any]:
    """Collect no doctests from tests: they would hide a test file's import errors, and with them its tests.

    With --doctest-ignore-import-errors, a failed import is skipped and leaves an empty module for the tests.
    """
    found = yield
    return [collector for collector in found if not isinstance(collector, DoctestModule)]


@pytest.fixture(autouse=True, scope="session")
def _entry_points_are_read_once() -> None:
    """Cache entry points, which Lightning reads for every trainer to find callbacks: this saves 6 ms each."""
    import lightning_fed.compat.package  # noqa: F401

    for fabric in ("lightning_fabric", "lightning.fabric"):
        registry: Any = sys.modules.get(f"{fabric}.utilities.registry")
        if registry is not None:
            registry.entry_points = cache(registry.entry_points)


@pytest.fixture(autouse=True, scope="session")
def _loggers_propagate() -> None:
    """Let the loggers of PyTorch and Lightning propagate records.

    There are 56. pytest 9.2 visits each logger that does not propagate, twelve times a test. An older pytest misses
    their records: Lightning's loggers do not propagate if nothing handles records when Lightning is imported.
    """
    import torch  # noqa: F401

    import lightning_fed.compat.package  # noqa: F401

    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith(("torch", "lightning", "pytorch_lightning")) and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(autouse=True)
def _no_process_group_stays() -> Iterator[None]:
    """Destroy the process group that a test's fit leaves, and restore its environment variables.

    Tests that fork within a group hang, and commands started with its rank wait for other processes.
    """
    import torch

    names = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")
    before = {name: os.environ[name] for name in names if name in os.environ}
    yield
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(before)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every test write its logs to its own folder."""
    import torch

    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
