"""A resumed run keeps its engine, and so ends with the same bits."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_fed import FederatedError
from lightning_fed.algorithms import Ditto, FedAvg, Scaffold
from lightning_fed.engines.vectorized.trial import TrialStep
from tests.helpers.engines import Ordinary, run, state_of
from tests.helpers.selection import few
from tests.helpers.training import CLASSES, FEATURES, data, same

EVEN = partial(data, (8, 8, 8, 8))


def engines_of(trainer: Any) -> list[str]:
    return trainer.fit_loop.clients.engine_names


def resumed(tmp_path: Path, at: int, to: int, first: dict[str, Any], second: dict[str, Any] | None = None) -> Any:
    """Return a run that is resumed at a round, possibly with other options."""
    path = tmp_path / f"{at}.ckpt"
    run(**first, max_rounds=at).save_checkpoint(path)
    return run(**(first if second is None else second), max_rounds=to, ckpt_path=path)


class Fitting(pl.LightningModule):
    """Fits its data quickly, so gradients are small and half-precision rounding dominates them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


class WithoutScaler(MixedPrecision):
    """Float16 mixed precision on a CPU, without gradient scaling."""

    def __init__(self) -> None:
        super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
        self.scaler = None


PRECISIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "bf16-mixed": lambda: {"precision": "bf16-mixed"},
    "bf16-true": lambda: {"precision": "bf16-true"},
    "16-true": lambda: {"precision": "16-true"},
    "16-mixed": lambda: {"precision": None, "plugins": [WithoutScaler()]},
}
FIT: dict[str, Any] = {"make": Fitting, "datamodule": EVEN, "limit_val_batches": 0, "local_epochs": 2}


@pytest.mark.thorough
@pytest.mark.parametrize("at", [2, 5, 20, 120])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_trial_decision_is_stable_in_half_precision(precision: str, at: int, tmp_path: Path) -> None:
    options = {**FIT, "engine": "auto"}
    whole = run(**options, **PRECISIONS[precision](), max_rounds=at + 2)
    first, second = ({**options, **PRECISIONS[precision]()} for _ in range(2))
    found = resumed(tmp_path, at, at + 2, first, second)
    assert engines_of(whole) == engines_of(found) == ["vectorized"]
    assert same(state_of(found), state_of(whole))


class Enlarged(torch.autograd.Function):
    """The identity, except that it is 5 % larger for several clients at once."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return 1.05 * x, in_dims[0]


class Wrong(torch.autograd.Function):
    """The identity, with a gradient that is 5 % too large for several clients at once."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Enlarged.apply(grad)


class Mistaken(Fitting):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(Wrong.apply(self.net(batch[0])), batch[1])


@pytest.mark.parametrize("precision", few(PRECISIONS, ["bf16-mixed"]))
def test_trial_in_half_precision_detects_wrong_results(precision: str) -> None:
    with pytest.raises(FederatedError, match="of several clients at once differs from that of one"):
        run(**{**FIT, "make": Mistaken}, **PRECISIONS[precision](), engine="vectorized", max_rounds=1)


