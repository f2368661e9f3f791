"""Personal parameters, which clients train and keep but never send, and clients' personal models."""

import copy
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule, FederatedError
from lightning_fed.algorithms import (
    APFL,
    Ditto,
    FedAvg,
    FedBN,
    FedCM,
    FedNova,
    FedPer,
    FedProx,
    FedRep,
    FedSAM,
    LGFedAvg,
    Mime,
    MimeLite,
    PFedMe,
    Scaffold,
    ServerOnly,
)
from lightning_fed.callbacks import ClientAccuracy, PersonalizedAccuracy
from lightning_fed.core.errors import FederatedError as CoreError
from lightning_fed.server import FedAdam, FedBuff, TopK
from tests.helpers.engines import full_batches
from tests.helpers.processes import in_processes
from tests.helpers.selection import covering
from tests.helpers.training import Net, clients, data, parameters, same, seeded, trainer

SIZES = (13, 8, 21, 5, 16, 9)
HEAD, BODY = 27, 128  # numbers of parameters


def run(model: Any = None, datamodule: Any = None, ckpt_path: Any = None, **options: Any) -> Any:
    """Return the trainer after a fit in float64."""
    fitted = trainer(**{"precision": "64-true", "limit_val_batches": 0, **options})
    model = seeded(dropout=0.0) if model is None else model
    fitted.fit(model, data() if datamodule is None else datamodule, ckpt_path=ckpt_path)
    return fitted


def personal(fitted: Any) -> dict[int, Tensor]:
    """Return the personal parameters of the clients that have taken part."""
    states = fitted.fit_loop.state.clients.state_dict()
    return {i: states[i]["personal.parameters"] for i in sorted(states)}


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


# ---------------------------------------------------------------------- engines and processes

WAYS: dict[str, dict[str, Any]] = {
    "FedPer": {"algorithm": FedPer(["head.*"])},
    "LG-FedAvg": {"algorithm": LGFedAvg(["body.*"])},
    "Scaffold": {"algorithm": Scaffold(), "personal": ["body.3.*", "head.bias"]},
    "FedProx, clipped": {"algorithm": FedProx(0.5), "personal": ["head.*"], "gradient_clip_val": 0.2},
    "FedCM": {"algorithm": FedCM(0.4), "personal": ["body.0.weight"]},
    "FedNova, momentum": {"algorithm": FedNova(), "personal": ["head.*"], "momentum": 0.9},
    "FedSAM": {"algorithm": FedSAM(0.1), "personal": ["head.*"]},
    "sparse": {"personal": ["head.*"], "compression": TopK(0.2)},
    "FedBuff": {"personal": ["head.*"], "asynchronous": FedBuff(size=2, concurrency=3), "sampler": None},
    "FedAdam": {"personal": ["head.*"], "server_optimizer": partial(FedAdam, lr=0.05)},
}


def run_way(way: str, datamodule: Any, **options: Any) -> Any:
    chosen = dict(WAYS[way])
    model = seeded(dropout=0.0, weight_decay=0.01, momentum=chosen.pop("momentum", 0.0))
    return run(model, datamodule, local_epochs=2, **{**chosen, **options})


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
def test_engines_agree(way: str) -> None:
    one, other = (run_way(way, full_batches(), **own) for own in ({}, {"engine": "vectorized", "chunk_size": 2}))
    close(one.fit_loop.state.x, other.fit_loop.state.x)
    ours, theirs = personal(one), personal(other)
    assert ours.keys() == theirs.keys()
    for i, own in ours.items():
        close(own, theirs[i])


def measured(**options: Any) -> tuple[Tensor, dict[int, Tensor], dict[Any, Any]]:
    """Return x, the personal parameters and the measurements of personal models, in one or two processes."""
    measure = ClientAccuracy()
    val = FederatedDataModule(clients=clients(SIZES), client_val=dict(enumerate(clients(SIZES))), batch_size=4)
    fitted = run(datamodule=val, algorithm=Scaffold(), personal=["head.*"], callbacks=[measure], **options)
    return fitted.fit_loop.state.x, personal(fitted), measure.own_table


@pytest.mark.thorough
def test_two_processes_match_one(tmp_path: Path) -> None:
    x, own, table = measured()
    found = in_processes(partial(measured, strategy="clients", devices=2), tmp_path)
    assert not any(outcome.trace for outcome in found), found[0].trace
    kept: dict[int, Tensor] = {}
    for outcome in found:
        close(outcome.value[0], x)
        kept |= outcome.value[1]
        assert outcome.value[2].keys() == table.keys()
        for i, logged in table.items():
            assert outcome.value[2][i] == pytest.approx(logged, rel=1e-10)
    assert kept.keys() == own.keys()
    for i, value in own.items():
        close(kept[i], value)


