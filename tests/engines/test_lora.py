"""LoRA adapters of peft: the exact mean of clients, and rejected layers."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fed import FederatedCallback, FederatedDataModule, FederatedError
from lightning_fed.algorithms import (
    Algorithm,
    FedCM,
    FedDane,
    FedPer,
    FedProx,
    FedProxVR,
    FedRep,
    FedSAM,
    Mime,
    MimeLite,
    MimeMVR,
    MoFedSAM,
    Scaffold,
    ScaffoldM,
    SGDm,
)
from tests.deploy.wire import Wire, make_trainer, simulated
from tests.helpers.adapters import Adapted, Reference, adapted, exact_trainer, merged_weights
from tests.helpers.processes import in_processes
from tests.helpers.training import CLASSES, FEATURES, Net, clients, data

pytestmark = pytest.mark.thorough  # importing peft takes seconds
NO_PEFT = 'no peft: pip install -e ".[pages]"'
SIZES = (13, 8, 21, 5)
MERGED = "net.base_model.model.{}.{}"


def problem(batch_size: int = 64) -> FederatedDataModule:
    """Return clients whose epoch is one batch by default."""
    return data(SIZES, batch_size=batch_size)


class Rounds(FederatedCallback):
    """Keeps the module's state, the bytes and the weights of every round."""

    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []
        self.down: list[int] = []
        self.up: list[int] = []
        self.weights: list[Any] = []

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        self.states.append({name: value.clone() for name, value in pl_module.state_dict().items()})
        self.down.append(round_report.bytes_down)
        self.up.append(round_report.bytes_up)
        self.weights.append(round_report.weights)


class Ends(FederatedCallback):
    """Keeps the clients' merged weights."""

    def __init__(self) -> None:
        self.merged: list[tuple[Any, dict[str, Tensor]]] = []  # client ids and weights

    def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
        self.merged.append((client_report.client_id, merged_weights(pl_module.state_dict())))


def run(module: Any = None, datamodule: Any = None, ckpt_path: Any = None, **options: Any) -> tuple[Any, Rounds]:
    module, rounds = adapted() if module is None else module, Rounds()
    callbacks = [rounds, *options.pop("callbacks", [])]
    trainer = exact_trainer(callbacks=callbacks, **options)
    trainer.fit(module, problem() if datamodule is None else datamodule, ckpt_path=ckpt_path)
    return module, rounds


def gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in other)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.parametrize(("precision", "tolerance"), [("64-true", 1e-12), ("32-true", 1e-6)])
def test_merged_weights_match_the_mean_of_the_client_weights(
    engine: str, weighting: str, precision: str, tolerance: float
) -> None:
    module = adapted(fan_in_fan_out=False)
    reference = Reference(module.double().state_dict())
    _, rounds = run(adapted(), engine=engine, weighting=weighting, precision=precision)
    batches = [one.tensors for one in clients(SIZES)]
    weights = SIZES if weighting == "examples" else (1,) * 4
    for state in rounds.states:
        reference.round(batches, weights, steps=3)
        found = merged_weights(state)
        assert gap(found, reference.mean_merged) < tolerance
        separate = reference.merged(reference.trained)  # the residual gives the same result
        assert gap(found, separate) < tolerance
        for layer in ("one", "two"):
            for x in "AB":
                own = state[MERGED.format(layer, f"lora_{x}.default.weight")]
                assert float((own.double() - reference.trained[layer + x]).abs().max()) < tolerance
    start = adapted().state_dict()
    moved = (
        rounds.states[-1][MERGED.format("two", "base_layer.weight")] - start[MERGED.format("two", "base_layer.weight")]
    )
    assert float(moved.abs().max()) > 1e-3  # far above the tolerances


