"""The user's unchanged ``training_step`` as a pure function of parameters and batch, for many clients at once."""

import dis
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from lightning_fed._compat import is_param_in_hook_signature, rank_zero_warn
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.flat import FlatParameters
from lightning_fed.core.seeds import foreign_state, preserved_random_state, random_state
from lightning_fed.engines.gradients import check_loss
from lightning_fed.engines.vectorized.batch_trees import flatten, unflatten
from lightning_fed.tracing.traces import Found, Traces, Values, kinds

__all__ = ["FunctionalStep", "Logged"]

_LOG = inspect.signature(pl.LightningModule.log)
_NO_OPTIONS = ("self", "name", "value", "batch_size")
_MEANS = (torch.mean, "mean", "avg")
_TOLERANCES: dict[Any, tuple[float, float]] = {
    torch.float64: (1e-9, 1e-12),
    torch.float32: (1e-4, 1e-6),
    "mixed": (1e-2, 1e-6),
}
"""How far the loss of a trace may be from the module's own, relatively and absolutely."""


@dataclass(frozen=True, slots=True)
class Logged:
    """One value that ``training_step`` logged.

    Attributes:
        value: The value of each client [S], [] of a single one.
        options: The other arguments of ``self.log``.
        batch_size: The ``batch_size`` among them, if it was given.
    """

    value: Tensor
    options: dict[str, Any]
    batch_size: int | None


class _Step(nn.Module):
    """Hand the module's parameters to ``functional_call``, with ``training_step`` as what is called."""

    def __init__(self, module: pl.LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any) -> Any:
        return self.module.training_step(*arguments)


