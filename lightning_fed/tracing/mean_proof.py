"""Whether a traced loss is the mean, over the examples of a batch, of a function of each example."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx

from lightning_fed.tracing.passes import shape_of

__all__ = ["Count", "mean_over_examples"]

_aten = torch.ops.aten

Count: TypeAlias = tuple[fx.Node, int]
"""A number that a mean divides by, and its share of each example if all parts of all examples count."""

_FIXED, _FILL, _ROWS, _SUM, _MEAN, _PAIR = "fixed", "fill", "rows", "sum", "mean", "mean and count"
"""What is known of a node: it is the same whatever the examples are; it is one number all over, too; its dimension 0 is
cut into blocks of one length, each a function of its own example; it is the sum of all that is in such rows; it is a
mean over examples; it is one, with what it was divided by."""

_MEAN_REDUCTION = 1  # PyTorch's number for it


def mean_over_examples(loss: fx.Node, leaves: Sequence[fx.Node], examples: int) -> list[Count] | None:
    """Prove that a loss is a mean over examples, or over equally many parts of each, by the operations it is made of.

    The loss of a batch is then the mean of those of its parts, weighted by their examples, and so is its gradient.

    Args:
        loss: The loss in a trace whose nodes know what they returned and of which none changes what it is given.
        leaves: The tensors of the batch, inputs of the trace.
        examples: The number of examples in the batch.

    Returns:
        The counts that means were divided by, to be looked at in every batch: targets that are to be ignored are not
        counted. None if there is no proof.
    """
    proof = _Proof(leaves, examples)
    return proof.counts if proof.of(loss) == _MEAN else None


class _Proof:
    """What is known of the nodes of a trace; None if nothing is."""

    def __init__(self, leaves: Sequence[fx.Node], examples: int) -> None:
        self.examples, self.counts = examples, list[Count]()
        self._known: dict[Any, str | None] = {
            leaf: _ROWS if _shape(leaf)[:1] == (examples,) else None for leaf in leaves
        }

    def of(self, node: fx.Node) -> str | None:
        """Return what is known of a node, without recursion, as networks are deep."""
        waiting = [node]
        while waiting:
            last = waiting[-1]
            missing = [source for source in last.all_input_nodes if source not in self._known]
            if not missing:
                waiting.pop()
                self._known.setdefault(last, self._judge(last))
            waiting += missing
        return self._known[node]

    def _judge(self, node: fx.Node) -> str | None:
        kinds = {self._known[source] for source in node.all_input_nodes}
        packet = getattr(node.target, "overloadpacket", None)
        if packet in _FILLS and None not in kinds:
            return _FILL
        if kinds <= {_FIXED, _FILL}:
            return _FIXED
        if node.target is operator.getitem:
            return {_ROWS: _ROWS, _PAIR: _MEAN if node.args[1] == 0 else None}.get(kinds.pop() or "")
        if kinds <= {_FIXED, _FILL, _SUM, _MEAN}:
            return self._of_numbers(node, packet)
        if not kinds <= {_FIXED, _FILL, _ROWS} or any(
            not self._is_cut(a) for a in node.all_input_nodes if self.is_rows(a)
        ):
            return None
        if packet in _NLL:
            return self._of_targets(node)
        if packet in _LOSSES:
            return self._of_loss(node, _LOSSES[packet])
        if packet in (_aten.mean, _aten.sum) and len(node.args) == 1:
            return _MEAN if packet is _aten.mean else _SUM
        rule = _RULES.get(packet, _pointwise)
        return _ROWS if rule(self, node) else None

    def is_rows(self, argument: Any) -> bool:
        """Whether an argument is known to be rows."""
        return isinstance(argument, fx.Node) and self._known[argument] == _ROWS

    def is_fill(self, argument: Any) -> bool:
        """Whether an argument is known to be one number all over."""
        return not isinstance(argument, fx.Node) or self._known[argument] == _FILL

    def _is_cut(self, node: fx.Node) -> bool:
        """Whether dimension 0 can be in blocks; of several tensors, each is looked at by itself."""
        shape = shape_of(node)
        return shape is not None and len(shape) > 0 and shape[0] % self.examples == 0

    def _of_numbers(self, node: fx.Node, packet: Any) -> str | None:
        """Judge what is made of sums, means and what is fixed: means stay means where that is linear."""
        kinds = [self._known.get(a, _FIXED) if isinstance(a, fx.Node) else _FIXED for a in node.args[:2]]
        if packet in _SAME:
            return kinds[0]
        if packet in (_aten.add, _aten.sub):
            return _MEAN if _SUM not in kinds else None  # of numbers that are the same for all, the mean is that number
        if packet is _aten.neg or (packet in (_aten.mul, _aten.div) and not node.kwargs):
            if packet is _aten.div and kinds == [_SUM, _SUM]:
                return self._of_ratio(*node.args)
            is_linear = kinds.count(_MEAN) == 1 and _SUM not in kinds
            return _MEAN if is_linear and (packet is not _aten.div or kinds[0] == _MEAN) else None
        return None

    def _of_ratio(self, total: Any, count: Any) -> str | None:
        """Judge a sum over the number of its parts that are not masked, as many as there are if none is."""
        parts = [_summed(total), _summed(count)]
        if _shape(parts[0]) != _shape(parts[1]) or parts[1].meta["val"].dtype is not torch.bool:
            return None
        return self._counted(count, parts[1], _MEAN)

    def _of_targets(self, node: fx.Node) -> str | None:
        """Judge a mean over those targets that are not to be ignored."""
        values, target, weight, reduction, *_ = node.args
        count = next((user for user in node.users if user.args[1:] == (1,)), None)
        if weight is not None or reduction != _MEAN_REDUCTION or count is None:
            return None
        return self._counted(count, target, _PAIR) if self.is_rows(values) and self.is_rows(target) else None

    def _counted(self, count: fx.Node, of: Any, kind: str) -> str:
        self.counts.append((count, math.prod(_shape(of)) // self.examples))
        return kind

    def _of_loss(self, node: fx.Node, at: int) -> str | None:
        """Judge a function of predictions and targets that says itself how it is reduced."""
        values, target, *weights = node.args[:at]
        is_plain = self.is_rows(values) and self.is_rows(target) and _shape(values) == _shape(target)
        if not is_plain or any(weight is not None for weight in weights):
            return None
        return {0: _ROWS, _MEAN_REDUCTION: _MEAN}.get((*node.args[at:], _MEAN_REDUCTION)[0])  # type: ignore[arg-type]


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(shape_of(node) or ())


def _summed(node: Any) -> Any:
    """Return what a sum adds up."""
    while node.target.overloadpacket in _SAME:
        node = node.args[0]
    return node.args[0]


def _pointwise(proof: _Proof, node: fx.Node) -> bool:
    """Whether an operation works number by number, and nothing but rows tells the rows apart."""
    out = _shape(node)
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()) or not out:
        return False
    return all(
        (len(_shape(a)), _shape(a)[0]) == (len(out), out[0]) if proof.is_rows(a) else _is_even(proof, a, len(out))
        for a in node.all_input_nodes
    )


def _is_even(proof: _Proof, node: Any, ndim: int) -> bool:
    """Whether what is fixed is the same for all rows of a tensor of so many dimensions."""
    return proof.is_fill(node) or len(_shape(node)) < ndim or _shape(node)[0] == 1


def _only_first(proof: _Proof, node: fx.Node) -> bool:
    """Whether the first argument alone is rows, of an operation that takes them one by one."""
    return proof.is_rows(node.args[0]) and not any(map(proof.is_rows, node.args[1:]))


def _along(proof: _Proof, node: fx.Node) -> bool:
    """Whether an operation works along dimensions that are not that of the rows."""
    packet = getattr(node.target, "overloadpacket", None)
    at = 2 if packet is _aten.linalg_vector_norm else 1
    if not _only_first(proof, node) or len(node.args) <= at:
        return False
    room = len(_shape(node.args[0])) + (packet is _aten.unsqueeze)
    found: Any = node.args[at]
    dims = found if isinstance(found, (list, tuple)) else [found]
    return len(dims) > 0 and all(isinstance(dim, int) and dim % room for dim in dims)


def _padded(proof: _Proof, node: fx.Node) -> bool:
    return _only_first(proof, node) and len(node.args[1]) < 2 * len(_shape(node.args[0]))  # type: ignore[arg-type]


def _normed(proof: _Proof, node: fx.Node) -> bool:
    return _only_first(proof, node) and len(node.args[1]) < len(_shape(node.args[0]))  # type: ignore[arg-type]


def _expanded(proof: _Proof, node: fx.Node) -> bool:
    before, after = _shape(node.args[0]), _shape(node)
    return (len(before), before[0]) == (len(after), after[0])


def _turned(proof: _Proof, node: fx.Node) -> bool:
    ndim = len(_shape(node))
    at: Any = node.args[1:]
    if isinstance(at[0], (list, tuple)):
        return bool(at[0][0] % ndim == 0)
    return all(dim % ndim for dim in at)


def _gathered(proof: _Proof, node: fx.Node) -> bool:
    values, dim, index = node.args[:3]
    are_rows = proof.is_rows(values) and proof.is_rows(index) and _shape(values)[0] == _shape(index)[0]
    return are_rows and bool(dim % len(_shape(values)))  # type: ignore[operator]


def _joined(proof: _Proof, node: fx.Node) -> bool:
    parts: Any = node.args[0]
    dim: Any = (*node.args[1:], 0)[0]
    return all(map(proof.is_rows, parts)) and bool(dim % len(_shape(parts[0])))


def _added_product(proof: _Proof, node: fx.Node) -> bool:
    bias, rows, columns = node.args[:3]
    is_first = proof.is_rows(rows) and not proof.is_rows(columns) and not proof.is_rows(bias)
    return is_first and _is_even(proof, bias, 2)


def _all_rows(proof: _Proof, node: fx.Node) -> bool:
    return all(map(proof.is_rows, node.all_input_nodes))


def _looked_up(proof: _Proof, node: fx.Node) -> bool:
    return not proof.is_rows(node.args[0]) and proof.is_rows(node.args[1])


_SAME = {_aten.view, _aten._unsafe_view, _aten.clone, _aten.detach, _aten._to_copy, _aten.alias}
_FILLS = {_aten.ones_like, _aten.zeros_like, _aten.full_like, _aten.full, _aten.ones, _aten.zeros, _aten.scalar_tensor}
_NLL = {_aten.nll_loss_forward, _aten.nll_loss2d_forward}
_LOSSES = {  # where the reduction stands
    _aten.mse_loss: 2,
    _aten.smooth_l1_loss: 2,
    _aten.huber_loss: 2,
    _aten.binary_cross_entropy: 3,
    _aten.binary_cross_entropy_with_logits: 4,
}
_BY_ROW = (
    *(_aten.convolution, _aten.mm, _aten.native_group_norm, _aten.max_pool2d_with_indices, _aten.avg_pool2d),
    *(_aten.max_pool3d_with_indices, _aten.avg_pool3d, _aten._adaptive_avg_pool2d, _aten._adaptive_avg_pool3d),
)
_BY_DIMENSION = (
    *(_aten.sum, _aten.mean, _aten.amax, _aten.amin, _aten.max, _aten.argmax, _aten.var_mean, _aten.logsumexp),
    *(_aten._log_softmax, _aten._softmax, _aten.cumsum, _aten.flip, _aten.linalg_vector_norm),
    *(_aten.unsqueeze, _aten.squeeze, _aten.select, _aten.slice, _aten.index_select),
)
_RULES: dict[Any, Callable[[_Proof, fx.Node], bool]] = {
    **dict.fromkeys((*_SAME, *_BY_ROW), _only_first),
    **dict.fromkeys(_BY_DIMENSION, _along),
    _aten.constant_pad_nd: _padded,
    _aten.native_layer_norm: _normed,
    _aten.expand: _expanded,
    _aten.permute: _turned,
    _aten.transpose: _turned,
    _aten.gather: _gathered,
    _aten.cat: _joined,
    _aten.addmm: _added_product,
    _aten.bmm: _all_rows,
    _aten._scaled_dot_product_flash_attention_for_cpu: _all_rows,
    _aten.embedding: _looked_up,
}