METHODS: list[Algorithm] = [
    FedProx(0.1),
    FedDane(0.1),
    Scaffold(),
    ScaffoldM(beta=0.2),
    Mime(base=SGDm()),
    MimeLite(base=SGDm()),
    MimeMVR(a=0.1),
    FedCM(0.4),
    FedSAM(0.05),
    MoFedSAM(0.05, 0.4),
    FedProxVR(0.1),
    FedPer(["*head*"]),
    FedRep(["*head*"], head_epochs=1),
]


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("algorithm", METHODS, ids=lambda method: type(method).__name__)
def test_mean_is_exact_for_every_model_averaging_method(algorithm: Algorithm, engine: str) -> None:
    ends = Ends()
    _, rounds = run(
        datamodule=problem(4), algorithm=algorithm, engine=engine, clients_per_round=3, max_rounds=2, callbacks=[ends]
    )
    for number, (state, weights) in enumerate(zip(rounds.states, rounds.weights, strict=True)):
        models = ends.merged[3 * number :][:3]
        mean = {n: sum(weights[i] * one[n] for i, one in models) for n in ("one", "two")}
        assert gap(merged_weights(state), mean) < 1e-12


def test_separate_means_do_not_match_the_merged_mean() -> None:
    reference = Reference(adapted().double().state_dict())
    reference.round([one.tensors for one in clients(SIZES)], SIZES, steps=3)
    _, rounds = run(lora="separate", max_rounds=1)
    assert gap(merged_weights(rounds.states[0]), reference.mean_merged) > 1e-3


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_frozen_a_has_an_exact_mean_and_is_not_sent(engine: str) -> None:
    ends = Ends()
    module, rounds = run(lora="frozen_a", engine=engine, weighting="uniform", callbacks=[ends])
    for number, state in enumerate(rounds.states):
        mean = {n: torch.stack([one[n] for _, one in ends.merged[4 * number :][:4]]).mean(0) for n in ("one", "two")}
        assert gap(merged_weights(state), mean) < 1e-12
    start = adapted().double().state_dict()
    for layer in ("one", "two"):
        name = MERGED.format(layer, "lora_A.default.weight")
        assert torch.equal(rounds.states[-1][name], start[name])
        base = MERGED.format(layer, "base_layer.weight")
        assert torch.equal(rounds.states[-1][base], start[base])
    sent = 2 * (8 + 7) + 7 * CLASSES + CLASSES
    assert rounds.up == [4 * 8 * sent] * 3
    assert rounds.down == [4 * 8 * sent] * 3
    assert all(p.requires_grad for name, p in module.named_parameters() if "lora" in name)  # as before the fit


def test_sites_with_frozen_a_yield_identical_bits_and_reject_another_a(tmp_path: Path) -> None:
    make, module, other = partial(make_trainer, "FedProx", lora="frozen_a"), adapted(), adapted()
    Wire(tmp_path, make, adapted).run(module)
    simulated(make, lambda: other)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in module.state_dict().items())
    with pytest.raises(FederatedError, match="its frozen parameters is .*, the server's is"):
        Wire(tmp_path / "others", make, Adapted).run(adapted())


def test_residual_bytes_match_its_factors_or_the_dense_matrix() -> None:
    sent = 2 * (8 + 7) + 2 * (FEATURES + 8) + 7 * CLASSES + CLASSES
    _, rounds = run(max_rounds=2)
    assert rounds.up == [4 * 8 * sent] * 2
    dense = 8 * FEATURES + 7 * 8  # three products of rank 2 would be larger
    assert rounds.down == [4 * 8 * sent, 4 * 8 * (sent + dense)]
    # With two clients, the residual is one product of rank 2. It is smaller: 2 * (8 + 6) < 8 * 6, 2 * (7 + 8) < 7 * 8.
    turns = {0: ["a", "b"], 1: ["b", "c"], 2: ["b", "d"]}
    named = FederatedDataModule(clients=dict(zip("abcd", clients(SIZES), strict=True)), batch_size=64)
    _, rounds = run(datamodule=named, sampler=lambda seed, round: turns[round])
    factors = 2 * (8 + FEATURES) + 2 * (7 + 8)
    assert rounds.down == [
        2 * 8 * sent,
        2 * 8 * (sent + factors),  # "b" and "c" lack the first residual
        2 * 8 * sent + 8 * (factors + dense),  # "b" lacks the second; "d" lacks both: 4 columns, more than dense
    ]
    _, rounds = run(clients_per_round=1)  # a mean of one client has no residual
    assert rounds.down == [8 * sent] * 3


