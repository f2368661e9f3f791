"""What ``self.log`` collects over a round: example-weighted means, per client and over the cohort."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_fed._compat import _ResultCollection, rank_zero_warn
from lightning_fed.server.aggregation import accumulation_dtype

__all__ = ["RoundResults"]

_MEANS = (torch.mean, "mean", "avg")


class _ClientMean:
    """The running example-weighted mean of one logged value over one client's round."""

    __slots__ = ("flags", "options", "total", "weight")

    def __init__(self, device: torch.device, flags: tuple[Any, ...]) -> None:
        self.total = torch.zeros((), dtype=accumulation_dtype(device), device=device)
        self.weight = 0
        self.flags = flags
        self.options: dict[str, Any] | None = None  # what `self.log` was given, once Lightning has checked it

    def add(self, value: Tensor, examples: int) -> None:
        """Add the mean over a batch."""
        self.total.add_(value.detach(), alpha=examples)
        self.weight += examples


class RoundResults(_ResultCollection):
    """Lightning's result collection, counted in rounds.

    A value logged in a local step without flags is the round's mean under its plain name: with the round as the axis
    of every logger, there is no place for a value per step. Lightning checks and rebuilds a value's metadata on every
    call; here that happens once per value, and a local step adds to a running sum.
    """

    def __init__(self) -> None:
        super().__init__(training=True)
        self._means: dict[str, _ClientMean] = {}
        self._warned: set[str] = set()
        self._registering = False
        self._in_client = False

    def log(  # type: ignore[override]
        self,
        fx: str,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool = True,
        on_step: bool = False,
        on_epoch: bool = True,
        reduce_fx: Any = torch.mean,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Collect one value; see :meth:`pytorch_lightning.LightningModule.log`."""
        if not self._in_client:
            super().log(
                fx, name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, batch_size=batch_size, **kwargs
            )
            return
        if on_step and not on_epoch:
            on_step, on_epoch = False, True
        elif on_step and name not in self._warned:
            self._warned.add(name)
            rank_zero_warn(
                f"self.log({name!r}, on_step=True): values of single local steps are not written, since the axis of the"
                f" loggers is the round. The round's mean is logged as {name}_epoch."
            )
        flags = (prog_bar, logger, on_step, reduce_fx)
        key = f"{fx}.{name}"
        size = self._client_size(batch_size)
        mean = self._means.get(key)
        if mean is None or mean.flags != flags or not isinstance(value, Tensor):
            averaged = isinstance(value, Tensor) and reduce_fx in _MEANS and not kwargs.get("enable_graph")
            self._registering = averaged
            super().log(fx, name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, batch_size=size, **kwargs)
            self._registering = False
            if not averaged:
                return
            mean = self._means[key] = _ClientMean(value.device, flags)
        mean.add(value, size)

    @contextmanager
    def of_client(self, module: pl.LightningModule) -> Iterator[None]:
        """Collect what is logged inside as one client's; ``module.log`` then adds straight to the running means.

        Anything that Lightning has not checked before, or anything but a 0-dim tensor, still goes Lightning's way. A
        module that overrides ``log`` is left alone.
        """
        self._in_client = True
        try:
            with self._shortcut(module):
                yield
        finally:
            self._in_client = False

    @contextmanager
    def _shortcut(self, module: pl.LightningModule) -> Iterator[None]:
        if type(module).log is not pl.LightningModule.log or "log" in module.__dict__:
            yield
            return
        checked = module.log

        def log(name: str, value: Any, *args: Any, batch_size: int | None = None, **options: Any) -> None:
            mean = self._means.get(f"{module._current_fx_name}.{name}")
            if mean is not None and mean.options == options and not args and type(value) is Tensor and value.ndim == 0:
                mean.add(value, self._client_size(batch_size))
                return
            checked(name, value, *args, **{**options, "batch_size": batch_size})
            mean = self._means.get(f"{module._current_fx_name}.{name}")
            if mean is not None and not args:
                mean.options = options

        module.__dict__["log"] = log
        try:
            yield
        finally:
            del module.__dict__["log"]

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """Update the round's value, unless the call only registers the value's metadata."""
        if not self._registering:
            super().update_metrics(key, value, batch_size)

    def _client_size(self, batch_size: int | None) -> int:
        return batch_size if batch_size is not None else (self.batch_size or 1)

    def close_client(self) -> dict[str, float]:
        """Add the client's means to the round's and return them by name."""
        closed = {}
        for key, mean in self._means.items():
            if mean.weight:
                value = mean.total / mean.weight
                self.update_metrics(key, value, mean.weight)
                closed[self[key].meta.name] = float(value)
                mean.total, mean.weight = torch.zeros_like(mean.total), 0
        return closed
