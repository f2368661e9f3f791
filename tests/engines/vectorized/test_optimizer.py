"""The user's local optimizer and clipping of gradients on stacked parameters, client by client."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fed.algorithms import FedAvg, FedNova, Mime, Scaffold
from tests.helpers.engines import Ordinary, assert_agree, refused, run
from tests.helpers.selection import covering, few

OPTIMIZERS = {
    "SGD momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD dampened": partial(torch.optim.SGD, lr=0.05, momentum=0.5, dampening=0.5),
    "Adam": partial(torch.optim.Adam, lr=0.01, weight_decay=0.01),
    "Adam amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "Adamax": partial(torch.optim.Adamax, lr=0.01),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "RAdam": partial(torch.optim.RAdam, lr=0.01),
}


@pytest.mark.parametrize(("optimizer", "algorithm"), covering(list(OPTIMIZERS), [FedAvg(), Scaffold(), FedNova()]))
def test_every_local_optimizer_agrees(optimizer: str, algorithm: Any) -> None:
    runs = [
        run(engine, partial(Ordinary, OPTIMIZERS[optimizer]), algorithm=algorithm, local_epochs=2)
        for engine in ("sequential", "vectorized")
    ]
    assert_agree(*runs)


@pytest.mark.parametrize(
    ("on", "clip"),
    covering(
        ["gradient", "corrected"],
        [{"gradient_clip_val": 0.05}, {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}],
    ),
)
def test_clipping_agrees(on: str, clip: dict[str, Any]) -> None:
    runs = [run(engine, algorithm=Scaffold(), gradient_clip_on=on, **clip) for engine in ("sequential", "vectorized")]
    assert_agree(*runs)


def test_groups_with_rates_of_their_own_agree() -> None:
    def groups(params: Any) -> torch.optim.Optimizer:
        params = list(params)
        return torch.optim.SGD([{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.0}], weight_decay=0.1)

    assert_agree(
        *(run(engine, partial(Ordinary, groups), algorithm=Scaffold()) for engine in ("sequential", "vectorized"))
    )


ENGINES = ("sequential", "vectorized")


class Scaled(Ordinary):
    """Has a parameter that is a single number."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


@pytest.mark.parametrize(
    "optimizer", few([torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adam], [torch.optim.NAdam])
)
def test_statistics_of_a_single_number_are_told_from_those_of_all_clients(optimizer: Any) -> None:
    make = partial(Scaled, partial(optimizer, lr=0.01))
    assert_agree(*(run(engine, make, algorithm=Mime()) for engine in ENGINES))


class MySgd(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        """Move against the gradient, scaled to length one over each parameter."""
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= group["lr"] * p.grad / p.grad.norm()


class Tuned(torch.optim.SGD):
    """Not known to be elementwise, though it is."""


def hooked_sgd(where: str, params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params, lr=0.1)
    getattr(optimizer, f"register_step_{where}_hook")(lambda *_: None)
    return optimizer


NOT_ELEMENTWISE: dict[str, tuple[Callable[..., Any], str]] = {
    "of the user's own": (MySgd, "the step of MySgd is not elementwise"),
    "a subclass": (partial(Tuned, lr=0.1), "the step of Tuned is not elementwise, or not known to be"),
    "Adafactor": (torch.optim.Adafactor, "the step of Adafactor is not elementwise"),
    "a hook before the step": (partial(hooked_sgd, "pre"), "step hooks"),
    "a hook after the step": (partial(hooked_sgd, "post"), "step hooks"),
}


@pytest.mark.parametrize("name", NOT_ELEMENTWISE)
def test_local_optimizers_that_mix_clients_are_refused(name: str) -> None:
    make, reason = NOT_ELEMENTWISE[name]
    refused(partial(Ordinary, make), reason)


def test_accumulated_gradients_are_refused() -> None:
    refused(Ordinary, "accumulate_grad_batches=2", accumulate_grad_batches=2)
