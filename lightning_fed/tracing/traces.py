"""Traces of functions of tensors, by what decides them: what PyTorch does, without the Python around it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from lightning_fed.tracing.in_place import SplitGraph, split_graph
from lightning_fed.tracing.passes import generalize, simplify

try:
    from torch._guards import TracingContext, tracing
    from torch.fx.experimental.proxy_tensor import make_fx
except ImportError as error:  # private names, which may move; everything runs without traces too
    _MISSING = str(error)
else:
    _MISSING = ""

__all__ = ["Found", "Trace", "Traces", "kinds", "resized"]

_MOST = 512  # traces, of some 300 kB each

Found: TypeAlias = tuple[Sequence[Tensor], Tensor, dict[str, Tensor]]
"""What a traced function returns: tensors, a loss, and named values."""


class Traces:
    """The one table of traces: from what decides a function to its graph, made when it is first asked for.

    A trace repeats what Python decided when it was made. Whoever asks for traces must therefore forbid them where
    Python may decide otherwise later, drop them when something has changed, and check them now and then. What is traced
    must not depend on what was run before: a trace rounds otherwise, and a resumed run has the same bits.

    Args:
        dtype: The default type of PyTorch within the functions.
        warn: Shows the user a warning.

    Attributes:
        allowed: Whether traces may be made and used.
    """

    def __init__(self, dtype: torch.dtype, warn: Callable[[str], None]) -> None:
        self._dtype, self._warn = dtype, warn
        self.allowed = not _MISSING
        self._traces: dict[Any, Trace | None] = {}
        if _MISSING:
            warn(
                f"Local steps run untraced, which is slower: PyTorch {torch.__version__} has no longer what traces are"
                f" made with ({_MISSING})."
            )

    def __len__(self) -> int:
        """The number of traces."""
        return sum(trace is not None for trace in self._traces.values())

    def forbid(self, why: str = "") -> Literal[False]:
        """Drop all traces and make no others; say why, if given; return False."""
        self.drop()
        if self.allowed and why:
            self._warn(why)
        self.allowed = False
        return False

    def forbid_after(self, error: Exception, when: str) -> Literal[False]:
        """Do that because of an error; return False."""
        return self.forbid(f"Local steps run untraced, which is slower: {type(error).__name__} {when} ({error}).")

    def drop(self) -> None:
        """Drop all traces; they are made anew."""
        self._traces.clear()

    def get(
        self,
        key: Any,
        function: Callable[..., Found],
        inputs: Callable[[int], Sequence[Tensor]],
        sizes: Sequence[int],
        *,
        moves: int,
        constants: int,
        notes: dict[str, set[str]] | None = None,
    ) -> "Trace | None":
        """Return the trace of a function, None if there can be none.

        Args:
            key: What decides the function and its inputs' shapes, up to their size.
            function: From tensors to tensors, loss and named values.
            inputs: Makes the function's tensors for a number of clients or of examples.
            sizes: The numbers that it is traced with. With several, the trace takes any number.
            moves: How many of its first inputs are moved along as many first results, in place.
            constants: How many of its last inputs stay as they are from call to call.
            notes: What the function notes while it is traced; a copy stays with the trace.
        """
        if key not in self._traces:
            if not self.allowed:
                return None
            if len(self) >= _MOST:  # shapes of batches may go on changing
                self.drop()
            graph = self._made(function, inputs, sizes, moves, constants)
            if not self.allowed:  # the function has forbidden it
                return None
            own_notes = {name: set(read) for name, read in (notes or {}).items()}
            self._traces[key] = None if graph is None else Trace(graph, self._dtype, own_notes)
        return self._traces[key]

    def _made(
        self,
        function: Callable[..., Found],
        inputs: Callable[[int], Sequence[Tensor]],
        sizes: Sequence[int],
        moves: int,
        constants: int,
    ) -> SplitGraph | None:
        """Return the graph of a function, made with some sizes to take any if there are several."""
        graphs: list[SplitGraph] = []
        for size in sizes:
            graph = self._split(function, inputs(size), moves, constants, may_fail=len(sizes) > 1)
            if graph is None:
                return None
            graphs.append(graph)
        first, *others = graphs
        if len({graph.names for graph in graphs}) > 1:
            return None
        pairs = [[graph.once for graph in graphs], [graph.call for graph in graphs]]
        return first if not others or generalize(pairs, [graph.owner for graph in graphs]) else None

    def _split(
        self,
        function: Callable[..., Found],
        tensors: Sequence[Tensor],
        moves: int,
        constants: int,
        may_fail: bool,
    ) -> SplitGraph | None:
        """Trace a function, and split the graph into what is done once and what is done in every call."""
        names = list[str]()

        def outputs(*given: Tensor) -> list[Tensor]:
            first, loss, values = function(*given)
            names[:] = values
            return [*first, loss, *values.values()]

        try:
            with torch.no_grad(), tracing(TracingContext(_Shapes())):  # type: ignore[arg-type]
                module = make_fx(outputs)(*tensors)
        except torch.OutOfMemoryError:
            raise  # nothing is wrong with the function
        except Exception as error:
            with torch.no_grad():
                function(*tensors)  # an error of the batch is not the trace's, and is raised here
            if not may_fail:
                self.forbid_after(error, "in tracing")
            return None
        simplify(module)
        return split_graph(module, moves, constants, tuple(names))


class _Shapes(TorchFunctionMode):
    """Where make_fx notes the shape of every result; with its own fake tensors tracing takes 1.7 times as long."""

    shape_env = None  # sizes are numbers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make a tensor without data; a single number stays on its device, where a pass may put a constant."""
        kwargs = kwargs or {}
        if func is torch.empty_strided and len(args[0]) > 0:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


