"""Graphs of functions of tensors that are called over and over: what PyTorch does, without the Python around it."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, fx

from lightning_fed._compat import rank_zero_warn
from lightning_fed.tracing.any_size import take_any_count
from lightning_fed.tracing.in_place import StepGraphs, same, split_step, use_bindings
from lightning_fed.tracing.passes import simplify

try:
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
except ImportError as error:  # private names, which may move; everything runs without traces too
    _MISSING = str(error)
else:
    _MISSING = ""

__all__ = ["TracedStep", "Traces", "kinds", "resized"]

_MOST = 512  # traces, of some 300 kB each

Values: TypeAlias = dict[str, tuple[Tensor, int | None]]
"""What was logged by name: the value, and the ``batch_size`` given with it."""

Found: TypeAlias = tuple[Sequence[Tensor], Tensor, Values]
"""Gradients, loss and logged values."""


class Traces:
    """Traces of functions by key, each made when it is first asked for.

    A trace repeats what Python decided when it was made. Whoever holds the traces must therefore forbid them where
    Python may decide otherwise later, drop them when something has changed, and check them now and then. What is traced
    must not depend on what was run before: a trace rounds otherwise, and a resumed run has the same bits.

    Args:
        dtype: The type that PyTorch makes of whole numbers, within the functions.

    Attributes:
        fit_any_count: Whether traced steps take any number of clients at once, by the kinds of their batches.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype
        self.allowed = not _MISSING
        if _MISSING:
            rank_zero_warn(
                f"Local steps run untraced, which is slower: PyTorch {torch.__version__} has no longer what traces are"
                f" made with ({_MISSING})."
            )
        self.fit_any_count: dict[Any, bool] = {}
        self._made: dict[Any, Callable[..., Found]] = {}
        self._steps: dict[Any, TracedStep | None] = {}

    def __len__(self) -> int:
        """The number of traces."""
        return len(self._made) + sum(step is not None for step in self._steps.values())

    def forbid(self) -> None:
        """Drop all traces and make no others."""
        self.allowed = False
        self.drop()

    def forbid_after(self, error: Exception, when: str) -> Literal[False]:
        """Do the same, and say why; return False."""
        self.forbid()
        rank_zero_warn(f"Local steps run untraced, which is slower: {type(error).__name__} {when} ({error}).")
        return False

    def drop(self) -> None:
        """Drop all traces; they are made anew."""
        self._made.clear()
        self._steps.clear()
        self.fit_any_count.clear()

    def _make_room(self) -> None:
        """Drop all traces where there are very many: shapes of batches may go on changing."""
        if len(self) >= _MOST:
            self.drop()

    def get(self, key: Any, function: Callable[..., Found], flat: Sequence[Tensor]) -> Callable[..., Found] | None:
        """Return the trace of a function, None if there can be none.

        Args:
            key: What decides the function and the shapes.
            function: From tensors to gradients, loss and logged values.
            flat: The tensors.
        """
        if key not in self._made:
            self._make_room()
            if not self.allowed or (traced := self._trace(function, flat)) is None:
                return None
            module, sizes = traced
            module.recompile()
            self._made[key] = _Call(_under(self._dtype, module.forward), sizes)
        return self._made[key]

    def get_step(
        self,
        key: Any,
        function: Callable[..., Found],
        flat: Callable[[], Sequence[Tensor]],
        count: int,
        constants: int,
        notes: dict[str, set[str]],
        prepare: Callable[[fx.GraphModule], int | None] | None = None,
        again: Sequence[Callable[[], Sequence[Tensor]]] = (),
    ) -> "TracedStep | None":
        """Return the trace of a function that moves its first ``count`` tensors along what it returns first.

        Args:
            key: What decides the function and the shapes.
            function: From tensors to directions, loss and logged values.
            flat: Makes the tensors, if there is no trace yet.
            count: The number of parameters, which come first.
            constants: The number of tensors that stay as they are from step to step, which come last.
            notes: What the function notes of what it reads.
            prepare: Changes what the trace returns; from the trace to the number of tensors that it then moves, None if
                there is to be none.
            again: Make those of other numbers of clients or of examples, for a trace that takes any number of them.

        Returns:
            None if there can be none.
        """
        if key not in self._steps:
            if not self.allowed:
                return None
            self._make_room()
            self._steps[key] = self._make_step(function, flat(), count, constants, notes, prepare, again)
        return self._steps[key]

    def _make_step(
        self,
        function: Callable[..., Found],
        flat: Sequence[Tensor],
        count: int,
        constants: int,
        notes: dict[str, set[str]],
        prepare: Callable[[fx.GraphModule], int | None] | None,
        again: Sequence[Callable[[], Sequence[Tensor]]],
    ) -> "TracedStep | None":
        # a correction that cannot be traced leaves the gradients, which are traced by themselves
        traced = self._trace(function, flat, may_fail=constants > 0)
        if traced is None:
            return None
        module, sizes = traced
        whole = fx.GraphModule(module, copy.deepcopy(module.graph))
        if prepare is not None:
            left = prepare(module)
            if left is None:
                return None
            count = left
        graphs = split_step(module.graph, count, constants)
        if graphs is None:
            return None
        alike, owners = [graphs], [module]
        for make in again:
            traced = self._trace(function, make(), may_fail=True)
            if traced is None or (prepare is not None and prepare(traced[0]) != count):
                return None
            other = split_step(traced[0].graph, count, constants)
            if other is None or other.has_sum != graphs.has_sum:
                return None
            alike.append(other)
            owners.append(traced[0])
        if again and not take_any_count([[each.once for each in alike], [each.step for each in alike]], owners):
            return None
        own_notes = {name: set(read) for name, read in notes.items()}
        return TracedStep(whole, graphs, count, sizes, own_notes, bool(again), self._dtype)

    def fits_any_size(
        self,
        step: "TracedStep",
        function: Callable[..., Found],
        flat: Callable[[int], Sequence[Tensor]],
        sizes: Sequence[int],
    ) -> bool:
        """Whether a step is the same graph for every number of examples; looked at once.

        Args:
            step: The step.
            function: What it is traced from.
            flat: Makes its tensors, of so many examples.
            sizes: The numbers that are tried.
        """
        if step.fits_any_size is None:
            others = (self._trace(function, flat(size), may_fail=True) for size in sizes)
            step.fits_any_size = all(other is not None and same(other[0], step.whole) for other in others)
        return step.fits_any_size

    def _trace(
        self, function: Callable[..., Found], flat: Sequence[Tensor], may_fail: bool = False
    ) -> tuple[fx.GraphModule, dict[str, int | None]] | None:
        sizes: dict[str, int | None] = {}

        def outputs(*tensors: Tensor) -> list[Tensor]:
            grads, loss, values = function(*tensors)
            sizes.update({name: size for name, (_, size) in values.items()})
            return [*grads, loss, *(value for value, _ in values.values())]

        # where make_fx notes shapes; it makes a place for each operation else, which takes most of its time
        shapes = TracingContext(FakeTensorMode(allow_fallback_kernels=True))
        try:
            with torch.no_grad(), tracing(shapes):
                module = make_fx(outputs)(*flat)
        except Exception as error:
            with torch.no_grad():
                function(*flat)  # what is wrong with the batch is no fault of the trace's, and is raised here
            if may_fail:
                return None
            self.forbid_after(error, "in tracing")
            return None
        if not self.allowed:  # the function has forbidden it
            return None
        simplify(module)
        return module, sizes


