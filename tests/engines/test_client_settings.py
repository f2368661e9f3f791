"""Settings changed by client hooks: each client uses its own, or an error names the setting."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedCallback, FederatedDataModule, FederatedError
from lightning_fed.algorithms import Ditto, FedAvg, FedProx, Mime, Scaffold, SGDm
from lightning_fed.callbacks import ClientModels, RoundProgressBar, UpdateCosine
from lightning_fed.engines.client_settings import SettingsSnapshot
from tests.engines.sequential.test_engine import Teacher
from tests.helpers.engines import Ordinary, Record, assert_agree, assert_close, results_of, run, state_of
from tests.helpers.processes import in_processes
from tests.helpers.selection import few
from tests.helpers.training import CLASSES, FEATURES, clients, data, same

RESTARTS = "engine='auto' restarts round"
PLAIN = partial(torch.optim.SGD, lr=0.1)
EVEN = partial(data, (8, 8, 8, 8))
UNALIKE = (1.0, 5.0, 1.0, 1.0)  # the last client leaves the first client's value
VECTORIZED: list[dict[str, Any]] = [{"engine": "vectorized"}, {"engine": "vectorized", "chunk_size": 1}]


@dataclass(slots=True)
class Options:
    """Settings without a ``__dict__``."""

    factor: float = 1.0


class Adjustable(Ordinary):
    """Has settings of all kinds, and each scales the logits."""

    def __init__(self, optimizer: Any = PLAIN) -> None:
        super().__init__(optimizer)
        self.factor, self.numbers, self.table = 1.0, torch.ones(CLASSES), {"deep": [1.0]}
        self.hparams.factor = 1.0
        self.hparams.config = {"model": {"head": {"loss": {"scale": {"of": {"logits": 1.0}}}}}}
        self.options = Options()
        self.frozen = nn.Linear(1, 1, bias=False).requires_grad_(False)
        nn.init.ones_(self.frozen.weight)
        self.hidden = [nn.Linear(1, 1, bias=False)]
        nn.init.ones_(self.hidden[0].weight)
        self.inner = nn.Identity()
        self.inner.factor = 1.0
        self.doubling = nn.Identity()
        self.last = nn.Identity()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.last(self(batch[0])) * self.factor * self.numbers * self.table["deep"][0] * self.hparams.factor
        out = (
            out
            * self.frozen.weight.view(())
            * self.hidden[0].weight.detach().view(())
            * self.inner.factor
            * self.options.factor
            * self.hparams.config["model"]["head"]["loss"]["scale"]["of"]["logits"]
            * (1 if self.doubling.training else 2)
        )
        loss = F.cross_entropy(out, batch[1])
        self.log("train_loss", loss)
        return loss


class Noisy(FederatedDataModule):
    """Shifts all examples of a batch by an attribute."""

    shift = 1.0

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + self.shift, batch[1]]


def noisy() -> FederatedDataModule:
    return Noisy(clients((8, 8, 8, 8)), batch_size=4)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


Setter = Callable[[Any, Any, float], None]


class Sets(FederatedCallback):
    """Sets a value for each client, by its id and the round."""

    def __init__(self, setter: Setter, value: Callable[[int, int], float], hook: str = "on_client_start") -> None:
        self.setter, self.value, self.hook = setter, value, hook

    def on_client_start(self, trainer: Any, pl_module: Any, round: int, client_id: Any) -> None:
        if self.hook == "on_client_start":
            self.setter(trainer, pl_module, self.value(client_id, round))

    def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
        if self.hook == "on_client_end":
            self.setter(trainer, pl_module, self.value(client_report.client_id, trainer.current_epoch))


def attribute(trainer: Any, module: Any, value: float) -> None:
    module.factor = value


def nested(trainer: Any, module: Any, value: float) -> None:
    module.inner.factor = value


def slot(trainer: Any, module: Any, value: float) -> None:
    module.options.factor = value


def new_tensor(trainer: Any, module: Any, value: float) -> None:
    module.numbers = torch.full((CLASSES,), value)


def tensor_in_place(trainer: Any, module: Any, value: float) -> None:
    module.numbers.data.fill_(value)


def collection(trainer: Any, module: Any, value: float) -> None:
    module.table["deep"][0] = value


def hyper_parameter(trainer: Any, module: Any, value: float) -> None:
    module.hparams.factor = value


def configuration(trainer: Any, module: Any, value: float) -> None:
    module.hparams.config["model"]["head"]["loss"]["scale"]["of"]["logits"] = value


def frozen(trainer: Any, module: Any, value: float) -> None:
    with torch.no_grad():
        module.frozen.weight.fill_(value)


def unregistered(trainer: Any, module: Any, value: float) -> None:
    module.hidden[0].load_state_dict({"weight": torch.full((1, 1), value)})


def mode(trainer: Any, module: Any, value: float) -> None:
    module.doubling.train(value == 1.0)


def submodule(trainer: Any, module: Any, value: float) -> None:
    module.last = nn.Identity() if value == 1.0 else Doubled()


def forward_hook(trainer: Any, module: Any, value: float) -> None:
    module.last._forward_hooks.clear()
    if value != 1.0:
        module.last.register_forward_hook(doubled)


def doubled(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
    return 2 * output


def rate(trainer: Any, module: Any, value: float) -> None:
    trainer.optimizers[0].param_groups[0]["lr"] = 0.1 * value


def momentum(trainer: Any, module: Any, value: float) -> None:
    trainer.optimizers[0].param_groups[0]["momentum"] = 0.1 * value


def decay(trainer: Any, module: Any, value: float) -> None:
    trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.1 * value


def method(trainer: Any, module: Any, value: float) -> None:
    trainer.fit_loop.settings.algorithm.mu = value


def clip(trainer: Any, module: Any, value: float) -> None:
    trainer.gradient_clip_val = 0.1 * value


def data_module(trainer: Any, module: Any, value: float) -> None:
    trainer.datamodule.shift = value


SETTERS: dict[Setter, str] = {
    attribute: "the attribute 'factor' of Adjustable",
    nested: "the attribute 'inner.factor' of Adjustable",
    slot: "the attribute 'options' of Adjustable",
    new_tensor: "the attribute 'numbers' of Adjustable",
    tensor_in_place: "the attribute 'numbers' of Adjustable",
    collection: "the attribute 'table' of Adjustable",
    hyper_parameter: "the attribute '_hparams' of Adjustable",
    configuration: "the attribute '_hparams' of Adjustable",
    frozen: "the frozen parameter 'frozen.weight' of Adjustable",
    unregistered: "the attribute 'hidden.0.weight' of Adjustable",
    mode: "the attribute 'doubling.training' of Adjustable",
    submodule: "the attribute '_modules' of Adjustable",
    forward_hook: "the attribute 'last._forward_hooks' of Adjustable",
    rate: "the learning rate of the local optimizer",
    momentum: "the option 'momentum' of the local optimizer",
    decay: "the option 'weight_decay' of the local optimizer",
    method: "the attribute 'mu' of FedProx",
    clip: "trainer.gradient_clip_val",
    data_module: "trainer.datamodule.shift",
}


def options_of(setter: Setter) -> dict[str, Any]:
    algorithm = FedProx(mu=1.0) if setter is method else FedAvg()
    return {"make": Adjustable, "algorithm": algorithm, "datamodule": noisy if setter is data_module else EVEN}


def setting(setter: Setter, value: Callable[[int, int], float], **options: Any) -> Callable[..., Any]:
    """Return a function that starts a run and sets a value for each client."""

    def start(**engine: Any) -> Any:
        return run(**{**options_of(setter), **options, "callbacks": [Sets(setter, value)], **engine})

    return start


@pytest.mark.parametrize("setter", few(SETTERS, [attribute, slot, rate]))
def test_auto_gives_each_client_its_own_settings(setter: Setter) -> None:
    start = setting(setter, lambda client, _: UNALIKE[client], max_rounds=2)
    with pytest.warns(UserWarning, match=RESTARTS) as said:
        found = start(engine="auto")
    (text,) = [str(warning.message) for warning in said if RESTARTS in str(warning.message)]
    assert "round 0 with 'sequential'" in text
    assert SETTERS[setter] in text
    assert same(state_of(found), state_of(start(engine="sequential")))


@pytest.mark.parametrize("engine", few(VECTORIZED, VECTORIZED[:1]), ids=["together", "alone"])
@pytest.mark.parametrize("setter", few(SETTERS, [nested, configuration, new_tensor, momentum, unregistered]))
def test_vectorized_error_names_the_setting_and_the_client(setter: Setter, engine: dict[str, Any]) -> None:
    start = setting(setter, lambda client, _: UNALIKE[client], max_rounds=1)
    found = f"on_client_start changes {SETTERS[setter]} for client [01],.*on_round_start.*engine='sequential'"
    with pytest.raises(FederatedError, match=found):
        start(**engine)


class Wide(Adjustable):
    """Has one setting in its class, and another in a large array."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.array = np.ones(200_000)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.scale * float(self.array[777])


