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

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as under nohup, or as a shell's background job
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Forks share tqdm's own lock: who is killed while it draws a bar would let the others wait for ever. The lock is set
# before any bar is drawn, as a subclass, such as Lightning's, otherwise gets one that no setting here reaches.
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

    The process that only hands out tests to workers imports nothing, which saves seconds.
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
    """Keep the share that was asked for; which share a test is in depends on its name alone."""
    number, count = config.getoption("--share")
    kept = [item for item in items if zlib.crc32(item.nodeid.encode()) % count == number - 1]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the tests of devices unless they are named: the test device would be the accelerator of all tests."""
    devices = Path(__file__).parent / "devices"
    if collection_path != devices:
        return None
    given = [(config.invocation_params.dir / arg.partition("::")[0]).resolve() for arg in config.args]
    return None if any(devices in (path, *path.parents) for path in given) else True


def pytest_collection_finish() -> None:
    """Collect garbage from here on, but not among what imports and collection have made: that takes 0.5 s each time."""
    gc.freeze()
    gc.enable()


class _TestFile(pytest.Module):
    """A file of tests, which is skipped where there is no hypothesis: dozens import it before anything else."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        """Collect the tests, or skip them."""
        try:
            return super().collect()
        except self.CollectError as error:
            if isinstance(error.__cause__, ModuleNotFoundError) and error.__cause__.name == "hypothesis":
                pytest.skip('no Hypothesis: pip install "lightning_fed[dev]"', allow_module_level=True)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    """Collect a file of tests as one that may be skipped."""
    return _TestFile.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Generator[None, Any, Any]:
    """Collect no doctests here: of a test file that cannot be imported they would hide that, and all of its tests.

    With --doctest-ignore-import-errors the failed import is skipped, and leaves an empty module behind for the tests.
    """
    found = yield
    return [collector for collector in found if not isinstance(collector, DoctestModule)]


@pytest.fixture(autouse=True, scope="session")
def _entry_points_are_read_once() -> None:
    """Spare every trainer 6 ms: Lightning asks each time which callbacks the packages that are installed bring."""
    import lightning_fed.compat.package  # noqa: F401

    for fabric in ("lightning_fabric", "lightning.fabric"):
        registry: Any = sys.modules.get(f"{fabric}.utilities.registry")
        if registry is not None:
            registry.entry_points = cache(registry.entry_points)


@pytest.fixture(autouse=True, scope="session")
def _loggers_propagate() -> None:
    """Let the loggers of PyTorch and Lightning pass records on.

    There are 56, and pytest 9.2 visits each logger that does not, twelve times a test. An older pytest does not see its
    records: Lightning's do not pass on if nothing handles records when it is imported.
    """
    import torch  # noqa: F401

    import lightning_fed.compat.package  # noqa: F401

    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith(("torch", "lightning", "pytorch_lightning")) and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(autouse=True)
def _no_process_group_stays() -> Iterator[None]:
    """End the process group that a test's fit leaves, and its part of the environment.

    Tests that fork in a group hang, and commands that are started with its rank wait for other processes.
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
    """Let every test write its logs to a folder of its own."""
    import torch

    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
