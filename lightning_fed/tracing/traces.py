"""Traces of tensor functions by key, which run PyTorch's operations without the Python around them."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from lightning_fed.tracing.in_place import SplitGraph, split_graph
from lightning_fed.tracing.passes import generalize, restore_cross_entropy, simplify

try:
    from torch._guards import TracingContext, tracing
    from torch.fx.experimental.proxy_tensor import make_fx
except ImportError as error:  # private names, which may move; everything also runs without traces
    _MISSING = str(error)
else:
    _MISSING = ""

_MOST = 512  # the most traces kept, about 300 kB each

Found: TypeAlias = tuple[Sequence[Tensor], Tensor, dict[str, Tensor]]
"""The results of a traced function: tensors, a loss, and named values."""


class Traces:
    """The table of traces: from a function's key to its graph, which is recorded on first use.

    A trace repeats Python's decisions from its recording. The caller must therefore forbid traces if these may change,
    drop them after changes, and check them regularly. The choice of traced functions must not depend on earlier runs: a
    trace rounds differently, and a resumed run must have the same bits.
    """

    def __init__(self, dtype: torch.dtype, warn: Callable[[str], None]) -> None:
        self._dtype, self._warn = dtype, warn  # the default dtype within functions; shows a warning
        self.allowed = not _MISSING  # whether traces may be recorded and used
        self.round = 0  # the caller's count; each trace keeps the count at its recording
        self._traces: dict[Any, Trace | None] = {}
        if _MISSING:
            warn(
                f"Local steps run untraced, which is slower: PyTorch {torch.__version__} has no longer what traces are"
                f" made with ({_MISSING})."
            )

    def __len__(self) -> int:
        """Return the number of traces."""
        return sum(trace is not None for trace in self._traces.values())

    def forbid(self, why: str = "") -> None:
        """Drop all traces and record no more; warn with the reason, if given."""
        self.drop()
        if self.allowed and why:
            self._warn(why)
        self.allowed = False

    def forbid_after(self, error: Exception, when: str) -> None:
        """Forbid traces because of an error."""
        self.forbid(f"Local steps run untraced, which is slower: {type(error).__name__} {when} ({error}).")

    def drop(self) -> None:
        """Drop all traces; later uses record them again."""
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
        """Return the trace of a function, or None if it cannot be traced.

        Args:
            key: A key of the function and its inputs' shapes, up to the size.
            function: Maps tensors to tensors, a loss and named values.
            inputs: Returns the function's tensors for a number of clients or examples.
            sizes: The numbers that it is traced with. With several, the trace accepts any number.
            moves: The number of first inputs that move in place along the first results.
            constants: The number of last inputs that do not change between calls.
            notes: The function's notes during tracing; the trace keeps a copy.
        """
        if key not in self._traces:
            if not self.allowed:
                return None
            if len(self) >= _MOST:  # the shapes of batches may keep changing
                self.drop()
            graphs = list[SplitGraph]()
            for size in sizes:
                graph = self._split(function, inputs(size), moves, constants, may_fail=len(sizes) > 1)
                if graph is None:
                    break
                graphs.append(graph)
            if not self.allowed:  # the function has forbidden traces
                return None
            own_notes = {name: set(read) for name, read in (notes or {}).items()}
            is_made = len(graphs) == len(sizes) and _accepts_any(graphs)
            self._traces[key] = Trace(graphs[0], self._dtype, own_notes, self.round) if is_made else None
        return self._traces[key]

    def _split(
        self,
        function: Callable[..., Found],
        tensors: Sequence[Tensor],
        moves: int,
        constants: int,
        may_fail: bool,
    ) -> SplitGraph | None:
        """Trace a function, and split the graph into a part that runs once and a part for every call."""
        names = list[str]()

        def outputs(*given: Tensor) -> list[Tensor]:
            first, loss, values = function(*given)
            names[:] = values
            return [*first, loss, *values.values()]

        try:
            with _uncollected(), torch.no_grad(), tracing(TracingContext(_Shapes())):  # type: ignore[arg-type]
                module = make_fx(outputs)(*tensors)
        except torch.OutOfMemoryError:
            raise  # nothing is wrong with the function
        except Exception as error:
            with torch.no_grad():
                function(*tensors)  # raises the error if the batch causes it, not the trace
            if not may_fail:
                self.forbid_after(error, "in tracing")
            return None
        simplify(module)
        restore_cross_entropy(module)
        return split_graph(module, moves, constants, tuple(names))


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pause Python's garbage collection: the operations of finalizers would fail in a trace, or become a part of it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _accepts_any(graphs: Sequence[SplitGraph]) -> bool:
    """Change the first of graphs that were recorded with several sizes to accept any; return False if it cannot."""
    if len({graph.names for graph in graphs}) > 1:
        return False
    pairs = [[graph.once for graph in graphs], [graph.call for graph in graphs]]
    return len(graphs) == 1 or generalize(pairs, [graph.owner for graph in graphs])


class _Shapes(TorchFunctionMode):
    """Records the shape of every result for make_fx, whose own fake tensors make tracing 1.7 times slower."""

    shape_env = None  # sizes are numbers
    in_kernel_invocation = False  # read by functions of torch.compile, which then report why they cannot be traced

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Create a tensor without data; a single number stays on its device, since a pass may use it."""
        kwargs = kwargs or {}
        if func is torch.empty_strided and len(args[0]) > 0:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


