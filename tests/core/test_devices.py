"""The device functions, with PyTorch device modules that lack some features."""

import re
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_fed.core import devices
from lightning_fed.core.errors import FederatedError

CPU, OTHER = torch.device("cpu"), torch.device("xpu", 1)


def with_module(monkeypatch: pytest.MonkeyPatch, **names: Any) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(**names))


def test_cpu_reports_no_memory_and_only_the_global_stream() -> None:
    before = torch.get_rng_state()
    devices.seed_device(CPU, 5)
    devices.seed_device(None, 5)
    assert torch.equal(before, torch.get_rng_state())
    assert devices.memory_of(CPU) is None
    assert devices.get_device_random_state(CPU) is None
    assert devices.accumulation(CPU) == {"dtype": torch.float64, "device": CPU}


def test_memory_reserved_by_pytorch_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with_module(
        monkeypatch,
        mem_get_info=lambda device: (100, 1000),
        memory_reserved=lambda device: 70,
        memory_allocated=lambda device: 30,
    )
    assert devices.memory_of(OTHER) == (140, 1000)


def test_shared_memory_device_reports_its_recommended_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with_module(monkeypatch, recommended_max_memory=lambda: 1000, current_allocated_memory=lambda: 300)
    assert devices.memory_of(OTHER) == (700, 1000)


def test_device_without_memory_info_has_no_known_memory_or_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    with_module(monkeypatch)
    assert devices.memory_of(OTHER) is None
    assert not devices.reset_peak_memory(OTHER)


def test_all_kinds_of_out_of_memory_errors_are_recognized() -> None:
    texts = (
        "MPS backend out of memory (MPS allocated",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate",
    )
    for error in (torch.OutOfMemoryError("CUDA out of memory"), *map(RuntimeError, texts)):
        assert devices.is_out_of_memory(error)
    for other in (None, RuntimeError("shape"), ValueError(texts[0]), MemoryError()):
        assert not devices.is_out_of_memory(other)


def test_released_error_frees_memory_in_every_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied, held = [], []

    def work() -> None:
        tensor = torch.zeros(3)
        held.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("no memory")

    def named() -> None:
        other = torch.zeros(3)
        held.append(weakref.ref(other))
        try:
            work()
        except RuntimeError as error:
            raise ValueError("in a client's work") from error

    def handled() -> None:
        last = torch.zeros(3)
        held.append(weakref.ref(last))
        try:
            named()
        except ValueError:
            raise KeyError("while it was handled")  # noqa: B904

    with_module(monkeypatch, empty_cache=lambda: emptied.append(1))
    with pytest.raises(KeyError, match="handled") as caught:
        handled()
    assert [tensor() is None for tensor in held] == [False] * 3
    devices.release_memory(caught.value, OTHER)
    assert [tensor() is None for tensor in held] == [True] * 3
    assert emptied == [1]


def test_stream_is_the_default_generator_of_the_device_index(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [torch.Generator(), torch.Generator()]
    with_module(monkeypatch, default_generators=streams, current_device=lambda: 0)
    devices.seed_device(OTHER, 5)
    assert streams[1].initial_seed() == 5
    state = devices.get_device_random_state(OTHER)
    drawn = torch.rand(3, generator=streams[1])
    assert not torch.equal(devices.get_device_random_state(OTHER), state)
    devices.set_device_random_state(OTHER, state)
    assert torch.equal(torch.rand(3, generator=streams[1]), drawn)
    devices.seed_device(torch.device("xpu"), 6)  # without an index: the current device
    assert streams[0].initial_seed() == 6


def test_lazily_created_generators_are_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[torch.Generator] = []
    with_module(monkeypatch, default_generators=streams, init=lambda: streams.extend([torch.Generator()] * 2))
    devices.seed_device(OTHER, 5)
    assert streams[1].initial_seed() == 5


def test_device_without_generators_uses_its_random_state_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = torch.Generator()
    with_module(
        monkeypatch, manual_seed=stream.manual_seed, get_rng_state=stream.get_state, set_rng_state=stream.set_state
    )
    devices.seed_device(OTHER, 5)
    state = devices.get_device_random_state(OTHER)
    drawn = torch.rand(3, generator=stream)
    devices.set_device_random_state(OTHER, state)
    assert torch.equal(torch.rand(3, generator=stream), drawn)


def test_device_without_a_random_stream_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with_module(monkeypatch)
    with pytest.raises(FederatedError, match=r"no random generator for the device 'xpu:1'"):
        devices.seed_device(OTHER, 5)


class Elsewhere(torch.Tensor):
    """A CPU tensor that is compared as if it were on an accelerator."""

    is_cpu = False  # type: ignore[assignment]


def test_shape_mismatch_is_unequal_and_keeps_the_result_order() -> None:
    one = torch.ones(2).as_subclass(Elsewhere)
    pairs = [(one, one[:1]), (one, one.clone()), (one, one + 1), (one[:1], one), (one, one.clone())]
    assert devices.are_equal(pairs) == [False, True, False, False, True]
    assert devices.are_equal([(torch.ones(2), torch.ones(1)), (torch.ones(2), torch.ones(2))]) == [False, True]


@pytest.mark.parametrize("has", [True, False])
def test_sums_are_on_the_cpu_if_the_device_has_no_float64(monkeypatch: pytest.MonkeyPatch, has: bool) -> None:
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: SimpleNamespace(has_fp64=has))
    assert devices.accumulation(OTHER) == {"dtype": torch.float64, "device": OTHER if has else CPU}
    assert devices.accumulation(torch.device("mps")) == {"dtype": torch.float64, "device": CPU}


def test_no_other_file_names_an_accelerator_type() -> None:
    package = Path(devices.__file__).parents[1]
    named = re.compile(r"""torch\.(cuda|xpu|mps)\b|["'](cuda|xpu|mps)["']""")
    found = {
        str(path.relative_to(package)): match.group()
        for path in package.rglob("*.py")
        if path != Path(devices.__file__) and (match := named.search(path.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(("kind", "pins"), [(None, False), ("cuda", True), ("mps", False)])
def test_memory_is_pinned_only_where_it_helps(monkeypatch: pytest.MonkeyPatch, kind: str | None, pins: bool) -> None:
    found = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    assert devices.can_pin() == pins
