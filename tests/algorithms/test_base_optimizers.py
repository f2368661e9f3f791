import math

import pytest
import torch

from lightning_fed.algorithms.base_optimizers import SGD, Adagrad, Adam, BaseOptimizer, RMSProp, SGDm, Yogi
from lightning_fed.core.errors import FederatedError
from tests.helpers.ids import spelled

ALL = [
    SGD(),
    SGDm(),
    SGDm(0.5, "heavy_ball"),
    RMSProp(),
    RMSProp(stats="old", v0=0.25),
    Adam(),
    Adam(stats="old", v0="grad"),
    Adagrad(beta1=0.5),
    Yogi(bias_correction=True),
    Yogi(stats="old", v0=1.0),
]


def scalar(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


def state(**values: float) -> dict[str, torch.Tensor]:
    return {k: torch.tensor(v, dtype=torch.float64) if k == "step" else scalar(v) for k, v in values.items()}


@pytest.mark.parametrize(
    ("rule", "s", "g", "direction", "tracked"),
    [
        (SGD(), {}, 3.0, 3.0, {}),
        (SGDm(0.25), {"m": 4.0}, 2.0, 2.5, {"m": 2.5}),
        (SGDm(0.25, "heavy_ball"), {"m": 4.0}, 2.0, 3.0, {"m": 3.0}),
        # v = 0.5 * 4 + 0.5 * 16 = 10 ("old": 16)
        (RMSProp(0.5, eps=1.0, stats="old"), {"v": 16.0, "step": 3}, 2.0, 2 / 5, {"v": 10.0, "step": 4}),
        (RMSProp(0.75, eps=1.0), {"v": 0.0, "step": 0}, 2.0, 1.0, {"v": 1.0, "step": 1}),
        # m = 0.5 * 2 + 0.5 * 4 = 3, v = 0.25 * 4 + 0.75 * 4 = 4
        (
            Adam(0.5, 0.75, eps=1.0, stats="old", v0=9.0),
            {"m": 4.0, "v": 4.0, "step": 1},
            2.0,
            1.0,
            {"m": 3.0, "v": 4.0, "step": 2},
        ),
        (
            Adam(0.5, 0.75, eps=1.0, bias_correction=False),
            {"m": 4.0, "v": 16.0, "step": 1},
            4.0,
            4 / 5,
            {"m": 4.0, "v": 16.0, "step": 2},
        ),
        # t = 2: m / (1 - 0.25) = 4, v / (1 - 0.75^2) = 7 / (7 / 16) = 16
        (
            Adam(0.5, 0.75, eps=1.0),
            {"m": 4.0, "v": 8.0, "step": 1},
            2.0,
            4 / 5,
            {"m": 3.0, "v": 7.0, "step": 2},
        ),
        # v = 7 + 9 = 16
        (Adagrad(0.0, eps=1.0), {"m": 8.0, "v": 7.0, "step": 0}, 3.0, 3 / 5, {"m": 3.0, "v": 16.0, "step": 1}),
        # v falls by 0.25 * 4 = 1, or rises by 0.25 * 16 = 4
        (
            Yogi(0.5, 0.75, eps=1.0),
            {"m": 0.0, "v": 5.0, "step": 0},
            2.0,
            1 / 3,
            {"m": 1.0, "v": 4.0, "step": 1},
        ),
        (
            Yogi(0.5, 0.75, eps=1.0),
            {"m": 0.0, "v": 5.0, "step": 0},
            4.0,
            2 / 4,
            {"m": 2.0, "v": 9.0, "step": 1},
        ),
    ],
)
def test_formulas_match_hand_computed_values(rule, s, g, direction, tracked):
    assert rule.direction(scalar(g), state(**s)).item() == pytest.approx(direction, rel=1e-14)
    assert {k: v.item() for k, v in rule.track(scalar(g), state(**s)).items()} == tracked


@pytest.mark.parametrize(
    ("rule", "theirs"),
    [
        (SGDm(0.9, "heavy_ball"), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        (Adam(0.9, 0.99, eps=1e-3), lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.9, 0.99), eps=1e-3)),
        (RMSProp(0.9, eps=1e-2), lambda p: torch.optim.RMSprop(p, lr=0.1, alpha=0.9, eps=1e-2)),
        (Adagrad(eps=1e-3, v0=0.5), lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.5, eps=1e-3)),
    ],
    ids=spelled,
)
def test_defaults_match_torch_optimizers(rule, theirs):
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
    x, s, optimizer = p.detach().clone(), rule.init(p.detach()), theirs([p])
    for _ in range(6):
        p.grad = torch.randn(5, generator=generator, dtype=torch.float64)
        x, s = x - 0.1 * rule.direction(p.grad, s), rule.track(p.grad, s)
        optimizer.step()
        torch.testing.assert_close(x, p.detach(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("rule", ALL, ids=repr)
def test_vector_slices_and_cohort_give_equal_results(rule):
    generator = torch.Generator().manual_seed(1)
    g, h = (torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    rows = [rule.track(h[i], rule.warm_start(h[i], rule.init(h[i]))) for i in range(3)]
    stacked = {k: torch.stack([s[k] for s in rows]).reshape(3, -1) for k in rows[0]}
    mapped = {k: torch.stack([s[k] for s in rows]) for k in rows[0]}
    for formula in (rule.direction, lambda g, s: rule.track(g, s).get("v", g)):
        whole = formula(g, stacked)
        by_vmap = torch.func.vmap(formula)(g, mapped)
        for i, s in enumerate(rows):
            want = formula(g[i], s)
            torch.testing.assert_close(whole[i], want, rtol=1e-10, atol=0)
            torch.testing.assert_close(by_vmap[i], want, rtol=1e-10, atol=0)
            part = {k: v if v.ndim == 0 else v[1:3] for k, v in s.items()}
            torch.testing.assert_close(formula(g[i, 1:3], part), want[1:3], rtol=1e-10, atol=0)


@pytest.mark.parametrize("rule", ALL, ids=repr)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dtype_is_kept_and_inputs_are_not_modified(rule, dtype):
    g = torch.tensor([1.0, -2.0, 0.5], dtype=dtype)
    s = rule.track(g, rule.init(g))
    before = {k: v.clone() for k, v in s.items()}
    assert rule.direction(g, s).dtype == dtype
    after = rule.track(g, s)
    assert all(torch.equal(s[k], before[k]) and after[k].dtype == v.dtype for k, v in s.items())
    assert torch.equal(g, torch.tensor([1.0, -2.0, 0.5], dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_yogi_ignores_rounding_differences_in_second_moment(dtype):
    rule, eps = Yogi(beta2=0.5), torch.finfo(dtype).eps
    v, g = torch.tensor([4.0, 1e-6, 300.0, 0.0], dtype=dtype), torch.tensor([2.0, 1e-3, 300.0**0.5, 0.0], dtype=dtype)
    for off in (-2 * eps, 2 * eps):
        s = {**rule.init(v), "v": v * (1 + off)}
        assert torch.equal(rule.track(g, s)["v"], s["v"])
    s = {**rule.init(v), "v": v * 1.25}
    assert torch.equal(rule.track(g, s)["v"] < s["v"], v > 0)
    s = {**rule.init(v), "v": v * 0.75}
    assert torch.equal(rule.track(g, s)["v"] > s["v"], v > 0)


def test_step_count_keeps_increasing_in_half_precision():
    rule = Adam()
    s = {**rule.init(torch.zeros(1, dtype=torch.bfloat16)), "step": torch.tensor(256.0)}
    assert rule.track(torch.ones(1, dtype=torch.bfloat16), s)["step"] == 257


def test_first_direction_is_bounded_unless_stats_are_old():
    g = torch.tensor([4.0, -0.5], dtype=torch.float64)
    for rule in (Adam(), Adagrad(), Yogi()):
        assert rule.direction(g, rule.init(g)).abs().max() <= 1.0
    literal = Adam(stats="old", eps=1e-3)
    torch.testing.assert_close(literal.direction(g, literal.init(g)), 0.1 * g / 1e-3)


def test_warm_start_squares_the_first_gradient_once():
    rule = RMSProp(beta=0.5, eps=1.0, v0="grad", stats="old")
    s = rule.warm_start(scalar(3.0), rule.init(scalar(0.0)))
    assert s["v"].item() == 9.0
    assert rule.direction(scalar(2.0), s).item() == 0.5
    later = rule.track(scalar(3.0), s)
    assert rule.warm_start(scalar(100.0), later)["v"].item() == 9.0
    assert RMSProp(v0=0.5).warm_start(scalar(3.0), RMSProp(v0=0.5).init(scalar(0.0)))["v"].item() == 0.5


def test_bias_correction_is_enabled_only_where_applicable():
    assert Adam().bias_correction
    assert not Adam(stats="old").bias_correction
    assert not Adam(v0="grad").bias_correction
    assert not Adam(bias_correction=False).bias_correction


def test_rmsprop_ignores_bias_correction():
    g = torch.tensor([2.0])
    corrected, plain = RMSProp(bias_correction=True), RMSProp()
    assert torch.equal(corrected.direction(g, corrected.init(g)), plain.direction(g, plain.init(g)))


def test_options_and_repr_round_trip():
    assert SGD().options() == {"name": "SGD"}
    assert SGDm(beta=0).options() == {"name": "SGDm", "beta": 0.0, "momentum_form": "ema"}
    assert repr(SGD()) == "SGD()"
    for rule in ALL:
        again = eval(repr(rule), {type(rule).__name__: type(rule)})
        assert again.options() == rule.options()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGDm(beta=1), r"SGDm\(beta=1\): beta must be a finite number in \[0, 1\)"),
        (lambda: SGDm(beta=-0.1), r"beta=-0.1"),
        (lambda: SGDm(beta=True), r"beta=True"),
        (lambda: SGDm(beta="0.9"), r"beta='0.9'"),
        (lambda: SGDm(momentum_form="torch"), r"momentum_form must be 'ema' or 'heavy_ball'"),
        (lambda: RMSProp(eps=0), r"RMSProp\(eps=0\): eps must be a finite number in \(0, inf\)"),
        (lambda: RMSProp(eps=math.inf), "eps=inf"),
        (lambda: RMSProp(v0=-1.0), r"v0=-1.0"),
        (lambda: RMSProp(v0="first"), r"v0 must be a finite number in \[0, inf\) or 'grad'"),
        (lambda: RMSProp(bias_correction=1), r"bias_correction must be True or False"),
        (lambda: Adam(beta1=math.nan), r"Adam\(beta1=nan\)"),
        (lambda: Adam(beta2=1.5), r"beta2=1.5"),
        (lambda: Adam(stats="stale"), r"stats must be 'new' or 'old'"),
        (lambda: Adam(stats="old", bias_correction=True), r"Choose stats='new' or bias_correction=False"),
        (lambda: Adam(v0="grad", bias_correction=True), r"Choose v0=0 or bias_correction=False"),
        (lambda: Adagrad(bias_correction=True), r"Adagrad\(bias_correction=True\): bias_correction must be False"),
        (lambda: Yogi(beta1=2), r"Yogi\(beta1=2\)"),
    ],
)
def test_invalid_hyperparameters_are_rejected(make, message):
    with pytest.raises(FederatedError, match=message):
        make()


def test_base_class_is_plain_sgd():
    g = torch.tensor([1.5])
    assert BaseOptimizer().init(g) == {}
    assert BaseOptimizer().direction(g, {}) is g
