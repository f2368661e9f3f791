"""Products of large layers through oneDNN, where processors are known to be faster with it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_fed.engines import onednn
from lightning_fed.engines.graphs import split_step, use_bindings
from lightning_fed.engines.onednn import add_product, use_onednn
from lightning_fed.engines.simplify import simplify

ZEN_5, ZEN_4, OTHER = onednn._Examples(1, 48), onednn._Examples(48, None), onednn._Examples(None, None)


def on(monkeypatch: pytest.MonkeyPatch, processor: Any) -> None:
    monkeypatch.setattr(onednn, "_least", lambda: processor)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows of the products that oneDNN has taken."""
    rows: list[int] = []
    take = torch.ops.mkldnn._linear_pointwise

    def note(*args: Any) -> Tensor:
        rows.append(len(args[0]))
        return take(*args)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", note)
    return rows


def relus(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor) -> list[Tensor]:
    z = torch.addmm(b, x, w.t())
    return [torch.addmm(c, torch.relu(z), v.t()), torch.relu(torch.addmm(b, x, w.t())), z]


@pytest.mark.parametrize(
    ("processor", "examples", "taken"),
    [(ZEN_5, 20, 2), (ZEN_4, 20, 0), (ZEN_4, 100, 2), (OTHER, 100, 0)],
    ids=["Zen 5", "Zen 4", "Zen 4, many examples", "other"],
)
def test_onednn_takes_the_layers_that_it_is_faster_with(
    processor: Any, examples: int, taken: int, monkeypatch: pytest.MonkeyPatch, calls: list[int]
) -> None:
    on(monkeypatch, processor)
    tensors = [0.1 * torch.randn(*shape) for shape in ((examples, 512), (64, 512), (64,), (3, 64), (3,))]
    module = make_fx(relus)(*tensors)
    expected = module(*tensors)
    use_onednn(module.graph)
    use_bindings(module.graph)
    module.recompile()
    torch.testing.assert_close(module(*tensors), expected)
    assert calls == [examples] * taken
    if processor.forward:  # one of the two large layers feeds a ReLU alone, the other one is asked for itself
        assert module.code.count(", True)") == 1


@pytest.mark.thorough
@pytest.mark.parametrize(("width", "dtype"), [(64, torch.float32), (512, torch.float64)])
def test_small_layers_and_other_numbers_stay_where_they_are(
    width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, ZEN_5)
    module = make_fx(relus)(*(torch.randn(*n, dtype=dtype) for n in ((20, width), (64, width), (64,), (3, 64), (3,))))
    use_onednn(module.graph)
    module.recompile()
    assert "_linear" not in module.code


@pytest.mark.thorough
@pytest.mark.parametrize("processor", [ZEN_5, ZEN_4])
@pytest.mark.parametrize("examples", [20, 100])
@pytest.mark.parametrize("beta", [1, 0.5])
def test_gradients_of_weights_over_many_examples_go_through_onednn(
    examples: int, beta: float, processor: Any, monkeypatch: pytest.MonkeyPatch, calls: list[int]
) -> None:
    on(monkeypatch, processor)

    def step(w: Tensor, x: Tensor, g: Tensor) -> Tensor:
        return torch.ops.aten.addmm_.default(w, g.t(), x, beta=beta, alpha=-0.1)

    w, x, g = 0.1 * torch.randn(64, 512), torch.randn(examples, 512), torch.randn(examples, 64)
    module = make_fx(step)(w.clone(), x, g)
    expected = step(w.clone(), x, g)
    use_onednn(module.graph)
    module.recompile()
    torch.testing.assert_close(module(w.clone(), x, g), expected, rtol=1e-5, atol=1e-5)
    added = w.clone()
    add_product(added, g.t(), x, alpha=-0.1)
    torch.testing.assert_close(added, step(w.clone() / beta, x, g), rtol=1e-5, atol=1e-5)
    assert len(calls) == (2 if examples >= 48 and processor is ZEN_5 else 0)


def test_weights_that_do_not_change_go_through_onednn_as_they_lie(
    monkeypatch: pytest.MonkeyPatch, calls: list[int]
) -> None:
    """The anchor's weights reach a step transposed, as constants."""
    on(monkeypatch, ZEN_5)

    def at_anchor(w: Tensor, b: Tensor, x: Tensor, v: Tensor) -> list[Tensor]:
        grads = torch.addmm(b, x, w.t())
        anchor = torch.addmm(b, x, v.t())
        return [(grads - anchor).t() @ x, (grads - anchor).sum(0), grads.sum()]

    w, b, x, v = 0.1 * torch.randn(64, 512), torch.zeros(64), torch.randn(20, 512), 0.1 * torch.randn(64, 512)
    module = make_fx(at_anchor)(w, b, x, v)
    simplify(module)
    graphs = split_step(module.graph, 2, 1)
    assert graphs is not None
    use_onednn(graphs.step)
    moved_w, moved_b = w.clone(), b.clone()
    rest = fx.GraphModule(module, graphs.once)(v)[2:]
    fx.GraphModule(module, graphs.step)(moved_w, moved_b, x, *rest, -0.1)
    assert len(calls) == 2
    for found, start, direction in zip((moved_w, moved_b), (w, b), at_anchor(w, b, x, v), strict=False):
        torch.testing.assert_close(found, start - 0.1 * direction, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("vendor", "family", "capability", "expected"),
    [
        ("AuthenticAMD", "26", "AVX512", ZEN_5),
        ("AuthenticAMD", "25", "AVX512", ZEN_4),
        ("AuthenticAMD", "25", "AVX2", OTHER),
        ("GenuineIntel", "6", "AVX512", OTHER),
        ("", "", "AVX512", OTHER),
    ],
)
def test_processors_are_told_apart(
    vendor: str, family: str, capability: str, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"vendor_id\t: {vendor}\ncpu family\t: {family}\nflags\t\t: fpu vme\n\nvendor_id\t: {vendor}\n"
    monkeypatch.setattr(Path, "read_text", lambda self: text if str(self) == "/proc/cpuinfo" else "")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert onednn._least.__wrapped__() == expected


def test_machines_that_say_nothing_of_themselves_are_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Path) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", fail)
    assert onednn._least.__wrapped__() == OTHER