def split(**options: Any) -> dict[str, tuple[Tensor, Any]]:
    """Return x and the clients' states for methods with and without their own local solves."""
    methods = (FedPer(["head.*"]), FedRep(["head.*"], 2), Ditto(0.5, batches="own"), APFL(0.4), PFedMe(2.0, 2))
    runs = {repr(method): run(algorithm=method, max_rounds=2, **options).fit_loop.state for method in methods}
    return {name: (state.x, state.clients.state_dict()) for name, state in runs.items()}


@pytest.mark.thorough
def test_processes_that_split_batches_match_one(tmp_path: Path) -> None:
    expected = split()
    for outcome in in_processes(partial(split, strategy="ddp", devices=2), tmp_path):
        assert not outcome.trace, outcome.trace
        for name, (x, states) in outcome.value.items():
            close(x, expected[name][0])
            assert states.keys() == expected[name][1].keys()
            for i, state in states.items():
                for key, value in state.items():
                    close(value, expected[name][1][i][key])


# ---------------------------------------------------------------------- local optimizers that clients keep


class WithNorm(Net):
    """The shared classifier with a layer for FedBN and any local optimizer."""

    build: Any = None

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.body.insert(0, nn.BatchNorm1d(6))

    def configure_optimizers(self) -> Any:
        return self.build(self.parameters())


OWN: dict[str, dict[str, Any]] = {
    "FedPer": {"algorithm": FedPer(["head.*"])},
    "FedRep": {"algorithm": FedRep(["head.*"], 2)},
    "LG-FedAvg": {"algorithm": LGFedAvg(["body.*"])},
    "FedBN": {"algorithm": FedBN()},
    "Ditto": {"algorithm": Ditto(0.5)},
    "APFL": {"algorithm": APFL(0.4)},
    "PFedMe": {"algorithm": PFedMe(2.0, 2)},
    "Scaffold": {"algorithm": Scaffold(), "personal": ["body.1.*", "head.bias"]},
}
SOLVERS: dict[str, Any] = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam": partial(torch.optim.Adam, lr=0.02),
    "AMSGrad": partial(torch.optim.AdamW, lr=0.02, amsgrad=True),
}


def with_norm(solver: str) -> WithNorm:
    model = seeded(WithNorm, dropout=0.0)
    model.build = SOLVERS[solver]
    return model


def kept(way: str, solver: str, where: str, folder: Path, part: str = "whole", **options: Any) -> Any:
    """Return x and this process's client states after three rounds, two ("first"), or a resumed third ("last")."""
    fitted = run(
        with_norm(solver),
        data((14, 8, 22, 6, 16, 10)),  # no batch has a single example, which BatchNorm rejects
        max_rounds=2 if part == "first" else 3,
        clients_per_round=4,  # of six: at least two train before and after the checkpoint
        ckpt_path=folder / f"{way}, {solver}.ckpt" if part == "last" else None,
        local_optimizer_state="keep",
        client_states=where,
        client_states_dir=folder / f"{way}, {solver}, {part}" if where == "disk" else None,
        **OWN[way],
        **options,
    )
    if part == "first":
        fitted.save_checkpoint(folder / f"{way}, {solver}.ckpt")
    state = fitted.fit_loop.state
    return state.x, state.clients.state_dict()


@pytest.mark.parametrize(("way", "solver", "where"), covering([*OWN], [*SOLVERS], ["disk", "memory"]))
def test_kept_optimizers_resume_exactly(way: str, solver: str, where: str, tmp_path: Path) -> None:
    straight = kept(way, solver, "memory", tmp_path)
    assert all(any(name.startswith("solver.") for name in state) for state in straight[1].values())
    kept(way, solver, where, tmp_path, "first")
    assert same(kept(way, solver, where, tmp_path, "last"), straight)