class _Call:
    """A traced function.

    Args:
        forward: From tensors to gradients, if there are any, the loss and the logged values, in one list.
        sizes: The ``batch_size`` of each logged value, by name.
    """

    def __init__(self, forward: Callable[..., list[Tensor]], sizes: dict[str, int | None]) -> None:
        self._forward = forward
        self._sizes = sizes
        self._start = -len(sizes) - 1

    def __call__(self, *arguments: Any) -> Found:
        """Return gradients, loss and logged values."""
        with torch.no_grad():
            out = self._forward(*arguments)
        names = self._sizes.items()
        values = {
            name: (value, size)
            for (name, size), value in zip(names, out[self._start + 1 :] if names else [], strict=True)
        }
        return out[: self._start], out[self._start], values


class TracedStep:
    """A traced local step.

    Args:
        whole: The trace as it was made.
        graphs: The same, in two parts.
        count: The number of parameters.
        sizes: The ``batch_size`` of each logged value, by name.
        notes: What it reads of the server state and of the cohort's gradients.
        takes_any_count: Whether it takes any number of clients at once, or of examples.
        dtype: The type that PyTorch makes of whole numbers in it.

    Attributes:
        fits_any_size: Whether it is the same for every number of examples; None as long as nobody has looked.
        sizes_seen: The shapes of batches for which its loss was compared with the module's.
        constant: Of every parameter, whether its direction has a constant part.
        takes_more: Whether a step takes more than constant parts of what depends on nothing else.
        run: Moves the parameters, and returns the loss and the logged values in a list.
    """

    def __init__(
        self,
        whole: fx.GraphModule,
        graphs: StepGraphs,
        count: int,
        sizes: dict[str, int | None],
        notes: dict[str, set[str]],
        takes_any_count: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.whole, self.has_sum, self.notes, self.takes_any_count = whole, graphs.has_sum, notes, takes_any_count
        self.fits_any_size: bool | None = None
        self.sizes_seen: set[Any] = set()
        self._count, self._sizes = count, sizes
        found = graphs.once.output_node().args[0]
        assert isinstance(found, (list, tuple))
        self.constant = [part is not None for part in found[:count]]
        self.takes_more = len(found) > count
        for graph in (graphs.once, graphs.step):
            use_bindings(graph)
        self._once = _under(dtype, fx.GraphModule(whole, graphs.once).forward)
        self.run: Callable[..., list[Tensor]] = _under(dtype, fx.GraphModule(whole, graphs.step).forward)

    def once(self, constants: Sequence[Tensor]) -> tuple[Sequence[Tensor | None], Sequence[Tensor]]:
        """Return the constant part of every parameter's direction, and what a step takes after the batch."""
        with torch.no_grad():
            out = self._once(*constants)
        return out[: self._count], out[self._count :]

    def __call__(self, *arguments: Any) -> tuple[Tensor, Values]:
        """Move the parameters, and return the loss and the logged values; to be called without gradients."""
        return self.named(self.run(*arguments))

    def named(self, results: Sequence[Tensor]) -> tuple[Tensor, Values]:
        """Return the loss and the logged values out of what :attr:`run` returns."""
        loss, *logged = results
        return loss, {name: (value, size) for (name, size), value in zip(self._sizes.items(), logged, strict=True)}


def _under(dtype: torch.dtype, function: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """Return a function that makes this type of whole numbers where it divides them."""
    if dtype == torch.get_default_dtype():
        return function

    def under(*arguments: Any) -> list[Tensor]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return function(*arguments)
        finally:
            torch.set_default_dtype(before)

    return under


def resized(leaves: Sequence[Tensor], size: int) -> list[Tensor]:
    """Return a batch of so many examples, made of those of another."""
    return [leaf.index_select(0, torch.arange(size, device=leaf.device) % len(leaf)) for leaf in leaves]


def kinds(leaves: Sequence[Tensor], size: int | None = None) -> list[tuple[torch.Size, torch.dtype]]:
    """Return what tells the tensors of batches apart; of :func:`resized` ones, if a size is given."""
    shapes = [leaf.shape if size is None else torch.Size((size, *leaf.shape[1:])) for leaf in leaves]
    return [(shape, leaf.dtype) for shape, leaf in zip(shapes, leaves, strict=True)]
