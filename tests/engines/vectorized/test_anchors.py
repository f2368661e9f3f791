"""Gradients at the anchor that are kept from the full pass are those that the local steps would take."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.algorithms import CMime, FedDane, Mime, MimeLite, MimeMVR, SGDm
from lightning_fed.engines.gradients import GradientPass
from lightning_fed.engines.vectorized import anchors, engine
from lightning_fed.engines.vectorized.anchors import AnchorPass
from lightning_fed.engines.vectorized.full_gradients import FullGradients
from lightning_fed.engines.vectorized.local_steps import LocalSteps
from lightning_fed.tracing.gradient_parts import Parts, keep_parts
from lightning_fed.tracing.passes import simplify
from tests.helpers.engines import Ordinary, assert_agree, run, state_of
from tests.helpers.selection import covering, few
from tests.helpers.training import CLASSES, FEATURES, data

SIZES = (14, 7, 11, 6, 10, 8)  # of batches of 4 the last ones have 2, 3 or 4 examples
UNEVEN = partial(data, SIZES)
PLAIN = partial(torch.optim.SGD, lr=0.05)
DECAYED = partial(torch.optim.SGD, lr=0.05, weight_decay=0.01)
Seen = list[bool]


@pytest.fixture(autouse=True)
def _also_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let gradients of models be kept that are so small that taking them again costs less."""
    monkeypatch.setattr(engine, "_SMALL_AT_ANCHOR", 0)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """For every traced local step, whether it was given a gradient at the anchor."""
    given: Seen = []
    take = LocalSteps._run_traced

    def note(self: LocalSteps, bound: Any, clients: Any, group: Any, kept: Any) -> Any:
        given.append(kept is not None)
        return take(self, bound, clients, group, kept)

    monkeypatch.setattr(LocalSteps, "_run_traced", note)
    return given


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> list[range]:
    """The examples of the batches that were passed over at once."""
    found: list[range] = []
    pass_over = anchors.AnchorTrace.pass_over

    def note(self: Any, sums: Any, epoch: Any, span: range, size: int) -> Any:
        found.append(span)
        return pass_over(self, sums, epoch, span, size)

    monkeypatch.setattr(anchors.AnchorTrace, "pass_over", note)
    return found


class Wide(Ordinary):
    """A network of layers whose factors are smaller than their gradients, in batches of four."""

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer)
        self.body, self.head = nn.Linear(FEATURES, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())


USUAL = partial(Ordinary, DECAYED)
METHODS = {
    "Mime": Mime(),
    "Mime SGDm": Mime(SGDm()),
    "MimeMVR": MimeMVR(a=0.5),
    "MimeMVR lemma9": MimeMVR(a=0.5, anchor="lemma9"),
}
ALONE = pytest.mark.parametrize("chunk_size", few([1, 4], [1]))
KINDS_AND_CHUNKS = [pytest.param(k, n, id=f"{k.__name__}-{n}") for k in (Ordinary, Wide) for n in (1, 4)]


def both(make: Callable[[], Any] = USUAL, datamodule: Any = UNEVEN, chunk_size: int = 1, **options: Any) -> None:
    """Run Mime in both engines, and compare everything."""
    options = {"algorithm": Mime(SGDm()), **options}
    vectorized = run("vectorized", make, datamodule, chunk_size=chunk_size, **options)
    assert_agree(run("sequential", make, datamodule, **options), vectorized)


@pytest.mark.parametrize(
    ("algorithm", "optimizer", "kind", "chunk_size"),
    few(
        [
            pytest.param(algorithm, optimizer, kind, n, id=f"{name}-{decay}-{kind.__name__}-{n}")
            for name, algorithm in METHODS.items()
            for decay, optimizer in (("plain", PLAIN), ("decayed", DECAYED))
            for kind in (Ordinary, Wide)
            for n in (1, 4)
        ],
        ["Mime-plain-Ordinary-1", "MimeMVR lemma9-decayed-Wide-4"],
    ),
)
def test_local_steps_take_what_the_full_pass_has_kept(
    algorithm: Any, optimizer: Any, kind: Any, chunk_size: int, seen: Seen
) -> None:
    both(partial(kind, optimizer), algorithm=algorithm, max_rounds=4, chunk_size=chunk_size)
    assert seen
    assert all(seen)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [Ordinary, Wide])
