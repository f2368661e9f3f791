"""Gradients of the user's ``training_step`` at other points: Mime's anchor and full-batch gradients.

Such a pass has no side effects on logs, metrics, buffers or gradients. If processes split batches, full-batch gradients
are sums over all processes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fed.compat.package import pl
from lightning_fed.compat.private import DummyLogger, call, is_param_in_hook_signature
from lightning_fed.core.buffers import held_by, overwrite
from lightning_fed.core.devices import accumulation
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.flat import FlatParameters, Layout
from lightning_fed.core.seeds import capture_random_state, preserved_random_state, seed_global
from lightning_fed.core.types import Vector
from lightning_fed.engines.changes import METRICS, copy_metric
from lightning_fed.strategies.ddp import split_of


def prepare_batch(trainer: pl.Trainer, batch: Any) -> Any:
    """Convert and transfer a batch as Lightning's training loop does, with the user's transfer hooks."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)


def check_loss(loss: Tensor | None) -> None:
    """Raise if a loss has several numbers, since it has no gradient."""
    if loss is not None and loss.ndim and loss.numel() != 1:
        raise FederatedError(
            f"training_step must return a loss of one number, found one of shape {list(loss.shape)}. Return its mean."
        )


class GradientPass:
    """Gradients of ``training_step`` at given points, without side effects.

    ``buffers`` has the owners of the buffers that a pass must not change, by default from :func:`buffer_owners`.
    """

    def __init__(
        self, trainer: pl.Trainer, flat: FlatParameters, buffers: Mapping[str, tuple[nn.Module, str]] | None = None
    ) -> None:
        self.trainer = trainer
        self.flat = flat
        self.split = split_of(trainer)
        module = trainer.lightning_module
        self._metrics = list[tuple[nn.Module, str, nn.Module, Any]]()  # with the metric's parent, name and copy
        self._children = list[dict[str, nn.Module | None]]()  # of each of the module's parts
        self._known: list[int] | None = None  # the children's ids when the metrics were copied
        self._buffers = list((buffer_owners(module) if buffers is None else buffers).values())
        self._logger: list[pl.loggers.Logger] = [DummyLogger()] if trainer.loggers else []

    def _find_metrics(self) -> None:
        """Give each of the module's metrics an empty copy, and note the children of the module's parts."""
        parents = [parent for _, parent in _outside_metrics(self.trainer.lightning_module)]
        # a scripted module's children are not in a dict, and stay the same
        self._children = [parent._modules for parent in parents if isinstance(parent._modules, dict)]
        self._known = list(map(id, chain.from_iterable(map(dict.values, self._children))))
        self._metrics = [
            (parent, name, child, copy_metric(child))
            for parent in parents
            for name, child in parent.named_children()
            if isinstance(child, METRICS)
        ]
        for *_, scratch in self._metrics:
            scratch.reset()

    @contextmanager
    def silent(self) -> Iterator[Callable[[], None]]:
        """Protect loggers, metrics, buffers and gradients from the code inside.

        It yields a function that undoes all changes of metrics and buffers so far.
        """
        module, trainer = self.trainer.lightning_module, self.trainer
        loggers, trainer.loggers = trainer.loggers, self._logger
        hook = module._current_fx_name  # Lightning does not reset it if the code inside fails
        grads = [p.grad for p in self.flat.params]
        # a step may have assigned another tensor since the fit began
        buffers = [(owner, name, held_by(owner, name)) for owner, name in self._buffers]
        values = [buffer.clone() for _, _, buffer in buffers]
        # a hook may have added or replaced a metric; by id, since == of two metrics makes a third
        if self._known != list(map(id, chain.from_iterable(map(dict.values, self._children)))):
            self._find_metrics()
        metrics = self._metrics
        for parent, name, _, scratch in metrics:
            parent._modules[name] = scratch

        def forget() -> None:
            for _, _, _, scratch in metrics:
                scratch.reset()
            with torch.no_grad():
                for (owner, name, buffer), value in zip(buffers, values, strict=True):
                    if name in owner._buffers:
                        owner._buffers[name] = buffer
                    overwrite(owner, name, value)

        try:
            with unlogged(module):
                yield forget
        finally:
            for parent, name, metric, _ in metrics:
                parent._modules[name] = metric
            forget()
            for p, grad in zip(self.flat.params, grads, strict=True):
                p.grad = grad
            self.flat.bind()
            trainer.loggers = loggers
            module.__dict__["_current_fx_name"] = hook  # an assignment would use the slow nn.Module.__setattr__

    def add(self, point: Sequence[Tensor], batch: Any, batch_idx: int, out: Vector, scale: float) -> None:
        """Add ``scale`` times the gradient at a point on one prepared batch to ``out`` [P], or [P + Q].

        A gradient scaler does not see an overflow here: after one, the pass is repeated at a lower scale.
        """
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        factor = float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0
        self.flat.bind(point)
        restore = capture_random_state(out.device) if factor > 1.0 else None
        grads = self._backward(batch, batch_idx, factor)
        while restore is not None and factor > 1.0 and not all(g.isfinite().all() for g in grads if g is not None):
            factor = max(1.0, factor / 64.0)
            restore()
            grads = self._backward(batch, batch_idx, factor)
        views = self.flat.cut(out)
        if self.flat.joins and not any(grad is not None and grad.is_sparse for grad in grads):
            parts = [torch.zeros_like(v) if g is None else g for v, g in zip(views, grads, strict=False)]
            out.add_(torch.cat([part.reshape(-1) for part in parts]), alpha=scale / factor)
            return
        for view, grad in zip(views, grads, strict=False):
            if grad is not None:
                view.add_(grad, alpha=scale / factor)

    def _forward(self, batch: Any, batch_idx: int) -> Tensor | None:
        module = self.trainer.lightning_module
        if not module.automatic_optimization:
            raise FederatedError(
                f"{type(module).__name__} uses manual optimization: its training_step steps the optimizer, so its loss"
                " and gradient at a given model cannot be measured. Remove the measure, or return the loss from"
                " training_step and leave steps to the trainer."
            )
        takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        arguments = (batch, batch_idx) if takes_index else (batch,)
        output = call._call_strategy_hook(self.trainer, "training_step", *arguments)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is not None and not isinstance(loss, Tensor):
            raise FederatedError(
                f"training_step must return a tensor, a dict with 'loss', or None, found {type(loss).__name__}."
            )
        check_loss(loss)
        return loss

    def _backward(self, batch: Any, batch_idx: int, factor: float) -> list[Tensor | None]:
        for p in self.flat.params:
            p.grad = None
        with torch.enable_grad():
            loss = self._forward(batch, batch_idx)
            if loss is not None:
                (loss * factor if factor != 1.0 else loss).backward()
        return [p.grad for p in self.flat.params]

    def forward(self, batch: Any, batch_idx: int) -> Tensor | None:
        """Return the loss on one prepared batch with the current parameters; inside :meth:`silent`."""
        with torch.enable_grad():
            return self._forward(batch, batch_idx)

    def full(self, point: Vector, batches: Iterable[tuple[Any, int]], size: int, decay: Sequence[float]) -> Vector:
        """Return the full-batch gradient [P] at a point: the mean over batches, weighted by size.

        Every batch starts from the same buffers, so the size of a batch does not matter.
        """
        views = self.flat.layout.views(point)
        out = torch.zeros_like(point)
        with self.silent() as forget:
            for i, (batch, own) in enumerate(self._parts(batches)):
                if own:
                    self.add(views, prepare_batch(self.trainer, batch), i, out, own / size)
                    forget()
        self.split.sum(out)
        return add_decay(out, point, self.flat.layout, decay)

    def hessian_vector(
        self, point: Vector, vector: Vector, batches: Iterable[tuple[Any, int]], size: int, decay: Sequence[float]
    ) -> Vector:
        """Return a client's full-batch Hessian at a point times a vector [P]; otherwise like :meth:`full`."""
        parts, out = self.flat.layout.views(vector), torch.zeros_like(point)
        with self.silent() as forget:
            self.flat.bind(self.flat.layout.views(point))
            for i, (batch, own) in enumerate(self._parts(batches)):
                products = self._second_backward(prepare_batch(self.trainer, batch), i, parts) if own else []
                forget()
                for view, product in zip(self.flat.layout.views(out) if own else [], products, strict=False):
                    if product is not None:
                        view.add_(product, alpha=own / size)
        self.split.sum(out)
        return add_decay(out, vector, self.flat.layout, decay)

    def _parts(self, batches: Iterable[tuple[Any, int]]) -> Iterator[tuple[Any, int]]:
        return (self.split.cut(batch, examples) for batch, examples in batches)

    def _second_backward(self, batch: Any, batch_idx: int, parts: Sequence[Tensor]) -> list[Tensor | None]:
        params = self.flat.params[: len(parts)]
        with torch.enable_grad():
            loss = self._forward(batch, batch_idx)
            for p in params:
                p.grad = None
            try:
                grads = () if loss is None else torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
                terms = [(g * v).sum() for g, v in zip(grads, parts, strict=False) if g is not None and g.requires_grad]
                if terms:  # empty if the loss is linear
                    torch.stack(terms).sum().backward()  # not autograd.grad, which skips unsupported nodes
            except RuntimeError as error:
                raise FederatedError(
                    f"The loss of {type(self.trainer.lightning_module).__name__} cannot be differentiated twice:"
                    f" {error}. Fused attention and cuDNN's recurrent layers have a form that can: see"
                    " torch.nn.attention.sdpa_kernel(SDPBackend.MATH) and torch.backends.cudnn.flags(enabled=False)."
                ) from error
        return [p.grad for p in params]

    @contextmanager
    def losses(self, point: Vector) -> Iterator[Callable[[Iterable[tuple[Any, int]], int], float]]:
        """Yield a function that returns the loss at a point [P], summed over examples, in eval mode.

        The sum is in float64; if processes split batches, it is over this process's examples. The function takes the
        client's (batch, examples in it) pairs, which visit every example once, and the seed of any randomness in eval
        mode. The global generators are restored afterwards.
        """
        module = self.trainer.lightning_module
        with self.silent() as forget, preserved_random_state(point.device), preserved_modes(module):
            self.flat.bind(self.flat.cut(point))

            @torch.no_grad()
            def loss_of(batches: Iterable[tuple[Any, int]], seed: int) -> float:
                seed_global(seed, point.device)
                module.eval()  # the last client's training_step may have changed it
                total = torch.zeros((), **accumulation(point.device))
                try:
                    for i, (batch, own) in enumerate(self._parts(batches)):
                        loss = self._forward(prepare_batch(self.trainer, batch), i) if own else None
                        if loss is not None:
                            total += (loss.detach().reshape(()) * own).to(total.device)
                finally:
                    forget()
                return float(total)

            yield loss_of