@pytest.mark.parametrize("algorithm", [FedProx(0.1), Scaffold()])
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_interrupted_run_yields_identical_bits(algorithm: Any, engine: str, tmp_path: Path) -> None:
    options = {"algorithm": algorithm, "engine": engine, "clients_per_round": 3}
    whole, rounds = run(datamodule=problem(4), **options)
    trainer = exact_trainer(max_rounds=2, **options)
    trainer.fit(adapted(), problem(4))
    path = tmp_path / "run.ckpt"
    trainer.save_checkpoint(path)
    rest, others = run(datamodule=problem(4), ckpt_path=path, **options)
    assert all(torch.equal(value, rest.state_dict()[name]) for name, value in whole.state_dict().items())
    assert others.down == rounds.down[2:]
    trainer.fit_loop.epoch_progress.reset()
    trainer.max_rounds = 3  # the same trainer continues
    model = trainer.lightning_module
    trainer.fit(model, problem(4))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in whole.state_dict().items())


def test_engines_agree() -> None:
    one, other = (run(engine=engine, datamodule=problem(4))[0].state_dict() for engine in ("sequential", "vectorized"))
    assert gap(one, other) < 1e-12


def test_processes_agree(tmp_path: Path) -> None:
    def work() -> dict[str, Tensor]:
        options = {"strategy": "clients", "devices": 2, "engine": "vectorized"}
        return {name: value.clone() for name, value in run(datamodule=problem(4), **options)[0].state_dict().items()}

    alone = run(engine="vectorized", datamodule=problem(4))[0].state_dict()
    found = [outcome.value for outcome in in_processes(work, tmp_path)]
    assert gap(alone, found[0]) < 1e-12
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_checkpoint_with_different_base_weights_is_rejected(tmp_path: Path) -> None:
    trainer = exact_trainer(max_rounds=2)
    trainer.fit(adapted(), problem())
    path = tmp_path / "run.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    saved["state_dict"][MERGED.format("one", "base_layer.weight")] += 1e-9
    torch.save(saved, path)
    with pytest.raises(FederatedError, match=r"lora='exact' on other base weights than the model has"):
        exact_trainer(max_rounds=3).fit(adapted(), problem(), ckpt_path=path)
    with pytest.raises(FederatedError, match=r"The checkpoint's lora is 'exact', this run's is 'separate'"):
        exact_trainer(max_rounds=3, lora="separate").fit(adapted(), problem(), ckpt_path=path)


def trained_base(module: Adapted) -> None:
    module.net.base_model.model.one.base_layer.weight.requires_grad_(True)


def shared_base(module: Adapted) -> None:
    module.other = torch.nn.Linear(FEATURES, 8)
    module.other.weight = module.net.base_model.model.one.base_layer.weight


def low_base(module: Adapted) -> None:
    layer = module.net.base_model.model.one.base_layer
    layer.weight.data = layer.weight.data.bfloat16()


def frozen(module: Adapted) -> None:
    for name, p in module.named_parameters():
        if "lora_A" in name:
            p.requires_grad_(False)