def test_later_epochs_take_their_own(kind: Any, seen: Seen) -> None:
    both(partial(kind, DECAYED), local_epochs=2)
    assert seen.count(True) == seen.count(False) > 0


@pytest.mark.thorough
@pytest.mark.parametrize("kind", few([Ordinary, Wide], [Wide]))
def test_clients_at_once_of_whom_some_are_in_their_second_epoch_take_their_own(kind: Any, seen: Seen) -> None:
    both(partial(kind, DECAYED), local_epochs=2, chunk_size=4)
    assert seen.count(False) > seen.count(True) > 0


def test_models_of_which_gradients_are_soon_taken_again_keep_none(monkeypatch: pytest.MonkeyPatch, seen: Seen) -> None:
    monkeypatch.setattr(engine, "_SMALL_AT_ANCHOR", sum(p.numel() for p in Ordinary().parameters()))
    both(datamodule=partial(data, (12, 8, 4, 16, 8, 12)), chunk_size=4)
    assert seen
    assert not any(seen)


@pytest.mark.thorough
def test_clients_that_take_fewer_steps_than_they_have_batches_take_their_own(seen: Seen) -> None:
    both(local_epochs=None, local_steps=1)
    assert seen
    assert not any(seen)


def test_clients_that_train_on_some_batches_only_take_their_own(seen: Seen) -> None:
    both(limit_train_batches=2)
    assert not all(seen)


def test_a_full_pass_sees_what_an_epoch_drops(seen: Seen) -> None:
    both(datamodule=partial(data, SIZES, drop_last=True))
    assert True in seen  # of the client whose batches are all full
    assert False in seen


@pytest.mark.parametrize(
    "algorithm", [pytest.param(MimeLite(SGDm()), marks=pytest.mark.thorough), CMime(SGDm())], ids=repr
)
def test_methods_without_an_anchor_or_a_traced_correction_keep_nothing(algorithm: Any, seen: Seen) -> None:
    both(algorithm=algorithm)
    assert not any(seen)


class Pictures(Ordinary):
    """A convolutional network, whose gradients are kept whole."""

    def __init__(self) -> None:
        super().__init__(DECAYED)
        self.body = nn.Sequential(nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.view(-1, 1, 2, 3)))


class Flat(Wide):
    """A network that sees pictures, and reshapes them by a number that depends on the examples."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(len(x), 1, 2, 3).flatten(1))


@pytest.mark.parametrize(
    ("make", "sizes", "chunk_size"), covering([Flat, Pictures], [SIZES, (12, 8, 4, 16, 8, 12)], [1, 4])
)
def test_batches_that_are_reshaped_by_their_examples_are_kept_too(
    make: Any, sizes: Any, chunk_size: int, seen: Seen
) -> None:
    both(make, partial(data, sizes), chunk_size=chunk_size)
    assert seen
    assert all(seen)


@pytest.mark.thorough
@ALONE
def test_a_last_batch_of_one_example_is_right_where_gradients_are_kept_whole(chunk_size: int, seen: Seen) -> None:
    both(Pictures, partial(data, (13, 8, 5, 9, 12, 4)), chunk_size=chunk_size)
    assert set(seen) == {True, False}


class BySize(Wide):
    """A network that is another one for each number of examples."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + len(x) / 10))