class Trace:
    """A traced function in two parts: one runs once for the constants, the other in every call.

    Attributes:
        checked: By kinds of compared inputs: the Python numbers that the function returned, which are not part of the
            trace; None if the trace is wrong.
        round: The round in which it was recorded.
    """

    def __init__(self, graph: SplitGraph, dtype: torch.dtype, notes: dict[str, set[str]], round: int) -> None:
        self.graph, self.notes, self.round = graph, notes, round
        self.checked: dict[Any, dict[str, Any] | None] = {}
        self._names = graph.names
        self._loss = -1 - len(graph.names)  # its position among the results
        self._once = _under(dtype, _module_of(graph.owner, graph.once).forward)
        self._call = _under(dtype, _module_of(graph.owner, graph.call).forward)

    def once(self, constants: Sequence[Tensor]) -> tuple[Sequence[Tensor | None], Sequence[Tensor]]:
        """Return the constant part of every moved input's direction, and the further inputs of a call."""
        with torch.no_grad():
            results = self._once(*constants)
        return results[: self.graph.moves], results[self.graph.moves :]

    def __call__(self, *arguments: Any) -> Found:
        """Move inputs and return the function's other results; call it without gradients.

        Arguments are the inputs except constants, the results of :meth:`once`, and the factor of the move.
        """
        results = self._call(*arguments)
        at = self._loss
        values = dict(zip(self._names, results[at + 1 :], strict=True)) if self._names else {}
        return results[:at], results[at], values


def _module_of(owner: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Return a graph as a module that calls operators directly, and finds its constants without ``nn.Module``."""
    for node in graph.nodes:
        if (operator := getattr(node.target, "_op", None)) is not None:
            direct: Any = partial(operator)
            direct.__name__, direct.__module__ = str(node.target), __name__  # for the code generated from the graph
            node.target = direct
    module = fx.GraphModule(owner, graph)
    # a module that is not registered may have parameters that require gradients, which in-place moves must not record
    constants = {name: p.detach() for name, p in module._parameters.items() if p is not None and p.requires_grad}
    vars(module).update(module._buffers, **constants)
    return module


def _under(dtype: torch.dtype, function: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """Return a function in which dividing integers gives this dtype."""
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
    """Return tensors with ``size`` rows, repeating the rows of others."""
    return [t.index_select(0, torch.arange(size, device=t.device) % len(t)) for t in tensors]


def kinds(tensors: Sequence[Tensor]) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    """Return the shapes and dtypes of tensors, as a key."""
    return tuple((t.shape, t.dtype) for t in tensors)