class FunctionalStep:
    """Gradients of ``training_step`` for several clients at once: ``vmap`` over stacked parameters.

    Args:
        trainer: The trainer, with its module attached.
        flat: The trainable parameters.

    Attributes:
        is_random: Whether the step draws random numbers.
        is_hot: Whether batches of this shape recur, so that a trace pays.
        checked: The kinds of traces that have been compared with the module in this round: "step", and "sum" for
            full-batch gradients.
        last_unused: The parameters that the last loss of :meth:`gradient_of_one` did not depend on; None if unknown.
    """

    def __init__(self, trainer: pl.Trainer, flat: FlatParameters) -> None:
        self.trainer = trainer
        self.flat = flat
        self.is_random = False
        self.last_unused: frozenset[int] | None = None
        self._has_looked = False
        module = self.module = trainer.lightning_module
        self._call = _Step(module)
        self._names = [f"module.{name}" for name in flat.names]
        self.reads_index = _reads(module.training_step, _index_of(module.training_step))
        self._takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self._options: dict[str, dict[str, Any]] = {}
        self._values: dict[str, Tensor] = {}
        self._sizes: dict[str, int | None] = {}
        self._held: Sequence[Tensor] | None = None  # the views that the module's parameters look at
        with trainer.precision_plugin.train_step_context():
            self.traces = Traces(torch.get_default_dtype())
        self.is_hot = False
        self.checked: set[str] = set()
        self._is_mixed = isinstance(trainer.precision_plugin, MixedPrecision)
        self._unused: dict[Any, frozenset[int]] = {}  # by what decides the shapes of a step

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
        leaves, spec = flatten(batch)
        key = (shared, batch_idx if self.reads_index else 0, spec, *kinds(leaves))
        with self._drawing_nothing():
            return self._run(key, lambda *flat: self._many(flat, spec, batch_idx, shared), [*views, *leaves])

    def _many(self, flat: Sequence[Tensor], spec: Any, batch_idx: int, shared: bool) -> Found:
        rows = (None if shared else 0, *(0 for _ in flat[len(self._names) :]))
        take = vmap(_gradient_of(self._loss_at(spec, batch_idx)), in_dims=rows, randomness="different")
        grads, (loss, values) = take(tuple(flat[: len(self._names)]), *flat[len(self._names) :])
        return grads, loss, self._with_sizes(values)

    def gradient_of_one(
        self, views: Sequence[Tensor], batch: Any, batch_idx: int
    ) -> tuple[Sequence[Tensor], Tensor, dict[str, Logged]]:
        """Return the same of one client, at a fraction of the cost of ``vmap``.

        Args:
            views: One tensor per parameter, [*shape]; the same list for all steps of a client saves time.
            batch: Its batch, every tensor [B, ...].
            batch_idx: Its index in the local epoch.

        Returns:
            Gradients [*shape] per parameter, the loss [], and the logged values by name.
        """
        leaves, spec = flatten(batch)
        key = (None, batch_idx if self.reads_index else 0, spec, *kinds(leaves))
        if self.is_hot and self.traces.allowed:
            self.last_unused = None
            return self._run(key, lambda *flat: self._one(flat, spec, batch_idx), [*views, *leaves])
        if self._held is not views:
            self.flat.point_to(views)
            self._held = views
        arguments = self._arguments(batch, batch_idx)
        with self._drawing_nothing(), torch.enable_grad():
            loss, values = self._loss(lambda: self.module.training_step(*arguments))
            grads = torch.autograd.grad(loss, self.flat.params, allow_unused=True)
        self.last_unused = frozenset(i for i, g in enumerate(grads) if g is None)
        whole = [torch.zeros_like(v) if g is None else g for g, v in zip(grads, views, strict=True)]
        return whole, loss.detach(), self.logged(self._with_sizes(values))

    def _one(self, flat: Sequence[Tensor], spec: Any, batch_idx: int, times: Tensor | None = None) -> Found:
        take = _gradient_of(self._loss_at(spec, batch_idx), times)
        grads, (loss, values) = take(tuple(flat[: len(self._names)]), *flat[len(self._names) :])
        return grads, loss, self._with_sizes(values)

    def _loss_at(self, spec: Any, batch_idx: int) -> Callable[..., Any]:
        """Return the loss of one client as a function of its parameters and the tensors of its batch."""

        def loss_of(point: tuple[Tensor, ...], *parts: Tensor) -> tuple[Tensor, tuple[Tensor, dict[str, Tensor]]]:
            parameters = dict(zip(self._names, point, strict=True))
            whole = self._arguments(unflatten(parts, spec), batch_idx)
            loss, values = self._loss(lambda: functional_call(self._call, parameters, whole))
            return loss, (loss.detach(), values)

        return loss_of

    def _run(
        self, key: Any, function: Callable[..., Found], flat: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Tensor, dict[str, Logged]]:
        """Call a function of tensors, through its trace where there is one or one is due."""
        trace = self.traces.get(key, function, flat) if self.is_hot else None
        if trace is None:
            found = function(*flat)
        else:
            found = trace(*flat)
            if "step" not in self.checked and not self.is_right(found[1], function(*flat)[1], "step"):
                found = function(*flat)
        grads, loss, values = found
        return grads, loss, self.logged(values)

    def is_right(self, loss: Tensor, real: Tensor, kind: str) -> bool:
        """Compare what a trace gives with what the module gives, once a round for each kind; the module is right."""
        self.checked.add(kind)
        if self.agrees(loss, real):
            return True
        self.traces.forbid()
        rank_zero_warn(
            f"{type(self.module).__name__}.training_step gives another loss than when it was traced, so it reads"
            " something beside self and the batch that changes. Local steps run untraced from here on, which is slower."
        )
        return False

    def agrees(self, loss: Tensor, real: Tensor) -> bool:
        """Whether two losses are the same up to rounding."""
        rtol, atol = _TOLERANCES.get("mixed" if self._is_mixed else loss.dtype, (5e-2, 1e-6))
        if loss.numel() > 1:
            return torch.allclose(real, loss, rtol=rtol, atol=atol, equal_nan=True)
        a, b = float(loss), float(real)  # the usual case, at a tenth of the cost
        return math.isclose(a, b, rel_tol=rtol, abs_tol=atol) or (math.isnan(a) and math.isnan(b))

    def begin_round(self) -> None:
        """Look again at what is looked at once a round."""
        self.checked.clear()
        self._has_looked = False
        self._unused.clear()

    def unused_in(self, batch: Any, batch_idx: int) -> frozenset[int]:
        """Return the same as :meth:`unused_parameters`, found out once a round for batches of one shape."""
        leaves, spec = flatten(batch)
        key = (batch_idx if self.reads_index else 0, spec, *kinds(leaves))
        if key not in self._unused:
            with preserved_random_state(self.flat.y.device):
                self._unused[key] = self.unused_parameters(batch, batch_idx)
        return self._unused[key]

    def unused_parameters(self, batch: Any, batch_idx: int) -> frozenset[int]:
        """Return the positions of parameters that the loss does not depend on: they have no gradient, not zero."""
        self.flat.restore()
        self._held = None
        arguments = self._arguments(batch, batch_idx)
        with torch.enable_grad():
            loss, _ = self._loss(lambda: self.module.training_step(*arguments))
            grads = torch.autograd.grad(loss, self.flat.params, allow_unused=True)
        return frozenset(i for i, g in enumerate(grads) if g is None)

    def _with_sizes(self, values: dict[str, Tensor]) -> Values:
        return {name: (value, self._sizes[name]) for name, value in values.items()}

    def logged(self, values: Values) -> dict[str, Logged]:
        """Return logged values with the options they were logged with."""
        return {name: Logged(value, self._options[name], size) for name, (value, size) in values.items()}

    def take(
        self,
        views: Sequence[Tensor],
        leaves: Sequence[Tensor],
        spec: Any,
        alone: bool,
        shared: bool = False,
        times: Tensor | None = None,
    ) -> Found:
        """Return gradients, loss and logged values as a pure function, to be traced.

        Args:
            views: One tensor per parameter, [S, *shape]; [*shape] of a single client, or if ``shared``.
            leaves: The tensors of the clients' batches [S, B, ...]; [B, ...] of a single client.
            spec: What puts a batch together.
            alone: Whether it is a single client.
            shared: Whether all clients are at the same point.
            times: What the gradients of a single client are multiplied with [], from the loss on.
        """
        flat = (*views, *leaves)
        return self._one(flat, spec, 0, times) if alone else self._many(flat, spec, 0, shared)

    def loss_of_first(
        self, views: Sequence[Tensor], leaves: Sequence[Tensor], spec: Any, batch_idx: int, alone: bool
    ) -> Tensor:
        """Return the module's own loss of the first client, to compare a trace's with."""
        first = (views, leaves) if alone else ([v[0] for v in views], [leaf[0] for leaf in leaves])
        self.flat.point_to(first[0])
        self._held = None
        arguments = self._arguments(unflatten(first[1], spec), batch_idx)
        with self._drawing_nothing(), torch.enable_grad():
            loss, _ = self._loss(lambda: self.module.training_step(*arguments))
        return loss.detach()

    @contextmanager
    def _drawing_nothing(self) -> Iterator[None]:
        """Refuse a step that draws random numbers and did not when it was tried out: nobody has seeded them.

        Python's and NumPy's generators are looked at once a round, PyTorch's every time.
        """
        if self.is_random:
            yield
            return
        device, looks = self.flat.y.device, not self._has_looked
        self._has_looked = True
        before = random_state(device), foreign_state() if looks else ()
        yield
        if before[0] != random_state(device) or (looks and before[1] != foreign_state()):
            raise FederatedError(
                f"engine='vectorized' cannot go on with {type(self.module).__name__}.training_step: it draws random"
                " numbers, which it did not when it was tried out. Let it draw from the first round on (from torch's"
                " generator), or use engine='sequential'."
            )

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
        check_loss(loss)
        return loss.reshape(()) if loss.ndim else loss, values

    def _log(self, *args: Any, **kwargs: Any) -> None:
        """Stand in for ``self.log``: collect the value, and check the other arguments once."""
        name, value = args[:2] if len(args) > 1 else (kwargs.get("name", *args[:1]), kwargs["value"])
        if name in self._values:
            raise FederatedError(
                f"engine='vectorized' logs a name once a step, found self.log({name!r}, ...) twice in training_step."
                " Log the mean of both, or use engine='sequential'."
            )
        options, size = self._options.get(name), kwargs.get("batch_size")
        if options is None or len(args) > 2:
            bound = _LOG.bind(self.module, *args, **kwargs).arguments
            options = self._options[name] = {k: v for k, v in bound.items() if k not in _NO_OPTIONS}
            size = bound.get("batch_size")
            _check_logged(name, value, options)
        if not isinstance(value, Tensor):
            _check_logged(name, value, options)
            self.traces.forbid()  # a trace would repeat this very number for ever
            value = torch.tensor(float(value))
        self._values[name] = value.detach().clone()  # a parameter would go on changing
        self._sizes[name] = size

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Collect what ``self.log`` is given inside, instead of handing it to Lightning."""
        attributes, loop = self.module.__dict__, self.trainer.fit_loop
        several = loop.runs_several
        own = {name: attributes[name] for name in ("log",) if name in attributes}
        attributes["log"], loop.runs_several = self._log, True
        try:
            yield
        finally:
            loop.runs_several = several
            del attributes["log"]
            attributes.update(own)
            self.flat.restore()
            self._held = None


def _gradient_of(loss_of: Callable[..., Any], times: Tensor | None = None) -> Callable[..., Any]:
    """Return the gradient of a loss by its first argument, times a number, with what else the loss returns.

    ``torch.func.grad`` does the same, but in a way that could be differentiated again, for which some operations have a
    formula of many steps instead of a kernel: the backward pass of a group norm takes twenty passes over its input.
    """

    def take(point: tuple[Tensor, ...], *parts: Tensor) -> Any:
        pulled: Any = vjp(lambda *at: loss_of(at, *parts), *point, has_aux=True)
        loss, pull_back, found = pulled
        with torch.no_grad():
            return pull_back(torch.ones_like(loss) if times is None else times.to(loss.dtype)), found

    return take


def _check_logged(name: str, value: Any, options: dict[str, Any]) -> None:
    reduce_fx = options.get("reduce_fx", "mean")
    is_number = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)
    if reduce_fx not in _MEANS or not is_number:
        found = f"reduce_fx={reduce_fx!r}" if reduce_fx not in _MEANS else f"a {type(value).__name__}"
        raise FederatedError(
            f"engine='vectorized' logs means of single numbers, found self.log({name!r}, ...) of {found} in"
            " training_step. Log a 0-dim tensor with reduce_fx='mean', or use engine='sequential'."
        )


def _index_of(step: Callable[..., Any]) -> str:
    """Return what ``training_step`` calls the index of the batch, its second argument."""
    names = list(inspect.signature(step).parameters)
    return "batch_idx" if "batch_idx" in names or len(names) < 2 else names[1]


def _reads(function: Callable[..., Any], argument: str) -> bool:
    """Whether a function's own code reads an argument; True where that cannot be told."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or argument not in code.co_varnames[: code.co_argcount]:
        return code is None or bool(code.co_flags & inspect.CO_VARARGS)
    read = (i.argval if isinstance(i.argval, tuple) else (i.argval,) for i in dis.get_instructions(code))
    return argument in code.co_cellvars or any(argument in names for names in read)