def test_batches_that_need_a_trace_of_their_own_are_taken_twice(spans: list[range], seen: Seen) -> None:
    both(BySize, partial(data, SIZES, full_batch_size=4))
    assert set(seen) == {True, False}
    # the two batches of a client of eight examples, and of no other in vain
    assert spans == [range(4), range(4, 8)] * (sum(seen) // 2)


class Words(Ordinary):
    """A network whose layers see the features of all examples one after the other, each as an example of its own."""

    def __init__(self, first: str) -> None:
        super().__init__(PLAIN)
        self.first = first
        self.body, self.head = nn.Linear(1, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.t().reshape(-1, 1) if self.first == "features" else x.reshape(-1, 1)
        hidden = self.body(rows).tanh()
        by_feature = hidden.view(FEATURES, -1, 5) if self.first == "features" else hidden.view(-1, FEATURES, 5)
        return self.head(by_feature.mean(0 if self.first == "features" else 1))


@pytest.mark.parametrize("first", few(["features", "examples"], ["features"]))
def test_rows_that_are_no_examples_are_not_taken_for_such(first: str) -> None:
    both(partial(Words, first), partial(data, (12, 8, 4, 16, 8, 12)))


@pytest.mark.parametrize(
    ("make", "full", "expected"),
    few(
        [
            pytest.param(make, full, expected, id=name)
            for name, make, full, expected in (
                ("at-once", Wide, 4096, [[range(12), range(12, 14)], [range(4), range(4, 5)], [range(1)]]),
                ("by-twos", Wide, 11, [[range(8), range(8, 12), range(12, 14)], [range(4), range(4, 5)], [range(1)]]),
                (
                    "one-by-one",
                    Wide,
                    2,
                    [[range(4), range(4, 8), range(8, 12), range(12, 14)], [range(4), range(4, 5)], [range(1)]],
                ),
                ("convolutions", Pictures, 4096, [[range(4), range(4, 8), range(8, 12)]]),
            )
        ],
        ["by-twos"],
    ),
)
def test_full_batches_are_passed_at_once_where_parts_have_rows(
    make: Any, full: int, expected: list[list[range]], spans: list[range], seen: Seen
) -> None:
    sizes = (14, 5, 1) if make is Wide else (12,)
    both(make, partial(data, sizes, full_batch_size=full), max_rounds=1, clients_per_round=len(sizes))
    assert spans == [span for client in expected for span in client]
    assert all(seen)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (lambda x, batches: x, True),
        (lambda x, batches: x * batches / len(x), True),
        (lambda x, batches: x / len(x), False),
        (lambda x, batches: x * batches, False),
        (lambda x, batches: x.flip(0), False),
        (lambda x, batches: x - x.mean(0), False),
        (lambda x, batches: x[:, 0].sum(), False),
        (lambda x, batches: x.t(), False),
        (lambda x, batches: torch.cat([x, x]), False),
    ],
    ids=["activations", "gradients", "shares", "multiples", "turned-round", "centered", "number", "columns", "twice"],
)
def test_parts_have_rows_where_each_is_the_same_whatever_comes_with_it(part: Any, expected: bool) -> None:
    class At:
        parts = Parts(fx.GraphModule({}, fx.Graph()), 1, [], {}, [])

        def add(self, sums: Any, leaves: Any, batches: int) -> Any:
            return None, [part(leaves[0], batches)]

    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    assert anchors.has_rows(At(), [x], []) is expected  # type: ignore[arg-type]


class Centered(Ordinary):
    """Its loss is no mean over examples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        z = self(x)
        loss = F.cross_entropy(z - z.mean(0), y)
        self.log("train_loss", loss)
        return loss


class Larger(Ordinary):
    """Its loss is another one for batches that are larger than those of local epochs."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y) * (2.0 if len(y) > 4 else 1.0)
        self.log("train_loss", loss)
        return loss


@pytest.mark.parametrize("module", few([Centered, Larger], [Larger]))
@pytest.mark.filterwarnings("ignore:.*gives another loss than when it was traced")
def test_losses_that_are_no_means_are_taken_over_full_batches(module: Any, seen: Seen) -> None:
    both(partial(module, PLAIN))
    assert not any(seen)