class Trace:
    """A traced function, in two parts: what depends on constants alone is done once, the rest in every call.

    Attributes:
        checked: By the kinds of inputs for which it was compared with the function: what Python numbers the function
            gave there, which are no part of the trace; None where the trace is wrong.
    """

    def __init__(self, graph: SplitGraph, dtype: torch.dtype, notes: dict[str, set[str]]) -> None:
        self.graph, self.notes = graph, notes
        self.checked: dict[Any, dict[str, Any] | None] = {}
        self._names = graph.names
        _call_directly(graph.once)
        _call_directly(graph.call)
        self._once = _under(dtype, fx.GraphModule(graph.owner, graph.once).forward)
        self._call = _under(dtype, fx.GraphModule(graph.owner, graph.call).forward)

    def once(self, constants: Sequence[Tensor]) -> tuple[Sequence[Tensor | None], Sequence[Tensor]]:
        """Return the constant part of every moved input's direction, and what a call takes after the other inputs."""
        with torch.no_grad():
            results = self._once(*constants)
        return results[: self.graph.moves], results[self.graph.moves :]

    def __call__(self, *arguments: Any) -> Found:
        """Move inputs and return the function's other results; to be called without gradients.

        Arguments are the inputs but for the constants, what :meth:`once` returned, and the factor of the move.
        """
        results = self._call(*arguments)
        start = len(results) - len(self._names) - 1
        return results[:start], results[start], dict(zip(self._names, results[start + 1 :], strict=True))


def _call_directly(graph: fx.Graph) -> None:
    """Call operators without the Python function around each of them, which takes half a microsecond."""
    for node in graph.nodes:
        if (operator := getattr(node.target, "_op", None)) is not None:
            direct: Any = partial(operator)
            direct.__name__, direct.__module__ = str(node.target), __name__  # for the code that is made of the graph
            node.target = direct


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


def resized(tensors: Sequence[Tensor], size: int) -> list[Tensor]:
    """Return tensors with so many rows, made of those of others."""
    return [t.index_select(0, torch.arange(size, device=t.device) % len(t)) for t in tensors]


def kinds(tensors: Sequence[Tensor]) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    """Return what tells tensors apart: their shapes and types."""
    return tuple((t.shape, t.dtype) for t in tensors)
