"""The user's unchanged ``training_step`` as a pure function of parameters and batch, for many clients at once."""

import dis
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree
from torchmetrics import Metric

from lightning_fed._compat import is_param_in_hook_signature
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.flat import FlatParameters
from lightning_fed.core.seeds import preserved_random_state
from lightning_fed.engines.gradients import buffer_owners

__all__ = ["FunctionalStep", "Logged", "stack_batches"]

_LOG = inspect.signature(pl.LightningModule.log)
_MEANS = (torch.mean, "mean", "avg")


@dataclass(frozen=True, slots=True)
class Logged:
    """One value that ``training_step`` logged.

    Attributes:
        value: The value of each client [S].
        options: The other arguments of ``self.log``.
    """

    value: Tensor
    options: dict[str, Any]


class _Step(nn.Module):
    """Hand the module's parameters to ``functional_call``, with ``training_step`` as what is called."""

    def __init__(self, module: pl.LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any) -> Any:
        return self.module.training_step(*arguments)


class FunctionalStep:
    """Gradients of ``training_step`` for several clients at once: ``vmap(grad(...))`` over stacked parameters.

    Args:
        trainer: The trainer, with its module attached.
        flat: The trainable parameters.
    """

    def __init__(self, trainer: pl.Trainer, flat: FlatParameters) -> None:
        self.trainer = trainer
        self.flat = flat
        self.is_random = False
        self.unused: frozenset[int] = frozenset()
        module = self.module = trainer.lightning_module
        self._call = _Step(module)
        self._names = [f"module.{name}" for name in flat.names]
        self.reads_index = _reads(module.training_step, "batch_idx")
        self._takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self._options: dict[str, dict[str, Any]] = {}
        self._values: dict[str, Tensor] = {}
        self._held: Sequence[Tensor] | None = None  # the views that the module's parameters look at

    def gradients(
        self, views: Sequence[Tensor], batch: Any, batch_idx: int, shared: bool = False
    ) -> tuple[Sequence[Tensor], Tensor, dict[str, Logged]]:
        """Return each client's gradients, loss and logged values on its own batch.

        Args:
            views: One tensor per parameter, [S, *shape]; [*shape] if ``shared``.
            batch: The clients' batches, every tensor stacked to [S, B, ...].
            batch_idx: Their index in the local epoch.
            shared: Whether all clients are at the same point.

        Returns:
            Gradients [S, *shape] per parameter, losses [S], and the logged values by name.
        """
        if not shared and len(views[0]) == 1:
            return self._of_one(views, batch, batch_idx)
        leaves, spec = pytree.tree_flatten(batch)

        def loss_of(point: tuple[Tensor, ...], *parts: Tensor) -> tuple[Tensor, tuple[Tensor, dict[str, Tensor]]]:
            parameters = dict(zip(self._names, point, strict=True))
            whole = self._arguments(pytree.tree_unflatten(parts, spec), batch_idx)
            loss, values = self._loss(lambda: functional_call(self._call, parameters, whole))
            return loss, (loss.detach(), values)

        rows = (None if shared else 0, *(0 for _ in leaves))
        take = vmap(grad(loss_of, has_aux=True), in_dims=rows, randomness="different")
        grads, (loss, values) = take(tuple(views), *leaves)
        return grads, loss, {name: Logged(value, self._options[name]) for name, value in values.items()}

    def _of_one(
        self, views: Sequence[Tensor], batch: Any, batch_idx: int
    ) -> tuple[Sequence[Tensor], Tensor, dict[str, Logged]]:
        """Take one client's gradient with autograd alone, at a fraction of the cost of ``vmap``."""
        if self._held is not views:
            self.flat.point_to([view[0] for view in views])
            self._held = views
        arguments = self._arguments(pytree.tree_map(lambda leaf: leaf[0], batch), batch_idx)
        with torch.enable_grad():
            loss, values = self._loss(lambda: self.module.training_step(*arguments))
            grads = torch.autograd.grad(loss, self.flat.params, allow_unused=True)
        logged = {name: Logged(value[None], self._options[name]) for name, value in values.items()}
        zeros = [torch.zeros_like(v) if g is None else g[None] for g, v in zip(grads, views, strict=True)]
        return zeros, loss.detach()[None], logged

    def _arguments(self, batch: Any, batch_idx: int) -> tuple[Any, ...]:
        return (batch, batch_idx) if self._takes_index else (batch,)

    def _loss(self, call: Callable[[], Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of one client, and what it logs."""
        values = self._values = {}
        with self.trainer.precision_plugin.train_step_context():
            output = call()
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            raise FederatedError(
                f"training_step returned {type(loss).__name__} instead of a loss, which clients that are run at"
                " once cannot skip. Return a tensor for every batch, or use engine='sequential'."
            )
        return loss, values

    def _log(self, *args: Any, **kwargs: Any) -> None:
        """Stand in for ``self.log``: collect the value, and check the other arguments once."""
        name, value = args[:2] if len(args) > 1 else (kwargs.get("name", *args[:1]), kwargs["value"])
        options = self._options.get(name)
        if options is None or len(args) > 2:
            bound = _LOG.bind(self.module, *args, **kwargs).arguments
            options = self._options[name] = {k: v for k, v in bound.items() if k not in ("self", "name", "value")}
            _check_logged(name, value, options)
        elif "batch_size" in kwargs:
            options["batch_size"] = kwargs["batch_size"]
        self._values[name] = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Collect what ``self.log`` is given inside, instead of handing it to Lightning."""
        attributes: dict[str, Any] = self.module.__dict__
        own = {name: attributes[name] for name in ("log",) if name in attributes}
        attributes["log"] = self._log
        try:
            yield
        finally:
            del attributes["log"]
            attributes.update(own)
            self.flat.restore()
            self._held = None

    # ------------------------------------------------------------------ the trial

    def try_out(self, batch: Any, batch_idx: int) -> None:
        """Take a step of two equal clients, and refuse the module if that is not what two separate steps would do.

        Args:
            batch: A client's batch, every tensor [1, B, ...].
            batch_idx: Its index in the local epoch.

        Raises:
            FederatedError: Naming what the module does that clients run at once cannot do, and the way out.
        """
        pair = [v.detach().expand(2, *v.shape) for v in self.flat.views]
        with preserved_random_state(self.flat.y.device), self.recording():
            kept = self._snapshot()
            try:
                grads, _, _ = self.gradients(pair, pytree.tree_map(lambda t: torch.cat([t, t]), batch), batch_idx)
                self._check_traces(kept)
                self.is_random = not torch.equal(kept["random"], torch.get_rng_state())
                if not self.is_random:
                    self._check_values([g[0] for g in grads], batch, batch_idx)
                self.unused = self._unused(batch, batch_idx)
            except FederatedError:
                raise
            except Exception as error:
                text = " ".join(str(error).split())
                raise self._refusal(f"it cannot be run for several clients at once ({text[:300]})") from error

    def _check_values(self, grads: Sequence[Tensor], batch: Any, batch_idx: int) -> None:
        """Compare with the gradient of one client, as a guard against operations that ``vmap`` gets wrong."""
        single, _, _ = self.gradients([v.detach()[None] for v in self.flat.views], batch, batch_idx)
        scale = max(float(g.abs().max()) for g in single) or 1.0
        for name, one, other in zip(self.flat.names, single, grads, strict=True):
            if not torch.allclose(one[0], other, rtol=1e-2, atol=1e-2 * scale, equal_nan=True):
                raise self._refusal(f"the gradient of {name!r} of several clients at once differs from that of one")

    def _unused(self, batch: Any, batch_idx: int) -> frozenset[int]:
        """Return the positions of parameters that the loss does not depend on: they have no gradient, not zero."""
        self.flat.restore()
        arguments = self._arguments(pytree.tree_map(lambda leaf: leaf[0], batch), batch_idx)
        with torch.enable_grad():
            loss, _ = self._loss(lambda: self.module.training_step(*arguments))
            grads = torch.autograd.grad(loss, self.flat.params, allow_unused=True)
        return frozenset(i for i, g in enumerate(grads) if g is None)

    def _snapshot(self) -> dict[str, Any]:
        module = self.module
        buffers = [owner.get_buffer(name) for owner, name in buffer_owners(module).values()]
        return {
            "random": torch.get_rng_state(),
            "foreign": _foreign_state(),
            "buffers": [(b, b.clone()) for b in buffers],
            "metrics": [(n, m, m._update_count) for n, m in module.named_modules() if isinstance(m, Metric)],
            "attributes": {(n, k): _mark(v) for n, m in module.named_modules() for k, v in _attributes(m).items()},
        }

    def _check_traces(self, kept: dict[str, Any]) -> None:
        module = self.module
        names = list(buffer_owners(module))
        for name, (buffer, before) in zip(names, kept["buffers"], strict=True):
            if not torch.equal(buffer, before):
                raise self._refusal(f"it changes the buffer {name!r}, as BatchNorm's running statistics in train mode")
        for name, metric, count in kept["metrics"]:
            if metric._update_count != count:
                raise self._refusal(
                    f"it updates the metric {name!r}; log a functional metric, or the loss alone, in training_step"
                )
        now = {(n, k): _mark(v) for n, m in module.named_modules() for k, v in _attributes(m).items()}
        for key in now.keys() | kept["attributes"].keys():
            if now.get(key) != kept["attributes"].get(key):
                raise self._refusal(f"it changes the attribute {'.'.join(filter(None, key))!r}")
        if _foreign_state() != kept["foreign"]:
            raise self._refusal("it draws from Python's or NumPy's generator, once for all clients; draw from torch's")

    def _refusal(self, reason: str) -> FederatedError:
        name = type(self.module).__name__
        return FederatedError(
            f"engine='vectorized' cannot take {name}.training_step: {reason}. Change that, or use engine='sequential'."
        )


def stack_batches(batches: Sequence[Any]) -> Any:
    """Stack the clients' batches, tensor by tensor, to [S, B, ...].

    Raises:
        FederatedError: If a batch holds anything but tensors.
    """
    flat = [pytree.tree_flatten(batch) for batch in batches]
    for leaf in flat[0][0]:
        if not isinstance(leaf, Tensor):
            raise FederatedError(
                f"engine='vectorized' needs batches of tensors only, found a {type(leaf).__name__} in one. Leave it out"
                " of the batch, or use engine='sequential'."
            )
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([torch.stack(column) for column in columns], flat[0][1])


def batch_shape(batch: Any) -> tuple[Any, ...]:
    """Return what batches must share to be stacked."""
    leaves, spec = pytree.tree_flatten(batch)
    return spec, *((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in leaves)


def _check_logged(name: str, value: Any, options: dict[str, Any]) -> None:
    reduce_fx = options.get("reduce_fx", "mean")
    if reduce_fx not in _MEANS or isinstance(value, Metric) or (isinstance(value, Tensor) and value.numel() != 1):
        found = f"reduce_fx={reduce_fx!r}" if reduce_fx not in _MEANS else f"a {type(value).__name__}"
        raise FederatedError(
            f"engine='vectorized' logs means of single numbers, found self.log({name!r}, ...) of {found} in"
            " training_step. Log a 0-dim tensor with reduce_fx='mean', or use engine='sequential'."
        )


def _foreign_state() -> tuple[Any, ...]:
    """Return the states of the generators that are not PyTorch's."""
    numpy: Any = np.random.get_state()
    return random.getstate(), numpy[1].tolist(), numpy[2]


def _reads(function: Callable[..., Any], argument: str) -> bool:
    """Whether a function's own code reads an argument; True where that cannot be told."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or argument not in code.co_varnames[: code.co_argcount]:
        return code is None or bool(code.co_flags & inspect.CO_VARARGS)
    read = (i.argval if isinstance(i.argval, tuple) else (i.argval,) for i in dis.get_instructions(code))
    return argument in code.co_cellvars or any(argument in names for names in read)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name != "log"}


def _mark(value: Any) -> Any:
    """Return something that changes when an attribute is assigned to, a collection grows, a tensor is written to."""
    if isinstance(value, (int, float, str, bool, type(None))):
        return value
    if isinstance(value, Tensor):
        return id(value), value._version
    return id(value), len(value) if isinstance(value, (list, dict, set)) else 0