def ignoring(share: float) -> FederatedDataModule:
    """Clients some of whose targets are to be ignored."""
    stream = torch.Generator().manual_seed(5)
    sets = []
    for size in SIZES:
        y = torch.randint(0, CLASSES, (size,), generator=stream)
        y[torch.rand(size, generator=stream) < share] = -100
        y[::4] = 0
        sets.append(TensorDataset(torch.randn(size, FEATURES, generator=stream), y))
    return FederatedDataModule(clients=sets, batch_size=4, shuffle=False)


IGNORING = [pytest.param(s, *kind.values, id=f"{s}-{kind.id}") for s in (0.5, 0.0) for kind in KINDS_AND_CHUNKS]


@pytest.mark.parametrize(("share", "kind", "chunk_size"), few(IGNORING, ["0.5-Ordinary-1"]))
def test_targets_that_are_ignored_weigh_as_they_do_in_full_batches(
    share: float, kind: Any, chunk_size: int, seen: Seen
) -> None:
    both(partial(kind, PLAIN), partial(ignoring, share), chunk_size)
    assert seen
    assert all(seen) if share == 0.0 else not any(seen)


@pytest.mark.thorough
@ALONE
def test_what_does_not_fit_is_taken_twice(monkeypatch: pytest.MonkeyPatch, chunk_size: int, seen: Seen) -> None:
    monkeypatch.setattr(anchors, "_KEPT_BYTES", 4000)
    both(chunk_size=chunk_size)
    assert set(seen) == {True, False}


def test_other_losses_in_the_next_round_are_looked_at_anew(seen: Seen) -> None:
    class Later(Larger):
        is_late = False

        def on_train_epoch_start(self) -> None:
            self.is_late = self.current_epoch > 1

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, 0) if self.is_late else Ordinary.training_step(self, batch, 0)

    both(partial(Later, PLAIN), max_rounds=4)
    assert set(seen) == {True, False}


def test_parts_of_another_network_in_the_next_round_are_looked_at_anew(seen: Seen) -> None:
    class Switching(Wide):
        """A network of linear layers first, then a convolution, and linear layers again."""

        is_odd = False

        def on_train_epoch_start(self) -> None:
            self.is_odd = self.current_epoch % 2 == 1

        def forward(self, x: Tensor) -> Tensor:
            if not self.is_odd:
                return super().forward(x)
            return F.conv2d(x.view(-1, 1, 2, 3), self.body.weight[:4, :4].reshape(4, 1, 2, 2)).flatten(1)

    both(partial(Switching, PLAIN), partial(data, (12, 8, 4, 16, 8, 12)), max_rounds=4)
    assert all(seen)


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "chunk_size"), KINDS_AND_CHUNKS)
def test_runs_repeat_bit_by_bit(kind: Any, chunk_size: int, tmp_path: Any) -> None:
    setup = {"make": kind, "algorithm": Mime(SGDm()), "datamodule": UNEVEN}
    options = {**setup, "max_rounds": 2, "chunk_size": chunk_size}
    whole = run("vectorized", **options)
    half = run("vectorized", **{**options, "max_rounds": 1})
    half.save_checkpoint(tmp_path / "half.ckpt")
    rest = run("vectorized", ckpt_path=tmp_path / "half.ckpt", **options)
    assert all(torch.equal(value, state_of(rest)[name]) for name, value in state_of(whole).items())


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "chunk_size"), KINDS_AND_CHUNKS)
def test_single_precision_agrees_too(kind: Any, chunk_size: int, seen: Seen) -> None:
    options = {"make": kind, "algorithm": Mime(SGDm()), "datamodule": UNEVEN, "precision": "32-true"}
    vectorized = run("vectorized", chunk_size=chunk_size, **options)
    assert_agree(run("sequential", **options), vectorized, rtol=1e-5, metrics=1e-4)
    assert all(seen)