@pytest.mark.thorough
@pytest.mark.parametrize("ways", [pytest.param(["APFL"], id="one"), pytest.param([*OWN], id="all")])
@pytest.mark.parametrize(
    ("solver", "where"),
    [pytest.param(solver, where, id=f"{solver}, {where}") for solver in SOLVERS for where in ("disk", "memory")],
)
def test_kept_optimizers_match_in_two_processes(ways: list[str], solver: str, where: str, tmp_path: Path) -> None:
    def both_halves() -> Any:
        two = {"strategy": "clients", "devices": 2}
        for way in ways:
            kept(way, solver, where, tmp_path, "first", **two)
        return {way: kept(way, solver, where, tmp_path, "last", **two) for way in ways}

    outcomes = in_processes(both_halves, tmp_path)
    assert not any(outcome.error for outcome in outcomes), outcomes[0].trace + outcomes[1].trace
    for way in ways:
        x, states = kept(way, solver, "memory", tmp_path)
        found = {i: state for outcome in outcomes for i, state in outcome.value[way][1].items()}
        assert found.keys() == states.keys()
        for outcome in outcomes:
            close(outcome.value[way][0], x)
        for i, state in states.items():
            assert found[i].keys() == state.keys()
            for name, value in state.items():
                close(found[i][name], value)
        kept(way, solver, where, tmp_path, "last")  # one process resumes from the checkpoint of two


@pytest.mark.parametrize("solver", SOLVERS)
def test_single_client_with_kept_optimizer_matches_a_plain_loop(solver: str) -> None:
    (own,), model, plain = clients((12,)), with_norm(solver), with_norm(solver)
    options = {"clients_per_round": 1, "local_optimizer_state": "keep", "max_rounds": 4, "local_epochs": 2}
    one = FederatedDataModule(clients=[own], batch_size=12)
    fitted = run(model, one, algorithm=FedPer(["head.*"]), **options)
    plain, (x, y) = plain.double(), own.tensors
    optimizer = plain.configure_optimizers()
    for _ in range(8):
        optimizer.zero_grad()
        F.cross_entropy(plain(x.double()), y).backward()
        optimizer.step()
    close(torch.cat([fitted.fit_loop.state.x, personal(fitted)[0]]), parameters(plain))


# ---------------------------------------------------------------------- personal and sent parameters


def test_server_holds_only_the_shared_parameters() -> None:
    model = seeded(dropout=0.0)
    head = parameters(model.head).double()
    fitted = run(model, algorithm=Scaffold(), personal=["head.*"], max_rounds=2)
    assert len(fitted.fit_loop.state.x) == len(fitted.fit_loop.server["c"]) == BODY
    assert torch.equal(parameters(model.head), head), "the module shows x^0's own part"
    assert {len(own) for own in personal(fitted).values()} == {HEAD}
    assert not any(torch.equal(own, head) for own in personal(fitted).values())


def test_personal_parameters_are_not_counted_in_bytes() -> None:
    whole, part = (run(personal=names, max_rounds=2).fit_loop.state for names in ((), ("head.*",)))
    for name in ("bytes_up", "bytes_down"):
        assert getattr(part, name) * (BODY + HEAD) == getattr(whole, name) * BODY


def test_empty_personal_list_matches_the_plain_method() -> None:
    state = run(personal=[]).fit_loop.state
    assert torch.equal(state.x, run().fit_loop.state.x)
    saved = state.state_dict()
    assert not any(saved[name].untyped_storage().nbytes() for name in ("personal", "start")), "which a file would hold"


def test_single_client_trains_as_if_nothing_were_personal() -> None:
    one = data((13,), batch_size=4)
    fitted = run(datamodule=one, algorithm=FedPer(["head.*"]), clients_per_round=1)
    whole = run(datamodule=one, algorithm=FedAvg(), clients_per_round=1).fit_loop.state.x
    assert torch.equal(torch.cat([fitted.fit_loop.state.x, personal(fitted)[0]]), whole)


def test_clients_not_sampled_keep_their_parameters() -> None:
    fitted = run(algorithm=FedPer(["head.*"]), sampler=lambda seed, round: [[0, 1], [2, 3]][round], max_rounds=1)
    first = personal(fitted)
    fitted.max_rounds = 2
    fitted.fit(fitted.lightning_module, data())
    after = personal(fitted)
    assert [torch.equal(first[i], after[i]) for i in (0, 1)] == [True, True]
    assert set(after) == {0, 1, 2, 3}


