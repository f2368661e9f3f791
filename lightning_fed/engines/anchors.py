"""Gradients at the anchor that are taken once: in the full pass, over the batches of a local epoch that is to come.

The full-batch gradient of Mime is the mean of the gradients on the batches on which its local steps take them again.
Where the loss is provably a mean over examples, the full pass goes over these very batches, and keeps what the steps
need: of the gradient of a linear layer its two factors, if they are smaller than their product; else the gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from lightning_fed.core.types import Vector
from lightning_fed.data.batch_settings import BatchSettings
from lightning_fed.engines.functional import FunctionalStep, flatten
from lightning_fed.engines.separable import mean_over_examples
from lightning_fed.engines.simplify import is_view, root, shape_of, writes
from lightning_fed.engines.traces import Found, TracedStep, kinds, resized

__all__ = ["AnchorPass", "KeptAnchor", "keep_parts"]

_KEPT_BYTES = 2**30  # kept from the full pass to the local steps, in each process
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a trace of gradients returns after the loss: the parts to be kept, then counts.

    Attributes:
        assemble: From the tensors of a batch and its parts to its gradients.
        count: The number of parts.
        shares: Of each count that a mean was divided by, the share of each example.
    """

    assemble: Callable[..., list[Tensor]]
    count: int
    shares: list[int]


@dataclass(frozen=True, slots=True)
class _AtPoint:
    """A trace of gradients at a point.

    Attributes:
        step: Adds them to sums.
        parts: What it returns beside.
        rest: What it takes after the batch.
    """

    step: TracedStep
    parts: Parts
    rest: Sequence[Tensor]

    def add(self, sums: Sequence[Tensor], leaves: Sequence[Tensor], factor: float) -> tuple[Tensor, list[Tensor]]:
        """Add a batch's gradients to sums, and return the loss, the parts and the counts."""
        with torch.no_grad():
            loss, *parts = self.step.run(*sums, *leaves, *self.rest, factor)
        return loss, parts


@dataclass(frozen=True, slots=True)
class KeptAnchor:
    """The parts of the gradient at the anchor on one batch."""

    parts: list[Tensor]
    _made_by: _AtPoint

    @property
    def assemble(self) -> Callable[..., list[Tensor]]:
        """From the tensors of the batch and the parts to the gradients."""
        return self._made_by.parts.assemble

    def parts_of(self, leaves: Sequence[Tensor], sums: Sequence[Tensor]) -> list[Tensor]:
        """Return the parts of another batch, given memory in the parameters' shapes; for traces of other sizes."""
        _, parts = self._made_by.add([torch.empty_like(s) for s in sums], leaves, 0.0)
        return parts[: self._made_by.parts.count]