def class_attribute(trainer: Any, module: Any, value: float) -> None:
    type(module).scale = value


def entry(trainer: Any, module: Any, value: float) -> None:
    module.array[777] = value


def gradient_hook(trainer: Any, module: Any, value: float) -> None:
    if value != 1.0:
        module.head.weight.register_hook(lambda gradient: value * gradient)


@pytest.mark.parametrize(("setter", "name"), [(class_attribute, "Wide.scale"), (entry, "array")])
def test_class_attributes_and_large_array_entries_are_settings(setter: Setter, name: str) -> None:
    start = setting(setter, lambda client, _: UNALIKE[client], make=Wide, max_rounds=1)
    with pytest.warns(UserWarning, match=f"{RESTARTS}.*attribute {name!r} of Wide"):
        found = start(engine="auto")
    assert same(state_of(found), state_of(start(engine="sequential")))
    assert (Wide.scale, found.lightning_module.array[777]) == (1.0, 1.0)


def test_vectorized_rejects_per_client_parameter_hooks() -> None:
    start = setting(gradient_hook, lambda client, _: UNALIKE[client], max_rounds=1)
    with pytest.raises(FederatedError, match="on_client_start changes the hooks of the parameter 'head.weight' for cl"):
        start(engine="vectorized")


@pytest.mark.parametrize("engine", few(VECTORIZED, VECTORIZED[:1]), ids=["together", "alone"])
def test_error_for_a_setting_shared_by_clients_suggests_on_round_start(engine: dict[str, Any]) -> None:
    start = setting(rate, lambda _, round: 2.0, max_rounds=1)
    with pytest.raises(FederatedError, match=r"on_client_start changes the learning rate .* for client 0, .* in on_ro"):
        start(**engine)


