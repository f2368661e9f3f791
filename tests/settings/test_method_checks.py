"""Invalid methods are rejected before they run, with an error that names the fault.

A rehearsal checks that their hooks return valid values and do not change their inputs.
"""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fed import FederatedError, algorithms
from lightning_fed.algorithms import (
    Algorithm,
    CMime,
    FedAvg,
    FedPer,
    FedRep,
    FedSpeed,
    LGFedAvg,
    Mime,
    MimeMVR,
    MoFedSAM,
    SGDm,
)
from lightning_fed.core.rounds import Update
from lightning_fed.settings.method_checks import check_method, has_parts_of_users, try_hooks
from tests.helpers.training import fit


class ReturnsNothing(Algorithm):
    def correct(self, g: Tensor, y: Tensor, step: Any) -> Any:
        pass


class ReturnsANorm(Algorithm):
    def correct(self, g: Tensor, y: Tensor, step: Any) -> Tensor:
        return g.norm()


class Normalized(Algorithm):
    def correct(self, g: Tensor, y: Tensor, step: Any) -> Tensor:
        return g / g.norm()


class Averaged(Algorithm):
    reduces = {"delta": "mean"}


class TakesLess(Algorithm):
    def advance(self, g: Tensor, step: Any) -> Any:
        return {}


class Drops(Algorithm):
    def update_server(self, x: Any, server: Any, mean: Any, cohort: Any) -> Any:
        return mean["delta"]


class Counts(Algorithm):
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def finish(self, y: Any, run: Any) -> Any:
        self.count += 1
        return super().finish(y, run)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (ReturnsNothing(), r"ReturnsNothing.correct\(\) must return the direction .*found a NoneType.*Return g"),
        (ReturnsANorm(), r"ReturnsANorm.correct\(\) must return .*found shape \(\)"),
        (Normalized(), r"Normalized.correct\(\) is not elementwise.*gradient_clip_on='corrected'"),
        (Averaged(), r"Averaged.reduces\['delta'\] must be one of .*found 'mean'"),
        (TakesLess(), r"TakesLess.advance\(.* must take \(g, y, step\): too many positional arguments"),
        (Drops(), r"Drops.update_server\(\) must return a direction and the server state, found a Tensor"),
        (Counts(), r"Counts has changed its attribute 'count' in a round"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Algorithm) else "",
)
def test_invalid_method_is_rejected(algorithm: Algorithm, message: str, engine: str) -> None:
    with pytest.raises(FederatedError, match=message):
        fit(algorithm=algorithm, engine=engine)


class Misspelt(Algorithm):
    def corect(self, g: Tensor, y: Tensor, step: Any) -> Tensor:
        return -g


def test_misspelled_hook_name_warns() -> None:
    with pytest.warns(UserWarning, match="Misspelt.corect is not a hook of a method.*Did you mean correct"):
        check_method(Misspelt())


class Noisy(Algorithm):
    def correct(self, g: Tensor, y: Tensor, step: Any) -> Tensor:
        return g + torch.randn_like(g)


class OfTheModel(Algorithm):
    def __init__(self) -> None:
        self.mask = torch.ones(1000)

    def correct(self, g: Tensor, y: Tensor, step: Any) -> Tensor:
        return g * self.mask


@pytest.mark.filterwarnings("error")
def test_valid_methods_pass_the_checks() -> None:
    makes: dict[Any, Any] = {
        CMime: lambda: CMime(SGDm()),
        **{cls: partial(cls, ["head.*"]) for cls in (FedPer, FedRep, LGFedAvg)},
        FedSpeed: lambda: FedSpeed(2.0, 0.1),
        MimeMVR: lambda: MimeMVR(0.3),
        MoFedSAM: lambda: MoFedSAM(0.1, 0.3),
    }
    names = [getattr(algorithms, name) for name in algorithms.__all__]
    methods = [cls for cls in names if issubclass(cls, Algorithm)]
    for cls in [*methods, Noisy, OfTheModel]:
        try:
            algorithm = makes.get(cls, cls)()
        except TypeError:
            algorithm = cls(0.3)
        before = torch.get_rng_state()
        check_method(algorithm)
        try_hooks(algorithm)
        assert torch.equal(before, torch.get_rng_state())
    assert FedAvg in methods


