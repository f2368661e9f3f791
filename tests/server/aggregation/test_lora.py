"""The exact mean of adapters on small matrices: sums over clients and processes, the residual, and its bytes."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from lightning_fed.core.errors import FederatedError
from lightning_fed.server.aggregation.lora import ExactLora, LoraPair, ProductSums

M, N, R, CLIENTS = 5, 4, 2, 3
SIZE = R * N + M * R + 1  # A, one other parameter, B


def pair(is_transposed: bool = False, dtype: torch.dtype = torch.float64) -> LoraPair:
    shape = (N, M) if is_transposed else (M, N)
    base = nn.Parameter(
        torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=dtype), requires_grad=False
    )
    return LoraPair(base, slice(0, R * N), slice(R * N + 1, SIZE), R, 1.5, is_transposed)


def vectors(count: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, SIZE, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def merged(own: LoraPair, x: Tensor) -> Tensor:
    """Return the merged weight [m, n]."""
    base = own.base.double().T if own.is_transposed else own.base.double()
    x = x.double()
    return base + own.scaling * x[own.b].view(M, R) @ x[own.a].view(R, N)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
@pytest.mark.parametrize("groups", [[[0, 1, 2]], [[0], [1, 2]]])
def test_merged_weight_equals_the_mean_of_client_weights(
    is_transposed: bool, dtype: torch.dtype, tolerance: float, groups: Sequence[Sequence[int]]
) -> None:
    own, x, y = pair(is_transposed, dtype), vectors(1, 7, dtype)[0], vectors(CLIENTS, 1, dtype)
    weights = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    wanted = sum(float(p) * merged(own, each) for p, each in zip(weights, y, strict=True))
    sums, lora = ProductSums([own]), ExactLora([own])
    for group in groups:
        sums.update((y - x)[list(group)], (0.7 * weights[list(group)]).tolist())  # some clients took fewer steps
    after = (weights @ y.double()).to(dtype)
    lora.close_round(x, after, sums)
    assert float((merged(own, after) - wanted).abs().max()) < tolerance


class TwoProcesses:
    """A process group that adds the sums of another process."""

    rank, size = 0, 2

    def __init__(self, other: ProductSums) -> None:
        self.other = other

    def sum(self, tensors: Sequence[Tensor]) -> None:
        for tensor, more in zip(tensors, self.other.sums, strict=True):
            tensor += more


def test_sums_merge_across_processes() -> None:
    own, changes = pair(), vectors(CLIENTS)
    whole, first, second = ProductSums([own]), ProductSums([own]), ProductSums([own])
    whole.update(changes, [0.2, 0.5, 0.3])
    first.update(changes[:2], [0.2, 0.5])
    second.update(changes[2:], [0.3])
    first.merge([first.partial(), second.partial()], TwoProcesses(second))  # type: ignore[arg-type]
    assert torch.allclose(first.sums[0], whole.sums[0], rtol=0, atol=1e-15)
    assert (first.weight, first.clients) == (pytest.approx(whole.weight), CLIENTS)


def test_single_weighted_client_keeps_the_base_weight() -> None:
    own, x, y = pair(), vectors(1, 7)[0], vectors(2, 1)
    start, sums, lora = own.base.clone(), ProductSums([own]), ExactLora([own])
    sums.update(y - x, [1.0, 0.0])
    lora.close_round(x, y[0], sums)
    assert torch.equal(own.base, start)
    assert lora.send([0, 1], x) == 0


def test_sent_bytes_count_only_missing_residuals() -> None:
    own, x = pair(), vectors(1)[0]
    lora = ExactLora([own])

    def close(clients: int) -> None:
        sums = ProductSums([own])
        sums.update(vectors(clients), [1.0] * clients)
        lora.close_round(x, x + vectors(clients).mean(0), sums)

    factors, dense = 8 * R * (M + N), 8 * M * N
    assert lora.send([0, 1], x) == 0
    assert lora.moved_weights == {}, "sites have those of the start"
    close(2)
    assert lora.moved_weights.keys() == lora.weights.keys() == {"0"}
    assert lora.send([0, 2], x) == 2 * factors  # a new client has the initial weights
    assert factors < dense < 2 * factors
    close(2)
    assert lora.send([0], x) == factors
    assert lora.send([1], x) == dense  # client 1 needs both residuals
    assert lora.send([0, 1], x) == 0
    other = ExactLora([own])
    other.load_state_dict(lora.state_dict())
    close(3)
    assert lora.send([2], x) == dense
    assert other.send([2], x) == factors  # client 2 already has the first residual
    own.base.data += 1e-12
    with pytest.raises(FederatedError, match="lora='exact' on other base weights than the model has"):
        other.load_state_dict(lora.state_dict() | {"base": "0"})
