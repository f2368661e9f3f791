"""Errors in clients' work: the client and step at fault, and short messages for users."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric

from lightning_fed import ClientError, FederatedError
from lightning_fed.algorithms import Mime
from lightning_fed.compat.private import SIGTERMException
from lightning_fed.core.rounds import ClientReport
from lightning_fed.engines.client_errors import ONE_VALUE, NamesClient, fault_of
from lightning_fed.strategies.split import PeerError
from tests.helpers.engines import Ordinary, assert_agree, refused, run
from tests.helpers.training import FEATURES, data, trainer


class Step(Ordinary):
    """Passes the loss of its training step through a function."""

    def __init__(self, then: Callable[..., Any]) -> None:
        super().__init__()
        self.then = then
        self.calls, self.seen, self.notes = 0, [], {}
        self.metric, self.unreduced = MeanMetric(), CatMetric()
        self.register_buffer("counter", torch.zeros(()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        return self.then(self, loss, batch)


def test_long_vmap_error_is_shortened_and_logged_in_full(caplog: pytest.LogCaptureFixture) -> None:
    def write_shared(module: Any, loss: Tensor, batch: Any) -> Tensor:
        shared = torch.zeros(FEATURES)
        shared[batch[0][0] > 0] = 1.0  # vmap rejects this with 393 characters
        return loss + 0 * shared.sum()

    t = trainer(engine="auto", callbacks=[])
    with caplog.at_level("DEBUG", logger="pytorch_lightning"):
        t.fit(Step(write_shared), data())
    (told,) = [r.getMessage() for r in caplog.records if "takes 'sequential'" in r.getMessage()]
    assert re.search(r"in-place operation, in test_client_errors.py, line \d+; .* level DEBUG\)\. Change that", told)
    assert "vmap:" not in told
    (whole,) = [r.getMessage() for r in caplog.records if r.levelname == "DEBUG" and "vmap:" in r.getMessage()]
    assert len(whole) > 300
    assert whole.endswith("please file a bug report instead.")


def test_unknown_error_is_described_by_type_and_line() -> None:
    class LongError(RuntimeError):
        pass

    def fail_on_vmap(module: Any, loss: Tensor, batch: Any) -> Tensor:
        if torch._C._functorch.is_batchedtensor(batch[0]):
            raise LongError("long" * 100)
        return loss

    where = r"in test_client_errors.py, line \d+"
    refused(partial(Step, fail_on_vmap), rf"at once \(a LongError, {where}; the full text of the error is in the log")


def report(steps: int = 3, loss: float = 0.5, norm: float = 1.0) -> ClientReport:
    return ClientReport("ann", 7, steps, loss, {}, norm, 0.0)


def test_client_with_non_finite_loss_or_parameters_is_blamed() -> None:
    assert fault_of(report(), lambda: [0.5] * 3, 2) is None
    assert fault_of(report(steps=0, loss=float("nan")), list, 2) is None, "it has no loss"
    for found, what in ((report(loss=float("inf")), "a loss"), (report(norm=float("nan")), "parameters")):
        error = fault_of(found, lambda: [0.5, float("inf"), float("nan")], 2)
        assert error is not None
        assert error.culprit == "ann"
        says = f"Client 'ann' returned {what}.* that (is|are) not finite in round 2, after 3 local steps; its"
        assert re.match(says + " loss was first inf at local step 2", str(error))


@pytest.mark.parametrize(
    ("error", "says", "culprit"),
    [
        (ValueError("no"), "ValueError: no", "ann"),
        (ClientError("no data"), ": no data", "ann"),
        (FederatedError("a setting"), "FederatedError: a setting", None),
        (MemoryError(), "MemoryError", None),
        (RuntimeError("DefaultCPUAllocator: can't allocate"), "DefaultCPUAllocator", None),
        (
            RuntimeError(f"{ONE_VALUE}, got [1, 8]"),
            r"got \[1, 8\]\. BatchNorm .*drop_last.*another full_batch_size",
            "ann",
        ),
        (RuntimeError("no Sparse tensors"), "leave out sparse=True", "ann"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_error_names_client_round_and_step(error: Exception, says: str, culprit: str | None) -> None:
    names = NamesClient("ann", 4, "its work", lambda: 2)
    where = "Client 'ann' failed in its work in round 4, local step 3: "
    with pytest.raises(ClientError, match=where) as caught, names:
        raise error
    assert re.search(says, str(caught.value))
    assert (caught.value.culprit, caught.value.__cause__) == (culprit, error)


def test_error_after_the_last_step_names_no_further_step() -> None:
    names = NamesClient("ann", 0, "its work", lambda: 4, planned=4)
    with pytest.raises(ClientError, match="in round 0, after its 4 local steps: ValueError"), names:
        raise ValueError


def test_error_before_the_first_step_names_no_step() -> None:
    names = NamesClient("ann", 0, "its gradient", lambda: None)
    with pytest.raises(ClientError, match="in its gradient in round 0: ValueError"), names:
        raise ValueError


@pytest.mark.parametrize("request_", [KeyboardInterrupt(), SIGTERMException(), PeerError("process 1 has failed")])
def test_stop_requests_and_outside_failures_blame_no_client(request_: BaseException) -> None:
    with pytest.raises(type(request_)), NamesClient("ann", 0, "its work", lambda: 0):
        raise request_


def test_step_without_a_gradient_cannot_be_clipped_by_value() -> None:
    def skip(module: Any, loss: Tensor, batch: Any) -> Any:
        module.calls += 1
        return None if module.calls == 2 else loss

    clip = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value", "max_rounds": 1}
    with pytest.raises(
        ClientError, match="local step 2: RuntimeError.*training_step returned None, and PyTorch cannot"
    ):
        trainer(**clip).fit(Step(skip), data())
    for remedy in ({"gradient_clip_algorithm": "norm"}, {"gradient_clip_on": "corrected"}):
        fitted = trainer(**{**clip, **remedy})
        fitted.fit(Step(skip), data())
        assert fitted.fit_loop.round == 1


class FixedSize(Ordinary):
    """Fails on batches of more than four examples, as a queue of keys or a recurrent state may."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + torch.zeros(4)[: len(batch[0])].add(batch[0][:, 0] * 0).sum()


def test_fixed_batch_size_module_raises_a_full_batch_size_hint() -> None:
    with pytest.raises(ClientError, match=r"full-batch gradient in round 0: RuntimeError.*set the data module's full_"):
        trainer(algorithm=Mime()).fit(FixedSize(), data())
    trainer(algorithm=Mime(), max_rounds=1).fit(FixedSize(), data(full_batch_size=4))


class Spectral(Ordinary):
    """Views a parameter as complex numbers, as state space models do. It starts at index 155 of the vector."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.copies = copies
        self.filter = nn.ParameterList([torch.ones(FEATURES, 2)])

    def forward(self, x: Tensor) -> Tensor:
        weight = self.filter[0].clone() if self.copies else self.filter[0]
        return super().forward((torch.view_as_complex(weight) * x).real)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.thorough
def test_parameter_viewed_as_another_dtype_must_be_copied() -> None:
    with pytest.raises(ClientError, match=r"divisible by 2\. Parameters are parts of one vector here.*weight\.clone"):
        run("auto", partial(Spectral, copies=False), max_rounds=1)
    assert_agree(run("sequential", partial(Spectral, copies=True)), run("vectorized", partial(Spectral, copies=True)))
