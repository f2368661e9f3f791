"""The user's unchanged ``training_step`` as a function of parameters and batch."""

import dis
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from numbers import Real
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lightning_fed.compat.package import pl
from lightning_fed.compat.private import is_param_in_hook_signature, rank_zero_warn
from lightning_fed.core.arguments import kind_of
from lightning_fed.core.devices import numbers_of
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.flat import FlatParameters
from lightning_fed.core.seeds import foreign_state, preserved_random_state, random_state
from lightning_fed.engines.base import OnlySequentialError, changed_since_trial
from lightning_fed.engines.gradients import check_loss
from lightning_fed.engines.logged import MEANS
from lightning_fed.engines.vectorized.batches import unflatten
from lightning_fed.tracing.traces import Trace, Traces, kinds

_LOG = inspect.signature(pl.LightningModule.log)
_NO_OPTIONS = ("self", "name", "value", "batch_size")
_TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-9, 1e-12),
    torch.float32: (1e-4, 1e-6),
    torch.float16: (5e-2, 1e-6),
    torch.bfloat16: (5e-2, 1e-6),
}
"""Relative and absolute tolerances of a trace's numbers against the module's; integers are compared exactly."""

_MIXED_TOLERANCES = dict.fromkeys(_TOLERANCES, (1e-2, 1e-6))
_EXACT = (0.0, 0.0)

_VALUES = (
    "item",
    "tolist",
    "numpy",
    "equal",
    "allclose",
    "is_nonzero",
    "__array__",
    "__bool__",
    "__float__",
    "__int__",
)
"""Functions of PyTorch that give Python the values of tensors."""

_DECORATORS = ("torch", "contextlib")  # packages whose decorators of functions pass the batch's index on, unread
_WARN_AFTER = 3  # rounds in which the step has to be traced again

_ROUNDING = 100
"""The error that a trace's gradient may have, in units of the difference between two ways of computing the module's."""


Sizes: TypeAlias = dict[str, float | None]
"""The ``batch_size`` of each logged value by name, or None if not given."""


class OwnStep(NamedTuple):
    """The results of a step of the module, without gradients."""

    loss: Tensor
    values: dict[str, Tensor]  # logged values by name
    sizes: Sizes


class _Listener(TorchFunctionMode):
    """Records in ``found`` what a step does with PyTorch's functions that several clients at once would do wrongly."""

    def __init__(self) -> None:
        super().__init__()
        self.found: str | None = None
        self._stance: AbstractContextManager[Any] = nullcontext()

    def __enter__(self) -> Any:
        """Start recording."""
        if "torch._dynamo" in sys.modules:  # run compiled networks eagerly, or this class would be compiled, too
            self._stance = torch.compiler.set_stance("force_eager")
        self._stance.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Stop recording."""
        super().__exit__(*error)
        self._stance.__exit__(*error)


class OwnStreams(_Listener):
    """Records in ``found`` how a step draws from streams other than the run's seeded ones.

    If clients run one by one, a stream that the step seeds gives each of them the same numbers. Clients at once share
    the stream, and only the first one would get these numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seed = torch.initial_seed()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a PyTorch function, and check its generator."""
        kwargs = kwargs or {}
        if kwargs.get("generator") not in (None, torch.default_generator):
            self.found = "draws from a generator of its own"
        elif torch.initial_seed() != self._seed:
            self.found = "seeds torch's generator"
        return func(*args, **kwargs)


class Reads(_Listener):
    """Records what a step for several clients, or examples, at once reads past its layers and its batch.

    ``found`` is the name of a parameter whose own object, not its stand-in in the layer, is used: several clients at
    once have values of their own in layers alone. From a list made in ``__init__``, the step would get those of no
    client, without a gradient. ``values`` tells whether Python reads a tensor's value, such as a buffer's, which a
    trace would repeat. ``caught`` is an error of PyTorch after which the step goes on.
    """

    _PROPERTIES = (int, torch.Size, torch.dtype, torch.device, torch.layout, type(None))

    def __init__(self, flat: FlatParameters) -> None:
        super().__init__()
        self.values = False
        self.caught: Exception | None = None
        self._names = dict(zip(map(id, flat.params), flat.names, strict=True))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a PyTorch function, and look at its arguments and its result."""
        try:
            result = func(*args, **(kwargs or {}))
        except (RuntimeError, ValueError) as error:
            self.caught = error
            raise
        self.values |= getattr(func, "__name__", "") in _VALUES
        if not isinstance(result, self._PROPERTIES):
            given = (self._names.get(id(leaf)) for leaf in pytree.tree_leaves((args, kwargs)))
            self.found = self.found or next(filter(None, given), None)
        return result