def array(trainer: Any, module: Any, value: float) -> None:
    module.array[:] = value


def test_array_contents_are_compared() -> None:
    class WithArray(Adjustable):
        def __init__(self) -> None:
            super().__init__()
            self.array = np.ones(CLASSES)

    start = setting(array, lambda client, _: UNALIKE[client], max_rounds=1, make=WithArray)
    with pytest.raises(FederatedError, match="on_client_start changes the attribute 'array' of WithArray for client 1"):
        start(engine="vectorized")


@pytest.mark.parametrize("algorithm", few([Scaffold(option="i"), Ditto(0.1)], []), ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("chunk_size", few([1, 4], []))
def test_full_gradients_and_custom_solves_use_hook_settings(algorithm: Any, chunk_size: int) -> None:
    for value in (lambda _, round: 1.0 + round, lambda client, _: UNALIKE[client]):
        start = setting(attribute, value, algorithm=algorithm, max_rounds=3)
        expected = start(engine="sequential")
        assert_agree(start(engine="auto", chunk_size=chunk_size), expected)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(("setter", "name"), [(attribute, "attribute 'factor'"), (frozen, "parameter 'frozen.weight'")])
def test_setting_missing_from_full_gradients_is_rejected(setter: Setter, name: str, engine: str) -> None:
    start = setting(setter, lambda _, round: 2.0, algorithm=Mime(SGDm()), max_rounds=1)
    with pytest.raises(FederatedError, match=f"{name} of Adjustable for client 0, after Mime has taken full-batch"):
        start(engine=engine)


def trainable(trainer: Any, module: Any, value: float) -> None:
    module.head.bias.requires_grad_(value == 1.0)


@pytest.mark.parametrize("hook", ["on_client_start", "on_client_end"])
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_freezing_a_parameter_per_client_is_rejected(hook: str, engine: str) -> None:
    """A method would still correct the parameter's zero gradient, and move it."""
    callback = Sets(trainable, lambda client, _: float(client == 0), hook)
    with pytest.raises(FederatedError, match=r"has frozen the parameter 'head\.bias'"):
        run(engine, make=Adjustable, algorithm=Scaffold(), datamodule=EVEN, callbacks=[callback], max_rounds=1)


# ---------------------------------------------------------------------- for one client alone


def values_of(trainer: Any) -> list[Any]:
    """Return the values of all settings that these tests change."""
    module, data = trainer.lightning_module, trainer.datamodule
    options = [{k: v for k, v in group.items() if k != "params"} for group in trainer.optimizers[0].param_groups]
    of_trainer = trainer.gradient_clip_val, trainer.fit_loop.corrected_clip, vars(trainer.fit_loop.settings.algorithm)
    of_data = getattr(data, "shift", 1.0), hasattr(data, "not_there_before")
    tensors = (
        module.numbers.tolist(),
        module.frozen.weight.tolist(),
        module.hidden[0].weight.tolist(),
        module.head.bias.requires_grad,
    )
    hooks = len(module.last._forward_hooks), type(module.last), module.doubling.training
    plain = (
        module.factor,
        module.inner.factor,
        module.options.factor,
        module.hparams.factor,
        module.hparams.config["model"]["head"],
    )
    more = hasattr(module, "not_there_before"), module.table
    return copy.deepcopy([options, *of_trainer, *of_data, *tensors, *hooks, *plain, *more])


class OnlyFor(FederatedCallback):
    """Changes a setting for clients 1 and 3, and records the settings that clients and rounds find."""

    def __init__(self, setter: Setter, round: int | None = None) -> None:
        self.setter, self.round = setter, round
        self.found: list[Any] = []
        self.at_end: list[Any] = []

    def _note(self, trainer: Any, notes: list[Any]) -> None:
        if trainer.fit_loop.prepared is not None:
            notes.append(values_of(trainer))

    def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
        self._note(trainer, self.found)

    def on_client_start(self, trainer: Any, pl_module: Any, round: int, client_id: Any) -> None:
        self._note(trainer, self.found)
        if client_id in (1, 3) and self.round in (None, round):
            self.setter(trainer, pl_module, 5.0)

    def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
        if client_report.client_id in (1, 3):
            self._note(trainer, self.at_end)

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        self._note(trainer, self.found)


def extra(trainer: Any, module: Any, value: float) -> None:
    module.not_there_before = [value]


def extended(trainer: Any, module: Any, value: float) -> None:
    module.table["deep"].append(value)
    module.table["more"] = value


def everything(trainer: Any, module: Any, value: float) -> None:
    for setter in (*SETTERS, extra, extended):
        setter(trainer, module, 1.1)
    trainer.fit_loop.corrected_clip = (value, "norm")
    trainer.datamodule.not_there_before = [value]


def test_combined_hook_settings_apply_to_their_client_only() -> None:
    callback = OnlyFor(everything)
    run("sequential", callbacks=[callback], **{**options_of(method), "datamodule": noisy, "max_rounds": 2})
    assert len(callback.found) == 2 * 6
    assert all(one == callback.found[0] for one in callback.found)


@pytest.mark.parametrize("hook", ["on_client_start", "on_train_batch_start"])
def test_hook_settings_are_restored_if_the_round_is_interrupted(hook: str) -> None:
    class Leaves(OnlyFor):
        def on_client_start(self, trainer: Any, pl_module: Any, round: int, client_id: Any) -> None:
            super().on_client_start(trainer, pl_module, round, client_id)
            self.leave(hook == "on_client_start" and pl_module.factor == 5.0)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            self.leave(pl_module.factor == 5.0)

        def leave(self, now: bool) -> None:
            if now:
                raise KeyboardInterrupt

    module = Adjustable()
    with pytest.raises(SystemExit):
        run("sequential", callbacks=[Leaves(attribute)], **{**options_of(attribute), "make": lambda: module})
    assert module.factor == 1.0


@pytest.mark.parametrize("setter", few([*SETTERS, extra, extended], [attribute, configuration, slot, rate]))
def test_hook_setting_applies_to_its_client_only(setter: Setter) -> None:
    callback = OnlyFor(setter)
    options = {**options_of(setter), "max_rounds": 2}
    found = run("sequential", callbacks=[callback], **options)
    first, *others = callback.found
    assert len(others) == 2 * 6 - 1
    assert all(one == first for one in others)
    assert len(callback.at_end) == 2 * 2
    assert all(one != first for one in callback.at_end)
    auto = OnlyFor(setter)
    with pytest.warns(UserWarning, match=RESTARTS):
        assert same(state_of(run("auto", callbacks=[auto], **options)), state_of(found))
    assert auto.found[-1] == auto.found[0]
    with pytest.raises(FederatedError, match="engine='vectorized' cannot give each client its own settings"):
        run("vectorized", callbacks=[OnlyFor(setter)], **options)


@pytest.mark.thorough
def test_per_client_hook_setting_is_kept_in_a_resumed_run(tmp_path: Path) -> None:
    options = {**options_of(attribute), "engine": "sequential"}
    half = run(callbacks=[OnlyFor(attribute, round=1)], max_rounds=2, **options)
    half.save_checkpoint(tmp_path / "half.ckpt")
    whole, resumed = (
        run(callbacks=[OnlyFor(attribute, round=1)], max_rounds=3, **options, **more)
        for more in ({}, {"ckpt_path": tmp_path / "half.ckpt"})
    )
    assert same(state_of(resumed), state_of(whole))


def test_changes_made_by_training_are_kept() -> None:
    class Counts(Adjustable):
        taken = 0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.taken += 1
            return super().training_step(batch, batch_idx)

    t = run("sequential", callbacks=[OnlyFor(attribute)], **{**options_of(attribute), "make": Counts})
    assert t.lightning_module.taken == t.fit_loop.steps_taken


def test_tensor_too_large_to_copy_cannot_be_written_per_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fed.engines.client_settings._COPIED", 2)
    with pytest.raises(FederatedError, match="on_client_start changes 'numbers' of Adjustable in place: 3 numbers"):
        run("sequential", callbacks=[OnlyFor(tensor_in_place)], **options_of(tensor_in_place))
    run("sequential", callbacks=[OnlyFor(new_tensor)], max_rounds=1, **options_of(new_tensor))


# ---------------------------------------------------------------------- after clients


@pytest.mark.parametrize("chunk_size", few([None, 1, 2], [None]))
@pytest.mark.parametrize("setter", few([attribute, rate, data_module], [attribute]))
def test_setting_from_on_client_end_applies_to_the_next_client(setter: Setter, chunk_size: int | None) -> None:
    def start(engine: str, **options: Any) -> Any:
        callback = Sets(setter, lambda client, _: 1.0 + client, "on_client_end")
        return run(engine, callbacks=[callback], **options, **options_of(setter))

    with pytest.warns(UserWarning, match=f"{RESTARTS} 0"):
        found = start("auto", chunk_size=chunk_size)
    assert same(state_of(found), state_of(start("sequential")))


def test_vectorized_error_names_the_setting_from_on_client_end() -> None:
    callback = Sets(attribute, lambda client, _: 1.0 + client, "on_client_end")
    with pytest.raises(FederatedError, match=r"on_client_end changes the attribute 'factor' .* after client \d"):
        run("vectorized", callbacks=[callback], **options_of(attribute))


@pytest.mark.thorough
def test_setting_after_the_last_client_applies_to_the_next_round() -> None:
    class Last(FederatedCallback):
        """Changes a setting after the last client of a round."""

        ended = 0

        def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
            self.ended += 1
            if self.ended % 4 == 0:
                pl_module.factor = 1.0 + self.ended / 4

    options = {"max_rounds": 2, **options_of(attribute)}
    expected = run("sequential", callbacks=[Last()], **options)
    with pytest.warns(UserWarning, match=f"{RESTARTS} 0"):
        assert same(state_of(run("auto", callbacks=[Last()], **options)), state_of(expected))


# ---------------------------------------------------------------------- the restart


class Relative(Record):
    """Changes settings relative to their values from round ``first`` on, undoes some of them, and counts clients."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.first, self.count, self.restarts = first, 0, 0
        self.noted: list[float] = []

    def on_client_start(self, trainer: Any, pl_module: Any, round: int, client_id: Any) -> None:
        super().on_client_start(trainer, pl_module, round, client_id)
        if round < self.first:
            return
        self.count += 1
        trainer.optimizers[0].param_groups[0]["lr"] *= 1 + self.count
        pl_module.factor += 0.1 * self.count
        pl_module.numbers.mul_(1 + 0.1 * client_id)
        pl_module.table["deep"].insert(0, 1.0 + self.count)
        self.noted.append(pl_module.factor)

    def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
        super().on_client_end(trainer, pl_module, client_report)
        if self.count:
            trainer.optimizers[0].param_groups[0]["lr"] /= 1 + self.count
            pl_module.numbers.div_(1 + 0.1 * client_report.client_id)

    def on_round_restart(self, trainer: Any, pl_module: Any, round: int) -> None:
        self.restarts += 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("first", "chunk_size"), [pytest.param(f, c, id=f"{f}-{c}") for f in (0, 1) for c in (None, 1, 3)]
)
def test_hooks_of_a_restarted_round_start_from_its_initial_state(first: int, chunk_size: int | None) -> None:
    records = Relative(first), Relative(first)
    with pytest.warns(UserWarning, match=f"{RESTARTS} {first}"):
        found = run("auto", callbacks=[records[0]], chunk_size=chunk_size, **options_of(attribute))
    expected = run("sequential", callbacks=[records[1]], **options_of(attribute))
    one, other = (r.order[len(r.order) - 8 * (3 - first) :] for r in records)
    assert one == other  # from the restarted round on
    assert records[0].count == records[1].count == 4 * (3 - first)
    assert records[0].noted == records[1].noted
    assert (records[0].restarts, records[1].restarts) == (1, 0)
    assert_agree(found, expected)
    if first == 0:
        assert same(state_of(found), state_of(expected))


@pytest.mark.thorough
def test_resumed_run_keeps_the_engine_and_yields_identical_bits(tmp_path: Path) -> None:
    def value(client: int, round: int) -> float:
        return UNALIKE[client] if round == 0 else 1.0

    start = setting(attribute, value, make=partial(Adjustable, None))
    with pytest.warns(UserWarning, match=RESTARTS):
        whole, half = (start(engine="auto", max_rounds=rounds) for rounds in (4, 2))
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed = start(engine="auto", max_rounds=4, ckpt_path=tmp_path / "half.ckpt")
    assert resumed.fit_loop.clients.engine.name == "sequential"
    assert same(state_of(resumed), state_of(whole))


@pytest.mark.parametrize("hook", few(["on_client_start", "on_client_end"], []))
@pytest.mark.parametrize("method", few([FedAvg, Scaffold], []))
def test_failing_clients_are_dropped_with_per_client_settings(hook: str, method: Any) -> None:
    def with_invalid() -> FederatedDataModule:
        parts = clients((8, 8, 8, 8))
        parts[2].tensors[0][0] = float("nan")
        return FederatedDataModule(parts, batch_size=4)

    options: dict[str, Any] = {"on_client_error": "drop", "max_failed_share": 0.5, "limit_val_batches": 0}
    options |= {"make": Adjustable, "algorithm": method(), "datamodule": with_invalid}
    found, expected = (
        run(engine, callbacks=[Sets(attribute, lambda client, _: UNALIKE[client], hook)], **options)
        for engine in ("auto", "sequential")
    )
    assert same(state_of(found), state_of(expected))


@pytest.mark.thorough
@pytest.mark.parametrize("hook", ["on_client_start", "on_client_end"])
def test_two_processes_restart_together(hook: str, tmp_path: Path) -> None:
    alone = results_of(in_two(hook, devices=1, engine="sequential"))["state"]
    for outcome in in_processes(partial(results_in_two, hook), tmp_path):
        state, name = outcome.value
        assert name == "sequential"
        assert_close(state, alone)


def in_two(hook: str, engine: str = "auto", **options: Any) -> Any:
    # The value depends on the client alone, since each process starts from its own settings. Only client 3 differs.
    callback = Sets(attribute, lambda client, _: 5.0 if client == 3 else 1.0, hook)
    if hook == "on_client_end":
        callback = Sets(attribute, lambda client, _: 1.0, hook)
        callback.on_client_start = Sets(attribute, lambda client, _: 5.0 if client == 3 else 1.0).on_client_start
    sizes = partial(data, (8, 8, 8, 8, 8, 8))
    case = {**options_of(attribute), "datamodule": sizes, "clients_per_round": 6, "algorithm": Scaffold()}
    return run(engine, callbacks=[callback], **{**case, **options})


def results_in_two(hook: str) -> Any:
    t = in_two(hook, strategy="clients", devices=2)
    return results_of(t)["state"], t.fit_loop.clients.engine.name


# ---------------------------------------------------------------------- settings that are not compared


@pytest.mark.thorough
@pytest.mark.parametrize("own", [None, RoundProgressBar, ClientModels, UpdateCosine])
def test_settings_are_not_compared_without_user_hooks(
    own: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Rounds(FederatedCallback):
        def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
            pl_module.factor = 1.0 + round

    monkeypatch.setattr(SettingsSnapshot, "changed", lambda *_: pytest.fail("settings were looked at"))
    callbacks = [Rounds(), *([own()] if own is not None else [])]
    bar = {"enable_progress_bar": own is RoundProgressBar, "default_root_dir": tmp_path}
    fit = run("auto", callbacks=callbacks, max_rounds=2, chunk_size=1, **bar, **options_of(attribute))
    assert fit.fit_loop.clients.engine.name == "vectorized"


@pytest.mark.thorough
def test_hooks_that_only_observe_keep_the_engine() -> None:
    options = {"max_rounds": 2, "chunk_size": 1, **options_of(attribute)}
    with_hooks = run("auto", callbacks=[Record()], **options)
    assert with_hooks.fit_loop.clients.engine.name == "vectorized"
    assert same(state_of(with_hooks), state_of(run("auto", **options)))


class Weighted(Ordinary):
    """Weights classes by a buffer."""

    def __init__(self) -> None:
        super().__init__(PLAIN)
        self.register_buffer("weights", torch.ones(CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return (self.weights[y] * F.cross_entropy(self(x), y, reduction="none")).mean()


class Replaces(FederatedCallback):
    """Changes the weight of the last class in every round, and gives each client its own buffer."""

    def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
        pl_module.weights[-1] = 1.0 + round

    def on_client_start(self, trainer: Any, pl_module: Any, round: int, client_id: Any) -> None:
        pl_module.weights = pl_module.weights.clone()


@pytest.mark.thorough
def test_buffer_replaced_by_a_hook_falls_back_to_sequential() -> None:
    stream, labels = torch.Generator().manual_seed(0), [[0, 1] * 4, [CLASSES - 1] * 8]
    sets = [TensorDataset(torch.randn(8, FEATURES, generator=stream), torch.tensor(y)) for y in labels]
    options = {"clients_per_round": 2, "callbacks": [Replaces()]}
    start = partial(run, make=Weighted, datamodule=partial(FederatedDataModule, clients=sets, batch_size=4), **options)
    with pytest.warns(UserWarning, match=f"{RESTARTS} 0 .*changes the attribute 'weights' of Weighted for client 0"):
        found = start("auto")
    assert same(state_of(found), state_of(start("sequential")))


class Counting(Ordinary):
    """Has a buffer that clients change, and a personal layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("batches", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches += 1
        return super().training_step(batch, batch_idx)


class Seen(FederatedCallback):
    """Records the module's state when a client's work begins and ends."""

    def __init__(self) -> None:
        self.start: dict[Any, Any] = {}
        self.end: dict[Any, Any] = {}
        self.server: dict[int, Any] = {}

    def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
        self.server[round] = copied(pl_module)

    def on_client_start(self, trainer: Any, pl_module: Any, round: int, client_id: Any) -> None:
        self.start[round, client_id] = copied(pl_module)
        assert torch.equal(trainer.fit_loop.client_model[0], trainer.fit_loop.state.x)

    def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
        self.end[trainer.current_epoch, client_report.client_id] = copied(pl_module)


def copied(module: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(("module", "engine"), [(Counting, "sequential"), (Ordinary, "vectorized")])
def test_hooks_see_the_model_the_client_starts_from(module: Any, engine: str) -> None:
    """They do not see the previous client's model: a hook may keep the server's model as a teacher, for example."""
    seen = Seen()
    options = {} if engine == "sequential" else {"chunk_size": 1}
    run(engine, module, EVEN, callbacks=[seen], personal=["head.*"], max_rounds=2, **options)
    assert len(seen.start) == 8
    for (number, client), start in seen.start.items():
        for name, value in start.items():
            own = seen.end[0, client][name] if number and name.startswith("head.") else seen.server[number][name]
            assert torch.equal(value, own), (number, client, name)


def test_hook_changes_to_weights_and_buffers_warn_once() -> None:
    """A client starts from the server's values, so setting them in a hook has no effect."""

    def edit(trainer: Any, module: Any, value: float) -> None:
        if value == 5.0:
            module.batches.fill_(value)

    with pytest.warns(UserWarning, match="on_client_start changes 'batches' of Counting for client 1") as warned:
        run("sequential", Counting, EVEN, callbacks=[Sets(edit, lambda client, _: UNALIKE[client])], max_rounds=2)
    assert len([w for w in warned if "on_client_start" in str(w.message)]) == 1


@pytest.mark.thorough
def test_both_engines_discard_hook_changes_to_weights_and_buffers() -> None:
    def edit(trainer: Any, module: Any, value: float) -> None:
        with torch.no_grad():
            module.head.weight.fill_(value)

    for engine in ("auto", "sequential"):
        options = {"max_rounds": 2, **options_of(attribute)}
        t = run(engine, callbacks=[Sets(edit, lambda client, _: UNALIKE[client])], **options)
        assert same(state_of(t), state_of(run(engine, **options)))


@pytest.mark.parametrize("engine", ["sequential", "auto"])
def test_teacher_that_follows_the_training_is_rejected(engine: str) -> None:
    with pytest.raises(FederatedError, match=r"changes the parameter 'teacher\..*as_buffers=\['teacher\.\*'\]"):
        run(engine, Teacher)


class Still(Teacher):
    """Has a teacher that its steps never change."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return Ordinary.training_step(self, batch, batch_idx)


def teacher(trainer: Any, module: Any, value: float) -> None:
    with torch.no_grad():
        for p in module.teacher.parameters():
            p.fill_(value)


@pytest.mark.parametrize("engine", few(["sequential", "vectorized"], ["vectorized"]))
def test_parameters_as_buffers_cannot_be_set_per_client(engine: str) -> None:
    options = {"make": Still, "datamodule": EVEN, "as_buffers": ["teacher.*"], "max_rounds": 1}
    with pytest.warns(UserWarning, match="on_client_start changes 'teacher.weight' of Still .*without effect"):
        found = run(engine, callbacks=[Sets(teacher, lambda client, _: UNALIKE[client])], **options)
    assert same(state_of(found), state_of(run(engine, **options)))


class FromTheSecondRound(Teacher):
    """Has a teacher that follows from the second round on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.current_epoch:
            self.follow()
        return Ordinary.training_step(self, batch, batch_idx)


class InLaterBatches(Teacher):
    """Has a teacher that follows in place from the third batch on, which the first clients do not reach."""

    def follow(self) -> None:
        for old, new in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
            old.data.mul_(0.9).add_(new.data, alpha=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx > 1:
            self.follow()
        return Ordinary.training_step(self, batch, batch_idx)


@pytest.mark.parametrize(
    ("module", "engine"),
    [(FromTheSecondRound, "sequential"), (InLaterBatches, "sequential"), (InLaterBatches, "vectorized")],
)
def test_teacher_that_starts_following_later_is_rejected(module: Any, engine: str) -> None:
    """Its changes would leak from one client to the next: an error of 130 % after four rounds."""
    with pytest.raises(FederatedError, match=r"changes the parameter 'teacher\..*as_buffers=\['teacher\.\*'\]"):
        run(engine, module, partial(data, (8, 8, 8, 24)))


class Outside(Teacher):
    """Has a teacher among trained layers, with ``requires_grad`` set although the optimizer does not train it."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleDict({"teacher": self.teacher.requires_grad_(True), "head": self.head})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.body.parameters(), *self.head.parameters()], lr=0.1)


def test_suggested_pattern_matches_no_trained_parameter() -> None:
    with pytest.raises(FederatedError, match="as_buffers=\\['teacher\\.\\*'\\]"):
        run("sequential", Outside)
