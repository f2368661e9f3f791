"""Collection of values from ``self.log``: per client, over a round or an evaluation, in all processes."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fed.compat.package import pl
from lightning_fed.compat.private import _ResultCollection, rank_zero_warn
from lightning_fed.core.devices import accumulation
from lightning_fed.core.errors import FederatedError
from lightning_fed.strategies.processes import Ranks

MEANS = (torch.mean, "mean", "avg")
_EXTREMES = {"max": np.max, "min": np.min}  # NaN if any value is, unlike Python's
_SYNC = ("sync_dist", "sync_dist_fn", "sync_dist_group", "rank_zero_only")
_PER_ROUND = ("on_train_start", "on_train_epoch_start", "on_train_epoch_end")  # every process logs the same in them


@dataclass(frozen=True, slots=True)
class Logged:
    """The values that one process logged under one name."""

    flags: dict[str, Any]  # the arguments of `self.log`, and the hook that called it
    value: float  # the sum of values times examples, or the sum, minimum or maximum of values
    weight: float  # the sum of the batch sizes
    dtype: torch.dtype  # the dtype of the value


class _ClientMean:
    """The running example-weighted mean of one logged value over one client's round.

    On an accelerator, the sum stays there, so that a local step does not wait. On a CPU it is a number, since adding
    tensors takes several times longer than reading one.
    """

    __slots__ = ("device", "flags", "options", "total", "weight")

    def __init__(self, device: torch.device, flags: tuple[Any, ...]) -> None:
        self.device, self.flags = device, flags
        self.options: dict[str, Any] | None = None  # the arguments of `self.log`, once Lightning has checked them
        self.reset()

    def reset(self) -> None:
        """Reset the mean for the next client."""
        kind = accumulation(self.device)
        self.total: float | Tensor = 0.0 if kind["device"].type == "cpu" else torch.zeros((), **kind)
        self.weight: float = 0

    def add(self, value: Tensor, examples: int) -> None:
        """Add a batch's mean."""
        if isinstance(self.total, Tensor):
            self.total.add_(value.detach(), alpha=examples)
        else:
            self.total += value.item() * examples
        self.weight += examples


class SharedResults(_ResultCollection):
    """Lightning's result collection, merged over several processes.

    Lightning would exchange values one by one, hang if a process did not log one of them, and average counts of
    examples as integers. Here, all are exchanged at once and weighted exactly; a value may come from some processes
    only.
    """

    def log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Collect one value; see :meth:`pytorch_lightning.LightningModule.log`."""
        flags = {k: v for k, v in kwargs.items() if k not in _SYNC}  # otherwise, processes' values would differ
        super().log(fx, name, value, *args, **flags)

    @property
    def names(self) -> set[str]:
        """The names of the values for callbacks: with the loader's index, if there are several loaders."""
        metas = [item.meta for item in self.values()]
        indices = [None if not meta.add_dataloader_idx else meta.dataloader_idx for meta in metas]
        return {
            meta.name if index is None else meta.name + self.DATALOADER_SUFFIX.format(index)
            for meta, index in zip(metas, indices, strict=True)
        }

    def partial(self) -> dict[str, Logged]:
        """Return the logged numbers, for other processes."""
        out = {}
        for key, item in self.valid_items():
            if item.is_tensor and item.meta.on_epoch and item.meta.fx not in _PER_ROUND:
                weight = item.cumulated_batch_size.item() if item.meta.is_mean_reduction else 1
                out[key] = Logged(_flags_of(item.meta), float(item.value), weight, item.value.dtype)
        return out

    def merge(self, partials: Sequence[Mapping[str, Logged]]) -> None:
        """Merge the numbers of every process's :meth:`partial`."""
        for key in dict.fromkeys(key for partial in partials for key in partial):
            parts = [partial[key] for partial in partials if key in partial]
            if key not in self:
                _ResultCollection.log(self, value=torch.zeros(()), batch_size=1, **parts[0].flags)
            item, values = self[key], [part.value for part in parts]
            reduce = _EXTREMES.get(parts[0].flags["reduce_fx"], sum)
            item.value = torch.tensor(reduce(values), dtype=parts[0].dtype, device=item.value.device)
            if item.meta.is_mean_reduction:
                item.cumulated_batch_size = torch.tensor(sum(part.weight for part in parts), device=item.value.device)
            item.has_reset, item._computed = False, None

    def metrics(self, on_step: bool) -> Any:
        """Return the values to show, log and monitor."""
        for _, item in () if on_step else self.valid_items():
            if item.is_tensor and item.meta.on_epoch and item._computed is None:
                item.compute()  # avoids Lightning's advice to synchronize values that are equal everywhere
        return super().metrics(on_step)


