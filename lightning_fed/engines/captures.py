"""Traced local steps recorded as CUDA graphs: one launch a step instead of one for every kernel."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_fed._compat import rank_zero_warn
from lightning_fed.engines.traces import TracedStep, Traces

__all__ = ["CapturedStep", "captured"]

Work = Callable[[], Sequence[Tensor]]


class Recording(Protocol):
    """Work on memory that stays where it is, to be done again and again."""

    def record(self, work: Work) -> Sequence[Tensor]:
        """Record the work, and return the tensors that hold its results whenever it has been done."""
        ...

    def replay(self) -> None:
        """Do the work."""
        ...


class _CudaGraph:
    """A recording on a GPU."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def record(self, work: Work) -> Sequence[Tensor]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()  # libraries set themselves up in a first run, which cannot be recorded
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self._graph):
            return work()

    def replay(self) -> None:
        self._graph.replay()


def recording_on(device: torch.device) -> Recording | None:
    """Return a new recording, None where the device has none."""
    return _CudaGraph() if device.type == "cuda" else None


def captured(
    traces: Traces,
    step: TracedStep,
    y: Tensor,
    views: Sequence[Tensor],
    leaves: Sequence[Tensor],
    rest: Sequence[Any],
) -> "CapturedStep | None":
    """Return a step as a recording, None where it cannot be one.

    Args:
        traces: The run's traces.
        step: The traced step.
        y: The memory that the parameters lie in; left as it is.
        views: The parameters.
        leaves: A batch.
        rest: What the step takes after it, tensors and numbers.
    """
    recording = recording_on(y.device) if traces.may_capture else None
    if recording is None:
        return None
    key = (y.data_ptr(), *((t.shape, t.dtype) for t in (*leaves, *rest) if isinstance(t, Tensor)))
    found: CapturedStep | None = step.captures.get(key)
    if found is not None and found.numbers == _numbers(rest):
        return found
    before = y.clone()
    try:
        found = step.captures[key] = CapturedStep(recording, step, views, leaves, rest)
    except RuntimeError as error:
        traces.may_capture = False
        rank_zero_warn(f"Local steps are not recorded as CUDA graphs, which is slower: {error}.")
        return None
    finally:
        y.copy_(before)
    return found


class CapturedStep:
    """A traced step on memory that stays where it is.

    Args:
        recording: What records it.
        step: The step.
        views: The parameters.
        leaves: A batch, of the shape of all.
        rest: What the step takes after it.

    Attributes:
        numbers: The numbers among the latter, which are part of the recording.
    """

    def __init__(
        self,
        recording: Recording,
        step: TracedStep,
        views: Sequence[Tensor],
        leaves: Sequence[Tensor],
        rest: Sequence[Any],
    ) -> None:
        self._recording = recording
        self.numbers = _numbers(rest)
        self._leaves = [leaf.clone() for leaf in leaves]
        self._rest = [value.clone() if isinstance(value, Tensor) else value for value in rest]
        self._given = rest
        self._results = recording.record(lambda: step.run(*views, *self._leaves, *self._rest))

    def __call__(self, leaves: Sequence[Tensor], rest: Sequence[Any]) -> Sequence[Tensor]:
        """Move the parameters, and return the loss and the logged values in a list."""
        _copy(leaves, self._leaves)
        if rest is not self._given:
            _copy(rest, self._rest)
            self._given = rest
        self._recording.replay()
        return [result.clone() for result in self._results]


def _numbers(rest: Sequence[Any]) -> list[Any]:
    return [value for value in rest if not isinstance(value, Tensor)]


def _copy(values: Sequence[Any], into: Sequence[Any]) -> None:
    for value, memory in zip(values, into, strict=True):
        if isinstance(memory, Tensor):
            memory.copy_(value, non_blocking=True)
