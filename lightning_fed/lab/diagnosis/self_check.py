r"""Check a method on a problem with a closed-form solution: four scalar quadratics, all in every round.

Client i has :math:`f_i(x) = a_i x^2 / 2 + b_i x`. The local step of most methods is then
:math:`y \leftarrow y - \eta (\alpha_i y + \beta_i)` with numbers that are constant in a round. K of them end at
:math:`x - s_i (\alpha_i x + \beta_i)` with :math:`s_i = (1 - (1 - \eta \alpha_i)^K) / \alpha_i`. The formulas below
are the papers' in these terms. They share no code with the methods.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from lightning_fed import algorithms
from lightning_fed.algorithms import Algorithm
from lightning_fed.callbacks import FederatedCallback
from lightning_fed.compat.package import pl
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import RoundReport
from lightning_fed.data import Quadratics
from lightning_fed.models import Quadratic
from lightning_fed.trainer.trainer import FederatedTrainer

_A, _G, _START, _RATE, _STEPS, _ROUNDS = (3.0, 1.0, 0.5, 1.5), 2.0, 1.0, 0.1, 3, 4
_CLIENTS = list(zip(_A, (_G, -_G) * 2, strict=True))
_TOLERANCE = 1e-9

Course = Iterator[float]  # x after each round


@dataclass(frozen=True)
class SelfCheck:
    """The result of the check.

    Attributes:
        outcome: "agrees" or "differs" from the formula, "no formula" known, or "failed" to run.
        text: A sentence that explains it.
    """

    outcome: str
    text: str

    @property
    def is_fault(self) -> bool:
        """Return whether something is wrong."""
        return self.outcome in ("differs", "failed")


def self_check(algorithm: Algorithm, engine: str) -> SelfCheck:
    """Run a method for some rounds on the quadratics, and compare it with its formula.

    Args:
        algorithm: The method. It is not modified.
        engine: The engine to run it with.
    """
    known, formula = _formula_of(algorithm)
    name = type(algorithm).__name__
    own = _own_hooks(type(algorithm), known)
    problem = f"{len(_A)} quadratics, {_ROUNDS} rounds of {_STEPS} local steps, engine={engine!r}"
    try:
        found = _run(algorithm, engine)
    except FederatedError as error:
        return SelfCheck("failed", f"{name} cannot run on {problem}: {error}")
    if formula is None:
        before, after = _loss(_START), _loss(found[-1])
        return SelfCheck(
            "no formula",
            f"no closed form of {algorithm!r} is known here, so nothing is verified. On {problem}, its loss went from"
            f" {before:.4g} to {after:.4g} (the least is 0).",
        )
    expected = list(islice(formula, _ROUNDS))
    for number, (x, y) in enumerate(zip(found, expected, strict=True)):
        if not abs(x - y) <= _TOLERANCE * max(1.0, abs(y)):
            cause = f"Its own {', '.join(own)} makes it another method than {known}, or is wrong" if own else _BROKEN
            return SelfCheck(
                "differs",
                f"{name} departs from the formula of {known} in round {number}: x = {x:.10g}, where the formula says"
                f" {y:.10g} ({problem}). {cause}.",
            )
    return SelfCheck("agrees", f"{name} follows its formula to {_TOLERANCE:g} on {problem}.")


_BROKEN = "Nothing of it is overridden: the installation, or a package that it uses, is broken"


class _Positions(FederatedCallback):
    """Record x after every round."""

    def __init__(self) -> None:
        self.x: list[float] = []

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round_report: RoundReport) -> None:
        """Record x."""
        self.x.append(float(trainer.fit_loop.state.x))


def _run(algorithm: Algorithm, engine: str) -> list[float]:
    positions = _Positions()
    trainer = FederatedTrainer(
        algorithm=deepcopy(algorithm),
        max_rounds=_ROUNDS,
        local_steps=_STEPS if algorithm.local_work else None,
        engine=engine,  # type: ignore[arg-type]
        seed=0,
        callbacks=[positions],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(Quadratic(x0=_START, lr=_RATE), Quadratics(a=_A, G=_G))
    return positions.x


def _own_hooks(kind: type, known: str) -> list[str]:
    """Return the hooks that a method overrides or adds, compared with the class that has the formula."""
    own = [klass for klass in kind.__mro__ if issubclass(klass, Algorithm) and klass is not Algorithm]
    names = [klass.__name__ for klass in own]
    above = own[: names.index(known)] if known in names else []
    return sorted({name for klass in above for name in vars(klass) if hasattr(Algorithm, name) and name[0] != "_"})


def _loss(x: float) -> float:
    return sum(a * x * x / 2 + b * x for a, b in _CLIENTS) / len(_CLIENTS)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _end(alpha: float, beta: float, x: float) -> float:
    """Return the end of the local steps y <- y - rate (alpha y + beta) from x."""
    s = (1 - (1 - _RATE * alpha) ** _STEPS) / alpha if alpha else _STEPS * _RATE
    return x - s * (alpha * x + beta)


def _walk(x: float, direction: Callable[[float], float], steps: int = _STEPS) -> float:
    """Return the end of local steps of any other form."""
    for _ in range(steps):
        x -= _RATE * direction(x)
    return x


def _sharp(method: Any, a: float, b: float, y: float) -> float:
    """Return FedSAM's gradient."""
    g = a * y + b
    return g + a * method.rho * g / (abs(g) + method.eps) if g else g


