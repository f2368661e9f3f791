"""What is proven to be a mean over examples is one, and what is none is not proven to be."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_fed.tracing.mean_proof import mean_over_examples
from lightning_fed.tracing.passes import simplify

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of a weight [8, 8], of inputs [B, 8] and of classes [B]."""

B = 8
conv = torch.randn(4, 2, 3, 3, dtype=torch.float64)
deep = torch.randn(3, 1, 2, 2, 2, dtype=torch.float64)
fixed = torch.randn(8, dtype=torch.float64)


def images(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w).reshape(-1, 2, 2, 2)


def attention(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    q = (x @ w).view(len(x), 2, 2, 2)
    k, v = q.tanh(), q.sin()
    return F.scaled_dot_product_attention(q, k, v).square().mean()


def network(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    z = F.conv2d(F.pad(images(w, x), (1, 1, 1, 1)), conv)
    z = F.avg_pool2d(F.gelu(F.group_norm(z, 2)), 2) + F.adaptive_avg_pool2d(F.max_pool2d(z, 2), 1)
    return F.cross_entropy(z.flatten(1), y % 4)


def characters(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    tokens = (x > 0).long()
    z = F.layer_norm(F.embedding(tokens, w), (8,))
    return F.cross_entropy(z.transpose(1, 2), tokens)


def by_hand(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    z = torch.log_softmax(x @ w, dim=-1)
    mask = y != -100
    picked = z.gather(1, torch.where(mask, y, 0).unsqueeze(1)).squeeze(1)
    return -(torch.where(mask, picked, 0.0).sum() / mask.sum())


MEANS: dict[str, Loss] = {
    "cross-entropy": lambda w, x, y: F.cross_entropy(x @ w, y),
    "by hand": by_hand,
    "squares": lambda w, x, y: F.mse_loss(x @ w, x),
    "absolute": lambda w, x, y: F.l1_loss(torch.relu(x) @ w, x),
    "huber": lambda w, x, y: F.huber_loss(x @ w, x, delta=0.5) + F.smooth_l1_loss(x @ w.t(), x),
    "binary of probabilities": lambda w, x, y: F.binary_cross_entropy(torch.sigmoid(x @ w), (x > 0).double()),
    "no reduction": lambda w, x, y: F.mse_loss(x @ w, x, reduction="none").mean(),
    "bias": lambda w, x, y: F.linear(x, w, fixed).square().mean(),
    "penalty": lambda w, x, y: F.cross_entropy(x @ w, y) + 0.1 * w.square().sum(),
    "two terms": lambda w, x, y: 0.5 * F.cross_entropy(x @ w, y) - (x @ w).mean() / 3.0,
    "norm of each": lambda w, x, y: ((x @ w) / (x @ w).norm(dim=1, keepdim=True)).logsumexp(1).mean(),
    "center of each": lambda w, x, y: ((x @ w) - (x @ w).mean(1, keepdim=True)).square().mean(),
    "best of each": lambda w, x, y: (x @ w).amax(1).mean() + (x @ w).max(dim=1).values.mean(),
    "pieces": lambda w, x, y: torch.cat([(x @ w)[:, :3], (x @ w.t())[:, 3:]], 1).tanh().mean(),
    "turned": lambda w, x, y: (x @ w).view(-1, 2, 4).permute(0, 2, 1).reshape(-1, 8).cumsum(1).square().mean(),
    "weighted targets": lambda w, x, y: ((x @ w) * torch.ones_like(x) * fixed).square().mean(),
    "other dtype": lambda w, x, y: (x @ w).float().square().mean().double(),
    "products of rows": lambda w, x, y: torch.bmm((x @ w).unsqueeze(1), (x @ w.t()).unsqueeze(2)).mean(),
    "volumes": lambda w, x, y: F.conv3d((x @ w).view(-1, 1, 2, 2, 2), deep).square().mean(),
    "attention": attention,
    "network": network,
    "characters": characters,
}
OTHERS: dict[str, Loss] = {
    "sum": lambda w, x, y: F.cross_entropy(x @ w, y, reduction="sum"),
    "sum over a number": lambda w, x, y: F.cross_entropy(x @ w, y, reduction="sum") / (len(x) + 1),
    "root": lambda w, x, y: F.mse_loss(x @ w, x).sqrt(),
    "product": lambda w, x, y: F.mse_loss(x @ w, x) * F.cross_entropy(x @ w, y),
    "inverse": lambda w, x, y: 1.0 / F.mse_loss(x @ w, x),
    "class weights": lambda w, x, y: F.cross_entropy(x @ w, y, weight=fixed.abs()),
    "batch norm": lambda w, x, y: F.batch_norm(x @ w, None, None, training=True).relu().square().mean(),
    "center of all": lambda w, x, y: ((x @ w) - (x @ w).mean(0)).square().mean(),
    "pairs": lambda w, x, y: ((x @ w) @ (x @ w).t()).logsumexp(1).mean(),
    "softmax over examples": lambda w, x, y: torch.softmax(x @ w, dim=0).square().mean(),
    "sum over examples": lambda w, x, y: (x @ w).sum(0).square().mean(),
    "best example": lambda w, x, y: (x @ w).amax(0).mean(),
    "place in the batch": lambda w, x, y: ((x @ w) * torch.arange(len(x))[:, None]).mean(),
    "neighbours": lambda w, x, y: ((x @ w) * (x @ w.t()).flip(0)).mean(),
    "running": lambda w, x, y: (x @ w).cumsum(0).square().mean(),
    "first half": lambda w, x, y: (x @ w)[: len(x) // 2].square().mean(),
    "stacked": lambda w, x, y: torch.cat([x @ w, x @ w.t()], 0).view(len(x), 2, 8).amax(1).mean(),
    "padded": lambda w, x, y: F.pad(x @ w, (0, 0, 0, len(x))).view(len(x), 2, 8).amax(1).mean(),
    "blocks": lambda w, x, y: (x @ w).view(2, -1).softmax(1).square().mean(),
    "permuted": lambda w, x, y: (x @ w).permute(1, 0).softmax(1).square().mean(),
    "transposed": lambda w, x, y: (x @ w).transpose(0, 1).softmax(1).square().mean(),
    "spread": lambda w, x, y: (x @ w).expand(len(x), len(x), 8).softmax(1).square().mean(),
    "normed": lambda w, x, y: F.layer_norm(x @ w, (len(x), 8)).tanh().square().mean(),
    "picked from others": lambda w, x, y: (x @ w).gather(0, (y % len(x))[:, None]).mean(),
    "looked up in others": lambda w, x, y: F.embedding(y % len(x), x @ w).square().mean(),
    "mixed": lambda w, x, y: (w[: len(x), : len(x)] @ x).square().mean(),
    "bias by place": lambda w, x, y: torch.addmm(w[: len(x)], x, w).square().mean(),
    "weights by place": lambda w, x, y: torch.bmm(x[:, None], w[: len(x), :, None]).square().mean(),
    "targets by place": lambda w, x, y: F.mse_loss(x @ w, w[: len(x)]),
    "weights of a loss by place": lambda w, x, y: F.binary_cross_entropy(
        torch.sigmoid(x @ w), (x > 0).double(), weight=torch.arange(8.0)[: len(x), None].double()
    ),
    "quotient": lambda w, x, y: w.sum() / F.mse_loss(x @ w, x),
    "sum and mean": lambda w, x, y: (x @ w).square().sum() + F.mse_loss(x @ w, x),
    "other rows": lambda w, x, y: (x @ w).t().reshape(-1, 8).prod(1).mean(),
    "ratio": lambda w, x, y: (x @ w).square().sum() / (x @ w.t()).square().sum(),
    "masked": lambda w, x, y: ((x @ w) * (x > 0)).sum() / (x > 0).sum(),
}


def proof(loss: Loss, x: Tensor, y: Tensor) -> list[int] | None:
    """Return the shares of the counts; None if there is no proof, or if not all that is counted counts."""
    module = make_fx(lambda w, *batch: [*torch.func.grad_and_value(loss)(w, *batch)])(W, x, y)  # type: ignore[no-untyped-call]
    simplify(module)
    _, *leaves = [node for node in module.graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    counts = mean_over_examples(output.args[0][1], leaves, len(x))
    if counts is None:
        return None
    output.args = ([node for node, _ in counts],)
    module.recompile()
    shares = [share for _, share in counts]
    return shares if [float(count) for count in module(W, x, y)] == [share * len(x) for share in shares] else None


torch.manual_seed(0)
W = torch.randn(8, 8, dtype=torch.float64)
X = torch.randn(B, 8, dtype=torch.float64)
Y = torch.randint(0, 8, (B,))


def gradient(loss: Loss, x: Tensor, y: Tensor) -> Tensor:
    w = W.clone().requires_grad_()
    return torch.autograd.grad(loss(w, x, y), w)[0]


def of_parts(loss: Loss, y: Tensor = Y) -> Tensor:
    parts = [slice(0, 3), slice(3, B)]
    return sum(((p.stop - p.start) / B * gradient(loss, X[p], y[p]) for p in parts), torch.zeros_like(W))


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_proven_and_its_gradient_is_that_of_the_parts(name: str) -> None:
    assert proof(MEANS[name], X, Y) is not None
    torch.testing.assert_close(of_parts(MEANS[name]), gradient(MEANS[name], X, Y), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_mean_is_not_proven_to_be_one(name: str) -> None:
    assert proof(OTHERS[name], X, Y) is None
    assert not torch.allclose(of_parts(OTHERS[name]), gradient(OTHERS[name], X, Y), rtol=1e-3)


@pytest.mark.parametrize("name", ["cross-entropy", "by hand"])
def test_ignored_targets_show_in_the_count(name: str) -> None:
    ignoring = Y.clone()
    ignoring[-1] = -100
    assert proof(MEANS[name], X, Y) == [1]
    assert proof(MEANS[name], X, ignoring) is None
    with pytest.raises(AssertionError):
        torch.testing.assert_close(of_parts(MEANS[name], ignoring), gradient(MEANS[name], X, ignoring))


def test_every_part_of_an_example_counts() -> None:
    assert proof(characters, X, Y) == [8]


def test_a_batch_that_not_every_tensor_has_as_many_rows_of_is_not_proven() -> None:
    assert proof(lambda w, x, y: (x @ w).mean() + y.double().mean(), X, Y[:2]) is None
