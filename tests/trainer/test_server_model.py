"""Hooks' changes of the model between rounds become the server's; changes during clients' work do not."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import Callback, LambdaCallback
from torch import Tensor

from lightning_fed import FederatedCallback, FederatedError
from lightning_fed.algorithms import FedAvg, FedDyn, Mime, Scaffold
from tests.helpers import engines
from tests.helpers.engines import Ordinary, assert_agree, state_of
from tests.helpers.processes import in_processes
from tests.helpers.selection import few
from tests.helpers.training import parameters, same

ENGINES = ("sequential", "vectorized")
run = partial(engines.run, datamodule=engines.full_batches)
HOOKS = ("on_train_start", "on_train_epoch_start", "on_validation_start", "on_validation_end", "on_train_epoch_end")


def crossed(*axes: Iterable[Any], default: Iterable[str]) -> list[Any]:
    """Return the product of several axes. The default run takes only the cases with these names."""
    cases = (
        pytest.param(*values, id="-".join(getattr(v, "__name__", str(v)) for v in values)) for values in product(*axes)
    )
    return few(cases, list(default))


class Annealed(Ordinary):
    """Has its weight decay in a buffer, which a hook may set."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("decay", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1]) + self.decay * self.head.weight.pow(2).sum()


def count(trainer: Any, module: Any, *_: Any) -> None:
    module.decay += 0.1


def halve(trainer: Any, module: Any, *_: Any) -> None:
    with torch.no_grad():
        module.head.weight.mul_(0.5)


def replace(trainer: Any, module: Any, *_: Any) -> None:
    module.head.weight.data = torch.full_like(module.head.weight, 0.25)


def hooked(hook: str, edit: Callable[..., None]) -> Callback:
    return LambdaCallback(**{hook: edit})


class AtRounds(FederatedCallback):
    """Edits in one of the hooks of rounds and clients."""

    def __init__(self, hook: str, edit: Callable[..., None]) -> None:
        self.edit = edit
        setattr(self, hook, edit)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("hook", "engine"),
    crossed(
        HOOKS,
        ENGINES,
        default=["on_train_epoch_start-vectorized"],
    ),
)
def test_buffer_set_by_a_hook_reaches_the_clients(hook: str, engine: str) -> None:
    t = run(engine, Annealed, callbacks=[hooked(hook, count)], num_sanity_val_steps=0)
    times = 1 if hook == "on_train_start" else 3
    assert float(t.lightning_module.decay) == pytest.approx(0.1 * times)
    plain = run(engine, Annealed)
    if hook in HOOKS[:2]:  # the other hooks set it for the next round, or after the last one
        assert not torch.equal(t.fit_loop.state.x, plain.fit_loop.state.x)
    assert float(t.fit_loop.state.buffers["decay"]) == pytest.approx(0.1 * times)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("hook", "method"),
    crossed(HOOKS, (FedAvg, Scaffold, Mime), default=["on_train_epoch_end-Scaffold"]),
)
def test_engines_agree_on_edits_by_hooks(hook: str, method: Any) -> None:
    def edit(*args: Any) -> None:
        count(*args)
        halve(*args)

    assert_agree(*(run(e, Annealed, algorithm=method(), callbacks=[hooked(hook, edit)]) for e in ENGINES))


@pytest.mark.thorough
@pytest.mark.parametrize(("edit", "engine"), crossed([halve, replace], ENGINES, default=["halve-vectorized"]))
def test_parameters_edited_at_the_end_of_fit_are_kept(edit: Callable[..., None], engine: str) -> None:
    plain = run(engine).lightning_module
    expected = plain.head.weight.detach().clone() * 0.5 if edit is halve else torch.full_like(plain.head.weight, 0.25)
    edited = run(engine, callbacks=[hooked("on_train_end", edit)])
    module = edited.lightning_module
    assert torch.equal(module.head.weight, expected)
    assert torch.equal(module.body[0].weight, plain.body[0].weight)
    assert torch.equal(parameters(module), edited.fit_loop.state.x)


@pytest.mark.parametrize("engine", few(ENGINES, ["sequential"]))
def test_initial_weights_may_be_set_in_on_train_start(engine: str) -> None:
    class Own(Ordinary):
        def __init__(self) -> None:
            super().__init__()
            replace(None, self)

    late = run(engine, callbacks=[hooked("on_train_start", replace)])
    assert same(state_of(late), state_of(run(engine, Own)))


@pytest.mark.parametrize("hook", ["on_round_start", "on_round_end"])
def test_round_hooks_may_edit_buffers(hook: str) -> None:
    t = run("sequential", Annealed, callbacks=[AtRounds(hook, count)])
    assert float(t.fit_loop.state.buffers["decay"]) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("hook", "engine"),
    crossed(
        ["on_client_start", "on_client_end"],
        ENGINES,
        default=["on_client_end-vectorized"],
    ),
)
def test_edits_in_client_hooks_are_discarded(hook: str, engine: str) -> None:
    def edit(*args: Any) -> None:
        count(*args)
        halve(*args)

    silent = AtRounds(hook, lambda *_: None)
    assert same(*(state_of(run(engine, Annealed, callbacks=[c])) for c in (AtRounds(hook, edit), silent)))


