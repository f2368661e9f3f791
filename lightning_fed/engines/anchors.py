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
from lightning_fed.engines.functional import FunctionalStep
from lightning_fed.engines.onednn import add_product
from lightning_fed.engines.separable import mean_over_examples
from lightning_fed.engines.simplify import erase_unused, is_view, root, shape_of, writes
from lightning_fed.engines.traces import Found, TracedStep, kinds, resized

__all__ = ["AnchorPass", "KeptAnchor", "keep_parts"]

_KEPT_BYTES = 2**30  # kept from the full pass to the local steps, in each process
_aten = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten.bmm.default)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a trace of gradients returns after the loss: the parts to be kept, then counts.

    Attributes:
        assemble: From the tensors of a batch and its parts to its gradients.
        count: The number of parts.
        shares: Of each count that a mean was divided by, the share of each example.
        products: Gradients that are products of two matrices with a row for every example, or as many for each, by
            their positions: where the left one, transposed, and the right one stand among the tensors of the batch and
            the parts. They are left to one product for all batches.
        others: The positions of the gradients that the trace adds to sums.
    """

    assemble: Callable[..., list[Tensor]]
    count: int
    shares: list[int]
    products: dict[int, tuple[int, int]]
    others: list[int]


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
        """Add a batch's gradients to sums, but for the products; return the loss, the parts and the counts."""
        with torch.no_grad():
            loss, *parts = self.step.run(*(sums[i] for i in self.parts.others), *leaves, *self.rest, factor)
        return loss, parts

    def add_products(
        self, sums: Sequence[Tensor], epoch: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], examples: list[int]
    ) -> None:
        """Add the products of all batches, given all their tensors, their parts, and the examples in each."""

        def joined(at: int, is_weighted: bool) -> Tensor:
            if at < len(epoch):
                return epoch[at]
            column = [own[at - len(epoch)] for own in parts]
            if is_weighted and examples[-1] != examples[0]:
                column[-1] = column[-1] * (examples[-1] / examples[0])
            return torch.cat(column)

        for i, (left, right) in self.parts.products.items():
            weighs_left = left >= len(epoch)  # the tensors of the batches stay as they are
            factors = joined(left, weighs_left).t(), joined(right, not weighs_left)
            add_product(sums[i], *factors, alpha=examples[0] / sum(examples))


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
        self._kept: dict[int, list[KeptAnchor]] = {}
        self._bytes: dict[int, int] = {}
        self._at: dict[Any, _AtPoint] = {}
        self._has_checked = False

    def begin_round(self, is_new: bool) -> None:
        """Begin with nothing kept; and with nothing known of the loss, if it may be a new one."""
        self.end_round()  # the last one may have been given up
        self._has_checked = False
        if is_new:
            self._is_mean.clear()

    def end_round(self) -> None:
        """Let go of all that was kept."""
        for kept in (self._kept, self._bytes, self._at):
            kept.clear()

    def of(self, index: int) -> Sequence[KeptAnchor]:
        """Return what is kept of a client's batches, in the order of its first local epoch; nothing if it is not."""
        return self._kept.get(index, ())

    def gradient(self, index: int, point: Vector, epoch: list[Tensor], settings: BatchSettings) -> Vector | None:
        """Return a client's full-batch gradient [P], and keep its parts; None if it cannot be had in this way.

        Args:
            index: The client's.
            point: The parameters [P], the same throughout a round.
            epoch: The tensors of all batches of its local epoch, which visit every example once, one after the other.
            settings: How examples become batches.
        """
        size = len(epoch[0])
        if not self._is_mean.get(size, True):
            return None
        batches = [list(batch) for batch in zip(*(t.split(settings.batch_size) for t in epoch), strict=True)]
        out = torch.zeros_like(point)
        sums, kept, losses = self.layout.views(out), list[KeptAnchor](), list[Tensor]()
        at = self._trace(batches[0], point, sums, settings.batch_size)
        if at is None or self._trace(batches[-1], point, sums, settings.batch_size) is None:
            return None  # the last one may have fewer examples than the trace fits
        for batch in batches:
            loss, parts = at.add(sums, batch, len(batch[0]) / size)
            counted = [float(count) for count in parts[at.parts.count :]]
            if counted != [share * len(batch[0]) for share in at.parts.shares]:
                return None  # targets that are to be ignored: batches do not weigh as much as they have examples
            losses.append(loss)
            kept.append(KeptAnchor(parts[: at.parts.count], at))
        needed = sum(part.numel() * part.element_size() for each in kept for part in each.parts)
        others = sum(size for client, size in self._bytes.items() if client != index)
        if others + needed > _KEPT_BYTES or not self._is_right(losses, epoch, point, settings):
            return None
        at.add_products(sums, epoch, [each.parts for each in kept], [len(batch[0]) for batch in batches])
        self._bytes[index] = needed
        self._kept[index] = kept
        return out

    def _is_right(self, losses: list[Tensor], epoch: Sequence[Tensor], point: Vector, settings: BatchSettings) -> bool:
        """Compare with the module's loss on all batches at once, once a round and for clients of a new size."""
        size = len(epoch[0])
        if self._has_checked and size in self._is_mean:
            return True
        self._has_checked = True
        most = settings.full_batch_size
        count = size if size <= most else max(1, most // settings.batch_size) * settings.batch_size
        expected = self.step.loss_of_first(self.layout.views(point), [t[:count] for t in epoch], list, 0, True)
        starts = range(0, count, settings.batch_size)
        weights = [min(settings.batch_size, count - start) / count for start in starts]
        found = sum(loss * weight for loss, weight in zip(losses, weights, strict=False))
        self._is_mean[size] = self.step.agrees(torch.as_tensor(found), expected)
        return self._is_mean[size]

    def _trace(self, leaves: Sequence[Tensor], point: Vector, sums: Sequence[Tensor], full: int) -> _AtPoint | None:
        """Return the trace for a batch: of full ones, which may do for others too."""
        examples = len(leaves[0])
        key = ("anchor", *kinds(leaves, full))
        if key not in self._at:
            made_of = leaves if examples == full else resized(leaves, full)
            step = self._get(key, made_of, point, sums)
            parts = self._parts.get(key)
            if step is None or parts is None:
                return None
            self._at[key] = _AtPoint(step, parts, step.once([point])[1])
        at = self._at[key]
        if examples != full and at.step.fits_any_size is None:
            function, other = self._function(len(leaves)), (full - 1, 2)
            at.step.fits_any_size = full > 2 and all(
                self.step.traces.is_same(at.step, function, [*sums, *resized(leaves, n), point]) for n in other
            )
        return at if examples == full or (at.step.fits_any_size and examples > 1) else None

    def _get(self, key: Any, leaves: Sequence[Tensor], point: Vector, sums: Sequence[Tensor]) -> TracedStep | None:
        def keep(module: fx.GraphModule) -> int | None:
            parts = self._parts[key] = keep_parts(module, len(sums), len(leaves))
            return None if parts is None else len(parts.others)

        function = self._function(len(leaves))
        return self.step.traces.get_step(key, function, lambda: [*sums, *leaves, point], len(sums), 1, {}, keep)

    def _function(self, num_leaves: int) -> Callable[..., Found]:
        """Return gradients and loss as a function of sums (not read), batch and point."""
        step, n = self.step, len(self.layout.shapes)

        def function(*flat: Tensor) -> Found:
            leaves, point = flat[n : n + num_leaves], self.layout.views(flat[-1])
            grads, loss, _ = step.take(point, leaves, list, alone=True, shared=True)
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
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    sums, leaves = inputs[:count], inputs[count : count + num_leaves]
    (output,) = (node for node in graph.nodes if node.op == "output")
    *grads, loss = output.args[0]
    shape = shape_of(leaves[0])
    if not shape or any(writes(node) for node in graph.nodes):
        return None
    counts = mean_over_examples(loss, leaves, shape[0])
    if counts is None:
        return None
    assembly, parts = _assembly(graph, grads, leaves)
    products = _products(grads, [*leaves, *parts], num_leaves)
    others = [i for i in range(count) if i not in products]
    output.args = ([*(grads[i] for i in others), loss, *parts, *(node for node, _ in counts)],)
    erase_unused(graph)
    for i in products:
        graph.erase_node(sums[i])
    assemble = fx.GraphModule(module, assembly).forward
    return Parts(assemble, len(parts), [share for _, share in counts], products, others)


def _products(grads: Sequence[fx.Node], at_hand: Sequence[fx.Node], num_leaves: int) -> dict[int, tuple[int, int]]:
    """Return the gradients that are products of what is at hand, by their positions."""
    places: dict[Any, int] = {node: i for i, node in enumerate(at_hand)}
    found = {}
    for i, grad in enumerate(grads):
        if grad.target is not _aten.mm.default or len(grad.users) != 1:
            continue
        turned: Any = grad.args[0]
        left, right = turned.args[0] if turned.target is _aten.t.default else None, grad.args[1]
        if left in places and right in places and max(places[left], places[right]) >= num_leaves:
            found[i] = places[left], places[right]
    return found


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