class Edits(pl.Callback):
    """Sets the module's head to zero before the second round."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            for p in pl_module.head.parameters():
                p.data.zero_()


def test_new_clients_start_from_parameters_edited_by_hooks() -> None:
    options = {"sampler": lambda seed, round: [[0, 1], [0, 2]][round], "max_rounds": 2, "personal": ["head.*"]}
    model = seeded(dropout=0.0)
    plain, edited = personal(run(**options)), personal(run(model, callbacks=[Edits()], **options))
    assert torch.equal(plain[0], edited[0])
    assert not torch.equal(plain[2], edited[2])
    assert not parameters(model.head).any()


def test_showing_client_model_requires_a_running_fit() -> None:
    fitted = run(personal=["head.*"], max_rounds=1)
    with pytest.raises(FederatedError, match="showing_client_model works while a fit is running"):
        fitted.fit_loop.showing_client_model(0).__enter__()


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_resume_is_exact(where: str, tmp_path: Path) -> None:
    options = {"client_states": where, "algorithm": Scaffold(), "personal": ["head.*"]}
    options |= {"client_states_dir": tmp_path / "states"} if where == "disk" else {}
    half = run(max_rounds=2, **options)
    half.save_checkpoint(tmp_path / "half.ckpt")
    other = Net(dropout=0.0)  # its head differs from that of x^0
    rest = run(other, max_rounds=5, ckpt_path=tmp_path / "half.ckpt", **options)
    straight = run(max_rounds=5, **{**options, "client_states": "memory", "client_states_dir": None})
    assert same(rest.fit_loop.state.state_dict(), straight.fit_loop.state.state_dict())


def test_checkpoint_with_other_personal_parameters_is_rejected(tmp_path: Path) -> None:
    run(personal=["head.weight"], max_rounds=1).save_checkpoint(tmp_path / "a.ckpt")
    there = r"The checkpoint's personal is \['head.weight'\], this run's is "
    for names, mine in ((["head.bias"], r"\['head.bias'\]"), ((), "None")):
        with pytest.raises(FederatedError, match=there + mine):
            run(personal=names, max_rounds=2, ckpt_path=tmp_path / "a.ckpt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"personal": ["head.weigth"]}, r"personal='head.weigth' fits no trained parameter.*'head.weight'"),
        ({"personal": ["x*"]}, "fits no trained parameter and no buffer of Net. There are 'body.0.weight'"),
        ({"personal": ["*"]}, "leaves no trained parameter of Net to be shared"),
        ({"personal": "head.*"}, "personal must be a list of names"),
        ({"personal": [3]}, "personal must be a list of names"),
        (
            {"personal": ["head.*"], "algorithm": Mime()},
            "cannot be combined with Mime.*gradients at the server's model",
        ),
        ({"personal": ["head.*"], "algorithm": MimeLite()}, "cannot be combined with MimeLite"),
        ({"personal": ["head.*"], "algorithm": Scaffold("i")}, "cannot be combined with Scaffold"),
        ({"personal": ["head.*"], "algorithm": FedProx(0.1, adaptive=True)}, "watches the loss of the server's model"),
        ({"personal": ["head.*"], "algorithm": ServerOnly(), "local_epochs": None}, "no local steps to train them in"),
        ({"algorithm": FedBN()}, "FedBN keeps BatchNorm layers with the clients, and Net has none"),
    ],
)
def test_invalid_personal_parameters_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        run(**options)


@pytest.mark.parametrize("cls", [FedPer, LGFedAvg])
def test_methods_require_a_list_of_parameter_names(cls: type[FedPer]) -> None:
    for names in ([], "head", [""]):
        with pytest.raises(CoreError, match=f"{cls.__name__}.personal.* must be a list of names"):
            cls(names)


# ---------------------------------------------------------------------- personal models


@pytest.mark.thorough
def test_personal_models_are_evaluated_alongside_the_server_model() -> None:
    own = dict(enumerate(clients(SIZES)))
    val = FederatedDataModule(clients=clients(SIZES), client_val=own, batch_size=4)
    callbacks = [ClientAccuracy("val_loss", "min"), PersonalizedAccuracy("val_loss", "min", local_steps=1)]
    model = seeded(dropout=0.0)
    fitted = run(model, val, personal=["head.*"], callbacks=callbacks, max_rounds=2, local_epochs=3)
    logged, table = fitted.callback_metrics, callbacks[0].own_table
    assert float(logged["clients_own/val_loss/mean"]) == pytest.approx(sum(r["val_loss"] for r in table.values()) / 6)
    assert float(logged["clients_own/val_loss/p10"]) < float(logged["clients_own/val_loss/p90"])
    assert "personalized_own/val_loss/mean" in logged
    heads = personal(fitted)
    for i, dataset in own.items():
        mine = copy.deepcopy(model)
        if i in heads:
            torch.nn.utils.vector_to_parameters(heads[i], mine.head.parameters())
        loss = float(F.cross_entropy(mine.eval()(dataset.tensors[0].double()), dataset.tensors[1]).detach())
        assert table[i]["val_loss"] == pytest.approx(loss, rel=1e-6)
        assert (table[i] == callbacks[0].table[i]) == (i not in heads)


# ---------------------------------------------------------------------- FedBN


class Normalised(pl.LightningModule):
    """A linear layer after batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x.to(self.dtype)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def by_hand(model: Normalised, own: list[TensorDataset], rounds: int, steps: int) -> list[Normalised]:
    """Return every client's model after rounds of full-batch steps. Rounds average all parameters but the norm's."""
    models = [copy.deepcopy(model) for _ in own]
    for _ in range(rounds):
        for mine, dataset in zip(models, own, strict=True):
            for _ in range(steps):
                mine.zero_grad()
                mine.training_step(dataset.tensors, 0).backward()
                with torch.no_grad():
                    for p in mine.parameters():
                        p -= 0.3 * p.grad
        share = [len(dataset) / sum(map(len, own)) for dataset in own]
        for name in ("weight", "bias"):
            mean = sum(w * getattr(m.out, name).data for w, m in zip(share, models, strict=True))
            for mine in models:
                getattr(mine.out, name).data.copy_(mean)
    return models