def _gradient(x: float) -> float:
    return _mean([a * x + b for a, b in _CLIENTS])


def _fedavg(method: Any, x: float = _START) -> Course:
    unit = _STEPS * _RATE if getattr(method, "pseudo_grad", "raw") == "normalized" else 1.0
    while True:
        yield (x := x + (_mean([_end(a, b, x) for a, b in _CLIENTS]) - x) / unit)


def _fedprox(method: Any, x: float = _START) -> Course:
    while True:
        yield (x := _mean([_end(a + method.mu, b - method.mu * x, x) for a, b in _CLIENTS]))


def _feddane(method: Any, x: float = _START) -> Course:
    mu = method.mu
    while True:
        yield (x := _mean([_end(a + mu, _gradient(x) - (a + mu) * x, x) for a, _ in _CLIENTS]))


def _server_only(method: Any, x: float = _START) -> Course:
    while True:
        yield (x := x - _gradient(x))


def _scaffold(method: Any, x: float = _START) -> Course:
    own = [0.0] * len(_CLIENTS)
    while True:
        c = _mean(own)
        ends = [_end(a, b - c_i + c, x) for (a, b), c_i in zip(_CLIENTS, own, strict=True)]
        if method.option == "i":
            own = [a * x + b for a, b in _CLIENTS]
        else:
            own = [c_i - c + (x - y) / (_STEPS * _RATE) for c_i, y in zip(own, ends, strict=True)]
        yield (x := _mean(ends))


def _mime(method: Any, x: float = _START) -> Course:
    beta = method.base.beta if type(method.base) is algorithms.SGDm else 0.0
    weight = 1 - beta if beta and method.base.momentum_form == "ema" else 1.0
    m = 0.0
    while True:
        c = _gradient(x)
        constant = [c - a * x if isinstance(method, algorithms.Mime) else b for a, b in _CLIENTS]
        ends = [_end(weight * a, weight * k + beta * m, x) for (a, _), k in zip(_CLIENTS, constant, strict=True)]
        m = weight * c + beta * m
        yield (x := _mean(ends))


def _mime_mvr(method: Any, x: float = _START) -> Course:
    w, before = method.a, x
    m = _gradient(x) if method.m0 == "grad" else 0.0
    while True:
        at, center = {"eq15": (x, before), "lemma9": (before, before), "current": (x, x)}[method.anchor]
        fixed = w * _gradient(center) + (1 - w) * m
        end = _mean([_end(a, fixed - a * at, x) for a, _ in _CLIENTS])
        m = _gradient(x) + (1 - w) * (m - _gradient(before))
        before, x = x, end
        yield x


def _fedcm(method: Any, x: float = _START) -> Course:
    w, momentum = method.alpha, 0.0
    while True:
        end = _mean([_end(w * a, w * b + (1 - w) * momentum, x) for a, b in _CLIENTS])
        momentum = (x - end) / (_STEPS * _RATE)
        x += method.eta_g * (end - x if method.eta_g_mode == "relative" else -momentum)
        yield x


def _feddyn(method: Any, x: float = _START) -> Course:
    own, w = [0.0] * len(_CLIENTS), method.alpha
    while True:
        ends = [_end(a + w, b + w * (d - x), x) for (a, b), d in zip(_CLIENTS, own, strict=True)]
        own = [d + y - x for d, y in zip(own, ends, strict=True)]
        yield (x := _mean(ends) + _mean(own))


def _fedexp(method: Any, x: float = _START) -> Course:
    eps = method.eps * (len(_CLIENTS) if method.eps_scaling == "cohort" else 1)
    while True:
        ways = [x - _end(a, b, x) for a, b in _CLIENTS]
        step = _mean([way**2 for way in ways]) / (2 * (_mean(ways) ** 2 + eps))
        eps *= method.eps_decay
        yield (x := x - max(1.0, step) * _mean(ways))


