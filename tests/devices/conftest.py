"""The device of these tests: the test device, or a real one with ``--accelerator gpu``."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--accelerator``."""
    parser.addoption(
        "--accelerator",
        default="mini",
        help="run tests/devices on this accelerator of Lightning, such as gpu (default: the test device)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests on the test device if others run: it must be registered before a process's first backward pass."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    if config.getoption("--accelerator") == "mini" and len(here) < len(items):
        for item in here:
            item.add_marker(pytest.mark.skip(reason="the test device needs a process of its own: pytest tests/devices"))


@dataclass(frozen=True)
class Place:
    """A device to train on.

    Attributes:
        name: The accelerator.
        tolerance: The allowed difference from the CPU's results. It is 0 for the sequential engine on the test
            device, which runs the CPU's kernels.
    """

    name: str
    tolerance: float

    def options(self, precision: str = "32-true") -> dict[str, Any]:
        """Return the arguments of a trainer on this device."""
        if self.name == "mini":
            from tests.devices.mini.lightning import on_mini

            return {"accelerator": "auto", **on_mini(precision)}
        return {"accelerator": self.name, "devices": 1, "precision": precision, "deterministic": True}

    @property
    def device(self) -> torch.device:
        """The first device of the accelerator."""
        found = torch.accelerator.current_accelerator()
        assert found is not None
        return torch.device(found.type, 0)


@pytest.fixture(scope="session")
def place(request: pytest.FixtureRequest) -> Place:
    """The requested device; skips the test if it is missing."""
    name = request.config.getoption("--accelerator")
    if name == "mini":
        for tool in ("g++", "ninja"):
            if shutil.which(tool) is None:
                pytest.skip(f"the test device needs {tool} to be built")
        import tests.devices.mini  # noqa: F401

        return Place(name, 0.0)
    if not torch.accelerator.is_available():
        pytest.skip(f"--accelerator {name}: PyTorch finds no accelerator here")
    return Place(name, 1e-4)


@pytest.fixture
def mini(place: Place) -> Iterator[Any]:
    """The test device itself, for tests of its counts and memory limits."""
    if place.name != "mini":
        pytest.skip("only the test device counts, and limits its memory")
    import tests.devices.mini as mini

    yield mini
    for index in range(2):
        mini.set_limit(index, 0)
    mini.core.set_float64(True)