class Momentum(Algorithm):
    def update_server(self, x: Any, server: Any, mean: Any, cohort: Any) -> Any:
        self._m = 0.5 * getattr(self, "_m", 0) + mean["delta"]
        return self._m, server


class Cached(Algorithm):
    def update_server(self, x: Any, server: Any, mean: Any, cohort: Any) -> Any:
        self._ones = torch.ones_like(x)
        return mean["delta"] * self._ones, server


def test_state_in_a_private_attribute_warns() -> None:
    with pytest.warns(UserWarning, match=r"algorithm=Momentum\(...\) changes its attribute '_m'.*Keep what changes"):
        fit(algorithm=Momentum(), max_rounds=2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*changes its attribute.*")
        fit(algorithm=Cached(), max_rounds=3)


# ------------------------------------------------------------------ a rehearsal


def method(**members: Any) -> Algorithm:
    """Return a method with these hooks and declarations."""
    return type("Own", (Algorithm,), members)()


def zeros(x: Any) -> dict[str, Any]:
    return {"k": torch.zeros_like(x)}


CLIENT = {"init_client": lambda self, x: zeros(x)}
LOCAL = {"init_local": lambda self, x, server, client: zeros(x)}
NUMBER = {"init_local": lambda self, x, server, client: {"k": torch.tensor(1.0)}}
SERVER = {"init_server": lambda self, x: zeros(x)}
TWO = {"reduces": {"delta": "uniform", "k": "uniform"}}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a state that is none": ({"init_server": lambda self, x: None}, r"init_server\(\) must return a state.*found"),
    "a kept state that is none": (
        {"finish": lambda self, y, run: Update({"delta": run.delta}, None)},
        r"finish\(\) must return a state.*found a NoneType. Return {} for none",
    ),
    "a number in a state": (
        {"begin_round": lambda self, x, server, cohort: {"r": cohort.round}},
        r"begin_round\(\) returns 'r' as an int, not as a tensor. Return torch.tensor\(0\)",
    ),
    "a number in a message": (
        {**TWO, "finish": lambda self, y, run: Update({"delta": run.delta, "k": run.num_steps})},
        r"finish\(\) returns 'k' as an int.*Return torch.as_tensor\(run.num_steps\)",
    ),
    "a declared message that is not sent": (
        TWO,
        r"finish\(\) sends \['delta'\].* declares \['delta', 'k'\]. Send 'k' too",
    ),
    "no update": ({"finish": lambda self, y, run: {"delta": run.delta}}, r"finish\(\) must return an Update, found"),
    "a new name to keep": (
        {"finish": lambda self, y, run: Update({"delta": run.delta}, {"k": run.delta})},
        r"finish\(\) must keep the names and shapes of init_client, none, found 'k' \[P\]",
    ),
    "a new name of the round": (
        {**LOCAL, "advance": lambda self, g, y, step: {"k": g, "j": g}},
        r"advance\(\) must keep the names and shapes of init_local, 'k' \[P\], found 'k' \[P\], 'j' \[P\]",
    ),
    "a norm in advance": (
        {**NUMBER, "advance": lambda self, g, y, step: {"k": 1 / (1 + g.norm())}},
        r"advance\(\) is not elementwise",
    ),
    "a matrix in correct": (
        {
            "init_client": lambda self, x: {"k": torch.zeros(2, len(x))},
            "correct": lambda self, g, y, step: g + step.client["k"][0],
        },
        r"correct\(\) is not elementwise.*only vectors like x are cut",
    ),
    "y itself": (
        {**LOCAL, "advance": lambda self, g, y, step: {"k": y}},
        r"advance\(\) returns y itself as 'k'.*Return y.clone\(\)",
    ),
    "a direction of another shape": (
        {"update_server": lambda self, x, server, mean, cohort: (mean["delta"].mean(), server)},
        r"update_server\(\) must return a direction, a tensor of the shape of x, found shape \(\)",
    ),
    "another model's parameters": (
        {"evaluate_at": lambda self, x, server: x[:2]},
        r"evaluate_at\(\) must return a point, .* found shape \(2,\)",
    ),
    "a mean in place": (
        {"update_server": lambda self, x, server, mean, cohort: (mean["delta"].mul_(0.5), server)},
        r"update_server\(\) changes mean\['delta'\] in place",
    ),
    "a change in place": (
        {"finish": lambda self, y, run: Update({"delta": run.delta.mul_(0.5)})},
        r"finish\(\) changes run.delta in place",
    ),
    "x in place": (
        {"start": lambda self, x, step: x.add_(0.1)},
        r"start\(\) changes x in place",
    ),
    "a state of the round in place": (
        {**LOCAL, "advance": lambda self, g, y, step: {"k": step.local["k"].mul_(0.5).add_(g)}},
        r"advance\(\) changes step.local\['k'\] in place",
    ),
    "a server state in place": (
        {**SERVER, "finish": lambda self, y, run: (run.server["k"].add_(1), Update({"delta": run.delta}))[1]},
        r"finish\(\) changes run.server\['k'\] in place",
    ),
    "a name of the library": (
        {"init_client": lambda self, x: {"buffer.k": x}},
        r"init_client\(\) names a state 'buffer.k', but names with 'buffer.' are those of buffers",
    ),
    "random numbers before the round": (
        {**SERVER, "begin_round": lambda self, x, server, cohort: {"k": torch.randn_like(x)}},
        r"begin_round\(\) draws from a global generator.*Draw in update_server\(\), which the run seeds",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_hook_with_an_invalid_result_is_rejected(case: str) -> None:
    members, message = REFUSED[case]
    with pytest.raises(FederatedError, match=message):
        try_hooks(method(**members), 31)


def test_inner_solve_is_rehearsed() -> None:
    inner = method(finish=lambda self, y, run: Update({}, {"j": y}))
    with pytest.raises(FederatedError, match=r"finish\(\) must keep the names and shapes of init_client, 'k' \[P\]"):
        try_hooks(method(**CLIENT, own_solve=inner))


def test_rehearsal_does_not_modify_the_method() -> None:
    class Notes(Algorithm):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def update_server(self, x: Any, server: Any, mean: Any, cohort: Any) -> Any:
            self.seen.append(cohort.round)
            return mean["delta"], server

    notes = Notes()
    try_hooks(notes)
    assert notes.seen == []


def test_hooks_that_require_a_round_or_the_model_pass() -> None:
    try_hooks(method(init_server=lambda self, x: {"k": x.view(5, 7).sum(0)}))
    try_hooks(method(begin_round=lambda self, x, server, cohort: cohort.advance_solver({}, x, x)))
    with pytest.raises(FederatedError, match="finish"):
        try_hooks(method(init_server=lambda self, x: {"k": x.view(5, 7).sum(0)}, finish=lambda self, y, run: None), 35)


def test_method_may_store_x_and_modify_its_state_dict() -> None:
    def begin_round(self: Any, x: Any, server: Any, cohort: Any) -> Any:
        server["before"] = x  # as it was when the round began
        return server

    def copied(self: Any, x: Any, server: Any, cohort: Any) -> Any:
        return {"before": x.clone()}

    hooks = {"init_server": lambda self, x: {"before": x}, "evaluate_at": lambda self, x, server: server["before"]}
    one, other = (fit(algorithm=method(begin_round=hook, **hooks)) for hook in (begin_round, copied))
    assert torch.equal(one, other)


def test_direction_of_another_dtype_is_rejected() -> None:
    def as_half(self: Any, x: Any, server: Any, mean: Any, cohort: Any) -> Any:
        return mean["delta"].half(), server

    with pytest.raises(FederatedError, match=r"a direction like x, which is \[.*\] of torch.float32, found .*float16"):
        fit(algorithm=method(update_server=as_half), max_rounds=1)


@pytest.mark.parametrize("found", ["head.*", None])
def test_personal_name_patterns_must_be_a_list(found: Any) -> None:
    with pytest.raises(FederatedError, match=r"personal_names\(\) must return a list of patterns, found .*\['head"):
        fit(algorithm=method(personal_names=lambda self, module: found), max_rounds=1)


def test_methods_with_user_defined_parts_are_detected() -> None:
    class Base(SGDm):
        pass

    class Method(FedAvg):
        pass

    found = [has_parts_of_users(method) for method in (FedAvg(), Mime(SGDm()), Mime(Base()), Method())]
    assert found == [False, False, True, True]
