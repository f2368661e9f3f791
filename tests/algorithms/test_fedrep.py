"""FedRep by hand; the given cases are in tests/oracle."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fed import FederatedError
from lightning_fed.algorithms import FedRep
from tests.helpers.engines import Ordinary
from tests.helpers.personal import close, kept, run
from tests.helpers.training import Net, clients, data, parameters, seeded

HEAD = ["head.*"]


def test_head_is_trained_before_body() -> None:
    (dataset,) = clients((8,))
    x, y = dataset.tensors[0].double(), dataset.tensors[1]
    model = seeded(dropout=0.0).double()
    fitted = run(FedRep(HEAD, head_epochs=3), data((8,), batch_size=8), clients_per_round=1, max_rounds=1)
    for part, rate, times in ((model.head, 0.05, 3), (model.body, 0.1, 1)):
        for _ in range(times):
            loss = F.cross_entropy(model(x), y)
            for p, g in zip(part.parameters(), torch.autograd.grad(loss, list(part.parameters())), strict=True):
                p.data -= rate * g
    close(fitted.fit_loop.state.x, parameters(model.body))
    close(kept(fitted)[0]["personal.parameters"], parameters(model.head))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_clipping_uses_gradient_of_the_trained_part_only(engine: str) -> None:
    (dataset,) = clients((8,))
    x, y = dataset.tensors[0].double(), dataset.tensors[1]
    model = seeded(dropout=0.0).double()
    once = {"clients_per_round": 1, "max_rounds": 1, "engine": engine, "gradient_clip_val": 0.1}
    fitted = run(FedRep(HEAD, head_epochs=3), data((8,), batch_size=8), **once)
    for part, rate, times in ((model.head, 0.05, 3), (model.body, 0.1, 1)):
        for _ in range(times):
            grads = torch.autograd.grad(F.cross_entropy(model(x), y), list(part.parameters()))
            norm = torch.cat([g.flatten() for g in grads]).norm()
            assert norm > 0.1
            for p, g in zip(part.parameters(), grads, strict=True):
                p.data -= rate * 0.1 / (norm + 1e-6) * g
    close(fitted.fit_loop.state.x, parameters(model.body))
    close(kept(fitted)[0]["personal.parameters"], parameters(model.head))


class Seen(Net):
    """Records the first feature of every example, batch by batch."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.order: list[tuple[float, ...]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.order.append(tuple(batch[0][:, 0].tolist()))
        return super().training_step(batch, batch_idx)


def test_head_and_body_shuffle_examples_independently() -> None:
    model = seeded(Seen)
    run(FedRep(HEAD, head_epochs=1), data((13,)), model, clients_per_round=1, max_rounds=1, engine="sequential")
    head, body = model.order[:4], model.order[4:]
    assert sorted(sum(head, ())) == sorted(sum(body, ()))
    assert head != body


def test_optimizer_does_not_update_the_inactive_part() -> None:
    def make(**options: Any) -> Any:
        model = seeded(partial(Ordinary, partial(torch.optim.AdamW, lr=0.01, weight_decay=0.5)))
        return run(FedRep(HEAD, head_epochs=1), model=model, clients_per_round=6, max_rounds=1, **options)

    start = parameters(seeded(Ordinary).head).double()
    heads = [state["personal.parameters"] for state in kept(make()).values()]
    # a decay of 0.005 in the body's steps would shrink the head further; its own steps are Adam's
    steps = [-(-size // 4) for size in (13, 8, 21, 5, 16, 9)]
    for head, taken in zip(heads, steps, strict=True):
        assert float((head - start * 0.995**taken).abs().max()) <= 0.01 * taken * 1.01
    with pytest.raises(FederatedError, match="FedRep lets parameters rest that the weight decay of AdamW would move"):
        make(engine="vectorized")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedRep(HEAD, head_epochs=0), "head_epochs"),
        (lambda: FedRep([]), "must be a list of names"),
    ],
)
def test_invalid_hyperparameters_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        make()