@pytest.mark.parametrize(
    ("hook", "engine"),
    crossed(HOOKS[1:], ENGINES, default=["on_train_epoch_start-sequential"]),
)
def test_edited_run_resumes_with_identical_bits(hook: str, engine: str, tmp_path: Path) -> None:
    class Save(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.fit_loop.round}.ckpt")

    def edit(*args: Any) -> None:
        count(*args)
        halve(*args)

    def go(**options: Any) -> Any:
        callbacks = [hooked(hook, edit), Save()]
        return run(engine, Annealed, algorithm=Scaffold(), callbacks=callbacks, num_sanity_val_steps=0, **options)

    whole = go(max_rounds=4)
    resumed = go(max_rounds=4, ckpt_path=tmp_path / "2.ckpt")
    assert same(*(state_of(t) for t in (whole, resumed)))
    saved = torch.load(tmp_path / "4.ckpt", weights_only=False)
    weights = torch.cat(
        [saved["state_dict"][name].reshape(-1) for name, _ in whole.lightning_module.named_parameters()]
    )
    assert torch.equal(weights, saved["loops"]["fit_loop"]["state_dict"]["step"]["x"])


@pytest.mark.parametrize("engine", few(ENGINES, ["sequential"]))
def test_measuring_is_not_an_edit(engine: str) -> None:
    class Measure(FederatedCallback):
        def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
            loop = trainer.fit_loop
            loop.full_gradient(0, torch.zeros_like(loop.state.x))
            loop.hessian_vector(0, torch.zeros_like(loop.state.x), torch.ones_like(loop.state.x))
            loop.evaluate_client(0, on="train", steps=2)
            loop.training_loss(0)

    assert same(*(state_of(run(engine, callbacks=[c])) for c in (Measure(), AtRounds("on_round_end", lambda *_: None))))


def test_editing_an_evaluated_but_untrained_model_is_rejected() -> None:
    shown = FedDyn(alpha=0.1, evaluate="mean")
    with pytest.raises(FederatedError, match=r"hook has changed parameters.*FedDyn shows another model"):
        run("sequential", algorithm=shown, callbacks=[hooked("on_train_epoch_end", halve)])
    run("sequential", Annealed, algorithm=shown, callbacks=[hooked("on_train_epoch_end", count)])


def edited_in_processes(only_first: bool) -> Any:
    def edit(trainer: Any, module: Any, *_: Any) -> None:
        if trainer.is_global_zero or not only_first:
            halve(trainer, module)

    options = {"devices": 2, "strategy": "clients", "accelerator": "cpu"}
    return state_of(run("sequential", callbacks=[hooked("on_train_epoch_start", edit)], **options))["x"]


@pytest.mark.thorough
def test_processes_must_make_the_same_edits(tmp_path: Path) -> None:
    alone = state_of(run("sequential", callbacks=[hooked("on_train_epoch_start", halve)]))["x"]
    for outcome in in_processes(lambda: edited_in_processes(False), tmp_path):
        torch.testing.assert_close(outcome.value, alone, rtol=1e-12, atol=1e-14)
    (tmp_path / "unlike").mkdir()
    outcomes = in_processes(lambda: edited_in_processes(True), tmp_path / "unlike")
    assert all("not alike in all processes" in str(outcome.error) for outcome in outcomes)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("engine", "chunk_size"),
    [
        pytest.param(engine, size, id=f"{size}-{engine}")
        for engine, size in [("sequential", None), *product(["vectorized"], [None, 1, 3])]
    ],
)
def test_client_hook_finds_the_client_model_in_the_module(engine: str, chunk_size: int | None) -> None:
    class Look(FederatedCallback):
        def __init__(self) -> None:
            self.models: list[Tensor] = []

        def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
            found = parameters(pl_module).clone()
            assert torch.equal(found, trainer.fit_loop.client_model[0])
            trainer.fit_loop.training_loss(0)
            assert torch.equal(found, parameters(pl_module))
            self.models.append(found)

    look, expected = Look(), Look()
    t = run(engine, callbacks=[look], chunk_size=chunk_size)
    run("sequential", callbacks=[expected])
    for one, other in zip(look.models, expected.models, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)
    assert torch.equal(parameters(t.lightning_module), t.fit_loop.state.x)


@pytest.mark.parametrize("engine", ENGINES)
def test_freezing_a_trained_parameter_during_fit_is_rejected(engine: str) -> None:
    def freeze(trainer: Any, module: Any, *_: Any) -> None:
        module.head.weight.requires_grad_(trainer.current_epoch < 1)

    with pytest.raises(FederatedError, match=r"frozen the parameter 'head.weight'.*fixed when the fit starts"):
        run(engine, callbacks=[hooked("on_train_epoch_start", freeze)])


@pytest.mark.parametrize("engine", ENGINES)
def test_unfreezing_an_optimizer_parameter_during_fit_is_rejected(engine: str) -> None:
    def freeze(trainer: Any, module: Any, *_: Any) -> None:
        module.head.weight.requires_grad_(trainer.current_epoch > 0)

    hooks = [hooked("on_fit_start", freeze), hooked("on_train_epoch_start", freeze)]
    with pytest.raises(FederatedError, match=r"unfrozen the parameter 'head.weight'.*fixed when the fit starts"):
        run(engine, callbacks=hooks)


class UnfreezesInAStep(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.current_epoch == 1:
            self.head.weight.requires_grad_(True)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_step_that_unfreezes_a_parameter_is_rejected_with_advice() -> None:
    with pytest.raises(FederatedError, match=r"has unfrozen the parameter 'head.weight'.*optimizer with rate 0"):
        run("sequential", UnfreezesInAStep)


@pytest.mark.parametrize("engine", few(ENGINES, ["sequential"]))
def test_parameters_may_be_frozen_after_training(engine: str) -> None:
    t = run(engine, callbacks=[hooked("on_train_end", lambda trainer, module: module.freeze())])
    assert not any(p.requires_grad for p in t.lightning_module.parameters())
    assert same(state_of(t), state_of(run(engine)))