def add_decay(grads: Tensor, point: Vector, layout: Layout, decay: Sequence[float]) -> Tensor:
    """Add the gradient of coupled weight decay at a point [P] to gradients [..., P], in place; return them."""
    parts = zip(grads.split(layout.sizes, dim=-1), point.split(layout.sizes), decay, strict=False)
    for part, at, rate in parts:
        if rate:
            part.add_(at, alpha=rate)
    return grads


@contextmanager
def unlogged(module: pl.LightningModule) -> Iterator[None]:
    """Drop all values that a module logs inside."""
    attributes: dict[str, Any] = module.__dict__
    own: dict[str, Any] = {name: attributes.pop(name) for name in ("log", "log_dict") if name in attributes}
    attributes["log"] = attributes["log_dict"] = lambda *_, **__: None
    try:
        yield
    finally:
        del attributes["log"], attributes["log_dict"]
        attributes.update(own)


@contextmanager
def preserved_modes(module: nn.Module) -> Iterator[None]:
    """Restore the training or evaluation mode of all parts of a module on exit."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def _outside_metrics(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and its submodules, with their name prefixes, without entering metrics."""
    yield prefix, module
    for name, child in module.named_children():
        if not isinstance(child, METRICS):
            yield from _outside_metrics(child, f"{prefix}{name}.")


def buffer_owners(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the owner and local name of every non-metric buffer, by qualified name; shared ones once."""
    seen: set[int] = set()
    owners = {}
    for prefix, parent in _outside_metrics(module):
        for name, buffer in parent._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                owners[prefix + name] = (parent, name)
    return owners