@pytest.mark.parametrize(("examples", "expected"), [(2, (2, 20)), (4, (20, 3))], ids=["factor", "product"])
def test_of_a_layer_the_smaller_is_kept_the_factors_or_the_product(examples: int, expected: tuple[int, int]) -> None:
    def gradients(_: Tensor, x: Tensor, point: Tensor) -> list[Tensor]:
        def loss(weight: Tensor) -> Tensor:
            return F.linear(x, weight).tanh().square().mean()

        return list(torch.func.grad_and_value(loss)(point))  # type: ignore[no-untyped-call]

    x, weight = torch.randn(examples, 3), torch.randn(20, 3)
    grad, loss = gradients(weight, x, weight)
    module = make_fx(gradients)(weight, x, weight)
    simplify(module)
    parts = keep_parts(module, 1, 1, examples)
    assert parts is not None
    module.recompile()
    *grads, again, kept = module(*[weight for _ in parts.others], x, weight)
    assert kept.shape == expected  # the other factor is the batch, which is at hand
    torch.testing.assert_close(again, loss)
    torch.testing.assert_close(parts.assembly(x, kept), [grad])
    if parts.products:
        assert (parts.products, grads) == ({0: (1, 0)}, [])
        torch.testing.assert_close(kept.t() @ x, grad)


def test_what_was_kept_goes_with_its_round(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    clear = AnchorPass.clear

    def note(self: AnchorPass) -> None:
        held.append(sum(len(self.of(i)) for i in range(len(SIZES))))
        clear(self)

    monkeypatch.setattr(AnchorPass, "clear", note)
    engine = run("vectorized", algorithm=Mime(SGDm()), datamodule=UNEVEN, clients_per_round=2, chunk_size=1)
    at_end = [count for count in held if count]
    assert len(at_end) == 3
    assert all(2 + 2 <= count <= 4 + 4 for count in at_end)  # of two clients of two to four batches
    assert not any(engine.fit_loop.clients.engine.anchors.of(i) for i in range(len(SIZES)))


class OfTheFirst(Ordinary):
    """Has the loss of all examples, and the gradient of the first few."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch[0])
        few = min(len(out), 8)
        return F.cross_entropy(torch.cat([out[:few], out[few:].detach()]), batch[1])


class Clamped(Ordinary):
    """Clamps the gradient of what comes out of it, so that those of batches do not add up to that of all."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch[0])
        if out.requires_grad:
            out.register_hook(lambda g: g.clamp(-0.02, 0.02))
        return F.cross_entropy(out, batch[1])


@pytest.mark.parametrize(
    ("method", "make", "chunk_size"),
    few(
        [
            pytest.param(method, make, n, id=f"{type(method).__name__}-{make.__name__}-{n}")
            for method in (Mime(base=SGDm()), MimeMVR(0.5), FedDane(0.1))
            for make in (OfTheFirst, Clamped)
            for n in (None, 1)
        ],
        ["Mime-Clamped-1", "FedDane-OfTheFirst-None"],
    ),
)
def test_a_gradient_that_is_not_the_losss_is_the_modules(method: Any, make: Any, chunk_size: int | None) -> None:
    options: dict[str, Any] = {"algorithm": method, "datamodule": UNEVEN}
    one = run("sequential", partial(make, PLAIN), **options)
    assert_agree(one, run("vectorized", partial(make, PLAIN), chunk_size=chunk_size, **options))


def test_a_last_batch_of_one_example_costs_no_second_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = {"traced": 0, "untraced": 0}
    for what, owner in (("traced", FullGradients), ("untraced", GradientPass)):
        name = "_add" if what == "traced" else "add"
        own = getattr(owner, name)

        def counted(self: Any, *args: Any, own: Any = own, what: str = what, **options: Any) -> Any:
            passes[what] += 1
            return own(self, *args, **options)

        monkeypatch.setattr(owner, name, counted)
    uneven = partial(data, (13, 9), full_batch_size=4)
    run(
        "vectorized",
        partial(Ordinary, PLAIN),
        uneven,
        algorithm=Mime(base=SGDm()),
        chunk_size=1,
        max_rounds=1,
        local_steps=1,
        local_epochs=None,
        clients_per_round=2,
    )
    assert passes == {"traced": 0, "untraced": 7}