class EvaluationResults(SharedResults):
    """The values logged in an evaluation whose batches several processes may share.

    Attributes:
        count: Returns the number of examples in the current batch, or None for Lightning's guess; called if a value is
            logged without ``batch_size``.
        processes: The number of processes that share the batches.
    """

    count: Callable[[], int | None] | None = None
    processes = 1
    _has_warned = False

    def log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Collect one value; see :meth:`pytorch_lightning.LightningModule.log`."""
        if kwargs.get("on_step") and self.processes > 1 and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"self.log({name!r}, on_step=True): {self.processes} processes share the batches of this evaluation,"
                " and loggers get the values of single batches from the first process alone. Values with on_epoch=True"
                " are exact. For all batches, evaluate in one process."
            )
        super().log(fx, name, value, *args, **kwargs)

    def _extract_batch_size(self, value: Any, batch_size: int | None, meta: Any) -> int:
        if batch_size is None and self.batch_size is None and self.count is not None:
            self.batch_size = self.count()
        return super()._extract_batch_size(value, batch_size, meta)

    def share(self, ranks: Ranks) -> None:
        """Merge the values logged for the current loader, and prepare metric objects for their exchange."""
        metrics = [key for key, item in self.valid_items() if not item.is_tensor]
        parts = ranks.gather((metrics, self.partial()))
        first = parts[0][0]
        for rank, (keys, _) in enumerate(parts):
            if unexpected := sorted(set(keys) ^ set(first)):
                raise FederatedError(
                    f"Process {rank} and process 0 did not log the same metric objects: {unexpected[0]!r} is missing in"
                    " one of them. Log a metric object for every batch, or in on_validation_epoch_end."
                )
        self.merge([partial for _, partial in parts])
        for key in first:  # metric objects exchange their states in this order
            self[key] = self.pop(key)
            self[key].value._computed = None  # drop this process's own result


class RoundResults(SharedResults):
    """Lightning's result collection, with one value per round.

    A value logged in a local step without flags becomes the round's mean under its plain name: the round is the axis
    of every logger. Lightning checks and rebuilds a value's metadata on every call; here that happens once per
    value, and a local step adds to a running sum.
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
            if kwargs.get("sync_dist") and not kwargs.get("rank_zero_only") and isinstance(value, Tensor):
                # reduce now: later, processes read their values at different times, and would wait for each other
                value = kwargs["sync_dist_fn"](value.clone(), reduce_op=getattr(reduce_fx, "__name__", reduce_fx))
            given = (prog_bar, logger, on_step, on_epoch, reduce_fx)
            super().log(fx, name, value, *given, batch_size=batch_size, **kwargs)
            return
        if isinstance(value, Tensor):
            value = value.to(accumulation(value.device)["device"])
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
            averaged = isinstance(value, Tensor) and reduce_fx in MEANS and not kwargs.get("enable_graph")
            self._registering = averaged
            try:
                super().log(fx, name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, batch_size=size, **kwargs)
            finally:  # Lightning raises for invalid calls, and a callback may catch that
                self._registering = False
            if not averaged:
                return
            mean = self._means[key] = _ClientMean(value.device, flags)
        mean.add(value, size)

    @contextmanager
    def of_client(self, module: pl.LightningModule) -> Iterator[None]:
        """Collect values logged inside as one client's; ``module.log`` then adds directly to the running means.

        Calls that Lightning has not checked before, and values other than 0-dim tensors, still use Lightning's code, as
        do modules that override ``log``.
        """
        has_shortcut = type(module).log is pl.LightningModule.log and "log" not in module.__dict__
        checked = module.log

        def log(name: str, value: Any, *args: Any, batch_size: int | None = None, **options: Any) -> None:
            mean = self._means.get(f"{module._current_fx_name}.{name}")
            if mean is not None and mean.options == options and not args and type(value) is Tensor and value.ndim == 0:
                mean.add(value, self._client_size(batch_size))
                return
            given: dict[str, Any] = {} if batch_size is None else {"batch_size": batch_size}
            checked(name, value, *args, **{**options, **given})
            mean = self._means.get(f"{module._current_fx_name}.{name}")
            if mean is not None and not args:
                mean.options = options

        self._in_client = True
        if has_shortcut:
            module.__dict__["log"] = log
        try:
            yield
        finally:
            self._in_client = False
            if has_shortcut:
                del module.__dict__["log"]

    def partial(self) -> dict[str, Logged]:
        """Return the values logged in this round's local steps, for other processes."""
        for _, item in self.valid_items():
            if not item.is_tensor and item.meta.fx not in _PER_ROUND:
                raise FederatedError(
                    f"self.log({item.meta.name!r}, ...) of a metric object in {item.meta.fx} is not offered with"
                    " several processes. Log its value, or train in one process."
                )
        return super().partial()

    @property
    def without_client_mean(self) -> set[str]:
        """The names logged in local steps with values other than means: metric objects, sums and extremes."""
        return {item.meta.name for key, item in self.items() if not (item.meta.fx in _PER_ROUND or key in self._means)}

    def of_hooks(self) -> dict[str, float]:
        """Return the numbers logged in hooks of the round, which should be equal in all processes."""
        items = [item for _, item in self.valid_items() if item.is_tensor and item.meta.fx in _PER_ROUND]
        return {item.meta.name: float(item.value) for item in items}

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """Update the round's value, unless the call only registers the value's metadata."""
        if not self._registering:
            super().update_metrics(key, value, batch_size)

    def _client_size(self, batch_size: int | None) -> int:
        size = self.batch_size if batch_size is None else batch_size
        return 1 if size is None else size  # 0 for a process without examples of a batch

    def savepoint(self) -> Callable[[], None]:
        """Return a function that undoes later logging; valid between clients only."""
        kept = {key: dict(vars(item)) for key, item in self.items()}  # values are replaced, never changed in place

        def undo() -> None:
            for key in [key for key in self if key not in kept]:
                del self[key]
                self._means.pop(key, None)
            for key, attributes in kept.items():
                vars(self[key]).update(attributes)
            for mean in self._means.values():
                mean.reset()
            self.batch = self.batch_size = None
            self._registering = False

        return undo

    def forget_clients(self, names: Collection[str] | None = None) -> list[str]:
        """Discard the values logged in this round's local steps, by default all; return their names."""
        metas = {key: item.meta for key, item in self.items() if item.meta.fx not in _PER_ROUND}
        gone = {key: meta.name for key, meta in metas.items() if names is None or meta.name in names}
        for key in gone:
            del self[key]
            self._means.pop(key, None)
        return list(gone.values())

    def client_partial(self) -> dict[str, Logged]:
        """Return the current client's sums, for processes that split its batches with this one."""
        return {
            key: Logged(_flags_of(self[key].meta), float(mean.total), mean.weight, torch.float64)
            for key, mean in self._means.items()
            if mean.weight
        }

    def merge_client(self, partials: Sequence[Mapping[str, Logged]], device: torch.device) -> None:
        """Merge the client's sums of every process's :meth:`client_partial`."""
        for key in dict.fromkeys(key for partial in partials for key in partial):
            parts = [partial[key] for partial in partials if key in partial]
            if key not in self._means:  # this process had no examples, so it has not logged it
                self._registering = True
                super().log(value=torch.zeros((), device=device), batch_size=1, **parts[0].flags)
                self._registering = False
                self._means[key] = _ClientMean(device, ())
            mean = self._means[key]
            mean.total = sum(part.value for part in parts)
            mean.weight = sum(part.weight for part in parts)

    def close_client(self) -> dict[str, float | Tensor]:
        """Add the client's means to the round's, and return them by name, on an accelerator without reading them."""
        closed: dict[str, float | Tensor] = {}
        for key, mean in self._means.items():
            if mean.weight:
                value = torch.as_tensor(mean.total / mean.weight, dtype=torch.float64)
                self.update_metrics(key, value, mean.weight)  # type: ignore[arg-type]  # accepts any number
                closed[self[key].meta.name] = float(value) if value.is_cpu else value
                mean.reset()
        return closed


def _flags_of(meta: Any) -> dict[str, Any]:
    names = ("name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
    fx = meta.fx.removesuffix(f".{meta.dataloader_idx}") if meta.add_dataloader_idx else meta.fx
    return {**{name: getattr(meta, name) for name in names}, "fx": fx, "reduce_fx": meta.reduce_fx.__name__}