class _OfOneClient:
    """A placeholder for values that differ between clients; raises an error if one is read."""

    def __init__(self, what: str, remedy: str) -> None:
        self._what, self._remedy = what, remedy

    def _refuse(self, *_: Any) -> NoReturn:
        raise FederatedError(
            f"engine='vectorized' has no value for {self._what} in training_step: clients are run at once, and these"
            f" differ from one to another. {self._remedy}, or use engine='sequential'."
        )

    __getattr__ = __getitem__ = __contains__ = __iter__ = __len__ = _refuse


_PROGRESS = _OfOneClient(
    "batch_idx, total_batch_idx and batch_progress of trainer.fit_loop", "Use the argument batch_idx of training_step"
)
_OPTIMIZER_STATE = _OfOneClient("the optimizer's state, such as Adam's moments", "Let the step read other values")


class _Step(nn.Module):
    """Wraps a module, so that ``functional_call`` calls its ``training_step``."""

    def __init__(self, module: pl.LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any) -> Any:
        return self.module.training_step(*arguments)


class ModuleStep:
    """Gradients of one client's ``training_step``: as a pure function to map and trace, and by the module itself."""

    def __init__(self, trainer: pl.Trainer, flat: FlatParameters) -> None:
        self.trainer, self.flat = trainer, flat
        self.is_random = False  # whether the step draws random numbers
        self.compared: set[Trace] = set()  # traces compared with the module in this round
        module = self.module = trainer.lightning_module
        self.reads_index = _reads_index(module.training_step)
        with trainer.precision_plugin.train_step_context():
            self.traces = Traces(torch.get_default_dtype(), rank_zero_warn)  # of functions that call the module
        self._call = _Step(module)
        self._parameter_positions = _parameter_positions(self._call, flat.params)
        self._takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        is_mixed = isinstance(trainer.precision_plugin, pl.plugins.precision.MixedPrecision)
        self._tolerances = _MIXED_TOLERANCES if is_mixed else _TOLERANCES
        self.options: dict[str, dict[str, Any]] = {}  # the other arguments of `self.log` by value name
        self.context: Callable[[], AbstractContextManager[Any]] = trainer.precision_plugin.train_step_context
        self.sizes: Sizes = {}  # batch sizes of values logged in the last call
        self._values: dict[str, Tensor] = {}  # values logged in the last call
        self._unused: dict[Any, frozenset[int]] = {}  # unused parameters, by the shapes of a step
        self._optimizer: Any = None  # the local optimizer, while its state must not be read
        self._times_outdated = 0
        self._has_looked = False  # whether Python's and NumPy's generators were checked in this round
        self._has_listened = False  # whether the step's streams were checked in this round

    def begin_round(self) -> None:
        """Reset the checks that are done once per round."""
        self.compared.clear()
        self._unused.clear()
        self._has_looked = self._has_listened = False
        self.traces.round += 1

    # ------------------------------------------------------------------ gradients of one client

    def gradient(
        self, point: Sequence[Tensor], leaves: Sequence[Tensor], spec: Any, batch_idx: int = 0
    ) -> tuple[Sequence[Tensor], Tensor, dict[str, Tensor]]:
        """Return gradients, loss and logged values as a pure function of tensors, for ``vmap`` and for traces.

        ``torch.func.grad`` would also allow second derivatives. But then some operations use formulas of many steps
        instead of a kernel: the backward of a group norm takes twenty passes.
        """

        def loss_at(*at: Tensor) -> tuple[Tensor, tuple[Tensor, dict[str, Tensor]]]:
            loss, values = self._loss(leaves, spec, batch_idx, {name: at[i] for name, i in self._parameter_positions})
            return loss, (loss.detach(), values)

        pulled: Any = vjp(loss_at, *point, has_aux=True)
        loss, pull_back, (value, logged) = pulled
        with torch.no_grad():
            grads = pull_back(torch.ones_like(loss))
        return grads, value, logged

    def own_gradient(
        self, point: Sequence[Tensor], leaves: Sequence[Tensor], spec: Any, batch_idx: int = 0
    ) -> tuple[list[Tensor | None], Tensor, dict[str, Tensor]]:
        """Return the same as :meth:`gradient` from the module itself, with None for parameters that the loss ignores.

        Without ``torch.func``, a step of one client takes two thirds of the time. Traces are compared with this.
        """
        loss, values = self._own_loss(point, leaves, spec, batch_idx)
        grads = torch.autograd.grad(loss, self.flat.params, allow_unused=True)
        return list(grads), loss.detach(), values

    def own_step(self, point: Sequence[Tensor], leaves: Sequence[Tensor], spec: Any, batch_idx: int = 0) -> OwnStep:
        """Return the loss and logged values from the module itself."""
        loss, values = self._own_loss(point, leaves, spec, batch_idx)
        return OwnStep(loss.detach(), values, self.sizes)

    def _own_loss(
        self, point: Sequence[Tensor], leaves: Sequence[Tensor], spec: Any, batch_idx: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        self.flat.bind(point)
        with torch.enable_grad():
            return self._loss(leaves, spec, batch_idx)

    def unused(self, leaves: Sequence[Tensor], spec: Any, batch_idx: int) -> frozenset[int]:
        """Return the positions of parameters that the loss does not depend on, once per round and shape."""
        key = (batch_idx if self.reads_index else 0, spec, kinds(leaves))
        if key not in self._unused:
            with preserved_random_state(self.flat.y.device):
                grads, _, _ = self.own_gradient(self.flat.views, leaves, spec, batch_idx)
            self._unused[key] = frozenset(i for i, g in enumerate(grads) if g is None)
        return self._unused[key]

    def _loss(
        self, leaves: Sequence[Tensor], spec: Any, batch_idx: int, parameters: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and logged values of one client, by default with the module's parameters."""
        batch = unflatten(leaves, spec)
        arguments = (batch, batch_idx) if self._takes_index else (batch,)
        values = self._values = {}
        self.sizes = {}
        optimizer, state = self._optimizer, None
        if optimizer is not None:
            state, optimizer.state = optimizer.state, _OPTIMIZER_STATE
        try:
            with self.context():
                if parameters is None:
                    output = self.module.training_step(*arguments)
                else:
                    # PyTorch's search for ties would swap a module with two names twice, which leaves the tensors of
                    # the call in place of its parameters
                    output = functional_call(self._call, parameters, arguments, tie_weights=False)
        finally:
            if optimizer is not None:
                optimizer.state = state
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            raise OnlySequentialError(
                f"training_step returned {type(loss).__name__} instead of a loss, which clients that are run at"
                " once cannot skip. Return a tensor for every batch, or use engine='sequential'."
            )
        check_loss(loss)
        return loss.reshape(()) if loss.ndim else loss, values

    # ------------------------------------------------------------------ traces and the module

    def agrees(self, value: Tensor, real: Tensor) -> bool:
        """Return whether two losses or logged values [] are equal up to rounding."""
        rtol, atol = self._tolerances.get(value.dtype, _EXACT)
        a, b = map(float, numbers_of([value, real]))
        return math.isclose(a, b, rel_tol=rtol, abs_tol=atol) or (math.isnan(a) and math.isnan(b))

    def difference(
        self,
        loss: Tensor,
        grads: Sequence[Tensor],
        own_loss: Tensor,
        own_grads: Sequence[Tensor | None],
        point: Tensor,
        again: Callable[[], Sequence[Tensor]],
        rate: float = 1.0,
    ) -> str | None:
        """Return how a trace's loss or gradients differ from the module's by more than rounding; None if neither does.

        Gradients may be a move of the parameters ``point``, divided by its ``rate``, with the parameters' rounding.
        ``again`` computes the module's in another way: near an optimum, they are only rounding, and differ as much.
        """
        theirs = list[Tensor]()
        for own_grad, like in zip(own_grads, grads, strict=True):
            theirs.append(torch.zeros_like(like) if own_grad is None else own_grad)
        mine, own = torch.cat([*map(torch.flatten, grads)]), torch.cat([*map(torch.flatten, theirs)])
        losses = loss.to(point.device), own_loss.to(point.device)
        # on a CPU, norms of order infinity take twenty times as long as both extremes
        extremes = chain.from_iterable(map(torch.aminmax, (mine - own, own, point)))
        a, b, *found = numbers_of([*losses, *extremes])  # one wait for the device
        difference, largest, at = (max(-low, high) for low, high in zip(found[::2], found[1::2], strict=True))
        rtol, atol = self._tolerances[loss.dtype]
        if not (math.isclose(a, b, rel_tol=rtol, abs_tol=atol) or (math.isnan(a) and math.isnan(b))):
            return "gives another loss"
        rtol, atol = self._tolerances[own.dtype]
        room = rtol * largest + atol + 4 * torch.finfo(point.dtype).eps * at / rate
        if not difference > room:  # the client's data may be NaN
            return None
        other = torch.cat([*map(torch.flatten, again())])
        (rounding,) = numbers_of([(other - own).abs().max()])
        return None if difference <= _ROUNDING * rounding else "has another gradient"

    def other_value(self, values: Mapping[str, Tensor], real: Mapping[str, Tensor]) -> str | None:
        """Return the name of a logged value [] that differs by more than rounding, or None."""
        for name, value in values.items():
            if not self.agrees(value, real[name]):
                return name
        return None

    def is_outdated(self, trace: Trace, what: str) -> bool:
        """Return whether a wrong trace is from an earlier round, and drop all traces if so.

        The step has changed since then, and is traced again: a resumed run does so, too, and must have the same bits.
        """
        if trace.round == self.traces.round:
            return False
        self.traces.drop()
        self._times_outdated += 1
        if self._times_outdated == _WARN_AFTER:
            rank_zero_warn(
                f"{type(self.module).__name__}.training_step {what} than when it was traced, so it reads values other"
                f" than self and the batch, which have changed in {_WARN_AFTER} rounds. It is traced again in each such"
                " round, which is slow. If it takes too long, use engine='sequential'."
            )
        return True

    def give_up(self, what: str) -> None:
        """Stop using traces and warn, since the module differs from its trace."""
        self.traces.forbid(
            f"{type(self.module).__name__}.training_step {what} than when it was traced, so it reads changing values"
            " other than self and the batch, or rounds coarsely, as in half precision. Local steps run untraced from"
            " here on, which is slower."
        )

    @contextmanager
    def same_draws_as_trial(self, several: bool) -> Iterator[None]:
        """Raise if a step draws random numbers, or from own streams for ``several`` clients, but did not in its trial.

        PyTorch's generator is checked every time. Python's and NumPy's, and own streams, are checked once per round.
        """
        device, is_random = self.flat.y.device, self.is_random
        looks, listens = not (is_random or self._has_looked), several and not self._has_listened
        self._has_looked |= looks
        self._has_listened |= listens
        before, streams = None if is_random else random_state(device), OwnStreams() if listens else None
        elsewhere = foreign_state() if looks else None
        with streams or nullcontext():
            yield
        if streams is not None and streams.found is not None:
            remedy = "Clients at once would get other numbers than one by one. Draw from torch's global generator"
            raise changed_since_trial(self.module, streams.found, remedy)
        if not is_random and (before != random_state(device) or (looks and elsewhere != foreign_state())):
            raise self.new_draws_error()

    def new_draws_error(self) -> FederatedError:
        """Return the error for a step that draws random numbers, but did not in its trial."""
        remedy = "Let it draw from the first round on (from torch's generator)"
        return changed_since_trial(self.module, "draws random numbers", remedy)

    def check_bound(self, views: Sequence[Tensor]) -> None:
        """Raise if a single client's step has assigned to a parameter's ``.data``, which is then no longer its row."""
        for name, p, view in zip(self.flat.names, self.flat.params, views, strict=True):
            if p.data_ptr() != view.data_ptr():
                what = f"assigns to .data of the parameter {name!r}"
                remedy = "Write to the parameter instead: with torch.no_grad(), parameter.copy_(value)"
                raise changed_since_trial(self.module, what, remedy)

    # ------------------------------------------------------------------ logging

    def _log(self, *args: Any, **kwargs: Any) -> None:
        """Replace ``self.log``: collect the value, and check the other arguments once."""
        name, value = args[:2] if len(args) > 1 else (kwargs.get("name", *args[:1]), kwargs["value"])
        if name in self._values:
            raise OnlySequentialError(
                f"engine='vectorized' logs a name once a step, found self.log({name!r}, ...) twice in training_step."
                " Log the mean of both, or use engine='sequential'."
            )
        options, size = self.options.get(name), kwargs.get("batch_size")
        if options is None or len(args) > 2:
            bound = _LOG.bind(self.module, *args, **kwargs).arguments
            options = self.options[name] = {k: v for k, v in bound.items() if k not in _NO_OPTIONS}
            size = bound.get("batch_size")
            _check_logged(name, value, options)
        if not (size is None or isinstance(size, Real)):
            raise OnlySequentialError(
                "engine='vectorized' takes Python numbers as batch sizes, found"
                f" self.log({name!r}, ..., batch_size=...) of {kind_of(size)} in training_step. Use a number that"
                " depends on the shape of the batch alone, or use engine='sequential'."
            )
        if not isinstance(value, Tensor):
            _check_logged(name, value, options)
            self.traces.forbid()  # a trace would repeat this number forever
            value = torch.tensor(float(value))
        self._values[name] = value.detach().clone()  # a parameter would change later
        self.sizes[name] = size  # type: ignore[assignment]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, collect the arguments of ``self.log`` instead of logging.

        Steps that read the batch progress or the optimizer's state raise an error.
        """
        attributes, loop = self.module.__dict__, self.trainer.fit_loop
        own, several = attributes.pop("log", None), loop.runs_several
        attributes["log"], loop.runs_several = self._log, True
        steps: Any = loop.epoch_loop
        progress, steps.batch_progress = steps.batch_progress, _PROGRESS
        self._optimizer = self.trainer.optimizers[0].base
        try:
            yield
        finally:
            self._optimizer = None
            steps.batch_progress, loop.runs_several = progress, several
            del attributes["log"]
            if own is not None:
                attributes["log"] = own
            self.flat.bind()


def _parameter_positions(module: nn.Module, parameters: Sequence[Tensor]) -> list[tuple[str, int]]:
    """Return the names of all attributes that hold one of the parameters, with its position.

    A tied parameter has several names, but a module that is reached in several ways has one.
    """
    positions = {id(parameter): i for i, parameter in enumerate(parameters)}
    return [
        (f"{prefix}.{key}", positions[id(parameter)])
        for prefix, owner in module.named_modules()
        for key, parameter in owner._parameters.items()
        if id(parameter) in positions
    ]


def _check_logged(name: str, value: Any, options: dict[str, Any]) -> None:
    reduce_fx = options.get("reduce_fx", "mean")
    is_number = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)
    if reduce_fx not in MEANS or not is_number:
        found = f"reduce_fx={reduce_fx!r}" if reduce_fx not in MEANS else kind_of(value)
        raise OnlySequentialError(
            f"engine='vectorized' logs means of single numbers, found self.log({name!r}, ...) of {found} in"
            " training_step. Log a 0-dim tensor with reduce_fx='mean', or use engine='sequential'."
        )


def _reads_index(step: Callable[..., Any]) -> bool:
    """Return whether ``training_step`` or one of its decorators reads the batch's index; True if unknown."""
    names = list(inspect.signature(step).parameters)
    argument = "batch_idx" if "batch_idx" in names or len(names) < 2 else names[1]
    inner: Any = step
    while hasattr(inner, "__wrapped__"):
        if getattr(inner, "__globals__", {}).get("__name__", "").partition(".")[0] not in _DECORATORS:
            return True
        inner = inner.__wrapped__
    code = getattr(inner, "__code__", None)
    if code is None or argument not in code.co_varnames[: code.co_argcount]:
        return code is None or bool(code.co_flags & inspect.CO_VARARGS)
    read = (i.argval if isinstance(i.argval, tuple) else (i.argval,) for i in dis.get_instructions(code))
    return argument in code.co_cellvars or any(argument in names for names in read)