class HalfOnly(Fitting):
    """Runs in half precision only."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        if out.dtype != torch.bfloat16:
            raise TypeError("this module is for bfloat16")
        return F.cross_entropy(out.float(), batch[1])


@pytest.mark.parametrize("precision", few(["bf16-mixed", "bf16-true"], ["bf16-mixed"]))
def test_half_precision_module_is_tried_in_half_precision(precision: str) -> None:
    found = run(**{**FIT, "make": HalfOnly}, precision=precision, engine="auto", max_rounds=2)
    assert engines_of(found) == ["vectorized"]


@pytest.mark.parametrize("precision", few(PRECISIONS, ["bf16-true"]))
def test_trial_does_not_modify_module_or_random_state(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    trial = TrialStep.run

    def watched(self: TrialStep, group: Any) -> None:
        def seen() -> list[Any]:
            tensors = (*self.module.parameters(), *self.module.buffers())
            return [(t.dtype, t.data_ptr(), t.detach().clone()) for t in tensors]

        before, random = seen(), torch.get_rng_state()
        trial(self, group)
        looked.append(same(before, seen()) and torch.equal(random, torch.get_rng_state()))

    class Frozen(Fitting):
        def __init__(self) -> None:
            super().__init__()
            self.net[0].requires_grad_(False)
            self.register_buffer("shift", torch.full((CLASSES,), 0.3))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]) + self.shift, batch[1])

    monkeypatch.setattr(TrialStep, "run", watched)
    run(**{**FIT, "make": Frozen}, **PRECISIONS[precision](), engine="vectorized", max_rounds=1)
    assert looked == [True]


# ---------------------------------------------------------------------- the choice in the checkpoint


class PerBatch(pl.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        """Do nothing. This hook needs a call for every batch."""


OPTIONS: dict[str, Any] = {"engine": "auto", "make": Ordinary, "datamodule": EVEN}


def test_resumed_auto_run_keeps_its_engine(tmp_path: Path) -> None:
    with_hook = {**OPTIONS, "callbacks": [PerBatch()]}
    found = resumed(tmp_path, 1, 3, with_hook, OPTIONS)  # the resumed run lacks the hook that decided the engine
    assert engines_of(found) == ["sequential"]
    assert same(state_of(found), state_of(run(**with_hook, max_rounds=3)))


def test_resumed_auto_run_warns_when_it_must_change_engine(tmp_path: Path) -> None:
    text = r"continues with 'sequential', though this run was trained with 'vectorized'.*PerBatch.on_train_batch_end"
    with pytest.warns(UserWarning, match=text):
        found = resumed(tmp_path, 1, 3, OPTIONS, {**OPTIONS, "callbacks": [PerBatch()]})
    assert engines_of(found) == ["sequential"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("first", "second", "taken"),
    [
        pytest.param(first, second, taken, id=f"{first}-{second}")
        for first, second, taken in [
            ("sequential", "auto", "vectorized"),
            ("vectorized", "auto", "vectorized"),
            ("auto", "sequential", "sequential"),
            ("auto", "vectorized", "vectorized"),
        ]
    ],
)
def test_explicit_engine_is_not_kept_as_the_auto_choice(first: str, second: str, taken: str, tmp_path: Path) -> None:
    found = resumed(tmp_path, 1, 2, {**OPTIONS, "engine": first}, {**OPTIONS, "engine": second})
    assert engines_of(found) == [taken]


@pytest.mark.parametrize(("gave_up", "taken"), [(None, "vectorized"), (True, "sequential")])
def test_checkpoint_without_engine_choice_loads(gave_up: bool | None, taken: str, tmp_path: Path) -> None:
    path = tmp_path / "old.ckpt"
    run(**OPTIONS, max_rounds=1).save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    state = checkpoint["loops"]["fit_loop"]["state_dict"]
    del state["engine"]
    state |= {} if gave_up is None else {"gave_up": gave_up}
    torch.save(checkpoint, path)
    assert engines_of(run(**OPTIONS, max_rounds=2, ckpt_path=path)) == [taken]


class DrawsLater(Ordinary):
    """Adds noise from the second round on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0] + 0.1 * torch.randn_like(batch[0]) if self.current_epoch > 0 else batch[0]
        return F.cross_entropy(self(x), batch[1])


@pytest.mark.filterwarnings("ignore:engine='auto'")
def test_resumed_run_with_late_random_step_has_identical_bits(tmp_path: Path) -> None:
    options = {**OPTIONS, "make": DrawsLater}
    whole, found = run(**options, max_rounds=2), resumed(tmp_path, 1, 2, options)
    assert engines_of(whole) == engines_of(found) == ["sequential"]
    assert same(state_of(found), state_of(whole))


class FailsTogether(Ordinary):
    """Reads a tensor's value on batches of one example, which several clients at once cannot do."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        return loss * (1 + 0 * batch[0].sum().item()) if len(batch[0]) == 1 else loss


@pytest.mark.filterwarnings("ignore:engine='auto' continues")
@pytest.mark.parametrize(
    "algorithm", few([FedAvg(), Scaffold(), Ditto(0.1)], []), ids=lambda algorithm: type(algorithm).__name__
)
def test_both_engines_of_a_method_fall_back_together(algorithm: Any, tmp_path: Path) -> None:
    options = {**OPTIONS, "make": FailsTogether, "datamodule": partial(data, (5, 5, 5, 5)), "algorithm": algorithm}
    whole, found = run(**options, max_rounds=4), resumed(tmp_path, 2, 4, options)
    assert set(engines_of(whole)) == set(engines_of(found)) == {"sequential"}
    assert same(state_of(found), state_of(whole))


def test_second_fit_keeps_the_engine(tmp_path: Path) -> None:
    hook, module = PerBatch(), None
    found = run(**{**OPTIONS, "callbacks": [hook]}, max_rounds=1)
    module = found.lightning_module
    found.callbacks.remove(hook)
    found.fit_loop.max_epochs = 3
    found.fit(module, EVEN())
    assert engines_of(found) == ["sequential"]
    assert same(state_of(found), state_of(run(**OPTIONS | {"engine": "sequential"}, max_rounds=3)))