REFUSED: dict[str, tuple[Callable[[Adapted], Any], dict[str, Any], dict[str, Any], str]] = {
    "DoRA": (lambda m: None, {"use_dora": True}, {}, "has a variant of LoRA, such as DoRA"),
    "trained base": (trained_base, {}, {}, "has a base weight that is trained"),
    "shared base": (shared_base, {}, {}, "has a base weight that other layers use"),
    "bfloat16": (
        low_base,
        {},
        {"precision": "32-true", "num_sanity_val_steps": 0},
        "has a base weight of torch.bfloat16, which cannot hold",
    ),
    "merged": (lambda m: m.net.merge_adapter(), {}, {}, "has merged its adapter into the base weight"),
    "personal": (lambda m: None, {}, {"personal": ["*lora_A*"]}, "has matrices that stay with the clients"),
    "frozen": (frozen, {}, {}, "the mean is exact already"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_layers_without_an_exact_mean_are_rejected(case: str) -> None:
    change, lora, options, told = REFUSED[case]
    module = adapted(**lora)
    change(module)
    with pytest.raises(FederatedError, match=told):
        exact_trainer(**options).fit(module, problem())


def test_frozen_a_rejects_variants_that_are_not_linear_in_b() -> None:
    with pytest.raises(FederatedError, match=r"lora='frozen_a'.*'net\.base_model\.model\.one' has a variant of LoRA"):
        exact_trainer(lora="frozen_a").fit(adapted(use_dora=True), problem())


def test_rejected_fit_leaves_no_matrix_frozen() -> None:
    module = adapted()
    with pytest.raises(FederatedError, match="fits no trained parameter"):
        exact_trainer(lora="frozen_a", personal=["*lora_A*"]).fit(module, problem())
    assert all(p.requires_grad for name, p in module.named_parameters() if "lora" in name)


@pytest.mark.parametrize("lora", ["exact", "frozen_a"])
def test_module_without_adapters_is_rejected(lora: str) -> None:
    with pytest.raises(FederatedError, match=rf"lora='{lora}' is about LoRA layers of peft, and Net has none"):
        exact_trainer(lora=lora).fit(Net(), problem())


def test_unsupported_layer_types_are_rejected() -> None:
    peft = pytest.importorskip("peft", reason=NO_PEFT)
    module = adapted()
    module.words = peft.get_peft_model(
        torch.nn.Sequential(torch.nn.Embedding(4, 3)), peft.LoraConfig(r=2, target_modules=["0"])
    )
    with pytest.raises(FederatedError, match=r"is lora\.layer\.Embedding, and only lora\.Linear is supported"):
        exact_trainer().fit(module, problem())


def test_transposed_base_weights_have_an_exact_mean() -> None:
    transformers = pytest.importorskip("transformers", reason='no transformers: pip install -e ".[pages]"')
    peft = pytest.importorskip("peft", reason=NO_PEFT)

    class Words(Adapted):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.GPT2Config(
                vocab_size=FEATURES, n_embd=8, n_layer=1, n_head=2, n_positions=8, num_labels=CLASSES, pad_token_id=0,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
            )  # fmt: skip
            adapter = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["c_attn"], fan_in_fan_out=True)
            self.net = peft.get_peft_model(transformers.GPT2ForSequenceClassification(config), adapter)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            tokens = x.argsort(1)
            return torch.nn.functional.cross_entropy(self.net(input_ids=tokens).logits, y)

        validation_step = None

    class Layer(FederatedCallback):
        """Keeps the clients' merged weights, as peft merges them."""

        def __init__(self) -> None:
            self.merged: list[Tensor] = []

        def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
            self.merged.append(merged(pl_module))

    def merged(module: Any) -> Tensor:
        (layer,) = [part for part in module.modules() if isinstance(part, peft.tuners.lora.Linear)]
        return (layer.base_layer.weight + layer.get_delta_weight("default")).detach().clone()

    torch.manual_seed(0)
    module, ends = Words(), Layer()
    for name, p in module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.3)
    datamodule = FederatedDataModule(clients=clients(SIZES), batch_size=64)
    run(module, datamodule, callbacks=[ends], max_rounds=1, weighting="uniform")
    mean = torch.stack(ends.merged).mean(0)
    assert torch.allclose(merged(module), mean, rtol=0, atol=1e-12)