def _fedacg(method: Any, z: float = _START) -> Course:
    m, w = 0.0, method.beta
    while True:
        way = _mean([_end(a + w, b - w * z, z) for a, b in _CLIENTS]) - z
        before, m = m, method.lam * m + way
        yield (z := z + m + method.lam * (m - before))


def _scaffold_m(method: Any, x: float = _START) -> Course:
    own, w, g, step = [0.0] * len(_CLIENTS), method.beta, 0.0, _STEPS * _RATE
    while True:
        c = _mean(own)
        both = list(zip(_CLIENTS, own, strict=True))
        ends = [_end(w * a, w * (b - c_i + c) + (1 - w) * g, x) for (a, b), c_i in both]
        own = [((x - y) / step - (1 - w) * g) / w + c_i - c for y, c_i in zip(ends, own, strict=True)]
        way = _mean(ends) - x
        g = -way / step
        yield (x := x + method.gamma * (way if method.gamma_mode == "relative" else -g))


def _fedsam(method: Any, x: float = _START) -> Course:
    while True:
        yield (x := _mean([_walk(x, partial(_sharp, method, a, b)) for a, b in _CLIENTS]))


def _mofedsam(method: Any, x: float = _START) -> Course:
    w, momentum = method.alpha, 0.0

    def direction(y: float, a: float, b: float) -> float:
        return float(w * _sharp(method, a, b, y) + (1 - w) * momentum)

    while True:
        end = _mean([_walk(x, partial(direction, a=a, b=b)) for a, b in _CLIENTS])
        momentum = (x - end) / (_STEPS * _RATE)
        x += method.eta_g * (end - x if method.eta_g_mode == "relative" else -momentum)
        yield x


def _fedspeed(method: Any, x: float = _START) -> Course:
    own, w, pull = [0.0] * len(_CLIENTS), method.alpha, 1 / method.lam

    def direction(y: float, a: float, b: float, d: float) -> float:
        g = a * y + b
        uphill = g + a * method.rho * g if method.perturb == "plain" else _sharp(method, a, b, y)
        return float((1 - w) * g + w * uphill + pull * (y - x + d))

    while True:
        ends = [_walk(x, partial(direction, a=a, b=b, d=d)) for (a, b), d in zip(_CLIENTS, own, strict=True)]
        own = [d + y - x for d, y in zip(own, ends, strict=True)]
        yield (x := _mean(ends) + _mean(own))


def _fedproxvr(method: Any, x: float = _START) -> Course:
    def direction(y: float, a: float, b: float) -> float:  # both estimators are exact here
        return float((a * y + b + method.mu * (y - x)) / (1 + _RATE * method.mu))

    while True:
        yield (x := _mean([_walk(x, partial(direction, a=a, b=b), _STEPS + 1) for a, b in _CLIENTS]))


_FORMULAS: dict[type, Callable[[Any], Course] | None] = {
    algorithms.FedAvg: _fedavg,
    algorithms.FedNova: _fedavg,  # all clients take the same number of steps
    algorithms.FedProx: _fedprox,
    algorithms.FedDane: _feddane,
    algorithms.ServerOnly: _server_only,
    algorithms.Scaffold: _scaffold,
    algorithms.CMime: None,
    algorithms.Mime: _mime,
    algorithms.MimeLite: _mime,
    algorithms.MimeMVR: _mime_mvr,
    algorithms.FedCM: _fedcm,
    algorithms.FedDyn: _feddyn,
    algorithms.FedExP: _fedexp,
    algorithms.FedACG: _fedacg,
    algorithms.ScaffoldM: _scaffold_m,
    algorithms.FedSAM: _fedsam,
    algorithms.MoFedSAM: _mofedsam,
    algorithms.FedSpeed: _fedspeed,
    algorithms.FedProxVR: _fedproxvr,
}


def _formula_of(algorithm: Algorithm) -> tuple[str, Course | None]:
    """Return the name of the class whose formula a method must follow, and the formula if there is one."""
    package = algorithms.__name__  # its other classes may derive from these, with another meaning
    known = next((k for k in type(algorithm).__mro__ if k in _FORMULAS or k.__module__.startswith(package)), None)
    build = _FORMULAS.get(known) if known is not None else None
    if known is None or build is None:
        return "", None
    is_affine = type(getattr(algorithm, "base", None)) in (type(None), algorithms.SGD, algorithms.SGDm)
    is_fixed = getattr(algorithm, "adaptive", None) is None
    return known.__name__, build(algorithm) if is_affine and is_fixed else None
