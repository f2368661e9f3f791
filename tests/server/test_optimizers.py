import io
from functools import partial

import pytest
import torch

from lightning_fed.algorithms.base_optimizers import Adam, Yogi
from lightning_fed.core.errors import FederatedError
from lightning_fed.server.optimizers import FedAdagrad, FedAdam, FedAvgM, FedRMSProp, FedYogi

ALL = [
    FedAvgM,
    partial(FedAvgM, momentum_form="ema"),
    FedAdam,
    partial(FedAdam, bias_correction=True, v0=0.0),
    partial(FedAdam, stats="old", v0="grad"),
    FedYogi,
    FedAdagrad,
    FedRMSProp,
]


def parameter(*values: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values, dtype=torch.float64))


def steps(optimizer: torch.optim.Optimizer, x: torch.nn.Parameter, *grads: float) -> list[float]:
    out = []
    for g in grads:
        x.grad = torch.full_like(x, g)
        optimizer.step()
        out.append(x[0].item())
    return out


@pytest.mark.parametrize(
    ("make", "grads", "want"),
    [
        # m = 1, 2.5
        (partial(FedAvgM, momentum=0.5), (1.0, 2.0), [-1.0, -3.5]),
        # m = 0.5, 1.25
        (partial(FedAvgM, lr=2.0, momentum=0.5, momentum_form="ema"), (1.0, 2.0), [-1.0, -3.5]),
        # m = 1, v = 4
        (partial(FedAdam, lr=1.0, beta1=0.5, beta2=0.0, tau=2.0), (2.0,), [-0.25]),
        # v = 0.75 * tau^2 + 0.25 * 4 = 4, then m = 0
        (partial(FedAdam, lr=1.0, beta1=0.0, beta2=0.75, tau=2.0), (2.0, 0.0), [-0.5, -0.5]),
        # v = 5 + 4
        (partial(FedAdagrad, lr=1.0, tau=1.0, v0=5.0), (2.0,), [-0.5]),
        # v = 5 - 0.25 * 4
        (partial(FedYogi, lr=1.0, beta1=0.0, beta2=0.75, tau=2.0, v0=5.0), (2.0,), [-0.5]),
        # the stored v = 4 divides first; the next is 0.5 * 4 + 0.5 * 28 = 16
        (
            partial(FedRMSProp, lr=1.0, beta=0.5, tau=1.0, v0=4.0, stats="old"),
            (28.0**0.5, 5.0),
            [-(28.0**0.5) / 3, -(28.0**0.5) / 3 - 1.0],
        ),
        # a warm start divides by |g| + tau
        (partial(FedAdam, lr=1.0, beta1=0.0, tau=1.0, v0="grad", stats="old"), (3.0,), [-0.75]),
    ],
)
def test_steps_match_a_hand_computation(make, grads, want):
    x = parameter(0.0)
    assert steps(make([x]), x, *grads) == pytest.approx(want, rel=1e-14)


def test_default_v0_is_tau_squared():
    for make in (FedAdam, FedYogi, FedAdagrad, FedRMSProp):
        ours, theirs = parameter(0.0), parameter(0.0)
        got = steps(make([ours], tau=0.5), ours, 1.0, -2.0)
        assert got == steps(make([theirs], tau=0.5, v0=0.25), theirs, 1.0, -2.0)
        assert got != steps(make([x := parameter(0.0)], tau=0.5, v0=0.0), x, 1.0, -2.0)


def test_bias_corrected_fedadam_matches_torch_adam():
    ours, theirs = parameter(1.0), parameter(1.0)
    got = steps(FedAdam([ours], lr=0.1, v0=0.0, tau=1e-3, bias_correction=True), ours, 1.0, -3.0, 0.5)
    want = steps(torch.optim.Adam([theirs], lr=0.1, betas=(0.9, 0.99), eps=1e-3), theirs, 1.0, -3.0, 0.5)
    assert got == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(("make", "rule"), [(FedAdam, Adam), (FedYogi, Yogi)])