class AnchorPass:
    """Full-batch gradients over the batches of a local epoch, and what is kept of them until its local steps.

    Args:
        step: The module's step.
    """

    def __init__(self, step: FunctionalStep) -> None:
        self.step = step
        self.layout = step.flat.layout
        self._parts: dict[Any, Parts | None] = {}  # by the traces' keys
        self._is_mean: dict[int, bool] = {}  # by the number of a client's examples
        self.begin_round(is_new=True)

    def begin_round(self, is_new: bool) -> None:
        """Forget what was kept in the last round; and what is known of the loss, if it may be a new one."""
        self._is_mean = {} if is_new else self._is_mean
        self._kept: dict[int, list[KeptAnchor]] = {}
        self._at: dict[Any, _AtPoint] = {}
        self._bytes, self._has_checked = 0, False

    def of(self, index: int) -> Sequence[KeptAnchor]:
        """Return what is kept of a client's batches, in the order of its first local epoch; nothing if it is not."""
        return self._kept.get(index, ())

    def gradient(
        self, index: int, point: Vector, batches: Sequence[tuple[Any, int]], settings: BatchSettings
    ) -> Vector | None:
        """Return a client's full-batch gradient [P], and keep its parts; None if it cannot be had in this way.

        Args:
            index: The client's.
            point: The parameters [P], the same throughout a round.
            batches: (batch, examples in it) pairs of its local epoch, which visit every example once.
            settings: How examples become batches.
        """
        size = sum(examples for _, examples in batches)
        if not self._is_mean.get(size, True):
            return None
        out = torch.zeros_like(point)
        sums, kept, losses = self.layout.views(out), list[KeptAnchor](), list[Tensor]()
        flat = [(*flatten(batch), examples) for batch, examples in batches]
        found = [self._trace(*each, point, sums, settings.batch_size) for each in flat]
        traces = [at for at in found if at is not None]
        if len(traces) < len(flat):
            return None
        for (leaves, _, examples), at in zip(flat, traces, strict=True):
            loss, parts = at.add(sums, leaves, examples / size)
            if [int(count) for count in parts[at.parts.count :]] != [share * examples for share in at.parts.shares]:
                return None  # targets that are to be ignored: batches do not weigh as much as they have examples
            losses.append(loss)
            kept.append(KeptAnchor(parts[: at.parts.count], at))
        needed = sum(part.numel() * part.element_size() for each in kept for part in each.parts)
        if self._bytes + needed > _KEPT_BYTES or not self._is_right(losses, batches, point, settings):
            return None
        self._bytes += needed
        self._kept[index] = kept
        return out

    def _is_right(
        self, losses: list[Tensor], batches: Sequence[tuple[Any, int]], point: Vector, settings: BatchSettings
    ) -> bool:
        """Compare with the module's loss on all batches at once, once a round and for clients of a new size."""
        size = sum(examples for _, examples in batches)
        if self._has_checked and size in self._is_mean:
            return True
        self._has_checked = True
        most = settings.full_batch_size
        many = len(batches) if size <= most else max(1, most // settings.batch_size)
        flat = [flatten(batch) for batch, _ in batches[:many]]
        whole = [torch.cat(column) for column in zip(*(leaves for leaves, _ in flat), strict=True)]
        expected = self.step.loss_of_first(self.layout.views(point), whole, flat[0][1], 0, True)
        weights = [examples / len(whole[0]) for _, examples in batches[:many]]
        found = sum(loss * weight for loss, weight in zip(losses, weights, strict=False))
        self._is_mean[size] = self.step.agrees(torch.as_tensor(found), expected)
        return self._is_mean[size]

    def _trace(
        self, leaves: Sequence[Tensor], spec: Any, examples: int, point: Vector, sums: Sequence[Tensor], full: int
    ) -> _AtPoint | None:
        """Return the trace for a batch: of full ones, which may do for others too."""
        key = ("anchor", spec, *kinds(leaves, full))
        if key not in self._at:
            made_of = leaves if examples == full else resized(leaves, full)
            step = self._get(key, made_of, spec, point, sums)
            parts = self._parts.get(key)
            if step is None or parts is None:
                return None
            self._at[key] = _AtPoint(step, parts, step.once([point])[1])
        at = self._at[key]
        if examples != full and at.step.fits_any_size is None:
            function, other = self._function(len(leaves), spec), (full - 1, 2)
            at.step.fits_any_size = full > 2 and all(
                self.step.traces.is_same(at.step, function, [*sums, *resized(leaves, n), point]) for n in other
            )
        return at if examples == full or (at.step.fits_any_size and examples > 1) else None

    def _get(
        self, key: Any, leaves: Sequence[Tensor], spec: Any, point: Vector, sums: Sequence[Tensor]
    ) -> TracedStep | None:
        def keep(module: fx.GraphModule) -> bool:
            self._parts[key] = keep_parts(module, len(sums), len(leaves))
            return self._parts[key] is not None

        function = self._function(len(leaves), spec)
        return self.step.traces.get_step(key, function, lambda: [*sums, *leaves, point], len(sums), 1, {}, keep)

    def _function(self, num_leaves: int, spec: Any) -> Callable[..., Found]:
        """Return gradients and loss as a function of sums (not read), batch and point."""
        step, n = self.step, len(self.layout.shapes)

        def function(*flat: Tensor) -> Found:
            leaves, point = flat[n : n + num_leaves], self.layout.views(flat[-1])
            grads, loss, _ = step.take(point, leaves, spec, alone=True, shared=True)
            return grads, loss, {}

        return function


def keep_parts(module: fx.GraphModule, count: int, num_leaves: int) -> Parts | None:
    """Let a trace of gradients return their parts as well, and the counts that its mean is divided by.

    Args:
        module: From ``count`` sums, the tensors of a batch and a point to as many gradients and the loss.
        count: The number of parameters.
        num_leaves: The number of tensors in the batch.

    Returns:
        None if the loss is not provably a mean over examples.
    """
    graph = module.graph
    leaves = [node for node in graph.nodes if node.op == "placeholder"][count : count + num_leaves]
    (output,) = (node for node in graph.nodes if node.op == "output")
    *grads, loss = output.args[0]
    shape = shape_of(leaves[0])
    if not shape or any(writes(node) for node in graph.nodes):
        return None
    counts = mean_over_examples(loss, leaves, shape[0])
    if counts is None:
        return None
    assembly, parts = _assembly(graph, grads, leaves)
    output.args = ([*grads, loss, *parts, *(node for node, _ in counts)],)
    return Parts(fx.GraphModule(module, assembly).forward, len(parts), [share for _, share in counts])


def _assembly(graph: fx.Graph, grads: Sequence[Any], leaves: Sequence[fx.Node]) -> tuple[fx.Graph, list[fx.Node]]:
    """Return the graph from batch and parts to gradients, and the parts."""
    parts: dict[fx.Node, None] = {}
    later: set[fx.Node] = set()  # done when gradients are assembled
    waiting = list(grads)
    while waiting:
        node = waiting.pop()
        if node in leaves or node in later or node in parts:
            continue
        factors = [a for a in node.all_input_nodes if root(a) not in leaves]
        is_large = node.target in _PRODUCTS and sum(map(_numel, factors)) < _numel(node)
        if is_large or (is_view(node.target) and node.op == "call_function"):
            later.add(node)
            waiting += node.all_input_nodes
        else:
            parts[node] = None
    out = fx.Graph()
    copies = {node: out.placeholder(node.name) for node in (*leaves, *parts)}
    for node in graph.nodes:
        if node in later:
            copies[node] = out.node_copy(node, copies.__getitem__)
    out.output([copies[grad] for grad in grads])
    return out, list(parts)


def _numel(node: fx.Node) -> int:
    shape = shape_of(node)
    return 0 if shape is None else shape.numel()
