"""Lightning's accelerator for the test device."""

from typing import Any

import torch
from pytorch_lightning.accelerators import Accelerator
from pytorch_lightning.plugins.precision import MixedPrecision
from pytorch_lightning.strategies import SingleDeviceStrategy

__all__ = ["MiniAccelerator", "on_mini"]


class MiniAccelerator(Accelerator):
    """``Trainer(accelerator=MiniAccelerator())``."""

    def setup_device(self, device: torch.device) -> None:
        torch.get_device_module("mini").set_device(device)

    def teardown(self) -> None:
        pass

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> list[torch.device]:
        return [torch.device("mini", i) for i in range(devices if isinstance(devices, int) else len(devices))]

    @staticmethod
    def get_parallel_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "mini"


def on_mini(precision: str = "32-true", index: int = 0) -> dict[str, Any]:
    """Return a trainer's arguments for training on the device.

    Mixed precision needs a plugin: Lightning maps "16-mixed" to CUDA for unknown devices.
    """
    strategy = SingleDeviceStrategy(torch.device("mini", index), accelerator=MiniAccelerator())
    if precision.endswith("-mixed"):
        return {"strategy": strategy, "plugins": [MixedPrecision(precision, device="mini")]}
    return {"strategy": strategy, "precision": precision}