def test_server_optimizers_match_the_base_optimizers(make, rule):
    x, base = parameter(0.0), rule(beta1=0.5, eps=0.1, v0=0.01, bias_correction=False)
    got = steps(make([x], lr=0.5, beta1=0.5, tau=0.1), x, 2.0, -1.0, 4.0)
    y, s, want = torch.zeros(1, dtype=torch.float64), base.init(torch.zeros(1, dtype=torch.float64)), []
    for g in (torch.tensor([v], dtype=torch.float64) for v in (2.0, -1.0, 4.0)):
        y, s = y - 0.5 * base.direction(g, s), base.track(g, s)
        want.append(y.item())
    assert got == pytest.approx(want, rel=1e-14)


@pytest.mark.parametrize("make", ALL)
def test_state_dict_round_trips_through_a_safe_load(make):
    x = parameter(1.0, -2.0)
    optimizer = make([x])
    steps(optimizer, x, 1.0, 2.0)
    file = io.BytesIO()
    torch.save({"x": x.detach(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    y = torch.nn.Parameter(loaded["x"])
    other = make([y], lr=123.0)
    other.load_state_dict(loaded["optimizer"])
    assert steps(optimizer, x, -1.0, 0.5) == steps(other, y, -1.0, 0.5)


def test_step_count_survives_a_load_in_half_precision():
    x = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = FedAdam([x])
    steps(optimizer, x, 1.0)
    optimizer.state[x]["step"].fill_(257)
    other = FedAdam([x])
    other.load_state_dict(optimizer.state_dict())
    assert other.state[x]["step"].item() == 257


@pytest.mark.parametrize("make", ALL)
def test_schedulers_change_the_learning_rate(make):
    x, y = parameter(0.0), parameter(0.0)
    scheduled, half = make([x], lr=1.0), make([y], lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(scheduled, lambda r: 0.5 if r else 0.0)
    assert steps(scheduled, x, 1.0) == [0.0]
    steps(half, y, 1.0)
    scheduler.step()
    start = y[0].item()
    assert steps(scheduled, x, 2.0)[0] == pytest.approx(steps(half, y, 2.0)[0] - start, rel=1e-12)


def test_hyperparameters_are_read_from_parameter_groups():
    x, y = parameter(0.0), parameter(0.0)
    optimizer = FedAvgM([{"params": [x]}, {"params": [y], "momentum": 0.0, "lr": 0.5}], momentum=0.5)
    for _ in range(2):
        x.grad, y.grad = torch.ones_like(x), torch.ones_like(y)
        optimizer.step()
    assert (x.item(), y.item()) == (-2.5, -1.0)
    optimizer.param_groups[0]["momentum"] = 0.0
    y.grad = None
    optimizer.step()
    assert (x.item(), y.item()) == (-3.5, -1.0)


def test_step_supports_a_tensor_learning_rate_and_a_closure():
    x = parameter(3.0)
    optimizer = FedAvgM([x], lr=torch.tensor(0.5))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = 0.5 * (x**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 4.5
    assert x.item() == 1.5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(FedAvgM, lr=-1.0), r"FedAvgM\(lr=-1.0\): lr must be a finite number in \[0, inf\)"),
        (partial(FedAvgM, momentum=1.0), r"FedAvgM\(momentum=1.0\)"),
        (partial(FedAvgM, momentum_form="nesterov"), r"momentum_form must be 'ema' or 'heavy_ball'"),
        (partial(FedAdam, tau=0.0), r"FedAdam\(tau=0.0\)"),
        (partial(FedAdam, beta1=1.0), r"FedAdam: .*beta1=1.0"),
        (partial(FedAdam, v0=-1.0), r"FedAdam: .*v0=-1.0"),
        (partial(FedYogi, beta2=2.0), r"FedYogi: .*beta2=2.0"),
        (partial(FedAdagrad, stats="fresh"), r"FedAdagrad: .*stats='fresh'"),
        (partial(FedRMSProp, beta=-1.0), r"FedRMSProp: .*beta=-1.0"),
        (partial(FedAdam, stats="old", bias_correction=True), "bias_correction=False"),
    ],
)
def test_invalid_hyperparameters_are_rejected(make, message):
    with pytest.raises(FederatedError, match=message):
        make([parameter(0.0)])