def test_fedbn_keeps_scales_shifts_and_statistics_on_the_client() -> None:
    own = [TensorDataset(x * (1 + i), y) for i, (x, y) in enumerate(d.tensors for d in clients((8, 12, 5)))]
    model = seeded(Normalised)
    expected = by_hand(copy.deepcopy(model).double().train(), own, rounds=3, steps=2)
    before = {name: value.double() for name, value in model.norm.state_dict().items()}
    measure = ClientAccuracy("val_loss", "min")
    val = FederatedDataModule(clients=own, client_val=dict(enumerate(own)), batch_size=12)
    options = {"algorithm": FedBN(), "callbacks": [measure], "clients_per_round": 3, "local_epochs": 2}
    fitted = run(model, val, **options)
    close(parameters(model.out), parameters(expected[0].out))
    assert same({k: v.double() for k, v in model.norm.state_dict().items()}, before), "the server's norm is that of x^0"
    states = fitted.fit_loop.state.clients.state_dict()
    for i, mine in enumerate(expected):
        close(states[i]["personal.parameters"], parameters(mine.norm))
        for name, value in mine.norm.named_buffers():
            close(states[i][f"buffer.norm.{name}"].double(), value.double())
        mine.eval()
        loss = F.cross_entropy(mine(own[i].tensors[0]), own[i].tensors[1]).detach()
        assert measure.own_table[i]["val_loss"] == pytest.approx(float(loss), rel=1e-6)
    plain = run(seeded(Normalised), val, **{**options, "algorithm": FedAvg(), "callbacks": []}).fit_loop.state
    x = fitted.fit_loop.state
    assert x.bytes_up < plain.bytes_up - 3 * 3 * 12 * 8, "neither parameters nor statistics of the norm are sent"
    with pytest.raises(FederatedError, match="clients keep their own buffers, such as 'norm.num_batches_tracked'"):
        run(seeded(Normalised), val, **{**options, "callbacks": []}, engine="vectorized")


# ---------------------------------------------------------------------- untrained parameters as buffers

AS_BUFFERS = {
    "body*": "fits 'body.0.weight', which the optimizer of FrozenHead trains",
    "heads.*": "fits no untrained parameter of FrozenHead. Did you mean 'head.bias'",
    "head.*": None,
}


class FrozenHead(Net):
    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.head.requires_grad_(False)


@pytest.mark.parametrize("pattern", AS_BUFFERS)
def test_only_untrained_parameters_can_be_treated_as_buffers(pattern: str) -> None:
    reason = AS_BUFFERS[pattern]
    if reason is None:
        fitted = run(FrozenHead(), as_buffers=[pattern])
        assert set(fitted.fit_loop.state.buffers) == {"head.weight", "head.bias"}
        return
    with pytest.raises(FederatedError, match=re.escape(reason)):
        run(FrozenHead(), as_buffers=[pattern])


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Exchanges(Net):
    """Replaces its head by another layer, or wraps it."""

    def __init__(self, has_other: bool) -> None:
        super().__init__(dropout=0.0)
        self.has_other = has_other

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.head = nn.Linear(8, 3) if self.has_other else Wrapper(self.head)  # type: ignore[assignment]


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_layer_can_be_wrapped_but_parameters_cannot_be_replaced(engine: str) -> None:
    expected = run().fit_loop.state.x
    assert torch.equal(run(seeded(Exchanges, has_other=False), engine="sequential").fit_loop.state.x, expected)
    with pytest.raises(FederatedError, match=r"Exchanges has replaced the parameter 'head.weight'"):
        run(seeded(Exchanges, has_other=True), engine=engine)
