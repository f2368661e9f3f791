"""The flat vector and the parameters that are views of it."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.flat import FlatParameters, Layout

shapes = st.lists(st.lists(st.integers(1, 3), max_size=3).map(torch.Size), min_size=1, max_size=5)


def linear() -> tuple[nn.Linear, FlatParameters]:
    module = nn.Linear(2, 3)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
        module.bias.copy_(torch.tensor([7.0, 8.0, 9.0]))
    return module, FlatParameters(list(module.named_parameters()))


def shares(tensor: Tensor, vector: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr()


@given(shapes)
def test_views_split_the_vector_in_order(shapes: list[torch.Size]) -> None:
    layout = Layout(shapes)
    vector = torch.arange(float(layout.numel))
    views = layout.views(vector)
    assert [v.shape for v in views] == shapes
    assert torch.equal(torch.cat([v.reshape(-1) for v in views]), vector)
    assert all(shares(v, vector) for v in views)


def test_state_views_split_only_vectors() -> None:
    state = {"m": torch.arange(8.0), "step": torch.tensor(3), "odd": torch.zeros(2, 2)}
    first, second = Layout([torch.Size([2, 3]), torch.Size([2])]).state_views(state)
    assert torch.equal(first["m"], torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]))
    assert torch.equal(second["m"], torch.tensor([6.0, 7.0]))
    for part in (first, second):
        assert part["step"] is state["step"]
        assert part["odd"] is state["odd"]


def test_vector_of_wrong_length_is_rejected() -> None:
    with pytest.raises(RuntimeError):
        Layout([torch.Size([2])]).views(torch.zeros(3))


def test_parameters_stay_the_same_objects_and_become_views_of_y() -> None:
    module = nn.Linear(2, 3)
    objects = list(module.parameters())
    flat = FlatParameters(list(module.named_parameters()))
    assert [id(p) for p in module.parameters()] == [id(p) for p in objects]
    assert flat.names == ["weight", "bias"]
    assert flat.numel == 9
    assert all(shares(p.data, flat.y) for p in objects)


def test_values_propagate_both_ways() -> None:
    module, flat = linear()
    assert torch.equal(flat.y, torch.arange(1.0, 10.0))
    flat.y.copy_(torch.arange(10.0, 19.0))
    assert torch.equal(module.weight[2], torch.tensor([14.0, 15.0]))
    module.bias.grad = torch.ones(3)
    torch.optim.SGD([module.bias], lr=2.0).step()
    assert torch.equal(flat.y[6:], torch.tensor([14.0, 15.0, 16.0]))


def test_bind_redirects_and_restores_the_parameters() -> None:
    module, flat = linear()
    elsewhere = torch.zeros(9)
    flat.bind(flat.layout.views(elsewhere))
    with torch.no_grad():
        module.weight.add_(1.0)
    assert torch.equal(elsewhere, torch.tensor([1.0] * 6 + [0.0] * 3))
    assert torch.equal(flat.y, torch.arange(1.0, 10.0))
    flat.bind()
    assert torch.equal(module.weight, flat.y[:6].view(3, 2))
    assert shares(module.bias.data, flat.y)


def test_release_gives_every_parameter_its_own_storage() -> None:
    module, flat = linear()
    flat.release()
    assert torch.equal(module.bias, torch.tensor([7.0, 8.0, 9.0]))
    flat.y.zero_()
    assert torch.equal(module.bias, torch.tensor([7.0, 8.0, 9.0]))
    assert not shares(module.weight.data, flat.y)
    assert not shares(module.weight.data, module.bias.data)
    assert module.weight.untyped_storage().nbytes() == 6 * 4


def test_tied_weights_stay_tied() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module[1].weight = module[0].weight
    flat = FlatParameters(list(module.named_parameters()))
    assert flat.numel == 4
    flat.y.fill_(2.0)
    assert torch.equal(module[1].weight, torch.full((2, 2), 2.0))


def test_transposed_parameters_keep_their_values() -> None:
    p = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    flat = FlatParameters([("p", p)])
    assert torch.equal(flat.y, torch.tensor([0.0, 3.0, 1.0, 4.0, 2.0, 5.0]))
    assert torch.equal(p, torch.arange(6.0).view(2, 3).t())


def test_gradients_flow_to_the_parameters() -> None:
    module, flat = linear()
    module(torch.tensor([[1.0, 2.0]])).sum().backward()
    assert torch.equal(module.weight.grad, torch.tensor([[1.0, 2.0]]).expand(3, 2))
    assert flat.y.grad is None
    assert not flat.y.requires_grad


def test_empty_parameter_list_is_rejected() -> None:
    with pytest.raises(FederatedError, match=r"no trainable parameter in its optimizer: set requires_grad=True"):
        FlatParameters([])


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            torch.zeros(1, dtype=torch.float64),
            r"one dtype and one device, found: 'a' is torch\.float32 on cpu, 'c' is torch\.float64 on cpu\. Convert",
        ),
        (torch.zeros(1, device="meta"), r"'a' is torch\.float32 on cpu, 'c' is torch\.float32 on meta"),
    ],
    ids=["dtype", "device"],
)
def test_mixed_parameters_are_rejected(second: Any, message: str) -> None:
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    with pytest.raises(FederatedError, match=message) as error:
        FlatParameters([("a", a), ("b", b), ("c", nn.Parameter(second))])
    assert "'b'" not in str(error.value)  # one name per kind is enough


def test_rejection_leaves_the_parameters_unchanged() -> None:
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1, dtype=torch.float64))
    before = copy.deepcopy([a, b]), a.data_ptr()
    with pytest.raises(FederatedError):
        FlatParameters([("a", a), ("b", b)])
    assert torch.equal(a, before[0][0])
    assert a.data_ptr() == before[1]
